"""Who takes part in a run, and which steps count: a state machine without I/O.

Theory of operation
-------------------

The machine is told what happened (`Received`, `Disconnected`, ... of effects.py) and the time, and answers with what to
do. It owns no socket, clock or thread: equal inputs, equal outputs. Whoever drives it calls `handle` for each input,
carries out the effects in order, and calls `handle` with a `Tick` no later than `wake_s`.

A run is a sequence of generations, each with one plan. The phase says what the run as a whole waits for:

    phase      waits for                        then                                         no later than
    GATHERING  enough nodes that are ready      plan, StartFabric              -> MEETING    gather_s
    MEETING    FabricStarted                    Begin to the plan's nodes      -> PREPARING  fabric_s
    PREPARING  Prepared from every member       Run to all of them             -> RUNNING    prepare_s without progress
    RUNNING    a Vote from every member         write Committed, send Commit   -> RUNNING    step_limit_s
               ... and, after the last step, its evaluation                    -> STOPPING
    STOPPING   every node to leave              Finish                         -> FINISHED   stop_s
    FINISHED   nothing

A node goes STARTING (joined) -> IDLE (its worker is ready) -> PREPARING (got Begin) -> RUNNING (prepared), and back to
IDLE when its generation is abandoned. It is held to account wherever it is: silent for heartbeat_s, its worker stopped
for stopped_s or not ready after ready_s, and it is lost.

The loss of a node, in any phase, is answered by the policy:

    STOP       collect evidence for verdict_s (at once when it is firm, see blame.py), name the first cause, tell all
               nodes to stop                                                                -> STOPPING
    REGROUP    exclude it (at once, unless a worker only lost a peer: whose fault that is, shows within verdict_s);
               if it was a member: Abandon to the others, plan for those that are left, and redo the step in the next
               generation                                                                   -> MEETING
               if no plan exists for them: wait for nodes                                   -> GATHERING
               if a layer has lost its last holder                                          -> STOPPING
               nodes that became ready meanwhile are taken in after the next commit

A failure in the middle of a recovery is no special case: it is the next generation. What arrives late, from a
generation or a step that is over, or from a connection that is gone, has no consequence.

The properties (numbers of ARCHITECTURE.md), each with a test:

    M1  Generations only grow.
    M2  A committed step is never undone and never done twice: a decision is written before it is sent, steps are
        decided in order, and a generation begins with the step after the last decision.
    M3  Every change has a reason, which goes into its record.
    M4  Nobody waits without a deadline: with nothing but ticks, the machine comes to FINISHED.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.blame import Cause, Weight, cause_of_exit, cause_of_failure, first_cause
from oobleck_jax.elastic.effects import (
    Close,
    ConnectionId,
    Disconnected,
    Effect,
    FabricFailed,
    FabricStarted,
    Finish,
    Ignored,
    Input,
    Interrupted,
    Received,
    Send,
    StartFabric,
    Tick,
    Write,
)
from oobleck_jax.elastic.generation import Generation
from oobleck_jax.elastic.node import Node, NodeState, deadlines_of
from oobleck_jax.elastic.terms import OnLoss, Terms, why_refuse
from oobleck_jax.elastic.votes import Decision, Fault
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.plan import NodeId


class Phase(StrEnum):
    """What the run as a whole waits for."""

    GATHERING = "gathering"
    MEETING = "meeting"
    PREPARING = "preparing"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


_NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.GATHERING: frozenset({Phase.MEETING, Phase.STOPPING}),
    Phase.MEETING: frozenset({Phase.PREPARING, Phase.MEETING, Phase.GATHERING, Phase.STOPPING}),
    Phase.PREPARING: frozenset({Phase.RUNNING, Phase.MEETING, Phase.GATHERING, Phase.STOPPING}),
    Phase.RUNNING: frozenset({Phase.MEETING, Phase.GATHERING, Phase.STOPPING}),
    Phase.STOPPING: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class Membership:
    """The state machine of a run; see the top of this file.

    Attributes:
        phase: what the run waits for.
    """

    def __init__(self, terms: Terms, now_s: float) -> None:
        self.phase = Phase.GATHERING
        self._terms = terms
        self._now_s = self._phase_since_s = now_s
        self._nodes: dict[NodeId, Node] = {}
        self._by_connection: dict[ConnectionId, Node] = {}
        self._current: Generation | None = None  # the last one there was, even if it has been abandoned
        self._holdings: dict[NodeId, tuple[int, ...]] = {}  # layers whose state after the last commit a node has
        self._causes: list[Cause] = []  # evidence that awaits the verdict
        self._end: Finish | None = None
        self._effects: list[Effect] = []

    @property
    def generation(self) -> int:
        """Number of the current generation; 0 before the first."""
        return self._current.number if self._current else 0

    @property
    def step(self) -> int:
        """The step in progress, which is also the number of committed steps."""
        return self._current.step if self._current else 0

    @property
    def wake_s(self) -> float:
        """When to call `handle` at the latest; infinite when finished, and only then."""
        return min((when_s for when_s, _ in self._deadlines()), default=math.inf)

    def handle(self, given: Input, now_s: float) -> tuple[Effect, ...]:
        """Take in what happened and return what to do, in this order.

        `now_s` must not decrease from call to call.
        """
        if self.phase is Phase.FINISHED:
            return ()
        self._now_s = now_s
        match given:
            case Received():
                self._receive(given.connection, given.message)
            case Disconnected():
                self._disconnected(given)
            case FabricStarted() | FabricFailed():
                self._fabric(given)
            case Interrupted():
                self._stop(given.reason, exit_code=given.exit_code, node=None)
            case Tick():
                pass
        # What has come in is looked at first: a vote that is in beats a deadline that has passed.
        while due := [(when_s, act) for when_s, act in self._deadlines() if when_s <= now_s]:
            min(due, key=lambda item: item[0])[1]()
        effects, self._effects = tuple(self._effects), []
        return effects

    # --------------------------------------------------------------------------------------------------- messages

    def _receive(self, connection: ConnectionId, message: messages.ToCoordinator) -> None:
        if isinstance(message, messages.Join):
            return self._join(connection, message)
        node = self._by_connection.get(connection)
        if node is None:
            return self._ignore(f"{_kind(message)} on a connection that takes no part (any more)")
        if message.node != node.node:
            return self._ignore(f"node {node.node} sent a {_kind(message)} in the name of node {message.node}")
        node.heard_s = self._now_s
        if self._is_over and not isinstance(message, messages.WorkerExited):
            return None
        match message:
            case messages.Heartbeat():
                stopped_since_s = node.stopped_since_s if node.stopped_since_s is not None else self._now_s
                node.stopped_since_s = stopped_since_s if message.is_worker_stopped else None
            case messages.WorkerExited():
                self._worker_exited(node, message)
            case messages.WorkerReady():
                self._worker_ready(node, message)
            case messages.Failed() if message.is_collateral and message.generation < self.generation:
                self._ignore(f"node {node.node} lost a peer in generation {message.generation}, which is over")
            case messages.Failed():
                self._blame(cause_of_failure(message, self._now_s))
            case messages.Progress() | messages.Prepared():
                self._preparing(node, message)
            case messages.Waiting() | messages.Vote() | messages.Evaluated():
                self._running(message)
        return None

    def _join(self, connection: ConnectionId, join: messages.Join) -> None:
        if connection in self._by_connection:
            return self._ignore(f"{join.name} joined twice on one connection")
        reason = "the run is over" if self._is_over else None
        reason = reason or why_refuse(join, self._terms, taken=self._nodes, has_begun=self.generation > 0)
        if reason:
            self._write(events.Rejected(name=join.name, reason=reason))
            self._do(Send(connection=connection, message=messages.Refused(reason=reason)), Close(connection=connection))
            return None
        free = next(number for number in range(self._terms.num_nodes) if number not in self._nodes)
        node = Node(
            node=NodeId(free) if join.node is None else join.node,
            connection=connection,
            incarnation=join.incarnation,
            heard_s=self._now_s,
            since_s=self._now_s,
        )
        self._nodes[node.node] = self._by_connection[connection] = node
        self._write(events.Joined(node=node.node, name=join.name, incarnation=join.incarnation))
        cores, num_threads = self._terms.place_at_start(node.node)
        welcome = messages.Welcome(
            node=node.node, config_json=self._terms.config_json, cores=cores, num_threads=num_threads
        )
        self._do(Send(connection=connection, message=welcome))
        return None

    def _worker_ready(self, node: Node, ready: messages.WorkerReady) -> None:
        if ready.incarnation != node.incarnation or node.state is not NodeState.STARTING:
            return self._ignore(f"node {node.node}: worker {ready.incarnation} is ready, which is known or over")
        if ready.num_devices < self._terms.num_devices:
            return self._lose(
                node, f"node {node.node} has {ready.num_devices} devices, but the run uses {self._terms.num_devices}"
            )
        self._write(
            events.Ready(
                node=node.node,
                incarnation=ready.incarnation,
                device_kind=ready.device_kind,
                num_devices=ready.num_devices,
                seconds=self._now_s - node.since_s,
            )
        )
        node.link_address = ready.link_address
        self._set(node, NodeState.IDLE)
        if self.phase is Phase.GATHERING:
            self._begin(f"node {node.node} is ready" if self.generation else "all nodes are ready")
        return None

    def _preparing(self, node: Node, message: messages.Progress | messages.Prepared) -> None:
        if message.generation != self.generation or node.state is not NodeState.PREPARING:
            return self._ignore(f"node {node.node}: {_kind(message)} of generation {message.generation}, which is over")
        # While one goes on, those that wait for it are well, too.
        for member in self._members():
            member.since_s = self._now_s
        if isinstance(message, messages.Progress):
            return self._write(
                events.Advanced(
                    node=node.node,
                    generation=message.generation,
                    phase=message.phase,
                    done=message.done,
                    total=message.total,
                )
            )
        self._set(node, NodeState.RUNNING)
        assert self._current is not None
        if self._current.add_prepared(message):
            self._run(self._current)
        return None

    def _running(self, message: messages.Waiting | messages.Vote | messages.Evaluated) -> None:
        current = self._current
        if current is None or self.phase is not Phase.RUNNING or message.generation != current.number:
            return self._ignore_late(message)
        match message:
            case messages.Evaluated() if current.awaits_evaluation(message):
                if evaluated := current.add_evaluated(message, self._now_s):
                    self._write(evaluated)
                    self._stop_if_done(current)
            case messages.Waiting() if message.step == current.step:
                current.add_waiting(message, self._now_s)
            case messages.Vote() if message.step == current.step < self._terms.steps and current.has_vote(message.node):
                match current.add_vote(message, tokens_per_step=self._terms.tokens_per_step):
                    case Decision() as decision:
                        self._commit(current, decision)
                    case Fault() as fault:
                        # Not the loss of a node: to redo the step would give the same, or hide a corruption.
                        self._fail(self._cause(fault.node, fault.cause))
                    case None:
                        pass
            case _:
                self._ignore_late(message)
        return None

    # ------------------------------------------------------------------------------------------------- generations

    def _begin(self, reason: str) -> None:
        """Begin the next generation if there are nodes enough; else wait for more."""
        ready = tuple(sorted(node.node for node in self._nodes.values() if node.state is not NodeState.STARTING))
        if not self.generation and len(ready) < self._terms.num_nodes:
            return None
        if lost := self._lost_layers():
            what = f"no live node has the state of layers {lost} after step {self.step - 1} any more ({reason})"
            return self._fail(self._cause(None, what))
        try:
            proposal = self._terms.replan(ready, self._holdings)
        except PlanError as error:
            if self._terms.on_loss is OnLoss.STOP:
                return self._fail(self._cause(None, str(error)))
            if self.phase is Phase.GATHERING:
                return None
            self._write(events.Gathering(reason=f"{reason}; {error}"))
            return self._enter(Phase.GATHERING)
        self._current = Generation(
            self.generation + 1,
            proposal.plan,
            holdings=self._holdings,
            first_step=self.step,
            evaluation_step=self._current.evaluation_step if self._current else None,
            now_s=self._now_s,
        )
        self._write(
            events.Planned(
                generation=self.generation,
                step=self.step,
                reason=reason,
                plan=proposal.plan,
                plan_reason=proposal.reason,
            )
        )
        self._do(StartFabric(generation=self.generation, num_nodes=len(self._current.members)))
        return self._enter(Phase.MEETING)

    def _lost_layers(self) -> list[int]:
        """Return the layers whose state died with their last holder; before the first commit every node can make it."""
        if self._current is None or self.step == 0:
            return []
        held = {layer for layers in self._holdings.values() for layer in layers}
        return [layer for layer in range(self._current.plan.num_layers) if layer not in held]

    def _fabric(self, given: FabricStarted | FabricFailed) -> None:
        if self.phase is not Phase.MEETING or given.generation != self.generation:
            return self._ignore(f"the fabric of generation {given.generation} is not needed any more")
        if isinstance(given, FabricFailed):
            what = f"JAX's coordination service of generation {self.generation} could not start: {given.error}"
            return self._fail(self._cause(None, what))
        assert self._current is not None
        cores = self._terms.place(self._current.plan)
        begin = messages.Begin(
            generation=self.generation,
            plan=self._current.plan,
            members=tuple(
                messages.Member(
                    node=node.node,
                    link_address=node.link_address,
                    cores=cores.get(node.node, ()),
                    holds=self._holdings.get(node.node, ()),
                )
                for node in self._members()
            ),
            fabric_address=given.address,
            step=self.step,
            evaluate_first=self._current.evaluation_step is not None,
        )
        for node in self._members():
            self._set(node, NodeState.PREPARING)
        self._send_to_members(begin)
        return self._enter(Phase.PREPARING)

    def _run(self, current: Generation) -> None:
        """Everybody is prepared: let them go."""
        self._write(current.run(self._now_s))
        # From here on the members have the state of their layers, and what any other node has falls behind.
        self._holdings = {node: current.plan.layers_of(node) for node in current.members}
        self._enter(Phase.RUNNING)
        self._send_to_members(messages.Run(generation=current.number, step=current.step))

    def _commit(self, current: Generation, decision: Decision) -> None:
        """The step counts: write that down, and only then tell."""
        step = current.step
        evaluates = self._terms.evaluates_after(step)
        self._write(current.commit(decision, evaluates=evaluates, now_s=self._now_s))
        self._send_to_members(messages.Commit(generation=current.number, step=step, global_norm=decision.global_norm))
        if self._stop_if_done(current) or self._terms.on_loss is OnLoss.STOP:
            return
        idle = {node.node for node in self._nodes.values() if node.state is NodeState.IDLE}
        if newcomers := sorted(idle.difference(current.plan.spare_nodes)):
            self._regroup(f"nodes {newcomers} are ready to take part")

    def _stop_if_done(self, current: Generation) -> bool:
        if current.step < self._terms.steps or current.evaluation_step is not None:
            return False
        self._stop(f"all {current.step} steps are done", exit_code=0, node=None)
        return True

    def _regroup(self, reason: str) -> None:
        """Abandon the current generation and begin the next one with the nodes there are."""
        if self.phase in (Phase.PREPARING, Phase.RUNNING):
            self._write(events.Abandoned(generation=self.generation, step=self.step, reason=reason))
            self._send_to_members(messages.Abandon(generation=self.generation, reason=reason))
            for node in self._members():
                self._set(node, NodeState.IDLE)
        self._begin(reason)

    # ------------------------------------------------------------------------------------------------------ losses

    def _disconnected(self, given: Disconnected) -> None:
        node = self._by_connection.pop(given.connection, None)
        if node is None:
            return None  # refused, or excluded before
        if self._is_over:
            return self._finish_if_alone()
        self._lose(node, f"the agent of node {node.node} is gone ({given.reason})")
        self._nodes.pop(node.node, None)
        return None

    def _worker_exited(self, node: Node, exited: messages.WorkerExited) -> None:
        if exited.incarnation != node.incarnation:
            return self._ignore(f"node {node.node}: worker {exited.incarnation} ended, which is not its current one")
        self._write(
            events.Left(
                node=node.node,
                exit_code=exited.exit_code,
                peak_memory_bytes=exited.peak_memory_bytes,
                agent_peak_memory_bytes=exited.agent_peak_memory_bytes,
            )
        )
        # A worker that fails says why and then exits: its exit explains nothing more.
        has_said_why = any(cause.node == node.node and cause.weight is Weight.OWN for cause in self._causes)
        if not (self._is_over or has_said_why):
            self._blame(cause_of_exit(exited, self._now_s))
        return None

    def _lose(self, node: Node, what: str) -> None:
        self._blame(self._cause(node.node, what))

    def _blame(self, cause: Cause) -> None:
        """Answer one piece of evidence that a node is lost, by the policy."""
        self._causes.append(cause)
        # To regroup costs little: wait only where it may be nobody's fault. To stop is final: wait for certainty.
        enough = Weight.OWN if self._terms.on_loss is OnLoss.REGROUP else Weight.FIRM
        if cause.weight >= enough:
            self._pass_verdict()

    def _pass_verdict(self) -> None:
        """The evidence is in: the first cause counts, the others are its consequences."""
        first = first_cause(self._causes)
        for cause in self._causes:
            if cause is not first:
                self._write_failure(cause, is_collateral=True)
        self._causes.clear()
        if self._terms.on_loss is OnLoss.STOP:
            return self._fail(first)
        self._write_failure(first, is_collateral=False)
        # Who only lost a peer is fine, and waits; if nobody knows which peer, all of them may try again.
        if first.guilty is not None and first.guilty in self._nodes:
            return self._exclude(self._nodes[first.guilty], first.what)
        if self._working:
            return self._regroup(first.what)
        return None

    def _exclude(self, node: Node, reason: str) -> None:
        """Go on without a node."""
        del self._nodes[node.node]
        self._holdings.pop(node.node, None)
        if self._by_connection.pop(node.connection, None):
            stop = messages.Stop(reason=f"excluded: {reason}", exit_code=1)
            self._do(Send(connection=node.connection, message=stop), Close(connection=node.connection))
        if node.node in self._working:
            self._regroup(reason)

    def _fail(self, cause: Cause) -> None:
        """End the run for a cause."""
        if self._is_over:
            return
        self._write_failure(cause, is_collateral=False)
        self._stop(cause.what, exit_code=1, node=cause.guilty)

    def _stop(self, reason: str, *, exit_code: int, node: NodeId | None) -> None:
        """Tell everybody that the run is over, and wait for them to leave."""
        if self._is_over:
            return
        self._end = Finish(reason=reason, exit_code=exit_code, node=node)
        self._enter(Phase.STOPPING)
        for connection in self._by_connection:
            self._do(Send(connection=connection, message=messages.Stop(reason=reason, exit_code=exit_code)))
        self._finish_if_alone()

    def _finish_if_alone(self) -> None:
        if not self._by_connection:
            self._finish()

    def _finish(self) -> None:
        end = self._end
        assert end is not None
        self._enter(Phase.FINISHED)
        self._write(events.Finished(steps=self.step, reason=end.reason, exit_code=end.exit_code, node=end.node))
        self._do(end)

    # --------------------------------------------------------------------------------------------------- deadlines

    def _deadlines(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Yield every wait that is going on: when it ends, and what happens then."""
        limits = self._terms.limits
        if self.phase is Phase.FINISHED:
            return
        if self.phase is Phase.STOPPING:
            yield self._phase_since_s + limits.stop_s, self._finish
            return
        if self._causes:
            yield self._causes[0].noticed_s + limits.verdict_s, self._pass_verdict
        for node in self._nodes.values():
            for when_s, what in deadlines_of(node, limits):
                yield when_s, partial(self._lose, node, what)
        match self.phase:
            case Phase.GATHERING:
                yield self._phase_since_s + limits.gather_s, self._too_few
            case Phase.MEETING:
                error = f"no answer within {limits.fabric_s:.0f} s"
                failed = FabricFailed(generation=self.generation, error=error)
                yield self._phase_since_s + limits.fabric_s, partial(self._fabric, failed)
            case Phase.RUNNING if self._current is not None and not self._causes:
                yield self._current.overdue_s(limits), partial(self._no_progress, self._current)
            case _:  # PREPARING: the deadlines of the nodes
                pass

    def _too_few(self) -> None:
        ready = sorted(node.node for node in self._nodes.values() if node.state is not NodeState.STARTING)
        what = (
            f"only {len(ready)} of {self._terms.num_nodes} nodes were ready after "
            f"{self._now_s - self._phase_since_s:.0f} s (ready: {ready}, joined: {sorted(self._nodes)}); "
            "start the others, or lower --nodes"
        )
        self._fail(self._cause(None, what))

    def _no_progress(self, current: Generation) -> None:
        """A step, or an evaluation, takes far longer than it may: find out who holds it up."""
        stopped = [node.node for node in self._members() if node.stopped_since_s is not None]
        found = current.held_up_by(stopped, self._now_s)
        who = f"node {found[0]} holds" if len(found) == 1 else f"one of the nodes {list(found)} holds"
        what = f"no progress for {current.stuck_s(self._now_s):.1f} s in step {current.step}: {who} it up"
        is_clear = len(found) == 1 or self._terms.on_loss is OnLoss.REGROUP
        self._blame(self._cause(found[0] if is_clear else None, what))

    # ----------------------------------------------------------------------------------------------------- helpers

    @property
    def _is_over(self) -> bool:
        return self.phase in (Phase.STOPPING, Phase.FINISHED)

    @property
    def _working(self) -> tuple[NodeId, ...]:
        """The members of the current generation, unless it is over."""
        if self._current is None or self.phase not in (Phase.MEETING, Phase.PREPARING, Phase.RUNNING):
            return ()
        return self._current.members

    def _members(self) -> list[Node]:
        return [self._nodes[node] for node in self._working if node in self._nodes]

    def _set(self, node: Node, state: NodeState) -> None:
        node.state, node.since_s = state, self._now_s

    def _enter(self, phase: Phase) -> None:
        assert phase in _NEXT[self.phase], (self.phase, phase)
        self.phase, self._phase_since_s = phase, self._now_s

    def _cause(self, node: NodeId | None, what: str) -> Cause:
        return Cause(node=node, weight=Weight.FIRM, what=what, noticed_s=self._now_s)

    def _send_to_members(self, message: messages.ToNode) -> None:
        for node in self._members():
            self._do(Send(connection=node.connection, message=message))

    def _do(self, *effects: Effect) -> None:
        self._effects.extend(effects)

    def _write(self, record: events.Record) -> None:
        self._do(Write(record=record))

    def _write_failure(self, cause: Cause, *, is_collateral: bool) -> None:
        self._write(
            events.Failed(
                generation=self.generation,
                step=self.step,
                node=cause.guilty,
                cause=cause.what,
                detail=cause.detail,
                is_collateral=is_collateral,
            )
        )

    def _ignore(self, reason: str) -> None:
        self._do(Ignored(reason=reason))

    def _ignore_late(self, message: messages.Waiting | messages.Vote | messages.Evaluated) -> None:
        self._ignore(
            f"node {message.node}: {_kind(message)} of generation {message.generation}, step {message.step}; "
            f"now {self.phase}, generation {self.generation}, step {self.step}"
        )


def _kind(message: messages.ToCoordinator) -> str:
    return type(message).__name__
