"""The course of a run: its phases, its generations, and the steps that count.

What changes the membership, and the transition table, are in membership.py.
"""

from collections.abc import Callable, Iterator
from functools import partial

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.absences import Absences
from oobleck_jax.elastic.attempts import Attempts
from oobleck_jax.elastic.blame import Cause, Evidence, Weight
from oobleck_jax.elastic.effects import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointFound,
    FabricFailed,
    FabricStarted,
    Finish,
    Interrupted,
    StartFabric,
)
from oobleck_jax.elastic.generation import Generation
from oobleck_jax.elastic.incidents import Incidents
from oobleck_jax.elastic.node import Node, NodeState
from oobleck_jax.elastic.outbox import Outbox
from oobleck_jax.elastic.phase import NEXT, Phase
from oobleck_jax.elastic.prospects import Prospects
from oobleck_jax.elastic.restores import Restores
from oobleck_jax.elastic.resumption import Recalled, Resumption, recall
from oobleck_jax.elastic.roster import Roster
from oobleck_jax.elastic.saving import Saving
from oobleck_jax.elastic.terms import OnLoss, Proposal, Terms
from oobleck_jax.elastic.votes import Decision, Fault
from oobleck_jax.errors import NotEnoughNodes, PlanError
from oobleck_jax.planning.plan import NodeId


