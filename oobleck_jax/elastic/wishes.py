"""What a person may want to happen to a node, and why it cannot."""

from oobleck_jax.elastic.effects import Asked, Wish
from oobleck_jax.elastic.roster import Roster
from oobleck_jax.elastic.terms import OnLoss


def why_not(asked: Asked, roster: Roster, *, on_loss: OnLoss, is_over: bool) -> str | None:
    """Return why a wish cannot be granted, or None when it can."""
    node = roster.get(asked.node)
    if is_over:
        return "the run is over"
    if node is None:
        return f"there is no node {asked.node} (there are {list(roster.ids)})"
    if node.leaves is not None:
        return f"node {asked.node} leaves already ({node.leaves})"
    if on_loss is OnLoss.STOP:
        return "with --fault-tolerance 0 the run would end with it; stop the run instead"
    if asked.wish is Wish.KILL and not node.is_ready:
        return f"the worker of node {asked.node} is only starting"
    return None
