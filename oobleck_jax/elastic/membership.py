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
               ... if a layer is lost: nodes    the same                       -> MEETING    reattach_s
               whose connection broke
               ... the newest checkpoint        Restored, the same             -> MEETING    find_s
               ... if there are too few: nodes  the same                       -> MEETING    wait_s
    MEETING    FabricStarted                    Begin to the members           -> PREPARING  fabric_s
    PREPARING  Prepared from every member       Run to all of them             -> RUNNING    prepare_s without progress
    RUNNING    a Vote from every worker         write Committed, send Commit   -> RUNNING    step_limit_s
               ... and, after the last step, its evaluation and checkpoint     -> STOPPING   save_s
    STOPPING   every node to leave              Finish                         -> FINISHED   stop_s
    FINISHED   nothing

A node (roster.py) goes STARTING (joined) -> IDLE (its worker is ready) -> PREPARING (got Begin) -> RUNNING (prepared),
and back to IDLE when its generation is abandoned. It is held to account wherever it is: silent for heartbeat_s, its
worker stopped for stopped_s or not ready after ready_s, and it is lost.

What changes the membership, and what follows, if the policy is REGROUP. To *regroup* is to send Abandon to the members,
plan for the nodes there are, and redo the step in the next generation (-> MEETING); if there is no plan for them, to
wait for nodes (-> GATHERING); if a layer has lost its last holder, to wait for nodes that lost their connection a
moment ago and may bring it back, then to go back to the newest checkpoint (-> GATHERING), or to end the run if there is
none (-> STOPPING).

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
    the user ends the run       it runs             at the next commit: a checkpoint (saving.py), then -> STOPPING
    a connection was replaced   at any time         as when the agent is lost, and as in a successor
    a person drains a node      at any time         as when the node is to leave
    a person kills a worker     at any time         as when the worker is lost; `Respawn` has the agent kill it

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
        decided in order, and a generation begins with the step after the last decision. Only going back to a
        checkpoint undoes steps; that is written, too, before anybody hears of it.
    M3  Every change has a reason, which goes into its record.
    M4  Nobody waits without a deadline: with nothing but ticks, the machine comes to FINISHED.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.blame import Cause, Evidence, Weight, cause_of_exit, cause_of_failure
from oobleck_jax.elastic.course import Course
from oobleck_jax.elastic.effects import (
    Asked,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointFound,
    ConnectionId,
    Disconnected,
    Effect,
    FabricFailed,
    FabricStarted,
    Input,
    Interrupted,
    Received,
    Tick,
    Wish,
)
from oobleck_jax.elastic.generation import Generation
from oobleck_jax.elastic.incidents import Incidents
from oobleck_jax.elastic.node import Awaited, Node, overdue
from oobleck_jax.elastic.outbox import Outbox
from oobleck_jax.elastic.phase import Phase
from oobleck_jax.elastic.prospects import Prospects
from oobleck_jax.elastic.resumption import Resumption
from oobleck_jax.elastic.roster import Roster
from oobleck_jax.elastic.terms import OnLoss, Terms
from oobleck_jax.elastic.wishes import why_not
from oobleck_jax.planning.plan import NodeId


