"""What each node of a run does, as far as the records tell."""

from collections.abc import Iterable
from dataclasses import dataclass

from oobleck_jax import events
from oobleck_jax.dashboard.snapshot import NodeState, NodeView
from oobleck_jax.planning.plan import NodeId


_IN_PLAN = (NodeState.PREPARING, NodeState.WORKING, NodeState.SPARE, NodeState.RETURNING)
_THERE = (*_IN_PLAN, NodeState.WAITING, NodeState.LEAVING)


@dataclass(kw_only=True, slots=True)
class _Node:
    name: str
    incarnation: int
    state: NodeState
    since: float
    detail: str = ""
    device_kind: str = ""
    num_devices: int = 1
    suspicion: str = ""  # why it may be lost


class Nodes:
    """All nodes that take part or took part; who is gone stays in view until it comes back.

    Attributes:
        holdings: layers of which each node surely has the state after the last commit, by node.
    """

    def __init__(self) -> None:
        self.holdings: dict[NodeId, tuple[int, ...]] = {}
        self._nodes: dict[NodeId, _Node] = {}
        self._planned: events.Planned | None = None

    def take(self, record: events.Record, now: float) -> None:
        match record:
            case events.Joined():
                self._nodes[record.node] = _Node(
                    name=record.name,
                    incarnation=record.incarnation,
                    state=NodeState.STARTING,
                    since=now,
                    detail="its worker starts",
                )
                self.holdings.pop(record.node, None)
            case events.Ready() if node := self._nodes.get(record.node):
                node.device_kind, node.num_devices = record.device_kind, record.num_devices
                node.incarnation = record.incarnation
                self._enter(record.node, NodeState.WAITING, now, "ready; waits for a place in the plan")
            case events.Advanced():
                self._enter(record.node, NodeState.PREPARING, now, f"{record.phase} {record.done} of {record.total}")
            case events.Planned():
                self._plan(record, now)
            case events.Prepared():
                self._prepared(now)
            case events.Gathering():
                for number in self._of(*_IN_PLAN):
                    self._enter(number, NodeState.WAITING, now, "waits for other nodes")
            case events.Failed() if record.node is not None and record.is_collateral:
                if node := self._nodes.get(record.node):
                    node.suspicion = record.cause
            case events.Failed() if record.node is not None:
                self._lose(record.node, now, record.cause)
            case events.Respawned():
                self._lose(record.node, now, record.reason)
                delay = f" in {record.delay_s:.0f} s" if record.delay_s else ""
                self._enter(record.node, NodeState.STARTING, now, f"gets a new worker{delay}: {record.reason}")
                if node := self._nodes.get(record.node):
                    node.incarnation = record.incarnation
            case events.Leaving():
                self._enter(record.node, NodeState.LEAVING, now, record.reason)
            case events.Left():
                self._left(record, now)
            case events.Resumed():
                for number in record.nodes:
                    self._enter(number, NodeState.RETURNING, now, "the coordinator was restarted")
            case events.Finished():
                for number in self._of(*_THERE, NodeState.STARTING):
                    self._enter(number, NodeState.LEFT, now, "the run is over")
            case _:
                pass

    def views(self) -> tuple[NodeView, ...]:
        """Return the nodes, ascending."""
        return tuple(
            NodeView(
                node=number,
                name=node.name,
                state=node.state,
                since=node.since,
                incarnation=node.incarnation,
                detail=node.detail,
            )
            for number, node in sorted(self._nodes.items())
        )

    @property
    def num_there(self) -> int:
        """Nodes that can be part of a plan."""
        return len(self._of(*_IN_PLAN, NodeState.WAITING))

    @property
    def working_devices(self) -> tuple[str, ...]:
        """The kind of each device of the nodes that work."""
        nodes = [self._nodes[number] for number in self._of(NodeState.WORKING, NodeState.PREPARING)]
        return tuple(node.device_kind for node in nodes for _ in range(node.num_devices))

    def _of(self, *states: NodeState) -> list[NodeId]:
        return [number for number, node in self._nodes.items() if node.state in states]

    def _enter(self, number: NodeId, state: NodeState, now: float, detail: str = "") -> None:
        if (node := self._nodes.get(number)) is not None:
            if node.state is not state:
                node.state, node.since = state, now
            node.detail = detail

    def _lose(self, number: NodeId, now: float, why: str) -> None:
        self.holdings.pop(number, None)
        self._enter(number, NodeState.LOST, now, why)

    def _plan(self, planned: events.Planned, now: float) -> None:
        """Everybody who can take part has a place in the plan, or is spare; who was in the one before is gone."""
        self._planned = planned
        spare = planned.plan.spare_nodes
        for number in planned.plan.nodes:
            self._enter(number, NodeState.SPARE if number in spare else NodeState.PREPARING, now)
        for number in self._of(*_IN_PLAN):
            node = self._nodes[number]
            if number in planned.plan.nodes:
                node.suspicion = ""
            elif node.suspicion or node.state is NodeState.RETURNING:
                self._lose(number, now, node.suspicion or "it did not come back")
            else:
                self._enter(number, NodeState.WAITING, now, "has no place in the plan")

    def _prepared(self, now: float) -> None:
        assert self._planned is not None
        plan = self._planned.plan
        for number in _without(plan.nodes, plan.spare_nodes):
            self._enter(number, NodeState.WORKING, now)
        for number in self._of(NodeState.LEAVING):  # the others run without it
            self._enter(number, NodeState.LEFT, now, "it was let go")
        self.holdings = {number: plan.layers_of(number) for number in _without(plan.nodes, plan.spare_nodes)}

    def _left(self, left: events.Left, now: float) -> None:
        node = self._nodes.get(left.node)
        if node is None or node.state in (NodeState.STARTING, NodeState.LOST):
            return  # of a worker that has been replaced, or whose loss is known
        self.holdings.pop(left.node, None)
        self._enter(left.node, NodeState.LEFT, now, f"its worker ended with exit code {left.exit_code}")


def _without(nodes: Iterable[NodeId], others: Iterable[NodeId]) -> list[NodeId]:
    gone = set(others)
    return [node for node in nodes if node not in gone]
