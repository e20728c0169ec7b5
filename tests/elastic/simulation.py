"""A membership machine with simulated nodes: no processes, no sockets, a clock that is a number."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeVar

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.effects import (
    CheckpointCommitted,
    CheckpointFound,
    CommitCheckpoint,
    ConnectionId,
    Effect,
    FabricStarted,
    FindCheckpoint,
    Finish,
    Input,
    Received,
    Send,
    StartFabric,
    Tick,
    Write,
)
from oobleck_jax.elastic.membership import Membership
from oobleck_jax.elastic.phase import Phase
from oobleck_jax.elastic.resumption import Resumption
from oobleck_jax.elastic.terms import Checkpoints, OnLoss, Terms
from oobleck_jax.journal import journal_of
from oobleck_jax.planning.plan import NodeId, Plan
from tests.elastic.plans import NUM_LAYERS, TOKENS_PER_MICROBATCH, terms


R = TypeVar("R")


@dataclass
class Simulation:
    """A machine, its nodes and its clock, without any process. Messages on a connection stay in order.

    What the machine sends waits in a node's inbox until the node works; what a node says waits in its outbox until it
    is delivered.
    """

    terms: Terms
    now_s: float = 100.0
    nodes: "dict[ConnectionId, Node]" = field(default_factory=dict)
    fabrics: list[StartFabric] = field(default_factory=list)
    wishes: list[CommitCheckpoint | FindCheckpoint] = field(default_factory=list)  # of checkpoints, not yet fulfilled
    disk: dict[str, tuple[int, int]] = field(default_factory=dict)  # checkpoints: generation and step, by folder
    history: list[Effect] = field(default_factory=list)
    dies_at_commit: bool = False  # the coordinator, as soon as the next decision is written
    num_connections: int = 0
    first_connection: int = 0  # of this coordinator
    num_restarts: int = 0
    num_sent_again: int = 0  # decisions, to nodes that came back

    def __post_init__(self) -> None:
        self.machine = Membership(self.terms, self.now_s)

    def feed(self, given: Input) -> tuple[Effect, ...]:
        effects = self.machine.handle(given, self.now_s)
        for effect in effects:
            self.history.append(effect)
            match effect:
                case Send(connection=connection, message=message):
                    if connection in self.nodes:
                        self.nodes[connection].inbox.append(message)
                case StartFabric():
                    self.fabrics.append(effect)
                case CommitCheckpoint() | FindCheckpoint():
                    self.wishes.append(effect)
                case Write(record=events.Committed()) if self.dies_at_commit:
                    self.restart()
                    break  # it got no further
                case _:
                    pass
        return effects

    def connect(self, node: "Node") -> None:
        """Give a node a new connection; what was on its way on an old one is lost."""
        self.nodes.pop(node.connection, None)
        node.connection = ConnectionId(self.num_connections)
        self.num_connections += 1
        self.nodes[node.connection] = node
        node.inbox.clear()
        node.outbox.clear()

    def join(self, node: int | None = None, **changes: Any) -> "Node":
        member = Node(ConnectionId(-1))
        self.connect(member)
        member.agent = f"agent-{member.connection}"
        own = {"versions": {"jax": "0.10"}, "num_devices": 1, "incarnation": 0, "agent": member.agent}
        values: dict[str, Any] = {**own, **changes}
        name = f"host-{member.connection}"
        join = messages.Join(name=name, node=None if node is None else NodeId(node), **values)
        self.feed(Received(connection=member.connection, message=join))
        return member

    def rejoin(self, node: "Node") -> None:
        """Let a node join again on a new connection, with its worker if that is ready."""
        self.connect(node)
        has_worker = node.is_alive and node.is_ready
        if not has_worker:
            node.is_alive, node.is_ready = True, False
            node.incarnation += 1
        join = messages.Join(
            name=f"host-{node.connection}",
            node=node.id,
            versions={"jax": "0.10"},
            num_devices=1,
            incarnation=node.incarnation,
            worker=ready(node.id, node.incarnation) if has_worker else None,
            held=node.held if has_worker else None,
            agent=node.agent,
        )
        effects = self.feed(Received(connection=node.connection, message=join))
        self.num_sent_again += sum(
            isinstance(effect, Send) and isinstance(effect.message, messages.Commit) for effect in effects
        )

    def restart(self) -> None:
        """The coordinator dies, and its successor reads what it wrote. The nodes have no connection then."""
        self.dies_at_commit = False
        self.num_restarts += 1
        self.first_connection = self.num_connections
        self.fabrics.clear()
        self.wishes.clear()
        known = [node for node in self.nodes.values() if node.has_agent and node.id >= 0]
        for node in self.nodes.values():
            node.inbox.clear()
            node.outbox.clear()
        written = [effect.record for effect in self.history if isinstance(effect, Write)]
        decisions = [record for record in written if isinstance(record, events.Committed | events.Restored)]
        journal = journal_of((0.0, record) for record in decisions)
        evaluated = [record.step for record in self.records(events.Evaluated)]
        is_last = bool(decisions) and isinstance(decisions[-1], events.Committed)
        resumed = Resumption(
            generation=max((record.generation for record in self.records(events.Planned)), default=0),
            plan=next((record.plan for record in reversed(self.records(events.Planned))), None),
            step=journal.next_step,
            committed=journal.committed[-1][1] if is_last else None,
            num_skipped=journal.num_skipped,
            restored_generation=journal.restored.generation if journal.restored else 0,
            nodes=tuple(sorted({node.id for node in known})),
            evaluated=not journal.next_step or journal.next_step - 1 in evaluated,
        )
        self.machine = Membership(self.terms, self.now_s, resumed)
        self.feed(Tick())

    def knows(self, node: "Node") -> bool:
        """Whether this coordinator, and not only the one before it, has heard of a node on its connection."""
        return node.connection >= self.first_connection

    def reattach(self) -> None:
        """All agents that live, and have no connection with this coordinator, join again."""
        for node in list(self.nodes.values()):
            if node.has_agent and node.id >= 0 and not self.knows(node):
                self.rejoin(node)

    def say(self, node: "Node", message: messages.ToCoordinator) -> tuple[Effect, ...]:
        return self.feed(Received(connection=node.connection, message=message))

    def start_fabric(self) -> None:
        wanted = self.fabrics.pop(0)
        self.feed(FabricStarted(generation=wanted.generation, address="127.0.0.1:1"))

    def use_disk(self) -> None:
        """Commit or find a checkpoint, whichever was asked for first."""
        match self.wishes.pop(0):
            case CommitCheckpoint(generation=generation, step=step):
                self.disk[folder_of(step, generation)] = generation, step
                self.feed(CheckpointCommitted(generation=generation, step=step, num_bytes=8, removed=()))
            case FindCheckpoint() as wanted:
                found = [
                    (generation, step, folder)
                    for folder, (generation, step) in self.disk.items()
                    if folder not in wanted.excluded and (wanted.end_step is None or step < wanted.end_step)
                ]
                point = None
                if found:
                    _, step, folder = max(found)
                    point = messages.RestorePoint(folder=folder, step=step)
                self.feed(CheckpointFound(point=point))

    def use_whole_disk(self) -> None:
        while self.wishes:
            self.use_disk()

    def deliver(self, node: "Node") -> None:
        while node.outbox:
            message = node.outbox.popleft()
            if self.knows(node):
                self.say(node, message)

    def round(self) -> None:
        """Let every node deal with what came in, and hear what it says."""
        for node in list(self.nodes.values()):
            node.work()
            self.deliver(node)

    def beat(self) -> None:
        """Every agent that lives gives a sign of life."""
        for node in self.nodes.values():
            if node.has_agent and node.id >= 0 and self.knows(node):
                self.say(node, messages.Heartbeat(node=node.id, is_worker_stopped=node.is_stopped))

    def pump_steps(self, num_steps: int) -> None:
        """Play until so many more steps are committed."""
        end = self.machine.step + num_steps
        for _ in range(100):
            if self.machine.step >= end:
                return
            if self.fabrics:
                self.start_fabric()
            if self.wishes:
                self.use_disk()
            self.round()
        raise AssertionError("nothing goes on")

    def pump(self) -> None:
        """Let everything happen that needs no time and no fault, until nothing is left to do."""
        while True:
            busy = any(node.has_agent and (node.inbox or node.outbox) for node in self.nodes.values())
            if not busy and not self.fabrics and not self.wishes:
                return
            if self.fabrics:
                self.start_fabric()
            if self.wishes:
                self.use_disk()
            self.round()

    def records(self, kind: type[R]) -> list[R]:
        return [
            effect.record for effect in self.history if isinstance(effect, Write) and isinstance(effect.record, kind)
        ]

    def sent(self, kind: type[R]) -> list[R]:
        return [
            effect.message for effect in self.history if isinstance(effect, Send) and isinstance(effect.message, kind)
        ]

    @property
    def end(self) -> Finish | None:
        return next((effect for effect in self.history if isinstance(effect, Finish)), None)


class Node:
    """An agent and its worker that do what they are told, and check that they may."""

    def __init__(self, connection: ConnectionId) -> None:
        self.connection = connection
        self.inbox: deque[messages.ToNode] = deque()
        self.outbox: deque[messages.ToCoordinator] = deque()
        self.has_agent = True
        self.agent = ""
        self.id = NodeId(-1)
        self.incarnation = -1
        self._start(0)
        self.is_alive = True  # the worker

    def _start(self, incarnation: int) -> None:
        """Start a worker."""
        self.incarnation = incarnation
        self.is_alive = True
        self.is_ready = False
        self.is_stopped = False  # by a signal, as its agent sees it
        self.plan: Plan | None = None
        self.generation = 0
        self.run_generation = 0
        self.state_step: dict[int, int] = {}  # of each layer it holds: the step that was applied last

    @property
    def held(self) -> messages.Held | None:
        """What the agent knows of its worker."""
        if not self.run_generation:
            return None
        (step,) = set(self.state_step.values()) or {-1}
        return messages.Held(generation=self.run_generation, step=step, layers=tuple(self.state_step))

    def work(self) -> None:
        """Deal with what came in."""
        while self.inbox and self.has_agent:
            self._take(self.inbox.popleft())

    def _take(self, message: messages.ToNode) -> None:
        match message:
            case messages.Respawn():
                assert message.incarnation > self.incarnation
                if self.is_alive or self.is_stopped:
                    self.outbox.append(exited(self.id, -9, self.incarnation))
                self._start(message.incarnation)
                self._get_ready()
            case messages.Stop() | messages.Refused():
                self.is_alive = self.has_agent = False
            case messages.Welcome():
                self.id = message.node
                if not self.is_ready:
                    self._get_ready()
            case _ if self.is_alive:
                self._work_on(message)
            case _:
                pass  # the worker is dead, or stopped

    def _get_ready(self) -> None:
        self.is_ready = True
        self.outbox.append(ready(self.id, self.incarnation))

    def _work_on(self, message: messages.ToNode) -> None:
        match message:
            case messages.Begin():
                assert message.generation > self.generation, "M1: an old generation came back"
                assert message.restore is None or message.restore.next_step == message.step
                assert message.restore is None or not any(member.holds for member in message.members)
                me = next(member for member in message.members if member.node == self.id)
                for layer in me.holds:
                    assert self.state_step[layer] == message.step - 1, "M2: believed to hold a state that it has not"
                self.plan, self.generation, self.begin = message.plan, message.generation, message
                self.outbox.append(prepared(self.id, message.generation))
            case messages.Run() if message.generation == self.generation:
                assert self.plan is not None
                # It has copied what it did not hold, and drops what it need not.
                self.state_step = dict.fromkeys(self.plan.layers_of(self.id), message.step - 1)
                self.run_generation = message.generation
                if self.begin.evaluate_first:
                    self._evaluate(message.step - 1)
                self._vote(message.step)
            case messages.SaveCheckpoint():
                is_there = set(self.state_step.values()) == {message.step}
                part = {"node": self.id, "generation": message.generation, "step": message.step}
                saved = messages.Saved(**part, groups={}, seconds={"copy": 0.1})
                self.outbox.append(saved if is_there else messages.NotSaved(**part, reason="it has another step"))
            case messages.Commit():
                assert message.generation == self.generation, "M2: a commit of a generation that is over"
                for layer, step in self.state_step.items():
                    assert step == message.step - 1, "M2: a step is applied twice, or one is left out"
                    self.state_step[layer] = message.step
                self._evaluate(message.step)
                self._vote(message.step + 1)
            case _:
                pass

    def _vote(self, step: int) -> None:
        assert self.plan is not None
        self.outbox.append(vote(self.id, self.plan, self.generation, step))

    def _evaluate(self, step: int) -> None:
        assert self.plan is not None
        if self.id in self.plan.holders_of(NUM_LAYERS - 1):
            self.outbox.append(
                messages.Evaluated(node=self.id, generation=self.generation, step=step, loss_sum=2.0, num_tokens=2)
            )


def folder_of(step: int, generation: int) -> str:
    return f"step-{step}-generation-{generation}"


def checkpoints(every_steps: int | None = None, **changes: Any) -> Checkpoints:
    return Checkpoints(folder=folder_of, every_steps=every_steps, **changes)


def ready(node: NodeId, incarnation: int = 0, num_devices: int = 1) -> messages.WorkerReady:
    return messages.WorkerReady(
        node=node,
        incarnation=incarnation,
        link_address=f"127.0.0.1:{5000 + node}",
        num_devices=num_devices,
        device_kind="cpu",
    )


def prepared(node: NodeId, generation: int) -> messages.Prepared:
    return messages.Prepared(node=node, generation=generation, num_compilations=0, seconds={})


def vote(node: NodeId, plan: Plan, generation: int, step: int, **changes: Any) -> messages.Vote:
    num_tokens = sum(
        pipeline.num_microbatches * TOKENS_PER_MICROBATCH
        for pipeline in plan.pipelines
        if pipeline.node_of(len(pipeline.template.stages) - 1) == node
    )
    values: dict[str, Any] = {
        "loss_sum": 3.0 * num_tokens,
        "num_tokens": num_tokens,
        "is_finite": True,
        "groups": tuple(
            messages.GroupReport(group=f"layer {layer}", squared_norm=1.0, checksum=step)
            for layer in plan.layers_of(node)
        ),
        "seconds": {},
    }
    return messages.Vote(node=node, generation=generation, step=step, **{**values, **changes})


def exited(node: NodeId, exit_code: int, incarnation: int = 0) -> messages.WorkerExited:
    return messages.WorkerExited(node=node, incarnation=incarnation, exit_code=exit_code, log_tail="")


def failure(node: NodeId, error: str, blames: NodeId | None = None, incarnation: int = 0) -> messages.Failed:
    return messages.Failed(
        node=node, incarnation=incarnation, generation=1, error=error, traceback="traceback", blames=blames
    )


def running(num_nodes: int = 3, **changes: Any) -> tuple[Simulation, list[Node]]:
    """A run in its first step; no node has voted."""
    simulation = Simulation(terms(**{"num_nodes": num_nodes, "steps": 1000, **changes}))
    nodes = [simulation.join(node) for node in range(num_nodes)]
    simulation.round()
    simulation.start_fabric()
    simulation.round()
    for node in nodes:
        node.work()
    assert simulation.machine.phase is Phase.RUNNING
    return simulation, nodes


def committing(num_steps: int, **changes: Any) -> tuple[Simulation, list[Node]]:
    """A run that has committed some steps, one second each."""
    simulation, nodes = running(**changes)
    for _ in range(num_steps):
        simulation.now_s += 1.0
        for node in nodes:
            simulation.deliver(node)
        for node in nodes:
            node.work()
    assert simulation.machine.step == num_steps
    return simulation, nodes


def regrouping(num_steps: int = 2, num_nodes: int = 4, **changes: object) -> tuple[Simulation, list[Node]]:
    """A run that may lose nodes, after some steps."""
    return committing(num_steps, num_nodes=num_nodes, on_loss=OnLoss.REGROUP, **changes)


def kill(simulation: Simulation, node: Node, exit_code: int = -9) -> None:
    """Kill the worker of a node; its agent says so."""
    node.is_alive = False
    simulation.say(node, exited(node.id, exit_code, node.incarnation))
