"""What a run asks of its nodes, and what the membership machine needs to know of the rest of the program."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from oobleck_jax.elastic.limits import Limits
from oobleck_jax.elastic.messages import RunId
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
    plan_s: float = 0.0  # that planning took, where somebody measured it


# Given the nodes that are ready (ascending), the layers whose current state each node has, and the plan so far: the
# plan for them, or PlanError. Pure.
Replan: TypeAlias = Callable[[tuple[NodeId, ...], Mapping[NodeId, tuple[int, ...]], Plan | None], Proposal]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """When checkpoints are written, and where.

    Attributes:
        folder: of the checkpoint of a step and generation. Pure.
        every_steps: steps from one to the next; None: steps do not decide.
        every_s: seconds from one to the next; None: time does not decide.
        at_end: whether the last step has one.
    """

    folder: Callable[[int, int], str]
    every_steps: int | None = None
    every_s: float | None = None
    at_end: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The terms of a run.

    Attributes:
        config_json: what every worker is configured with.
        run_id: of the run; a coordinator that is started again has a new one.
        config_digest: of what the user asked for; a node that has flags of its own must have the same.
        versions: of the software every node must run, by name.
        num_nodes: nodes to wait for at the start.
        max_nodes: the most there can be; None: as many as at the start.
        num_devices: of each node.
        num_layers: of the model.
        steps: optimizer steps to commit.
        tokens_per_step: tokens that the votes of a step must cover.
        evaluates_after: whether an evaluation follows the commit of a step.
        replan: the planner.
        ahead: stages that the plans to come may need, the most likely first.
        place: cores of each node of a plan; nodes that may use any core are left out.
        place_at_start: cores and number of threads of a node's worker, before there is a plan.
        faults_of: what is to go wrong on purpose with the first worker of a node.
        on_loss: what to do when a node is lost.
        max_skipped: steps in a row that count although a gradient is not finite, without an update.
        limits: how long each wait may last.
        checkpoints: what is written; None: nothing, and there is nothing to go back to.
    """

    config_json: str
    run_id: RunId
    config_digest: str
    versions: Mapping[str, str]
    num_nodes: int
    num_devices: int
    num_layers: int
    steps: int
    tokens_per_step: int
    evaluates_after: Callable[[int], bool]
    replan: Replan
    place: Callable[[Plan], Mapping[NodeId, tuple[int, ...]]]
    place_at_start: Callable[[NodeId], tuple[tuple[int, ...], int]]
    max_nodes: int | None = None
    ahead: tuple[Stage, ...] = ()
    faults_of: Callable[[NodeId], tuple[str, ...]] = lambda node: ()
    on_loss: OnLoss = OnLoss.STOP
    max_skipped: int = 0
    limits: Limits = field(default_factory=Limits)
    checkpoints: Checkpoints | None = None

    @property
    def most_nodes(self) -> int:
        return self.num_nodes if self.max_nodes is None else max(self.max_nodes, self.num_nodes)
