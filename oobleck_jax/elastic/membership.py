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
    REGROUP    exclude it; if it was a member: Abandon to the others, plan for those that are left, and redo the step in
               the next generation                                                          -> MEETING
               if no plan exists for them: wait for nodes                                   -> GATHERING
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
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TypeAlias

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.blame import Cause, Weight, cause_of_exit, cause_of_failure, first_cause, suspects
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
from oobleck_jax.elastic.limits import Limits
from oobleck_jax.elastic.votes import Decision, Fault, decide
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.plan import NodeId, Plan


class Phase(StrEnum):
    """What the run as a whole waits for."""

    GATHERING = "gathering"
    MEETING = "meeting"
    PREPARING = "preparing"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


class NodeState(StrEnum):
    """How far a node is."""

    STARTING = "starting"
    IDLE = "idle"
    PREPARING = "preparing"
    RUNNING = "running"


class OnLoss(StrEnum):
    """What to do when a node is lost."""

    STOP = "stop"
    REGROUP = "regroup"


_NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.GATHERING: frozenset({Phase.MEETING, Phase.STOPPING}),
    Phase.MEETING: frozenset({Phase.PREPARING, Phase.MEETING, Phase.GATHERING, Phase.STOPPING}),
    Phase.PREPARING: frozenset({Phase.RUNNING, Phase.MEETING, Phase.GATHERING, Phase.STOPPING}),
    Phase.RUNNING: frozenset({Phase.MEETING, Phase.GATHERING, Phase.STOPPING}),
    Phase.STOPPING: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}

