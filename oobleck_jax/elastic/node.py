"""A node that takes part, as the membership machine sees it."""

from collections.abc import Iterator
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Overdue:
    """A wait for one node: how long it has been going on when it ends, and what is wrong with the node then."""

    since_s: float
    limit_s: float
    what: str
    is_agent: bool = False  # with its agent, not only with its worker

    @property
    def when_s(self) -> float:
        return self.since_s + self.limit_s


def deadlines_of(node: Node, limits: Limits) -> Iterator[Overdue]:
    """Yield the waits for one node."""
    who = f"node {node.node}"
    yield Overdue(
        since_s=node.heard_s,
        limit_s=limits.heartbeat_s,
        what=f"the agent of {who} has been silent for {limits.heartbeat_s:.1f} s",
        is_agent=True,
    )
    if node.stopped_since_s is not None:
        what = f"the worker of {who} has been stopped by a signal (SIGSTOP) for {limits.stopped_s:.1f} s"
        yield Overdue(since_s=node.stopped_since_s, limit_s=limits.stopped_s, what=what)
    if node.state is NodeState.STARTING:
        began = "it joined" if not node.incarnation else f"its start as incarnation {node.incarnation}"
        what = f"the worker of {who} was not ready {limits.ready_s:.0f} s after {began}"
        yield Overdue(since_s=node.since_s, limit_s=limits.ready_s, what=what)
    if node.state is NodeState.PREPARING:
        what = f"{who} prepared for {limits.prepare_s:.0f} s without any progress"
        yield Overdue(since_s=node.since_s, limit_s=limits.prepare_s, what=what)
