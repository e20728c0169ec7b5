"""What a run asks of its nodes, and what the membership machine needs to know of the rest of the program."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from oobleck_jax.elastic.limits import Limits
from oobleck_jax.elastic.messages import Join
from oobleck_jax.planning.plan import NodeId, Plan, Stage


class OnLoss(StrEnum):
    """What to do when a node is lost."""

    STOP = "stop"
    REGROUP = "regroup"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A plan, and why it is this one."""

    plan: Plan
    reason: str
    ahead: tuple[Stage, ...] = ()  # stages that the plans after it may need, the most likely first


# Given the nodes that are ready (ascending), and the layers whose current state each node has: the plan for them, or
# PlanError. Pure.
Replan: TypeAlias = Callable[[tuple[NodeId, ...], Mapping[NodeId, tuple[int, ...]]], Proposal]


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The terms of a run.

    Attributes:
        config_json: what every worker is configured with.
        config_digest: of `config_json`; a node that has flags of its own must have the same.
        versions: of the software every node must run, by name.
        num_nodes: nodes to wait for at the start, and the most there can be.
        num_devices: of each node.
        steps: optimizer steps to commit.
        tokens_per_step: tokens that the votes of a step must cover.
        evaluates_after: whether an evaluation follows the commit of a step.
        replan: the planner.
        place: cores of each node of a plan; nodes that may use any core are left out.
        place_at_start: cores and number of threads of a node's worker, before there is a plan.
        on_loss: what to do when a node is lost.
        limits: how long each wait may last.
    """

    config_json: str
    config_digest: str
    versions: Mapping[str, str]
    num_nodes: int
    num_devices: int
    steps: int
    tokens_per_step: int
    evaluates_after: Callable[[int], bool]
    replan: Replan
    place: Callable[[Plan], Mapping[NodeId, tuple[int, ...]]]
    place_at_start: Callable[[NodeId], tuple[tuple[int, ...], int]]
    on_loss: OnLoss = OnLoss.STOP
    limits: Limits = field(default_factory=Limits)


def why_refuse(join: Join, terms: Terms, *, taken: Collection[NodeId], has_begun: bool) -> str | None:
    """Return why a node cannot take part, or None when it is welcome.

    Args:
        join: what the node says of itself.
        terms: of the run.
        taken: the nodes that take part already.
        has_begun: whether the first generation has begun.
    """
    if has_begun and terms.on_loss is OnLoss.STOP:
        return "the run has begun, and its nodes stay the same to the end"
    for name, wanted in terms.versions.items():
        if join.versions.get(name) != wanted:
            return f"{name} {join.versions.get(name, '(unknown)')} on {join.name}, but the run uses {name} {wanted}"
    if join.config_digest not in (None, terms.config_digest):
        return f"{join.name} was started with other flags than the coordinator; start all with the same ones"
    if join.num_devices != terms.num_devices:
        return f"{join.name} offers {join.num_devices} devices, but the run uses {terms.num_devices} of each node"
    if join.node is not None and join.node in taken:
        return f"node {join.node} takes part already"
    if join.node is not None and not 0 <= join.node < terms.num_nodes:
        return f"there is no node {join.node}: the run has nodes 0 to {terms.num_nodes - 1}"
    if len(taken) >= terms.num_nodes:
        return f"the run has all of its {terms.num_nodes} nodes"
    return None
