"""What a person may want to happen to a node, or to the run, and why it cannot."""

from oobleck_jax.elastic.effects import Asked, Wish
from oobleck_jax.elastic.roster import Roster
from oobleck_jax.elastic.terms import OnLoss, Terms


def why_not(asked: Asked, roster: Roster, terms: Terms, *, is_over: bool) -> str | None:
    """Return why a wish cannot be granted, or None when it can."""
    if is_over:
        return "the run is over"
    if asked.wish is Wish.CHECKPOINT:
        return None if terms.checkpoints else "this run saves nothing; start it without --checkpoint-every 0"
    node = None if asked.node is None else roster.get(asked.node)
    if node is None:
        return f"there is no node {asked.node} (there are {list(roster.ids)})"
    if node.leaves is not None:
        return f"node {asked.node} leaves already ({node.leaves})"
    if terms.on_loss is OnLoss.STOP:
        return "with --fault-tolerance 0 the run would end with it; stop the run instead"
    if asked.wish is Wish.KILL and not node.is_ready:
        return f"the worker of node {asked.node} is only starting"
    return None
