"""A node that takes part, as the membership machine sees it."""

from dataclasses import dataclass
from enum import StrEnum

from oobleck_jax.elastic.effects import ConnectionId
from oobleck_jax.elastic.limits import Limits
from oobleck_jax.planning.plan import NodeId


class NodeState(StrEnum):
    """How far a node is."""

    STARTING = "starting"
    IDLE = "idle"
    PREPARING = "preparing"
    RUNNING = "running"


@dataclass(kw_only=True, slots=True)
class Node:
    """What is known of a node. Belongs to the machine, which changes it."""

    node: NodeId
    name: str  # of its host, for people
    connection: ConnectionId
    incarnation: int  # of its worker
    heard_s: float  # last sign of life of the agent
    since_s: float  # in its state, or since its last progress; a worker that starts later: when it does
    agent: str = ""  # what its agent calls itself
    state: NodeState = NodeState.STARTING
    ready_s: float | None = None  # when its worker became ready
    link_address: str = ""
    holds: tuple[int, ...] = ()  # layers whose state after the last commit its worker has
    stopped_since_s: float | None = None  # its worker, by a signal
    leaves: str | None = None  # why it has been asked to leave

    @property
    def is_ready(self) -> bool:
        return self.state is not NodeState.STARTING

    @property
    def takes_part(self) -> bool:
        """Whether it has been told of the current generation."""
        return self.state in (NodeState.PREPARING, NodeState.RUNNING)

    def enter(self, state: NodeState, now_s: float) -> None:
        self.state, self.since_s = state, now_s


class Awaited(StrEnum):
    """What a node is waited for."""

    HEARTBEAT = "heartbeat"  # of its agent
    WAKE = "wake"  # of a worker that a signal has stopped
    READY = "ready"
    PREPARED = "prepared"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overdue:
    """What is wrong with a node for which a wait has ended, and how long the wait was."""

    limit_s: float
    what: str
    is_agent: bool = False  # with its agent, not only with its worker


def first_deadline(node: Node, limits: Limits) -> tuple[float, Awaited]:
    """Return when the first wait for a node ends, and which one that is. Asked for all nodes again and again."""
    first = node.heard_s + limits.heartbeat_s, Awaited.HEARTBEAT
    if node.stopped_since_s is not None:
        first = min(first, (node.stopped_since_s + limits.stopped_s, Awaited.WAKE))
    if node.state is NodeState.STARTING:
        first = min(first, (node.since_s + limits.ready_s, Awaited.READY))
    if node.state is NodeState.PREPARING:
        first = min(first, (node.since_s + limits.prepare_s, Awaited.PREPARED))
    return first


def overdue(node: Node, awaited: Awaited, limits: Limits) -> Overdue:
    """Return what is wrong with a node that was waited for in vain."""
    who = f"node {node.node}"
    match awaited:
        case Awaited.HEARTBEAT:
            what = f"the agent of {who} has been silent for {limits.heartbeat_s:.1f} s"
            return Overdue(limit_s=limits.heartbeat_s, what=what, is_agent=True)
        case Awaited.WAKE:
            what = f"the worker of {who} has been stopped by a signal (SIGSTOP) for {limits.stopped_s:.1f} s"
            return Overdue(limit_s=limits.stopped_s, what=what)
        case Awaited.READY:
            began = "it joined" if not node.incarnation else f"its start as incarnation {node.incarnation}"
            what = f"the worker of {who} was not ready {limits.ready_s:.0f} s after {began}"
            return Overdue(limit_s=limits.ready_s, what=what)
        case Awaited.PREPARED:
            what = f"{who} prepared for {limits.prepare_s:.0f} s without any progress"
            return Overdue(limit_s=limits.prepare_s, what=what)
