"""What a run looks like at one moment, as the page and /metrics show it. Travels to the page as JSON.

Times are seconds since 1970.
"""

from enum import StrEnum

import msgspec

from oobleck_jax.planning.plan import NodeId


class RunPhase(StrEnum):
    """What the run does."""

    STARTING = "starting"  # until the first generation is prepared
    TRAINING = "training"
    REGROUPING = "regrouping"  # from a change of membership to the first commit after it
    WAITING = "waiting"  # for nodes: there is no plan for those there are
    FINISHED = "finished"
    STOPPED = "stopped"  # before its last step, on request
    FAILED = "failed"


class NodeState(StrEnum):
    """What a node does."""

    STARTING = "starting"  # its worker comes up
    WAITING = "waiting"  # ready; has no place in the plan yet
    RETURNING = "returning"  # a coordinator that took over expects it back
    PREPARING = "preparing"
    WORKING = "working"
    SPARE = "spare"
    LEAVING = "leaving"  # after the step in progress
    LEFT = "left"
    LOST = "lost"


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node that takes part, or took part."""

    node: NodeId
    name: str  # of its host
    state: NodeState
    since: float  # it is in this state
    incarnation: int  # of its worker
    detail: str  # how far it is, or why it is in this state


class StageView(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of a pipeline."""

    node: NodeId
    layers: str  # for people
    first_layer: int
    end_layer: int  # exclusive
    num_devices: int


class PipelineView(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline of the plan."""

    num_microbatches: int
    stages: tuple[StageView, ...]


class IncidentView(msgspec.Struct, frozen=True, kw_only=True):
    """A change of membership, and what it cost; see `events.Incident`."""

    time: float  # of the first commit after it
    kind: str
    cause: str
    nodes: tuple[NodeId, ...]
    collateral: tuple[NodeId, ...]
    step: int
    num_generations: int
    seconds: dict[str, float]
    received_bytes: int
    num_redone_microbatches: int
    num_compilations: int


class CurveView(msgspec.Struct, frozen=True, kw_only=True):
    """Means over runs of consecutive steps: single steps at first, longer runs as steps become many."""

    steps: tuple[int, ...]  # the first of each run
    losses: tuple[float, ...]
    tokens_per_s: tuple[float, ...]


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint that is complete."""

    step: int  # the last one that it contains
    time: float


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    time: float
    preset: str
    run_dir: str
    phase: RunPhase
    reason: str  # of the phase, or of the last change
    started: float | None
    generation: int
    step: int  # committed steps
    steps: int  # to do
    loss: float | None
    eval_loss: float | None
    grad_norm: float | None
    tokens_per_s: float | None  # over the last steps
    mfu: float | None  # share of the peak of the devices; None: unknown peak
    seconds_left: float | None
    goodput: float | None  # share of the time since the first step began that went into steps that count
    fault_tolerance: int
    survivable: int | None  # losses at once that are surely survived now; None: nothing to lose
    nodes: tuple[NodeView, ...]
    pipelines: tuple[PipelineView, ...]
    plan_reason: str
    incidents: tuple[IncidentView, ...]  # the last ones, newest first
    num_incidents: dict[str, int]  # by kind
    num_redone_microbatches: int
    checkpoint: CheckpointView | None
    has_actions: bool  # there is a token, so that who has it may act
    curve: CurveView

    @property
    def num_live_nodes(self) -> int:
        return sum(node.state not in (NodeState.LOST, NodeState.LEFT) for node in self.nodes)