# Given the nodes that are ready (ascending) and the layers whose current state each node has, return the plan for them,
# or raise PlanError. Pure.
Replan: TypeAlias = Callable[[tuple[NodeId, ...], Mapping[NodeId, tuple[int, ...]]], Plan]


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a run asks of its nodes, and what it needs to know of the rest of the program.

    Attributes:
        place: cores of each node in a plan; nodes that may use any core are left out.
        place_at_start: cores and number of threads of a node's worker, before there is a plan.
    """

    config_json: str
    config_digest: str
    versions: dict[str, str]
    num_nodes: int
    num_devices: int  # of each node
    steps: int
    tokens_per_step: int
    evaluates_after: Callable[[int], bool]
    replan: Replan
    place: Callable[[Plan], Mapping[NodeId, tuple[int, ...]]]
    place_at_start: Callable[[NodeId], tuple[tuple[int, ...], int]]
    on_loss: OnLoss = OnLoss.STOP
    limits: Limits = field(default_factory=Limits)


@dataclass(kw_only=True, slots=True)
class _Node:
    """What the machine knows of a node that takes part."""

    node: NodeId
    connection: ConnectionId
    incarnation: int
    heard_s: float  # last sign of life of the agent
    since_s: float  # in its state, or since its last progress
    state: NodeState = NodeState.STARTING
    link_address: str = ""
    stopped_since_s: float | None = None  # its worker, by a signal


@dataclass(kw_only=True, slots=True)
class _Evaluation:
    """An evaluation that is going on."""

    step: int
    missing: set[NodeId]
    loss_sums: dict[NodeId, float | None] = field(default_factory=dict[NodeId, float | None])
    num_tokens: int = 0


class Membership:
    """The state machine of a run; see the top of this file.

    Attributes:
        phase: what the run waits for.
        generation: number of the current generation; 0 before the first.
        step: the step in progress; equal to the number of committed steps.
    """

    def __init__(self, terms: Terms, now_s: float) -> None:
        self.phase = Phase.GATHERING
        self.generation = 0
        self.step = 0
        self._terms = terms
        self._phase_since_s = now_s
        self._nodes: dict[NodeId, _Node] = {}
        self._by_connection: dict[ConnectionId, _Node] = {}
        self._effects: list[Effect] = []
        self._end: Finish | None = None
        # Of the current generation:
        self._plan: Plan | None = None
        self._generation_since_s = now_s
        self._prepared: dict[NodeId, messages.Prepared] = {}
        # Of the current step:
        self._votes: dict[NodeId, messages.Vote] = {}
        self._waits: dict[NodeId, NodeId] = {}
        self._step_since_s = now_s
        self._recent_steps_s: deque[float] = deque(maxlen=16)
        self._evaluation: _Evaluation | None = None
        # Layers whose state after step - 1 a node has; empty until a generation has run.
        self._holdings: dict[NodeId, tuple[int, ...]] = {}
        self._causes: list[Cause] = []  # evidence that awaits the verdict

    def handle(self, given: Input, now_s: float) -> tuple[Effect, ...]:
        """Take in what happened and return what to do, in this order.

        `now_s` must not decrease from call to call.
        """
        match given:
            case Received():
                self._receive(given.connection, given.message, now_s)
            case Disconnected():
                self._disconnected(given, now_s)
            case FabricStarted() | FabricFailed():
                self._fabric(given, now_s)
            case Interrupted():
                self._stop(given.reason, exit_code=given.exit_code, node=None, now_s=now_s)
            case Tick():
                pass
        # What has come in is looked at first: a vote that is in beats a deadline that has passed.
        while due := [(when_s, act) for when_s, act in self._deadlines() if when_s <= now_s]:
            min(due, key=lambda item: item[0])[1](now_s)
        effects, self._effects = tuple(self._effects), []
        return effects

    @property
    def wake_s(self) -> float:
        """When to call `handle` at the latest; infinite when finished, and only then."""
        return min((when_s for when_s, _ in self._deadlines()), default=math.inf)

    @property
    def members(self) -> tuple[NodeId, ...]:
        """The nodes that work in the current generation, ascending; the position is the rank in its fabric."""
        if self._plan is None:
            return ()
        return tuple(sorted(node for pipeline in self._plan.pipelines for node in pipeline.nodes))

    # ------------------------------------------------------------------------------------------------- messages

    def _receive(self, connection: ConnectionId, message: messages.ToCoordinator, now_s: float) -> None:
        if isinstance(message, messages.Join):
            return self._join(connection, message, now_s)
        node = self._by_connection.get(connection)
        if node is None:
            return self._ignore(f"{_kind(message)} from a connection that takes no part (any more)")
        if message.node != node.node:
            return self._ignore(f"node {node.node} sent a {_kind(message)} in the name of node {message.node}")
        node.heard_s = now_s
        if self.phase in (Phase.STOPPING, Phase.FINISHED) and not isinstance(message, messages.WorkerExited):
            return None
        match message:
            case messages.Heartbeat():
                self._heartbeat(node, message, now_s)
            case messages.WorkerExited():
                self._worker_exited(node, message, now_s)
            case messages.WorkerReady():
                self._worker_ready(node, message, now_s)
            case messages.Failed():
                self._blame(cause_of_failure(message, now_s), now_s)
            case messages.Progress() | messages.Prepared():
                self._preparing(node, message, now_s)
            case messages.Waiting():
                if self._is_current(message):
                    self._waits[node.node] = message.waits_for
            case messages.Vote():
                self._vote(message, now_s)
            case messages.Evaluated():
                self._evaluated(message, now_s)
        return None

    def _join(self, connection: ConnectionId, join: messages.Join, now_s: float) -> None:
        if connection in self._by_connection:
            return self._ignore(f"{join.name} joined twice on one connection")
        if reason := self._why_not(join):
            self._write(events.Rejected(name=join.name, reason=reason))
            self._do(Send(connection=connection, message=messages.Refused(reason=reason)), Close(connection=connection))
            return None
        free = (NodeId(number) for number in range(len(self._nodes) + 1) if number not in self._nodes)
        node_id = join.node if join.node is not None else next(free)
        node = _Node(node=node_id, connection=connection, incarnation=join.incarnation, heard_s=now_s, since_s=now_s)
        self._nodes[node_id] = self._by_connection[connection] = node
        self._write(events.Joined(node=node_id, name=join.name, incarnation=join.incarnation))
        cores, num_threads = self._terms.place_at_start(node_id)
        welcome = messages.Welcome(
            node=node_id, config_json=self._terms.config_json, cores=cores, num_threads=num_threads
        )
        self._do(Send(connection=connection, message=welcome))
        return None

    def _why_not(self, join: messages.Join) -> str | None:
        """Return why a node may not take part, or None."""
        terms = self._terms
        if self.phase in (Phase.STOPPING, Phase.FINISHED):
            return "the run is over"
        if self.generation and terms.on_loss is OnLoss.STOP:
            return "the run has begun, and its nodes stay the same to the end"
        for name, wanted in terms.versions.items():
            if join.versions.get(name) != wanted:
                return f"{name} {join.versions.get(name, 'unknown')} on {join.name}, but the run uses {name} {wanted}"
        if join.config_digest not in (None, terms.config_digest):
            return f"{join.name} was started with other flags than the coordinator; start all with the same ones"
        if join.num_devices != terms.num_devices:
            return f"{join.name} offers {join.num_devices} devices, but the run uses {terms.num_devices} of each node"
        if join.node is not None and join.node in self._nodes:
            return f"node {join.node} takes part already"
        if join.node is not None and not 0 <= join.node < terms.num_nodes:
            return f"there is no node {join.node}: the run has nodes 0 to {terms.num_nodes - 1}"
        if len(self._nodes) >= terms.num_nodes:
            return f"the run has all of its {terms.num_nodes} nodes"
        return None

    def _heartbeat(self, node: _Node, heartbeat: messages.Heartbeat, now_s: float) -> None:
        if not heartbeat.is_worker_stopped:
            node.stopped_since_s = None
        elif node.stopped_since_s is None:
            node.stopped_since_s = now_s

    def _worker_ready(self, node: _Node, ready: messages.WorkerReady, now_s: float) -> None:
        if ready.incarnation != node.incarnation or node.state is not NodeState.STARTING:
            return self._ignore(f"node {node.node}: worker {ready.incarnation} is ready, but that is over")
        if ready.num_devices < self._terms.num_devices:
            what = f"node {node.node} has {ready.num_devices} devices, but the run uses {self._terms.num_devices}"
            return self._blame(Cause(node=node.node, weight=Weight.FIRM, what=what, noticed_s=now_s), now_s)
        self._write(
            events.Ready(
                node=node.node,
                incarnation=ready.incarnation,
                device_kind=ready.device_kind,
                num_devices=ready.num_devices,
                seconds=now_s - node.since_s,
            )
        )
        node.state, node.since_s, node.link_address = NodeState.IDLE, now_s, ready.link_address
        if self.phase is Phase.GATHERING:
            self._begin("all nodes are ready" if not self.generation else f"node {node.node} is ready", now_s)
        return None

    def _preparing(self, node: _Node, message: messages.Progress | messages.Prepared, now_s: float) -> None:
        if message.generation != self.generation or node.state is not NodeState.PREPARING:
            return self._ignore(f"node {node.node}: {_kind(message)} of generation {message.generation}, which is over")
        node.since_s = now_s
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
        node.state = NodeState.RUNNING
        self._prepared[node.node] = message
        if len(self._prepared) == len(self.members):
            self._run(now_s)
        return None

    def _is_current(self, message: messages.Vote | messages.Waiting) -> bool:
        """Whether a message is of the step in progress; if not, the reason is noted."""
        if self.phase is Phase.RUNNING and (message.generation, message.step) == (self.generation, self.step):
            return True
        self._ignore(
            f"node {message.node}: {_kind(message)} of generation {message.generation}, step {message.step}; "
            f"now {self.phase}, generation {self.generation}, step {self.step}"
        )
        return False

    def _vote(self, vote: messages.Vote, now_s: float) -> None:
        if not self._is_current(vote):
            return None
        if vote.node not in self.members or vote.node in self._votes or self.step >= self._terms.steps:
            return self._ignore(f"node {vote.node} has no vote (left) in step {vote.step}")
        self._votes[vote.node] = vote
        self._waits.pop(vote.node, None)
        if len(self._votes) < len(self.members):
            return None
        match decide(self._votes, tokens_per_step=self._terms.tokens_per_step):
            case Decision() as decision:
                self._commit(decision, now_s)
            case Fault() as fault:
                # Not the loss of a node: redoing the step elsewhere would give the same, or hide a corruption.
                self._fail(Cause(node=fault.node, weight=Weight.FIRM, what=fault.cause, noticed_s=now_s), now_s)
        return None

    def _evaluated(self, evaluated: messages.Evaluated, now_s: float) -> None:
        evaluation = self._evaluation
        if (
            evaluation is None
            or self.phase is not Phase.RUNNING
            or (evaluated.generation, evaluated.step) != (self.generation, evaluation.step)
            or evaluated.node not in evaluation.missing
        ):
            return self._ignore(f"node {evaluated.node}: evaluation of step {evaluated.step}, which is over")
        evaluation.missing.remove(evaluated.node)
        evaluation.loss_sums[evaluated.node] = evaluated.loss_sum
        evaluation.num_tokens += evaluated.num_tokens
        if evaluation.missing:
            return None
        sums = [loss_sum for _, loss_sum in sorted(evaluation.loss_sums.items()) if loss_sum is not None]
        is_finite = len(sums) == len(evaluation.loss_sums) and evaluation.num_tokens > 0
        self._write(
            events.Evaluated(
                generation=self.generation,
                step=evaluation.step,
                loss=math.fsum(sums) / evaluation.num_tokens if is_finite else None,
                num_tokens=evaluation.num_tokens,
            )
        )
        self._evaluation = None
        self._step_since_s = now_s  # the next step begins only now
        self._stop_if_done(now_s)
        return None

    # ------------------------------------------------------------------------------------------------ generations

    def _begin(self, reason: str, now_s: float) -> None:
        """Begin the next generation if there are nodes enough; else wait for more."""
        terms = self._terms
        ready = tuple(sorted(node.node for node in self._nodes.values() if node.state is not NodeState.STARTING))
        self._plan = None
        if not self.generation and len(ready) < terms.num_nodes:
            return self._enter(Phase.GATHERING, now_s)
        try:
            plan = terms.replan(ready, self._holdings)
        except PlanError as error:
            if terms.on_loss is OnLoss.STOP:
                return self._fail(Cause(node=None, weight=Weight.FIRM, what=str(error), noticed_s=now_s), now_s)
            self._ignore(f"no plan for nodes {list(ready)}: {error}")
            return self._enter(Phase.GATHERING, now_s)
        self._plan = plan
        self.generation += 1
        self._generation_since_s = now_s
        self._prepared.clear()
        self._forget_step(now_s)
        self._recent_steps_s.clear()
        self._write(events.Planned(generation=self.generation, step=self.step, reason=reason, plan=plan))
        self._do(StartFabric(generation=self.generation, num_nodes=len(self.members)))
        return self._enter(Phase.MEETING, now_s)

    def _fabric(self, given: FabricStarted | FabricFailed, now_s: float) -> None:
        if self.phase is not Phase.MEETING or given.generation != self.generation:
            return self._ignore(f"the fabric of generation {given.generation} is not needed any more")
        if isinstance(given, FabricFailed):
            what = f"JAX's coordination service of generation {self.generation} could not start: {given.error}"
            return self._fail(Cause(node=None, weight=Weight.FIRM, what=what, noticed_s=now_s), now_s)
        assert self._plan is not None
        cores = self._terms.place(self._plan)
        members = tuple(
            messages.Member(
                node=node,
                link_address=self._nodes[node].link_address,
                cores=cores.get(node, ()),
                holds=self._holdings.get(node, ()),
            )
            for node in self.members
        )
        begin = messages.Begin(
            generation=self.generation,
            plan=self._plan,
            members=members,
            fabric_address=given.address,
            step=self.step,
            evaluate_first=self._evaluation is not None,
        )
        self._enter(Phase.PREPARING, now_s)
        for node in self._member_nodes():
            node.state, node.since_s = NodeState.PREPARING, now_s
            self._do(Send(connection=node.connection, message=begin))
        return None

    def _run(self, now_s: float) -> None:
        """Everybody is prepared: let them go."""
        assert self._plan is not None
        self._write(
            events.Prepared(
                generation=self.generation,
                step=self.step,
                seconds=now_s - self._generation_since_s,
                num_compilations={node: self._prepared[node].num_compilations for node in self.members},
                phases={node: self._prepared[node].seconds for node in self.members},
            )
        )
        # From here on everybody has the state of its layers, and nobody else's is up to date after the next commit.
        self._holdings = {node: self._plan.layers_of(node) for node in self.members}
        if self._evaluation is not None:
            self._evaluation = self._new_evaluation(self._evaluation.step)
        self._enter(Phase.RUNNING, now_s)
        self._forget_step(now_s)
        for node in self._member_nodes():
            run = messages.Run(generation=self.generation, step=self.step)
            self._do(Send(connection=node.connection, message=run))

    def _commit(self, decision: Decision, now_s: float) -> None:
        """The step counts: write that down, and only then tell."""
        step_time_s = now_s - self._step_since_s
        self._recent_steps_s.append(step_time_s)
        self._write(
            events.Committed(
                generation=self.generation,
                step=self.step,
                loss=decision.loss,
                grad_norm=decision.global_norm,
                step_time_s=step_time_s,
            )
        )
        commit = messages.Commit(generation=self.generation, step=self.step, global_norm=decision.global_norm)
        for node in self._member_nodes():
            self._do(Send(connection=node.connection, message=commit))
        if self._terms.evaluates_after(self.step):
            self._evaluation = self._new_evaluation(self.step)
        self.step += 1
        self._forget_step(now_s)
        if self._stop_if_done(now_s) or self._terms.on_loss is OnLoss.STOP:
            return
        assert self._plan is not None
        newcomers = [
            node.node
            for node in self._nodes.values()
            if node.state is NodeState.IDLE and node.node not in self._plan.spare_nodes
        ]
        if newcomers:
            self._regroup(f"nodes {sorted(newcomers)} are ready to take part", now_s)

    def _new_evaluation(self, step: int) -> _Evaluation:
        assert self._plan is not None
        return _Evaluation(step=step, missing=set(self._plan.holders_of(self._plan.num_layers - 1)))

    def _stop_if_done(self, now_s: float) -> bool:
        if self.step < self._terms.steps or self._evaluation is not None:
            return False
        self._stop(f"all {self.step} steps are done", exit_code=0, node=None, now_s=now_s)
        return True

    def _regroup(self, reason: str, now_s: float) -> None:
        """Abandon the current generation and begin the next one with the nodes there are."""
        if self.phase in (Phase.PREPARING, Phase.RUNNING):
            self._write(events.Abandoned(generation=self.generation, step=self.step, reason=reason))
            abandon = messages.Abandon(generation=self.generation, reason=reason)
            for node in self._member_nodes():
                node.state, node.since_s = NodeState.IDLE, now_s
                self._do(Send(connection=node.connection, message=abandon))
        self._begin(reason, now_s)

    def _forget_step(self, now_s: float) -> None:
        self._votes.clear()
        self._waits.clear()
        self._step_since_s = now_s

    # ----------------------------------------------------------------------------------------------------- losses

    def _disconnected(self, given: Disconnected, now_s: float) -> None:
        node = self._by_connection.pop(given.connection, None)
        if node is None:
            return  # refused, or excluded before
        if self.phase in (Phase.STOPPING, Phase.FINISHED):
            self._drop(node)
            return self._finish_if_alone(now_s)
        what = f"the agent of node {node.node} is gone ({given.reason})"
        self._blame(Cause(node=node.node, weight=Weight.FIRM, what=what, noticed_s=now_s), now_s)
        self._drop(node)

    def _worker_exited(self, node: _Node, exited: messages.WorkerExited, now_s: float) -> None:
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
        if self.phase in (Phase.STOPPING, Phase.FINISHED):
            return None
        has_told = any(cause.node == node.node and cause.weight is Weight.OWN for cause in self._causes)
        if has_told:
            return None  # it failed, said why, and left
        return self._blame(cause_of_exit(exited, now_s), now_s)

    def _blame(self, cause: Cause, now_s: float) -> None:
        """Answer one piece of evidence that a node is lost, by the policy."""
        if self._terms.on_loss is OnLoss.REGROUP:
            return self._exclude(cause, now_s)
        self._causes.append(cause)
        if cause.weight is Weight.FIRM:
            self._pass_verdict(now_s)
        return None

    def _pass_verdict(self, now_s: float) -> None:
        """The evidence is in: the first cause ends the run, the others are its consequences."""
        first = first_cause(self._causes)
        for cause in self._causes:
            if cause is not first:
                self._write_failure(cause, is_collateral=True)
        self._fail(first, now_s)

    def _exclude(self, cause: Cause, now_s: float) -> None:
        """Go on without a node."""
        assert cause.node is not None
        node = self._nodes.get(cause.node)
        self._write_failure(cause, is_collateral=cause.weight is Weight.COLLATERAL)
        if node is None:
            return
        self._drop(node)
        if self._by_connection.pop(node.connection, None):
            stop = messages.Stop(reason=f"excluded: {cause.what}")
            self._do(Send(connection=node.connection, message=stop), Close(connection=node.connection))
        if node.node in self.members and self.phase in (Phase.MEETING, Phase.PREPARING, Phase.RUNNING):
            self._regroup(cause.what, now_s)

    def _drop(self, node: _Node) -> None:
        self._nodes.pop(node.node, None)
        self._holdings.pop(node.node, None)

    def _fail(self, cause: Cause, now_s: float) -> None:
        """End the run for a cause."""
        if self.phase in (Phase.STOPPING, Phase.FINISHED):
            return
        self._write_failure(cause, is_collateral=False)
        self._stop(cause.what, exit_code=1, node=cause.node, now_s=now_s)

    def _write_failure(self, cause: Cause, *, is_collateral: bool) -> None:
        self._write(
            events.Failed(
                generation=self.generation,
                step=self.step,
                node=cause.node,
                cause=cause.what,
                detail=cause.detail,
                is_collateral=is_collateral,
            )
        )

    def _stop(self, reason: str, *, exit_code: int, node: NodeId | None, now_s: float) -> None:
        """Tell everybody that the run is over, and wait for them to leave."""
        if self.phase in (Phase.STOPPING, Phase.FINISHED):
            return
        self._end = Finish(reason=reason, exit_code=exit_code, node=node)
        self._causes.clear()
        self._enter(Phase.STOPPING, now_s)
        for connection in self._by_connection:
            self._do(Send(connection=connection, message=messages.Stop(reason=reason, exit_code=exit_code)))
        self._finish_if_alone(now_s)

    def _finish_if_alone(self, now_s: float) -> None:
        if not self._by_connection:
            self._finish(now_s)

    def _finish(self, now_s: float) -> None:
        assert self._end is not None
        end = self._end
        self._enter(Phase.FINISHED, now_s)
        self._write(events.Finished(steps=self.step, reason=end.reason, exit_code=end.exit_code, node=end.node))
        self._do(end)

    # -------------------------------------------------------------------------------------------------- deadlines

    def _deadlines(self) -> Iterator[tuple[float, Callable[[float], None]]]:
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
            yield (
                node.heard_s + limits.heartbeat_s,
                partial(
                    self._lose, node, f"the agent of node {node.node} has been silent for {limits.heartbeat_s:.1f} s"
                ),
            )
            if node.stopped_since_s is not None:
                yield (
                    node.stopped_since_s + limits.stopped_s,
                    partial(self._lose, node, f"the worker of node {node.node} has been stopped by a signal (SIGSTOP)"),
                )
            if node.state is NodeState.STARTING:
                yield (
                    node.since_s + limits.ready_s,
                    partial(
                        self._lose,
                        node,
                        f"the worker of node {node.node} was not ready {limits.ready_s:.0f} s after joining",
                    ),
                )
            if node.state is NodeState.PREPARING:
                yield (
                    node.since_s + limits.prepare_s,
                    partial(
                        self._lose, node, f"node {node.node} prepared for {limits.prepare_s:.0f} s without any progress"
                    ),
                )
        match self.phase:
            case Phase.GATHERING:
                yield self._phase_since_s + limits.gather_s, self._too_few
            case Phase.MEETING:
                error = f"no answer within {limits.fabric_s:.0f} s"
                yield (
                    self._phase_since_s + limits.fabric_s,
                    partial(self._fabric, FabricFailed(generation=self.generation, error=error)),
                )
            case Phase.RUNNING if not self._causes:
                yield self._step_since_s + self._step_limit_s(), self._no_progress
            case _:
                pass

    def _step_limit_s(self) -> float:
        limit_s = self._terms.limits.step_limit_s(self._recent_steps_s)
        return max(limit_s, self._terms.limits.first_step_s) if self._evaluation is not None else limit_s

    def _lose(self, node: _Node, what: str, now_s: float) -> None:
        self._blame(Cause(node=node.node, weight=Weight.FIRM, what=what, noticed_s=now_s), now_s)

    def _too_few(self, now_s: float) -> None:
        terms = self._terms
        ready = sorted(node.node for node in self._nodes.values() if node.state is not NodeState.STARTING)
        what = (
            f"only {len(ready)} of {terms.num_nodes} nodes were ready after {now_s - self._phase_since_s:.0f} s "
            f"(ready: {ready}, joined: {sorted(self._nodes)}); start the others, or lower --nodes"
        )
        self._fail(Cause(node=None, weight=Weight.FIRM, what=what, noticed_s=now_s), now_s)

    def _no_progress(self, now_s: float) -> None:
        """A step, or an evaluation, takes far longer than it may: find out who holds it up."""
        evaluation = self._evaluation
        late = [node for node in self.members if node not in self._votes]
        if evaluation is not None and self.step >= self._terms.steps:
            late = sorted(evaluation.missing)
        stopped = [node.node for node in self._member_nodes() if node.stopped_since_s is not None]
        found = suspects(late, waits=self._waits, stopped=stopped)
        who = f"node {found[0]} holds it up" if len(found) == 1 else f"one of the nodes {list(found)} holds it up"
        what = f"no progress for {now_s - self._step_since_s:.1f} s in step {self.step}: {who}"
        is_clear = len(found) == 1 or self._terms.on_loss is OnLoss.REGROUP
        node = found[0] if is_clear else None
        self._blame(Cause(node=node, weight=Weight.FIRM, what=what, noticed_s=now_s), now_s)

    # ----------------------------------------------------------------------------------------------------- helpers

    def _member_nodes(self) -> list[_Node]:
        return [self._nodes[node] for node in self.members if node in self._nodes]

    def _enter(self, phase: Phase, now_s: float) -> None:
        assert phase is self.phase or phase in _NEXT[self.phase], (self.phase, phase)
        if phase is not self.phase or phase is Phase.MEETING:
            self._phase_since_s = now_s
        self.phase = phase

    def _do(self, *effects: Effect) -> None:
        self._effects.extend(effects)

    def _write(self, record: events.Record) -> None:
        self._do(Write(record=record))

    def _ignore(self, reason: str) -> None:
        self._do(Ignored(reason=reason))


def _kind(message: messages.ToCoordinator) -> str:
    return type(message).__name__