class Course:
    """Takes the run from phase to phase.

    Attributes:
        phase: what the run waits for.
        now_s: the time; whoever calls sets it first.
        current: the last generation there was, even if it has been abandoned.
    """

    def __init__(
        self,
        terms: Terms,
        *,
        roster: Roster,
        prospects: Prospects,
        evidence: Evidence,
        incidents: Incidents,
        out: Outbox,
        resumed: Resumption | None,
        now_s: float,
    ) -> None:
        self.phase = Phase.GATHERING
        self.now_s = self._phase_since_s = now_s
        self.current: Generation | None = None
        self._terms = terms
        self._roster, self._prospects, self._evidence, self._incidents = roster, prospects, evidence, incidents
        self._out = out
        self._origin = resumed or Resumption()
        self._committed = self._origin.committed  # the last decision, which a worker may not have heard of
        self._valid_since = self._origin.restored_generation  # what workers have of generations before counts no more
        self._saving = Saving(terms, roster, out, now_s)
        self._restores = Restores(terms, out, is_due=self._origin.is_restore_due)
        self._what_is_lost = "no live node has the state of the run"
        self._waits_for = ""  # what GATHERING is about
        self._attempts = Attempts()
        self._num_skipped = self._origin.num_skipped  # the last so many steps were not finite
        self._starting: int | None = None  # the generation whose fabric is being started
        self._end: Finish | None = None
        self._end_step = terms.steps  # sooner if the run is interrupted
        self._interruption: tuple[Interrupted, float] | None = None  # and how long it may take
        self._absences = Absences()
        self._is_taking_over = resumed is not None and resumed.generation > 0
        # Unless others keep the run's state, there is no hurry: all nodes that there can be take part from the start.
        self._awaits_all = not (self._is_taking_over and self._origin.nodes) or terms.on_loss is OnLoss.STOP
        if resumed is not None:
            if self._is_taking_over:
                self._absences.add(resumed.nodes, now_s + terms.limits.reattach_s)
            self._incidents.open("coordinator", "the coordinator was restarted", (), now_s)
            self._out.write(events.Resumed(generation=self.generation, step=self.step, nodes=resumed.nodes))

    @property
    def generation(self) -> int:
        """Number of the current generation; 0 before the first."""
        return self.current.number if self.current else self._origin.generation

    @property
    def step(self) -> int:
        """The step in progress, which is also the number of committed steps."""
        if self._restores.point is not None:
            return self._restores.point.next_step
        return self.current.step if self.current else self._origin.step

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.STOPPING, Phase.FINISHED)

    @property
    def working(self) -> tuple[NodeId, ...]:
        """The nodes without which the current generation cannot go on; none if it is over."""
        if self.current is None or self.phase not in (Phase.MEETING, Phase.PREPARING, Phase.RUNNING):
            return ()
        return self.current.workers if self.phase is Phase.RUNNING else self.current.members

    def members(self) -> list[Node]:
        """The nodes that take part in the current generation."""
        return [node for node in self._roster if node.takes_part]

    @property
    def _evaluation_step(self) -> int | None:
        """The committed step whose evaluation is not complete, if there is one."""
        if self.current is None:
            step = self._origin.evaluation_step(self._terms.evaluates_after)
        else:
            step = self.current.evaluation_step
        # Of the steps that are done again, those before the last one have been evaluated.
        return step if step == self.step - 1 else None

    @property
    def is_done(self) -> bool:
        """Whether all steps are committed, and evaluated; the last checkpoint may be missing."""
        return self.step >= self._end_step and self._evaluation_step is None

    @property
    def has_begun(self) -> bool:
        """Whether the nodes of the run are decided: not while a run that is taken up again waits for them."""
        return self.generation > 0 and self.phase is not Phase.GATHERING

    # ---------------------------------------------------------------------------------------------------- gathering

    def gathered(self, reason: str) -> None:
        """If nodes are waited for: see whether they are enough now."""
        if self.phase is not Phase.GATHERING:
            return
        if not self._is_taking_over:
            self._begin(reason)
        elif self._absences.next_s is None:
            self._take_over()

    def lost_touch(self, node: NodeId) -> None:
        """The connection of a node ended: its agent may come back, and bring its worker along."""
        self._absences.add([node], self.now_s + self._terms.limits.reattach_s)

    def came_back(self, node: NodeId) -> bool:
        """The agent of a node has joined; return whether that was waited for."""
        return self._absences.remove(node)

    def recall(self, held: messages.Held | None) -> Recalled:
        """Return what a worker that comes back is good for."""
        return recall(held, step=self.step, committed=self._committed, valid_since=self._valid_since)

    def _give_up_waiting(self) -> None:
        """Nodes have not come back in time."""
        self.gathered(f"nodes {self._absences.take_late(self.now_s)} did not come back")

    def _take_over(self) -> None:
        """The nodes of the last coordinator are back, or have had their time."""
        self._is_taking_over = False
        ready = {node.node for node in self._roster if node.is_ready}
        self._awaits_all |= not ready
        missing = [node for node in self._origin.nodes if node not in ready]
        reason = "the coordinator was restarted" + (f"; nodes {missing} did not come back" if missing else "")
        self._incidents.open("coordinator", reason, missing, self.now_s)
        if missing and self._terms.on_loss is OnLoss.STOP and self._terms.checkpoints is None:
            return self._fail_for(reason, missing[0])
        return self._begin(reason)

    def _too_few(self) -> None:
        if self._waits_for:
            waited = f"waited {self.now_s - self._phase_since_s:.0f} s for nodes ({self._waits_for})"
            return self._fail_for(f"{waited}; start more, or raise --wait-minutes")
        ready = [node.node for node in self._roster.ready()]
        what = (
            f"only {len(ready)} of {self._terms.num_nodes} nodes were ready after "
            f"{self.now_s - self._phase_since_s:.0f} s (ready: {ready}, joined: {list(self._roster.ids)}); "
            "start the others, or lower --nodes"
        )
        return self._fail_for(what)

    # -------------------------------------------------------------------------------------------------- generations

    def _begin(self, reason: str, proposal: Proposal | None = None) -> None:
        """Begin the next generation if there are nodes enough; else wait for more."""
        if self._awaits_all and len(self._roster.ready()) < self._terms.num_nodes:
            return None
        self._awaits_all = False
        if self.is_done and not self._restores.is_due and not self._saving.wants_last(self.step - 1):
            return self._stop_done()
        if self._misses_layers(reason):
            return None
        try:
            proposal = proposal or self._prospects.propose(self.current.plan if self.current else self._origin.plan)
        except PlanError as error:
            return self._without_plan(reason, error)
        if self.current is None and self.generation and self._restores.point is None and not self.is_done:
            self._incidents.redo(proposal.plan.num_microbatches)  # of a run whose coordinator died
        self.current = current = Generation(
            self.generation + 1,
            proposal,
            holdings=self._roster.holdings,
            leaving=[node.node for node in self._roster.leaving()],
            first_step=self.step,
            evaluation_step=self._evaluation_step,
            restore=self._restores.point,
            now_s=self.now_s,
        )
        if self._restores.point is not None:
            self._num_skipped = 0  # of steps that are done again
        for node in self._roster.leaving():
            if node.node not in current.members:
                self._roster.release(node)
        self._incidents.begin(proposal.plan_s)
        self._out.write(current.planned(reason))
        self._enter(Phase.MEETING)
        return self._start_fabric(current)

    def _without_plan(self, reason: str, error: PlanError) -> None:
        """There is no plan for the nodes that stay: wait for others, but keep nobody who is to leave."""
        if self._terms.on_loss is OnLoss.STOP:
            return self._fail_for(str(error))
        for node in self._roster.leaving():
            self._roster.release(node)
        if why := self._roster.why_nobody_can_come():
            return self._fail_for(f"no node is left, and none can come: {why} (the last: {reason})")
        if self._misses_layers(reason):
            return None
        more = f"; {error.num_needed - error.num_nodes} more needed" if isinstance(error, NotEnoughNodes) else ""
        point = self._restores.point
        then = f", then it goes on from the checkpoint of step {point.step}" if point else ""
        return self._wait(f"{error}{more}{then}", reason)

    def _wait(self, what: str, reason: str) -> None:
        """Wait for nodes."""
        if self.phase is not Phase.GATHERING:
            self._enter(Phase.GATHERING)
        if what != self._waits_for:
            self._waits_for = what
            self._out.write(events.Gathering(reason=f"{reason}; {what}"))

    # -------------------------------------------------------------------------------------------------- checkpoints

    def _misses_layers(self, reason: str) -> bool:
        """Go back to a checkpoint if a layer's state is lost; wait first for nodes that may bring it back.

        Before the first commit, any node can make the state of any layer.
        """
        restores = self._restores
        if restores.is_looking or restores.point is not None:
            return restores.is_looking
        if not restores.is_due:
            lost = self._prospects.lost_layers(self._terms.num_layers)
            if not self.step or not lost:
                return False
            self._what_is_lost = f"no live node has the state of layers {lost} after step {self.step - 1} any more"
            if away := self._absences.at(self.now_s):
                self._wait(f"{self._what_is_lost}, but nodes {away} may come back with it", reason)
                return True
            if why := restores.lose(self.step, reason):
                self._fail_for(f"{self._what_is_lost}, and {why}")
                return True
        if self._terms.checkpoints is None:
            self._fail_for(f"{self._what_is_lost}, and there is no checkpoint ({reason})")
            return True
        if self.phase is not Phase.GATHERING:
            self._enter(Phase.GATHERING)
        restores.look(self.step, reason, self.now_s)
        return True

    def found(self, given: CheckpointFound) -> None:
        """The checkpoint to go on from is known, or that there is none."""
        restores, step = self._restores, self.step
        if not restores.is_looking or self.is_over:
            return self._out.ignore("a checkpoint that nobody looks for any more")
        if why := restores.take(given, step=step, generation=self.generation + 1):
            return self._fail_for(f"{self._what_is_lost}, and {why}")
        if (point := restores.point) is None:
            return self._begin("there is no older checkpoint")
        self._incidents.go_back(max(step - point.next_step, 0))
        self._attempts.clear()
        self._committed, self._valid_since = None, self.generation + 1
        for node in self._roster:
            node.holds = ()
        if point.next_step >= self._terms.steps:
            self._saving.settle(point.step)
        return self._begin(f"going back to the checkpoint of step {point.step}")

    def restore_failed(self, node: Node, message: messages.RestoreFailed) -> None:
        """A node cannot use the checkpoint: try the next older one."""
        current = self.current
        if current is None or self.phase is not Phase.PREPARING or message.generation != current.number:
            return self._out.ignore(
                f"node {node.node}: RestoreFailed of generation {message.generation}, which is over"
            )
        what = f"node {node.node} cannot restore: {message.reason}"
        self._out.write(events.Damaged(what=what))
        self._restores.fail(may_be_intact=message.may_be_intact)
        return self.regroup(what)

    def saving(self, given: messages.Saved | messages.NotSaved | CheckpointCommitted | CheckpointFailed) -> None:
        """A checkpoint gets on, or comes to nothing."""
        if isinstance(given, CheckpointCommitted | CheckpointFailed):
            self._saving.conclude(given, self.now_s)
        else:
            self._saving.take(given)
        self._end_if_saved()

    def save_soon(self) -> None:
        """Save the state after the step in progress, though it is not time."""
        self._saving.want()

    def look_after_saving(self) -> None:
        """Give a checkpoint up whose writers are not there any more."""
        if not self.is_over and self._saving.look():
            self._end_if_saved()

    def _saving_overdue(self) -> None:
        self._saving.overdue()
        self._end_if_saved()

    def _end_if_saved(self) -> None:
        if self.current is not None and self.phase is Phase.RUNNING:
            self._stop_if_done(self.current)

    def _start_fabric(self, current: Generation) -> None:
        """Have the fabric of a generation started, one at a time: generations may follow each other quickly."""
        if self._starting is None:
            self._starting = current.number
            self._out.do(StartFabric(generation=current.number, num_nodes=len(current.members)))

    def fabric(self, given: FabricStarted | FabricFailed) -> None:
        """The coordination service of a generation can be used, or not."""
        if given.generation == self._starting:
            self._starting = None
        current = self.current
        if current is None or self.phase is not Phase.MEETING or given.generation != current.number:
            self._out.ignore(f"the fabric of generation {given.generation} is not needed any more")
            if current is not None and self.phase is Phase.MEETING:
                self._start_fabric(current)
            return None
        if isinstance(given, FabricFailed):
            what = f"JAX's coordination service of generation {current.number} could not start: {given.error}"
            return self._fail_for(what)
        nodes = sorted((node for node in self._roster if node.node in current.members), key=lambda node: node.node)
        begin = current.begin(
            nodes, fabric_address=given.address, cores=self._terms.place(current.plan), ahead=self._terms.ahead
        )
        for node in nodes:
            node.enter(NodeState.PREPARING, self.now_s)
        self._send_to_members(begin)
        return self._enter(Phase.PREPARING)

    def preparing(self, node: Node, message: messages.Progress | messages.Prepared) -> None:
        """A member goes on with its preparation, or is done."""
        current = self.current
        if current is None or message.generation != current.number or node.state is not NodeState.PREPARING:
            return self._out.ignore(
                f"node {node.node}: {type(message).__name__} of generation {message.generation}, which is over"
            )
        # While one goes on, those that wait for it are well, too.
        for member in self.members():
            member.since_s = self.now_s
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
        node.enter(NodeState.RUNNING, self.now_s)
        self._incidents.prepare(message)
        if current.add_prepared(message):
            self._run(current)
        return None

    def _run(self, current: Generation) -> None:
        """Everybody is prepared: let them go."""
        self._out.write(current.run(self.now_s))
        self._enter(Phase.RUNNING)
        for node in self._roster.leaving():
            self._roster.release(node)
        # From here on the workers have the state of their layers, and what any other node has falls behind.
        for node in self._roster:
            node.holds = current.plan.layers_of(node.node)
        self._restores.end()
        self._send_to_members(messages.Run(generation=current.number, step=current.step))
        self._stop_if_done(current)

    def running(self, node: Node, message: messages.Waiting | messages.Vote | messages.Evaluated) -> None:
        """A member has something to say of a step."""
        current = self.current
        if current is None or self.phase is not Phase.RUNNING or message.generation != current.number:
            return self._ignore_late(message)
        if node.state is not NodeState.RUNNING:
            return self._ignore_late(message)
        match message:
            case messages.Evaluated() if current.awaits_evaluation(message):
                if evaluated := current.add_evaluated(message, self.now_s):
                    self._out.write(evaluated)
                    self._stop_if_done(current)
            case messages.Waiting() if message.step == current.step:
                current.add_waiting(message, self.now_s)
            case messages.Vote() if message.step == current.step < self._end_step and current.has_vote(message.node):
                self._incidents.redone(message)
                may_skip = self._num_skipped < self._terms.max_skipped
                match current.add_vote(message, tokens_per_step=self._terms.tokens_per_step, may_skip=may_skip):
                    case Decision() as decision:
                        self._commit(current, decision)
                    case Fault() as fault:
                        # Not the loss of a node: to redo the step would give the same, or hide a corruption.
                        self._fail_for(fault.cause, fault.node)
                    case None:
                        pass
            case _:
                self._ignore_late(message)
        return None

    def _commit(self, current: Generation, decision: Decision) -> None:
        """The step counts: write that down, and only then tell."""
        step = current.step
        evaluates = self._terms.evaluates_after(step)
        self._committed = current.commit(decision, evaluates=evaluates, now_s=self.now_s)
        self._out.write(self._committed)
        commit = messages.Commit(
            generation=current.number,
            step=step,
            global_norm=decision.global_norm,
            is_last=current.step >= self._end_step,
        )
        self._send_to_members(commit)
        for node in self._roster:
            if not node.takes_part:
                node.holds = ()  # one that came back with its worker, and now falls behind
        self._attempts.clear()
        self._num_skipped = self._num_skipped + 1 if decision.global_norm is None else 0
        self._saving.after_commit(current, self.now_s)
        self._close_incidents(current, step, first_step_s=self._committed.step_time_s)
        if not self._stop_if_done(current) and self._terms.on_loss is OnLoss.REGROUP:
            self._change_at_boundary(current)

    def _change_at_boundary(self, current: Generation) -> None:
        """Between two steps: go on without the nodes that leave, and with those that came."""
        leaving, newcomers = self._roster.leaving(), self._prospects.newcomers(self.now_s)
        proposal = None
        if newcomers and not leaving:
            try:
                proposal = self._prospects.propose(current.plan)
            except PlanError:
                return
            if proposal.plan.pipelines == current.plan.pipelines:
                return  # they would be spare, and nothing else would change: let them wait
        reasons = [f"node {node.node} leaves ({node.leaves})" for node in leaving]
        if leaving:
            self._incidents.open("leave", "; ".join(reasons), [node.node for node in leaving], self.now_s)
        if newcomers:
            reasons.append(f"nodes {newcomers} are ready to take part")
            self._incidents.open("join", reasons[-1], newcomers, self.now_s)
        if reasons:
            self.regroup("; ".join(reasons), proposal)

    def regroup(self, reason: str, proposal: Proposal | None = None) -> None:
        """Abandon the current generation and begin the next one with the nodes there are."""
        for cause in self._evidence.take():  # about a generation that is over now
            self.write_failure(cause, is_collateral=True)
        if self.phase in (Phase.PREPARING, Phase.RUNNING):
            self._out.write(events.Abandoned(generation=self.generation, step=self.step, reason=reason))
            self._send_to_members(messages.Abandon(generation=self.generation, reason=reason))
            for node in self.members():
                node.enter(NodeState.IDLE, self.now_s)
        self._begin(reason, proposal)

    def retry(self, reason: str, *, is_blameless: bool = False) -> None:
        """Regroup because a member was lost, unless that has happened too often in this step."""
        current = self.current
        if current is not None and self.phase in (Phase.PREPARING, Phase.RUNNING):
            self._attempts.add(reason, is_blameless=is_blameless)
            if why := self._attempts.why_give_up(current.step, self._terms.limits):
                return self._fail_for(why)
            if len(self._attempts) >= self._terms.limits.max_restore_attempts and (why := self._restores.doubt(reason)):
                return self._fail_for(why)
            if self.phase is Phase.RUNNING and current.step < self._terms.steps:
                self._incidents.redo(current.plan.num_microbatches)
        return self.regroup(reason)

    # ------------------------------------------------------------------------------------------------------- ending

    def _stop_if_done(self, current: Generation) -> bool:
        """If nothing is left to do but to save: save, or end the run. Return whether that is so."""
        if not self.is_done:
            return False
        if self._saving.at_end(current, self.now_s):
            self._close_incidents(current, current.step - 1, first_step_s=0.0)
            self._stop_done()
        return True

    def interrupt(self, given: Interrupted) -> None:
        """End the run early: after this step and a checkpoint of it, if there are checkpoints at all, or at once."""
        if self.phase is Phase.RUNNING and self._interruption is None and self._saving.wants_last(self.step):
            self._interruption = given, self.now_s + self._terms.limits.last_words_s
            self._end_step = min(self.step + 1, self._end_step)
        else:
            self.stop(given.reason, exit_code=given.exit_code, node=None)

    def _stop_done(self) -> None:
        if self._interruption is not None and self.step < self._terms.steps:
            given, _ = self._interruption
            return self.stop(given.reason, exit_code=given.exit_code, node=None)
        return self.stop(f"all {self.step} steps are done", exit_code=0, node=None)

    def fail(self, cause: Cause) -> None:
        """End the run for a cause."""
        if self.is_over:
            return
        self.write_failure(cause, is_collateral=False)
        self.stop(cause.what, exit_code=1, node=cause.guilty)

    def stop(self, reason: str, *, exit_code: int, node: NodeId | None) -> None:
        """Tell everybody that the run is over, and wait for them to leave."""
        if self.is_over:
            return
        self._end = Finish(reason=reason, exit_code=exit_code, node=node)
        self._enter(Phase.STOPPING)
        for connection in self._roster.connections:
            self._out.send(connection, messages.Stop(reason=reason, exit_code=exit_code))
        self.finish_if_alone()

    def finish_if_alone(self) -> None:
        """Finish as soon as everybody has left."""
        if not self._roster.connections:
            self._finish()

    def _finish(self) -> None:
        end = self._end
        assert end is not None
        self._enter(Phase.FINISHED)
        self._out.write(events.Finished(steps=self.step, reason=end.reason, exit_code=end.exit_code, node=end.node))
        self._out.do(end)

    # ---------------------------------------------------------------------------------------------------- deadlines

    def deadlines(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Yield the waits of the run as a whole: when each ends, and what happens then."""
        limits = self._terms.limits
        if self._interruption is not None and not self.is_over:
            given, until_s = self._interruption
            yield until_s, partial(self.stop, given.reason, exit_code=given.exit_code, node=None)
        if self._saving.deadline_s is not None and not self.is_over:
            yield self._saving.deadline_s, self._saving_overdue
        match self.phase:
            case Phase.GATHERING if self._restores.is_looking:
                unread = f"the checkpoints cannot be read: no answer within {limits.find_s:.0f} s"
                yield self._restores.look_until_s, partial(self.found, CheckpointFound(point=None, unread=unread))
            case Phase.GATHERING:
                yield self._phase_since_s + (limits.wait_s if self._waits_for else limits.gather_s), self._too_few
                if self._absences.next_s is not None:
                    yield self._absences.next_s, self._give_up_waiting
            case Phase.MEETING:
                error = f"no answer within {limits.fabric_s:.0f} s"
                failed = FabricFailed(generation=self.generation, error=error)
                yield self._phase_since_s + limits.fabric_s, partial(self.fabric, failed)
            case Phase.STOPPING:
                yield self._phase_since_s + limits.stop_s, self._finish
            case _:  # the deadlines of the nodes, and of the step
                pass

    # ------------------------------------------------------------------------------------------------------ helpers

    def _fail_for(self, what: str, node: NodeId | None = None) -> None:
        self.fail(Cause(node=node, weight=Weight.FIRM, what=what, noticed_s=self.now_s))

    def _enter(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], (self.phase, phase)
        self.phase, self._phase_since_s, self._waits_for = phase, self.now_s, ""

    def _send_to_members(self, message: messages.ToNode) -> None:
        for node in self.members():
            self._out.send(node.connection, message)

    def _close_incidents(self, current: Generation, step: int, *, first_step_s: float) -> None:
        for record in self._incidents.close(current.number, step, self.now_s, first_step_s=first_step_s):
            self._out.write(record)

    def write_failure(self, cause: Cause, *, is_collateral: bool) -> None:
        self._out.write(cause.record(generation=self.generation, step=self.step, is_collateral=is_collateral))

    def _ignore_late(self, message: messages.Waiting | messages.Vote | messages.Evaluated) -> None:
        self._out.ignore(
            f"node {message.node}: {type(message).__name__} of generation {message.generation}, step {message.step}; "
            f"now {self.phase}, generation {self.generation}, step {self.step}"
        )
