"""What goes into the membership machine, and what comes out of it.

The coordinator turns sockets, clocks and signals into inputs, and carries the effects out in the order given; that
order matters: a commit decision is recorded before it is sent.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, TypeAlias

from oobleck_jax import events
from oobleck_jax.checkpoint.manifest import GroupRecord
from oobleck_jax.elastic import messages
from oobleck_jax.planning.plan import NodeId


ConnectionId = NewType("ConnectionId", int)


# ------------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A message came in."""

    connection: ConnectionId
    message: messages.ToCoordinator


@dataclass(frozen=True, kw_only=True, slots=True)
class Disconnected:
    """A connection ended, for whatever reason."""

    connection: ConnectionId
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FabricStarted:
    """The coordination service of a generation accepts its nodes."""

    generation: int
    address: str  # host:port, as the nodes reach it


@dataclass(frozen=True, kw_only=True, slots=True)
class FabricFailed:
    """The coordination service of a generation could not start."""

    generation: int
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommitted:
    """A checkpoint counts from now on."""

    generation: int
    step: int
    num_bytes: int
    removed: tuple[str, ...]  # folders of older ones


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFailed:
    """A checkpoint whose parts are written does not count nevertheless."""

    generation: int
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFound:
    """The answer to FindCheckpoint."""

    point: messages.RestorePoint | None  # None: there is none
    damaged: tuple[str, ...] = ()  # newer ones that cannot be used, and why
    unread: str = ""  # why nobody can tell what there is


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """The user, or the system, wants the run to end."""

    reason: str
    exit_code: int


class Wish(StrEnum):
    """What a person may want to happen."""

    DRAIN = "drain"  # a node leaves, as on SIGTERM
    KILL = "kill"  # a node's worker is killed
    CHECKPOINT = "checkpoint"  # the state after the step in progress is saved


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A person wants something to happen, and `Membership.why_not` had nothing against it."""

    wish: Wish
    node: NodeId | None = None  # None: to the run


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Nothing happened but that time went by."""


Input: TypeAlias = (
    Received
    | Disconnected
    | FabricStarted
    | FabricFailed
    | CheckpointCommitted
    | CheckpointFailed
    | CheckpointFound
    | Interrupted
    | Asked
    | Tick
)


# ------------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send a message."""

    connection: ConnectionId
    message: messages.ToNode


@dataclass(frozen=True, kw_only=True, slots=True)
class Close:
    """Close a connection, after all that was sent on it."""

    connection: ConnectionId


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFabric:
    """Start JAX's coordination service for a generation; answer with FabricStarted or FabricFailed."""

    generation: int
    num_nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitCheckpoint:
    """Let a checkpoint count, all parts of which are written; answer with CheckpointCommitted or CheckpointFailed."""

    generation: int
    step: int
    groups: dict[str, GroupRecord]


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanCheckpoints:
    """Remove what was left half written, but for the checkpoint that is being written now."""

    generation: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FindCheckpoint:
    """Look for the newest checkpoint that is intact; answer with CheckpointFound."""

    excluded: frozenset[str]  # folders
    end_step: int | None  # those that contain this step, or a later one, do not count


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Write a record where it belongs, and show it."""

    record: events.Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Ignored:
    """An input was of no consequence, and why; worth a line in a log."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """The run is over, and with it the machine."""

    reason: str
    exit_code: int
    node: NodeId | None  # to blame, where there is one


Effect: TypeAlias = (
    Send | Close | StartFabric | CommitCheckpoint | CleanCheckpoints | FindCheckpoint | Write | Ignored | Finish
)