class Membership:
    """The state machine of a run; see the top of this file.

    What happens to nodes is dealt with here; what the run does then, in course.py.
    """

    def __init__(self, terms: Terms, now_s: float, resumed: Resumption | None = None) -> None:
        """Wait for nodes: of a new run, or those of a run whose coordinator died."""
        self._terms = terms
        self._now_s = now_s
        self._out = Outbox()
        self._roster = Roster(terms, self._out)
        self._prospects = Prospects(terms, self._roster)
        self._evidence = Evidence()
        self._incidents = Incidents()
        self._course = Course(
            terms,
            roster=self._roster,
            prospects=self._prospects,
            evidence=self._evidence,
            incidents=self._incidents,
            out=self._out,
            resumed=resumed,
            now_s=now_s,
        )
        # When to call `handle` at the latest; infinite when finished, and only then.
        self.wake_s = self._first_deadline()[0]

    @property
    def phase(self) -> Phase:
        """What the run waits for."""
        return self._course.phase

    @property
    def generation(self) -> int:
        """Number of the current generation; 0 before the first."""
        return self._course.generation

    @property
    def step(self) -> int:
        """The step in progress, which is also the number of committed steps."""
        return self._course.step

    def handle(self, given: Input, now_s: float) -> tuple[Effect, ...]:
        """Take in what happened and return what to do, in this order.

        `now_s` must not decrease from call to call.
        """
        if self._course.phase is Phase.FINISHED:
            return ()
        self._now_s = self._course.now_s = now_s
        match given:
            case Received():
                self._receive(given.connection, given.message)
            case Disconnected():
                self._disconnected(given)
            case FabricStarted() | FabricFailed():
                self._course.fabric(given)
            case CheckpointCommitted() | CheckpointFailed():
                self._course.saving(given)
            case CheckpointFound():
                self._course.found(given)
            case Interrupted():
                self._course.interrupt(given)
            case Asked():
                self._asked(given)
            case Tick():
                pass
        # A vote that changes nothing yet moves no deadline, and a step has as many votes as nodes.
        is_vote = isinstance(given, Received) and isinstance(given.message, messages.Vote)
        if not (is_vote and self._out.is_empty and now_s < self.wake_s):
            # What has come in is looked at first: a vote that is in beats a deadline that has passed.
            while (first := self._first_deadline())[0] <= now_s:
                first[1]()
            self._course.look_after_saving()
            self.wake_s = self._first_deadline()[0]
        return self._out.take()

    def why_not(self, asked: Asked) -> str | None:
        """Return why a wish cannot be granted, or None when it can."""
        return why_not(asked, self._roster, self._terms, is_over=self._course.is_over)

    def _asked(self, asked: Asked) -> None:
        if why := self.why_not(asked):
            return self._out.ignore(f"{asked.wish} of node {asked.node}: {why}")
        if asked.node is None:
            return self._course.save_soon()
        if asked.wish is Wish.DRAIN:
            node = self._roster.get(asked.node)
            assert node is not None
            return self._leave(node, "a person asked for it")
        what = f"the worker of node {asked.node} is killed: a person asked for it"
        return self._blame(self._cause(asked.node, what))

    def _receive(self, connection: ConnectionId, message: messages.ToCoordinator) -> None:
        if isinstance(message, messages.Join):
            return self._join(connection, message)
        node = self._roster.hear(connection, message, self._now_s)
        if node is None or (self._course.is_over and not isinstance(message, messages.WorkerExited)):
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
                if not node.is_ready:
                    node.since_s = self._now_s  # it goes on
                self._out.write(events.CompiledAhead(node=node.node, done=message.done, total=message.total))
            case messages.Progress() | messages.Prepared():
                self._course.preparing(node, message)
            case messages.RestoreFailed():
                self._course.restore_failed(node, message)
            case messages.Saved() | messages.NotSaved():
                self._course.saving(message)
            case messages.Waiting() | messages.Vote() | messages.Evaluated():
                self._course.running(node, message)
        return None

    # --------------------------------------------------------------------------------------------- coming and going

    def _join(self, connection: ConnectionId, join: messages.Join) -> None:
        old = self._roster.get(join.node)
        node = self._roster.admit(
            connection, join, has_begun=self._course.has_begun, is_over=self._course.is_over, now_s=self._now_s
        )
        if node is None:
            return None
        was_away = self._course.came_back(node.node)
        if join.worker is None and old is not None:
            return self._replaced(node)
        if join.worker is None:
            return self._course.gathered(f"node {node.node} came back without its worker") if was_away else None
        # It comes back with its worker, which may be in the middle of a step that nobody else is in any more.
        recalled = self._course.recall(join.held)
        node.holds = recalled.holds
        if recalled.commit is not None:
            self._out.send(connection, recalled.commit)
        back = f"node {node.node} is back with its worker"
        self._out.send(connection, messages.Abandon(generation=self._course.generation, reason=back))
        return self._course.gathered(back) if old is None else self._replaced(node)

    def _replaced(self, node: Node) -> None:
        """A node came back on a new connection before its old one was known to be lost."""
        cause = self._cause(node.node, f"the connection of node {node.node} was lost: it has a new one")
        if self._terms.on_loss is OnLoss.STOP:
            return self._course.fail(cause)
        self._course.write_failure(cause, is_collateral=False)
        self._incidents.open("loss", cause.what, [node.node], self._now_s)
        self._prospects.forget(node.node)
        if node.node in self._course.working:
            return self._course.retry(cause.what)
        return self._course.gathered(cause.what)

    def _worker_ready(self, node: Node, ready: messages.WorkerReady) -> None:
        if ready.incarnation != node.incarnation or node.is_ready:
            return self._out.ignore(f"node {node.node}: worker {ready.incarnation} is ready, which is known or over")
        if ready.num_devices < self._terms.num_devices:
            what = f"node {node.node} has {ready.num_devices} devices, but the run uses {self._terms.num_devices}"
            return self._blame(self._cause(node.node, what, is_agent=True))
        self._roster.make_ready(node, ready, self._now_s)
        return self._course.gathered(f"node {node.node} is ready" if self._course.generation else "all nodes are ready")

    def _leave(self, node: Node, why: str) -> None:
        """A node has been asked to leave: at once if nobody needs it, else when the others can do without it."""
        if node.leaves is not None:
            return self._out.ignore(f"node {node.node} leaves, which is known")
        self._out.write(events.Leaving(node=node.node, reason=why))
        reason = f"node {node.node} leaves ({why})"
        if self._terms.on_loss is OnLoss.STOP:
            return self._blame(self._cause(node.node, reason))
        node.leaves = why
        if self._course.phase is Phase.RUNNING and node.node in self._course.working:
            return None  # after the next commit
        self._incidents.open("leave", reason, [node.node], self._now_s)
        if node.node in self._course.working:
            return self._course.regroup(reason)
        if self._course.phase is Phase.GATHERING and node.holds:
            return self._course.gathered(reason)
        return self._roster.release(node)

    # ------------------------------------------------------------------------------------------------------- losses

    def _disconnected(self, given: Disconnected) -> None:
        node = self._roster.disconnect(given.connection)
        if node is None:
            return None  # refused, or told to go before
        if self._course.is_over:
            return self._course.finish_if_alone()
        if node.holds and node.leaves is None:
            self._course.lost_touch(node.node)
        what = f"the agent of node {node.node} is gone ({given.reason})"
        return self._blame(self._cause(node.node, what, is_agent=True))

    def _worker_exited(self, node: Node, exited: messages.WorkerExited) -> None:
        self._roster.record_exit(exited)
        if exited.incarnation != node.incarnation:
            return self._out.ignore(f"node {node.node}: worker {exited.incarnation} ended, which has been replaced")
        # A worker that fails says why and then exits: its exit explains nothing more.
        if not (self._course.is_over or self._evidence.has_said_why(node.node)):
            self._blame(cause_of_exit(exited, self._now_s))
        return None

    def _worker_failed(self, node: Node, failed: messages.Failed) -> None:
        if failed.is_collateral and failed.generation < self._course.generation:
            return self._out.ignore(f"node {node.node} lost a peer in generation {failed.generation}, which is over")
        if failed.incarnation != node.incarnation:
            return self._out.ignore(f"node {node.node}: worker {failed.incarnation} failed, which has been replaced")
        return self._blame(cause_of_failure(failed, self._now_s))

    def _blame(self, cause: Cause) -> None:
        """Answer one piece of evidence that a node is lost, by the policy."""
        self._evidence.add(cause)
        # To regroup costs little: wait only where it may be nobody's fault. To stop is final: wait for certainty.
        enough = Weight.OWN if self._terms.on_loss is OnLoss.REGROUP else Weight.FIRM
        if cause.weight >= enough:
            self._pass_verdict()

    def _pass_verdict(self) -> None:
        """The evidence is in: the first cause counts, the others are its consequences."""
        first, *others = self._evidence.take()
        for cause in others:
            self._course.write_failure(cause, is_collateral=True)
        if self._terms.on_loss is OnLoss.STOP:
            self._course.fail(first)
        else:
            self._lose(first)

    def _lose(self, cause: Cause) -> None:
        """Go on without a worker; who only lost a peer is fine, and waits."""
        working = self._course.working
        node = self._roster.get(cause.guilty)
        if node is not None and cause.weight is Weight.COLLATERAL and node.node not in working:
            node = None  # whoever is blamed has no part in it
        is_collateral = node is not None and self._incidents.is_consequence(cause, self._terms.limits)
        self._course.write_failure(cause, is_collateral=is_collateral)
        if node is None:
            if working:
                self._incidents.open("loss", cause.what, (), self._now_s, notice_s=cause.notice_s)
                self._course.retry(cause.what, is_blameless=True)
            return
        if is_collateral:
            self._incidents.add_collateral(node.node)
        else:
            self._incidents.open("loss", cause.what, [node.node], self._now_s, notice_s=cause.notice_s)
        self._remove(node, cause)
        if node.node in working:
            self._course.retry(cause.what)
        elif self._course.generation:
            self._course.gathered(cause.what)

    def _remove(self, node: Node, cause: Cause) -> None:
        """Have the worker of a node replaced, or do without the node."""
        self._prospects.forget(node.node)
        if cause.is_agent:
            self._roster.cut_off(node, cause.what)
        elif node.leaves is not None:
            self._roster.release(node)
        else:
            self._respawn(node, cause)

    def _respawn(self, node: Node, cause: Cause) -> None:
        current = self._course.current if self._course.working else None
        self._roster.respawn(
            node,
            cause.what,
            self._now_s,
            has_begun=self._course.generation > 0,
            yield_s=0.0 if current is None else current.yield_s(self._terms.limits),
        )

    # ---------------------------------------------------------------------------------------------------- deadlines

    def _first_deadline(self) -> tuple[float, Callable[[], None]]:
        return min(self._deadlines(), key=lambda item: item[0], default=(math.inf, lambda: None))

    def _deadlines(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Yield the waits that are going on, of those for nodes the first: when it ends, and what happens then."""
        yield from self._course.deadlines()
        if self._course.is_over:
            return
        limits, current = self._terms.limits, self._course.current
        if (first := self._roster.first_deadline()) is not None:
            when_s, node, awaited = first
            yield when_s, partial(self._overdue, node, awaited)
        if self._evidence.since_s is not None:
            yield self._evidence.since_s + limits.verdict_s, self._pass_verdict
        elif current is not None and self._course.phase is Phase.RUNNING and not self._course.is_done:
            yield current.overdue_s(limits), partial(self._no_progress, current)

    def _overdue(self, node: Node, awaited: Awaited) -> None:
        found = overdue(node, awaited, self._terms.limits)
        cause = self._cause(node.node, found.what, is_agent=found.is_agent)
        self._blame(replace(cause, notice_s=found.limit_s))

    def _no_progress(self, current: Generation) -> None:
        """A step, or an evaluation, takes far longer than it may: find out who holds it up."""
        stopped = [node.node for node in self._course.members() if node.stopped_since_s is not None]
        found = current.held_up_by(stopped, self._now_s)
        who = f"node {found[0]} holds" if len(found) == 1 else f"one of the nodes {list(found)} holds"
        what = f"no progress for {current.stuck_s(self._now_s):.1f} s in step {current.step}: {who} it up"
        is_clear = len(found) == 1 or self._terms.on_loss is OnLoss.REGROUP
        cause = self._cause(found[0] if is_clear else None, what)
        self._blame(replace(cause, notice_s=current.stuck_s(self._now_s)))

    def _cause(self, node: NodeId | None, what: str, *, is_agent: bool = False) -> Cause:
        return Cause(node=node, weight=Weight.FIRM, what=what, noticed_s=self._now_s, is_agent=is_agent)
