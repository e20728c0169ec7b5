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
    connection: ConnectionId
    incarnation: int
    heard_s: float  # last sign of life of the agent
    since_s: float  # in its state, or since its last progress
    state: NodeState = NodeState.STARTING
    link_address: str = ""
    stopped_since_s: float | None = None  # its worker, by a signal


def deadlines_of(node: Node, limits: Limits) -> Iterator[tuple[float, str]]:
    """Yield the waits for one node: when each ends, and what is wrong with the node then."""
    who = f"node {node.node}"
    yield node.heard_s + limits.heartbeat_s, f"the agent of {who} has been silent for {limits.heartbeat_s:.1f} s"
    if node.stopped_since_s is not None:
        what = f"the worker of {who} has been stopped by a signal (SIGSTOP) for {limits.stopped_s:.1f} s"
        yield node.stopped_since_s + limits.stopped_s, what
    if node.state is NodeState.STARTING:
        what = f"the worker of {who} was not ready {limits.ready_s:.0f} s after it joined"
        yield node.since_s + limits.ready_s, what
    if node.state is NodeState.PREPARING:
        what = f"{who} prepared for {limits.prepare_s:.0f} s without any progress"
        yield node.since_s + limits.prepare_s, what
