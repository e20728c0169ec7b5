"""Plans for losses that have not happened yet, so that a recovery finds them made.

A plan takes some 15 ms of compute. That is little, but cores are busy when a node is lost, and all the others wait.
"""

from collections.abc import Mapping
from typing import TypeAlias

from oobleck_jax.elastic.terms import Proposal, Replan
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.plan import NodeId, Plan


MAX_NODES = 32  # of a plan; for more of them the work would take seconds, again after each change

_Question: TypeAlias = tuple[tuple[NodeId, ...], tuple[tuple[NodeId, tuple[int, ...]], ...], Plan | None]


class Foresight:
    """A planner that remembers. It is pure, so what it said once is what it would say again."""

    def __init__(self, replan: Replan) -> None:
        self._replan = replan
        self._plan: Plan | None = None
        self._known: dict[_Question, Proposal] = {}

    def replan(
        self, nodes: tuple[NodeId, ...], holdings: Mapping[NodeId, tuple[int, ...]], old: Plan | None
    ) -> Proposal:
        """Return the plan for these nodes; as the planner that this one was given.

        Raises:
            PlanError: there is none.
        """
        known = self._known.get(_question(nodes, holdings, old))
        return self._replan(nodes, holdings, old) if known is None else known

    def foresee(self, plan: Plan) -> None:
        """Plan for the loss of each node of a plan that is carried out; for a thread of its own.

        What was planned before is forgotten; another call, for a later plan, ends this one.
        """
        self._plan = plan
        known: dict[_Question, Proposal] = {}
        for lost in plan.nodes if len(plan.nodes) <= MAX_NODES else ():
            nodes = tuple(node for node in plan.nodes if node != lost)
            holdings = {node: layers for node in nodes if (layers := plan.layers_of(node))}
            try:
                known[_question(nodes, holdings, plan)] = self._replan(nodes, holdings, plan)
            except PlanError:  # the run waits for nodes then
                continue
            if self._plan is not plan:
                return
        self._known = known


def _question(nodes: tuple[NodeId, ...], holdings: Mapping[NodeId, tuple[int, ...]], old: Plan | None) -> _Question:
    return nodes, tuple(sorted(holdings.items())), old
