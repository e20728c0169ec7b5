"""What the nodes there are allow: a plan for them, who is new to it, and what has been lost."""

from oobleck_jax.elastic.roster import Roster
from oobleck_jax.elastic.terms import Proposal, Terms
from oobleck_jax.errors import NotEnoughNodes
from oobleck_jax.planning.plan import NodeId, Plan


class Prospects:
    """Looks at the roster with the eyes of the planner, and remembers for whom it has planned."""

    def __init__(self, terms: Terms, roster: Roster) -> None:
        self._terms = terms
        self._roster = roster
        self._planned_for: set[NodeId] = set()

    def propose(self, old: Plan | None) -> Proposal:
        """Return the plan for the nodes that are ready and stay, given the plan so far.

        Raises:
            PlanError: there is none.
        """
        nodes = tuple(node.node for node in self._roster.ready())
        self._planned_for = set(nodes)
        if not nodes:
            raise NotEnoughNodes("no node is left", num_nodes=0, num_needed=1)
        return self._terms.replan(nodes, self._roster.holdings, old)

    def newcomers(self, now_s: float) -> list[NodeId]:
        """Return the nodes that no plan has reckoned with; none while others will be ready in a moment."""
        new = [node for node in self._roster.ready() if node.node not in self._planned_for]
        if new and not all(node.is_ready for node in self._roster):
            waited_s = now_s - min(node.since_s for node in new)
            if waited_s < self._terms.limits.settle_s:
                return []
        return [node.node for node in new]

    def forget(self, node: NodeId) -> None:
        """A node was lost: when it is ready again, it is new."""
        self._planned_for.discard(node)

    def lost_layers(self, num_layers: int) -> list[int]:
        """Return the layers whose state after the last commit no node has any more."""
        held = {layer for layers in self._roster.holdings.values() for layer in layers}
        return [layer for layer in range(num_layers) if layer not in held]
