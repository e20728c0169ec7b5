"""Who takes part in a run, and which steps count: a state machine without I/O.

Theory of operation
-------------------

The machine is told what happened (`Received`, `Disconnected`, ... of effects.py) and the time, and answers with what to
do. It owns no socket, clock or thread: equal inputs, equal outputs. Whoever drives it calls `handle` for each input,
carries out the effects in order, and calls `handle` with a `Tick` no later than `wake_s`.

A run is a sequence of generations, each with one plan. The phase says what the run as a whole waits for:

    phase      waits for                        then                                         no later than
    GATHERING  enough nodes that are ready      plan, StartFabric              -> MEETING    gather_s
               ... after a restart: old nodes   the same                       -> MEETING    reattach_s
    MEETING    FabricStarted                    Begin to the members           -> PREPARING  fabric_s
    PREPARING  Prepared from every member       Run to all of them             -> RUNNING    prepare_s without progress
    RUNNING    a Vote from every worker         write Committed, send Commit   -> RUNNING    step_limit_s
               ... and, after the last step, its evaluation                    -> STOPPING
    STOPPING   every node to leave              Finish                         -> FINISHED   stop_s
    FINISHED   nothing

A node (roster.py) goes STARTING (joined) -> IDLE (its worker is ready) -> PREPARING (got Begin) -> RUNNING (prepared),
and back to IDLE when its generation is abandoned. It is held to account wherever it is: silent for heartbeat_s, its
worker stopped for stopped_s or not ready after ready_s, and it is lost.

What changes the membership, and what follows, if the policy is REGROUP. To *regroup* is to send Abandon to the members,
plan for the nodes there are, and redo the step in the next generation (-> MEETING); if there is no plan for them, to
wait for nodes (-> GATHERING); if a layer has lost its last holder, to end the run (-> STOPPING).

    what happens                when                what follows
    a worker is lost            it works            its node -> STARTING, Respawn to its agent; the others regroup
                                it does not         its node -> STARTING, Respawn to its agent
    ... for the 5th time        at any time         the node is excluded: Stop to it, and no Join of it is accepted
    an agent is lost            at any time         the node is off the roster; the others regroup if it worked
    who failed is not known     within verdict_s    all regroup; 3 times in a row, then the run ends
    nodes are ready             at the next commit  regroup if the plan for all of them is another one
    a node is to leave          it works            at the next commit: regroup without it
                                it prepares         regroup without it, at once
                                it does neither     Stop to it, at once
    the coordinator died        in its successor    agents join again with their workers: a decision that did not reach
                                                    one is sent again, then Abandon; they regroup
    a connection was replaced   at any time         as when the agent is lost, and as in a successor

A worker that is replaced holds nothing; what its old incarnation has left to say has no consequence. A node that leaves
prepares with the others while they may need the layers it holds, outside of the plan, and gets its Stop when they run.
A failure in the middle of a recovery is no special case: it is the next generation; but a step that is tried too often
ends the run (attempts.py). What arrives late, from a generation or a step that is over, or from a connection that is
gone, has no consequence.

If the policy is STOP, the first loss ends the run: evidence is collected for verdict_s (at once when it is firm, see
blame.py), the first cause is named, and all nodes are told to stop (-> STOPPING).

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
from oobleck_jax.elastic.attempts import Attempts
from oobleck_jax.elastic.blame import Cause, Weight, cause_of_exit, cause_of_failure, first_cause
from oobleck_jax.elastic.effects import (
    ConnectionId,
    Disconnected,
    Effect,
    FabricFailed,
    FabricStarted,
    Finish,
    Input,
    Interrupted,
    Received,
    StartFabric,
    Tick,
)
from oobleck_jax.elastic.generation import Generation
from oobleck_jax.elastic.incidents import Incidents
from oobleck_jax.elastic.node import Node, NodeState
from oobleck_jax.elastic.outbox import Outbox
from oobleck_jax.elastic.resumption import Resumption, recall
from oobleck_jax.elastic.roster import Roster
from oobleck_jax.elastic.terms import OnLoss, Proposal, Terms
from oobleck_jax.elastic.votes import Decision, Fault
from oobleck_jax.errors import NotEnoughNodes, PlanError
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

    def __init__(self, terms: Terms, now_s: float, resumed: Resumption | None = None) -> None:
        """Wait for nodes: of a new run, or those of a run whose coordinator died."""
        self.phase = Phase.GATHERING
        self._terms = terms
        self._now_s = self._phase_since_s = now_s
        self._out = Outbox()
        self._roster = Roster(terms, self._out)
        self._origin = resumed or Resumption()
        self._committed = self._origin.committed  # the last decision
        self._current: Generation | None = None  # the last one there was, even if it has been abandoned
        self._starting: int | None = None  # the generation whose fabric is being started
        self._planned_for: set[NodeId] = set()  # the ready nodes that the last plan, or thought of one, reckons with
        self._causes: list[Cause] = []  # evidence that awaits the verdict
        self._attempts = Attempts()
        self._incidents = Incidents()
        self._end: Finish | None = None
        self._reattach_until_s: float | None = None  # until then, old nodes may come back
        if resumed is not None:
            self._reattach_until_s = now_s + terms.limits.reattach_s
            self._incidents.open("coordinator", "the coordinator was restarted", (), now_s)
            self._out.write(events.Resumed(generation=self.generation, step=self.step, nodes=resumed.nodes))

    @property
    def generation(self) -> int:
        """Number of the current generation; 0 before the first."""
        return self._current.number if self._current else self._origin.generation

    @property
    def step(self) -> int:
        """The step in progress, which is also the number of committed steps."""
        return self._current.step if self._current else self._origin.step

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
        return self._out.take()

    # --------------------------------------------------------------------------------------------------- messages

    def _receive(self, connection: ConnectionId, message: messages.ToCoordinator) -> None:
        if isinstance(message, messages.Join):
            return self._join(connection, message)
        node = self._roster.hear(connection, message, self._now_s)
        if node is None or (self._is_over and not isinstance(message, messages.WorkerExited)):
            return None
        match message:
            case messages.Heartbeat():
                pass  # it has been heard
            case messages.Leaving():
                self._leave(node, message.reason)
            case messages.WorkerExited():
                self._worker_exited(node, message)
            case messages.WorkerReady():
                self._worker_ready(node, message)
            case messages.Failed():
                self._worker_failed(node, message)
            case messages.CompiledAhead():
                self._out.write(events.CompiledAhead(node=node.node, done=message.done, total=message.total))
            case messages.Progress() | messages.Prepared():
                self._preparing(node, message)
            case messages.Waiting() | messages.Vote() | messages.Evaluated():
                self._running(node, message)
        return None

    def _preparing(self, node: Node, message: messages.Progress | messages.Prepared) -> None:
        current = self._current
        if current is None or message.generation != current.number or node.state is not NodeState.PREPARING:
            return self._out.ignore(
                f"node {node.node}: {_kind(message)} of generation {message.generation}, which is over"
            )
        # While one goes on, those that wait for it are well, too.
        for member in self._members():
            member.since_s = self._now_s
        if isinstance(message, messages.Progress):
            return self._out.write(
                events.Advanced(
                    node=node.node,
                    generation=message.generation,
                    phase=message.phase,
                    done=message.done,
                    total=message.total,
                )
            )
        node.enter(NodeState.RUNNING, self._now_s)
        self._incidents.prepare(message)
        if current.add_prepared(message):
            self._run(current)
        return None

    def _running(self, node: Node, message: messages.Waiting | messages.Vote | messages.Evaluated) -> None:
        current = self._current
        if current is None or self.phase is not Phase.RUNNING or message.generation != current.number:
            return self._ignore_late(message)
        if node.state is not NodeState.RUNNING:
            return self._ignore_late(message)
        match message:
            case messages.Evaluated() if current.awaits_evaluation(message):
                if evaluated := current.add_evaluated(message, self._now_s):
                    self._out.write(evaluated)
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

    def _begin(self, reason: str, proposal: Proposal | None = None) -> None:
        """Begin the next generation if there are nodes enough; else wait for more."""
        if not self.generation and len(self._roster.ready()) < self._terms.num_nodes:
            return None
        if self.step >= self._terms.steps and self._evaluation_step is None:
            return self._stop_done()
        if self._current is not None and self._fails_for_lost_layers(self._current.plan.num_layers, reason):
            return None
        try:
            proposal = proposal or self._propose()
        except PlanError as error:
            return self._without_plan(reason, str(error))
        if self._fails_for_lost_layers(proposal.plan.num_layers, reason):
            return None
        self._current = current = Generation(
            self.generation + 1,
            proposal,
            holdings=self._roster.holdings,
            leaving=[node.node for node in self._roster.leaving()],
            first_step=self.step,
            evaluation_step=self._evaluation_step,
            now_s=self._now_s,
        )
        for node in self._roster.leaving():
            if node.node not in current.members:
                self._release(node)
        self._incidents.begin(proposal.plan_s)
        self._out.write(
            events.Planned(
                generation=current.number,
                step=current.step,
                reason=reason,
                plan=proposal.plan,
                plan_reason=proposal.reason,
            )
        )
        self._enter(Phase.MEETING)
        return self._start_fabric(current)

    def _propose(self) -> Proposal:
        """Return the plan for the nodes that are ready and stay.

        Raises:
            PlanError: there is none.
        """
        nodes = tuple(node.node for node in self._roster.ready())
        self._planned_for = set(nodes)
        if not nodes:
            raise NotEnoughNodes("no node is left", num_nodes=0, num_needed=1)
        return self._terms.replan(nodes, self._roster.holdings)

    def _without_plan(self, reason: str, error: str) -> None:
        """There is no plan for the nodes that stay: wait for others, but keep nobody who is to leave."""
        if self._terms.on_loss is OnLoss.STOP:
            return self._fail(self._cause(None, error))
        for node in self._roster.leaving():
            self._release(node)
        if self._current is not None and self._fails_for_lost_layers(self._current.plan.num_layers, reason):
            return None
        if self.phase is Phase.GATHERING:
            return None
        self._out.write(events.Gathering(reason=f"{reason}; {error}"))
        return self._enter(Phase.GATHERING)

    def _fails_for_lost_layers(self, num_layers: int, reason: str) -> bool:
        """End the run if a layer's state died with its last holder; before the first commit, any node can make it."""
        held = {layer for layers in self._roster.holdings.values() for layer in layers}
        lost = [layer for layer in range(num_layers) if layer not in held]
        if self._committed is None or not lost:
            return False
        what = f"no live node has the state of layers {lost} after step {self.step - 1} any more"
        self._fail(self._cause(None, f"{what}, and there is no checkpoint ({reason})"))
        return True

    def _start_fabric(self, current: Generation) -> None:
        """Have the fabric of a generation started, one at a time: generations may follow each other quickly."""
        if self._starting is None:
            self._starting = current.number
            self._out.do(StartFabric(generation=current.number, num_nodes=len(current.members)))

    def _fabric(self, given: FabricStarted | FabricFailed) -> None:
        if given.generation == self._starting:
            self._starting = None
        current = self._current
        if current is None or self.phase is not Phase.MEETING or given.generation != current.number:
            self._out.ignore(f"the fabric of generation {given.generation} is not needed any more")
            if current is not None and self.phase is Phase.MEETING:
                self._start_fabric(current)
            return None
        if isinstance(given, FabricFailed):
            what = f"JAX's coordination service of generation {current.number} could not start: {given.error}"
            return self._fail(self._cause(None, what))
        nodes = sorted((node for node in self._roster if node.node in current.members), key=lambda node: node.node)
        begin = current.begin(nodes, fabric_address=given.address, cores=self._terms.place(current.plan))
        for node in nodes:
            node.enter(NodeState.PREPARING, self._now_s)
        self._send_to_members(begin)
        return self._enter(Phase.PREPARING)

    def _run(self, current: Generation) -> None:
        """Everybody is prepared: let them go."""
        self._out.write(current.run(self._now_s))
        self._enter(Phase.RUNNING)
        for node in self._roster.leaving():
            self._release(node)
        # From here on the workers have the state of their layers, and what any other node has falls behind.
        for node in self._roster:
            node.holds = current.plan.layers_of(node.node)
        self._send_to_members(messages.Run(generation=current.number, step=current.step))

    def _commit(self, current: Generation, decision: Decision) -> None:
        """The step counts: write that down, and only then tell."""
        step = current.step
        evaluates = self._terms.evaluates_after(step)
        self._committed = current.commit(decision, evaluates=evaluates, now_s=self._now_s)
        self._out.write(self._committed)
        self._send_to_members(messages.Commit(generation=current.number, step=step, global_norm=decision.global_norm))
        for node in self._roster:
            if not node.takes_part:
                node.holds = ()  # one that came back with its worker, and now falls behind
        self._attempts.clear()
        self._close_incidents(current, step, first_step_s=self._committed.step_time_s)
        if not self._stop_if_done(current) and self._terms.on_loss is OnLoss.REGROUP:
            self._change_at_boundary(current)

    def _change_at_boundary(self, current: Generation) -> None:
        """Between two steps: go on without the nodes that leave, and with those that came."""
        leaving, newcomers = self._roster.leaving(), self._newcomers()
        proposal = None
        if newcomers and not leaving:
            try:
                proposal = self._propose()
            except PlanError:
                return
            if proposal.plan.pipelines == current.plan.pipelines:
                return  # they would be spare, and nothing else would change: let them wait
        reasons = [f"node {node.node} leaves ({node.leaves})" for node in leaving]
        if leaving:
            self._incidents.open("leave", "; ".join(reasons), [node.node for node in leaving], self._now_s)
        if newcomers:
            reasons.append(f"nodes {newcomers} are ready to take part")
            self._incidents.open("join", reasons[-1], newcomers, self._now_s)
        if reasons:
            self._regroup("; ".join(reasons), proposal)

    def _newcomers(self) -> list[NodeId]:
        """Return the nodes that no plan has reckoned with; none while others will be ready in a moment."""
        new = [node for node in self._roster.ready() if node.node not in self._planned_for]
        if new and not all(node.is_ready for node in self._roster):
            waited_s = self._now_s - min(node.since_s for node in new)
            return [node.node for node in new] if waited_s >= self._terms.limits.settle_s else []
        return [node.node for node in new]

    def _regroup(self, reason: str, proposal: Proposal | None = None) -> None:
        """Abandon the current generation and begin the next one with the nodes there are."""
        for cause in self._causes:  # about a generation that is over now
            self._write_failure(cause, is_collateral=True)
        self._causes.clear()
        if self.phase in (Phase.PREPARING, Phase.RUNNING):
            self._out.write(events.Abandoned(generation=self.generation, step=self.step, reason=reason))
            self._send_to_members(messages.Abandon(generation=self.generation, reason=reason))
            for node in self._members():
                node.enter(NodeState.IDLE, self._now_s)
        self._begin(reason, proposal)

    # --------------------------------------------------------------------------------------------- coming and going

    def _join(self, connection: ConnectionId, join: messages.Join) -> None:
        old = self._roster.get(join.node)
        node = self._roster.admit(
            connection, join, has_begun=self.generation > 0, is_over=self._is_over, now_s=self._now_s
        )
        if node is None or join.worker is None:
            return None
        # It comes back with its worker, which may be in the middle of a step that nobody else is in any more.
        recalled = recall(join.held, self._committed)
        node.holds = recalled.holds
        if recalled.commit is not None:
            self._out.send(connection, recalled.commit)
        back = f"node {node.node} is back with its worker"
        self._out.send(connection, messages.Abandon(generation=self.generation, reason=back))
        return self._gathered(back) if old is None else self._replaced(node)

    def _worker_ready(self, node: Node, ready: messages.WorkerReady) -> None:
        if ready.incarnation != node.incarnation or node.is_ready:
            return self._out.ignore(f"node {node.node}: worker {ready.incarnation} is ready, which is known or over")
        if ready.num_devices < self._terms.num_devices:
            what = f"node {node.node} has {ready.num_devices} devices, but the run uses {self._terms.num_devices}"
            return self._blame(self._cause(node.node, what, is_agent=True))
        self._roster.make_ready(node, ready, self._now_s)
        return self._gathered(f"node {node.node} is ready" if self.generation else "all nodes are ready")

    def _gathered(self, reason: str) -> None:
        """If nodes are waited for: see whether they are enough now."""
        if self.phase is not Phase.GATHERING:
            return
        if self._reattach_until_s is None:
            self._begin(reason)
        elif not self._not_back() and self._origin.nodes:
            self._take_over()

    def _not_back(self) -> list[NodeId]:
        """Return the nodes that the last coordinator knew, and that have not come back with their workers."""
        ready = {node.node for node in self._roster if node.is_ready}
        return [node for node in self._origin.nodes if node not in ready]

    def _take_over(self) -> None:
        """The nodes of the last coordinator are back, or have had their time."""
        self._reattach_until_s = None
        missing = self._not_back()
        reason = "the coordinator was restarted" + (f"; nodes {missing} did not come back" if missing else "")
        self._incidents.open("coordinator", reason, missing, self._now_s)
        if missing and self.generation and self._terms.on_loss is OnLoss.STOP:
            return self._fail(self._cause(missing[0], reason))
        return self._begin(reason)

    def _leave(self, node: Node, why: str) -> None:
        """A node has been asked to leave: at once if nobody needs it, else when the others can do without it."""
        if node.leaves is not None:
            return self._out.ignore(f"node {node.node} leaves, which is known")
        self._out.write(events.Leaving(node=node.node, reason=why))
        reason = f"node {node.node} leaves ({why})"
        if self._terms.on_loss is OnLoss.STOP:
            return self._blame(self._cause(node.node, reason))
        node.leaves = why
        if self.phase is Phase.RUNNING and node.node in self._working:
            return None  # after the next commit
        self._incidents.open("leave", reason, [node.node], self._now_s)
        if node.node in self._working:
            return self._regroup(reason)
        if self.phase is Phase.GATHERING and node.holds:
            return self._gathered(reason)
        return self._release(node)

    def _release(self, node: Node) -> None:
        """Let a node go that was asked to leave."""
        self._roster.dismiss(node, f"node {node.node} leaves ({node.leaves})", exit_code=0)

    # ------------------------------------------------------------------------------------------------------ losses

    def _disconnected(self, given: Disconnected) -> None:
        node = self._roster.disconnect(given.connection)
        if node is None:
            return None  # refused, or told to go before
        if self._is_over:
            return self._finish_if_alone()
        what = f"the agent of node {node.node} is gone ({given.reason})"
        return self._blame(self._cause(node.node, what, is_agent=True))

    def _replaced(self, node: Node) -> None:
        """A node came back on a new connection before its old one was known to be lost."""
        cause = self._cause(node.node, f"the connection of node {node.node} was lost: it has a new one")
        if self._terms.on_loss is OnLoss.STOP:
            return self._fail(cause)
        self._write_failure(cause, is_collateral=False)
        self._incidents.open("loss", cause.what, [node.node], self._now_s)
        self._planned_for.discard(node.node)
        return self._retry(cause.what) if node.node in self._working else self._gathered(cause.what)

    def _worker_exited(self, node: Node, exited: messages.WorkerExited) -> None:
        self._roster.record_exit(exited)
        if exited.incarnation != node.incarnation:
            return self._out.ignore(f"node {node.node}: worker {exited.incarnation} ended, which has been replaced")
        # A worker that fails says why and then exits: its exit explains nothing more.
        has_said_why = any(cause.node == node.node and cause.weight is Weight.OWN for cause in self._causes)
        if not (self._is_over or has_said_why):
            self._blame(cause_of_exit(exited, self._now_s))
        return None

    def _worker_failed(self, node: Node, failed: messages.Failed) -> None:
        if failed.is_collateral and failed.generation < self.generation:
            return self._out.ignore(f"node {node.node} lost a peer in generation {failed.generation}, which is over")
        if node.incarnation and not node.is_ready:
            # It may be of the worker before; that of the new one is followed by its exit, which tells.
            return self._out.ignore(f"node {node.node}: a failure before worker {node.incarnation} is ready")
        return self._blame(cause_of_failure(failed, self._now_s))

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
            self._fail(first)
        else:
            self._lose(first)

    def _lose(self, cause: Cause) -> None:
        """Go on without a worker; who only lost a peer is fine, and waits."""
        working = self._working
        node = self._roster.get(cause.guilty)
        if node is not None and cause.weight is Weight.COLLATERAL and node.node not in working:
            node = None  # whoever is blamed has no part in it
        is_collateral = node is not None and self._incidents.is_consequence(cause, self._terms.limits)
        self._write_failure(cause, is_collateral=is_collateral)
        if node is None:
            if working:
                self._incidents.open("loss", cause.what, (), self._now_s)
                self._retry(cause.what, is_blameless=True)
            return
        if is_collateral:
            self._incidents.add_collateral(node.node)
        else:
            self._incidents.open("loss", cause.what, [node.node], self._now_s)
        self._remove(node, cause)
        if node.node in working:
            self._retry(cause.what)
        elif self.generation:
            self._gathered(cause.what)

    def _remove(self, node: Node, cause: Cause) -> None:
        """Have the worker of a node replaced, or do without the node."""
        self._planned_for.discard(node.node)
        if cause.is_agent:
            self._roster.cut_off(node, cause.what)
        elif node.leaves is not None:
            self._release(node)
        else:
            self._roster.respawn(node, cause.what, self._now_s)

    def _retry(self, reason: str, *, is_blameless: bool = False) -> None:
        """Regroup because a member was lost, unless that has happened too often in this step."""
        current = self._current
        if current is not None and self.phase in (Phase.PREPARING, Phase.RUNNING):
            self._attempts.add(reason, is_blameless=is_blameless)
            if why := self._attempts.why_give_up(current.step, self._terms.limits):
                return self._fail(self._cause(None, why))
            if self.phase is Phase.RUNNING and current.step < self._terms.steps:
                self._incidents.redo(current.plan.num_microbatches)
        return self._regroup(reason)

    # ------------------------------------------------------------------------------------------------------ ending

    def _stop_if_done(self, current: Generation) -> bool:
        if current.step < self._terms.steps or current.evaluation_step is not None:
            return False
        self._close_incidents(current, current.step - 1, first_step_s=0.0)
        self._stop_done()
        return True

    def _stop_done(self) -> None:
        self._stop(f"all {self.step} steps are done", exit_code=0, node=None)

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
        for connection in self._roster.connections:
            self._out.send(connection, messages.Stop(reason=reason, exit_code=exit_code))
        self._finish_if_alone()

    def _finish_if_alone(self) -> None:
        if not self._roster.connections:
            self._finish()

    def _finish(self) -> None:
        end = self._end
        assert end is not None
        self._enter(Phase.FINISHED)
        self._out.write(events.Finished(steps=self.step, reason=end.reason, exit_code=end.exit_code, node=end.node))
        self._out.do(end)

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
        for node, overdue in self._roster.deadlines():
            yield overdue.when_s, partial(self._overdue, node.node, overdue.what, is_agent=overdue.is_agent)
        match self.phase:
            case Phase.GATHERING:
                yield self._phase_since_s + limits.gather_s, self._too_few
                if self._reattach_until_s is not None:
                    yield self._reattach_until_s, self._take_over
            case Phase.MEETING:
                error = f"no answer within {limits.fabric_s:.0f} s"
                failed = FabricFailed(generation=self.generation, error=error)
                yield self._phase_since_s + limits.fabric_s, partial(self._fabric, failed)
            case Phase.RUNNING if self._current is not None and not self._causes:
                yield self._current.overdue_s(limits), partial(self._no_progress, self._current)
            case _:  # PREPARING: the deadlines of the nodes
                pass

    def _overdue(self, node: NodeId, what: str, *, is_agent: bool) -> None:
        self._blame(self._cause(node, what, is_agent=is_agent))

    def _too_few(self) -> None:
        ready = [node.node for node in self._roster.ready()]
        what = (
            f"only {len(ready)} of {self._terms.num_nodes} nodes were ready after "
            f"{self._now_s - self._phase_since_s:.0f} s (ready: {ready}, joined: {list(self._roster.ids)}); "
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
    def _evaluation_step(self) -> int | None:
        """The committed step whose evaluation is not complete, if there is one."""
        if self._current is None:
            return self._origin.evaluation_step(self._terms.evaluates_after)
        return self._current.evaluation_step

    @property
    def _working(self) -> tuple[NodeId, ...]:
        """The nodes without which the current generation cannot go on; none if it is over."""
        if self._current is None or self.phase not in (Phase.MEETING, Phase.PREPARING, Phase.RUNNING):
            return ()
        return self._current.workers if self.phase is Phase.RUNNING else self._current.members

    def _members(self) -> list[Node]:
        """The nodes that take part in the current generation."""
        return [node for node in self._roster if node.takes_part]

    def _enter(self, phase: Phase) -> None:
        assert phase in _NEXT[self.phase], (self.phase, phase)
        self.phase, self._phase_since_s = phase, self._now_s

    def _cause(self, node: NodeId | None, what: str, *, is_agent: bool = False) -> Cause:
        return Cause(node=node, weight=Weight.FIRM, what=what, noticed_s=self._now_s, is_agent=is_agent)

    def _send_to_members(self, message: messages.ToNode) -> None:
        for node in self._members():
            self._out.send(node.connection, message)

    def _close_incidents(self, current: Generation, step: int, *, first_step_s: float) -> None:
        for record in self._incidents.close(current.number, step, self._now_s, first_step_s=first_step_s):
            self._out.write(record)

    def _write_failure(self, cause: Cause, *, is_collateral: bool) -> None:
        self._out.write(
            events.Failed(
                generation=self.generation,
                step=self.step,
                node=cause.guilty,
                cause=cause.what,
                detail=cause.detail,
                is_collateral=is_collateral,
            )
        )

    def _ignore_late(self, message: messages.Waiting | messages.Vote | messages.Evaluated) -> None:
        self._out.ignore(
            f"node {message.node}: {_kind(message)} of generation {message.generation}, step {message.step}; "
            f"now {self.phase}, generation {self.generation}, step {self.step}"
        )


def _kind(message: messages.ToCoordinator) -> str:
    return type(message).__name__
