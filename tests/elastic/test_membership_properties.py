"""Properties M1 to M4 of the membership machine, whatever happens in whatever order.

Hypothesis plays a cluster: nodes join, work, are killed, cut off, frozen and come back; messages are late, of dead
connections, or lies about the generation; time passes. Both policies are played. The simulated nodes check from their
side that no step is undone, left out or applied twice (simulation.py).
"""

import math
from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import seed, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.effects import (
    Disconnected,
    FabricFailed,
    Finish,
    Interrupted,
    Send,
    StartFabric,
    Tick,
    Write,
)
from oobleck_jax.elastic.limits import Limits
from oobleck_jax.elastic.phase import Phase
from oobleck_jax.elastic.terms import OnLoss
from tests.elastic.plans import terms
from tests.elastic.simulation import Node, Simulation, checkpoints, exited, failure, vote


class AnyRun(RuleBasedStateMachine):
    """Whatever can happen to a run."""

    check: Callable[[Simulation], None]

    @initialize(
        on_loss=st.sampled_from([OnLoss.REGROUP, OnLoss.REGROUP, OnLoss.STOP]),
        num_faults=st.integers(0, 5),
        num_nodes=st.integers(2, 5),
        steps=st.integers(1, 6),
        eval_every=st.integers(1, 3),
        num_late=st.sampled_from([0, 0, 0, 0, 1, 4]),
        num_leaves=st.integers(1, 3),
        num_more=st.integers(0, 2),
        dies_in_step=st.none() | st.integers(0, 3),
        every_steps=st.sampled_from([0, 1, 2]),
    )
    def begin(
        self,
        on_loss: OnLoss,
        num_faults: int,
        num_nodes: int,
        steps: int,
        eval_every: int,
        num_late: int,
        num_leaves: int,
        num_more: int,
        dies_in_step: int | None,
        every_steps: int,
    ) -> None:
        self.dies_in_step = dies_in_step  # the coordinator, when the decision is written, and nobody has heard of it
        self.faults_left, self.leaves_left = num_faults, num_leaves
        self.simulation = Simulation(
            terms(
                on_loss=on_loss,
                num_nodes=num_nodes,
                max_nodes=num_nodes + num_more,
                steps=steps,
                evaluates_after=lambda step: (step + 1) % eval_every == 0,
                checkpoints=checkpoints(every_steps) if every_steps else None,
                limits=Limits(gather_s=30.0, wait_s=30.0, ready_s=20.0, prepare_s=20.0, first_step_s=20.0),
            )
        )
        for _ in range(max(num_nodes - num_late, 1)):
            self.simulation.join()
        self.play_on(num_rounds=1)

    def pick(self, index: int) -> Node:
        nodes = list(self.simulation.nodes.values())
        return nodes[index % len(nodes)]

    index = st.integers(0, 7)

    @rule(num_rounds=st.integers(1, 5))
    def play_on(self, num_rounds: int) -> None:
        """Everybody does a bit."""
        for _ in range(num_rounds):
            if self.simulation.fabrics:
                self.simulation.start_fabric()
            self.simulation.use_whole_disk()
            self.simulation.dies_at_commit |= self.simulation.machine.step == self.dies_in_step
            self.simulation.round()
            if self.simulation.num_restarts and self.dies_in_step is not None:
                self.dies_in_step = None
                self.simulation.reattach()

    @rule(seconds=st.floats(0.01, 2.0))
    def play_slowly(self, seconds: float) -> None:
        self.time_passes(seconds)
        self.play_on(num_rounds=2)

    @rule(index=index)
    def work(self, index: int) -> None:
        """One node does its work, but is not heard yet."""
        self.pick(index).work()

    @rule(index=index)
    def deliver_one(self, index: int) -> None:
        """One message arrives; its sender may be gone by now."""
        node = self.pick(index)
        if node.outbox:
            self.simulation.say(node, node.outbox.popleft())

    @precondition(lambda self: self.faults_left)
    @rule(index=index, exit_code=st.sampled_from([-9, -6, 0, 1]))
    def worker_dies(self, index: int, exit_code: int) -> None:
        self.faults_left -= 1
        node = self.pick(index)
        if node.is_alive and node.id >= 0:
            node.is_alive = False
            node.outbox.append(exited(node.id, exit_code, node.incarnation))

    @precondition(lambda self: self.faults_left and self.simulation.disk)
    @rule(num_rounds=st.integers(0, 8))
    def all_workers_die(self, num_rounds: int) -> None:
        """There is a checkpoint, and nothing else."""
        self.faults_left -= 1
        for node in self.simulation.nodes.values():
            if node.is_alive and node.id >= 0:
                node.is_alive = False
                node.outbox.append(exited(node.id, -9, node.incarnation))
        self.play_on(num_rounds)

    @rule(index=index, may_be_intact=st.booleans())
    def checkpoint_is_damaged(self, index: int, may_be_intact: bool) -> None:
        """The node is in the middle of a restore, or was: then it has no consequence."""
        node, machine = self.pick(index), self.simulation.machine
        if node.is_alive and node.id >= 0 and self.simulation.disk:
            damaged = messages.RestoreFailed(
                node=node.id, generation=machine.generation, reason="damaged", may_be_intact=may_be_intact
            )
            self.simulation.say(node, damaged)

    @precondition(lambda self: self.faults_left)
    @rule(index=index, is_collateral=st.booleans())
    def worker_raises(self, index: int, is_collateral: bool) -> None:
        self.faults_left -= 1
        node = self.pick(index)
        if node.is_alive and node.id >= 0:
            node.is_alive = False
            error = "PeerLost: gone" if is_collateral else "ValueError: boom"
            node.outbox.append(failure(node.id, error, incarnation=node.incarnation))
            node.outbox.append(exited(node.id, 1, node.incarnation))

    @precondition(lambda self: self.faults_left)
    @rule(index=index)
    def connection_breaks(self, index: int) -> None:
        self.faults_left -= 1
        node = self.pick(index)
        node.is_alive = node.has_agent = False
        self.simulation.feed(Disconnected(connection=node.connection, reason="reset by peer"))

    @precondition(lambda self: self.faults_left)
    @rule(index=index, num_rounds=st.none() | st.integers(0, 4))
    def connection_flaps(self, index: int, num_rounds: int | None) -> None:
        """A connection breaks, and its agent has a new one: some time after the coordinator saw that, or before."""
        self.faults_left -= 1
        node = self.pick(index)
        old = node.connection
        if not node.has_agent or node.id < 0:
            return
        if num_rounds is not None:
            self.simulation.feed(Disconnected(connection=old, reason="reset by peer"))
            self.play_on(num_rounds)
        self.simulation.rejoin(node)
        if num_rounds is None:
            self.simulation.feed(Disconnected(connection=old, reason="reset by peer"))

    @precondition(lambda self: self.faults_left)
    @rule(index=index, num_crashes=st.sampled_from([2, 6]))
    def worker_crashes_in_a_loop(self, index: int, num_crashes: int) -> None:
        self.faults_left -= 1
        node = self.pick(index)
        for _ in range(num_crashes):
            if node.is_alive and node.id >= 0:
                node.is_alive = False
                node.outbox.append(exited(node.id, 1, node.incarnation))
                self.time_passes(1.0)
                self.play_on(num_rounds=2)

    @precondition(lambda self: self.faults_left)
    @rule(index=index)
    def old_worker_is_heard_late(self, index: int) -> None:
        """What a worker that has been replaced said before it was."""
        node = self.pick(index)
        if node.incarnation > 0 and node.has_agent:
            self.simulation.say(node, exited(node.id, -9, node.incarnation - 1))
            self.simulation.say(node, failure(node.id, "ValueError: boom", incarnation=node.incarnation - 1))

    @rule(index=index)
    def node_is_to_leave(self, index: int) -> None:
        node = self.pick(index)
        if node.has_agent and node.id >= 0 and self.leaves_left:
            self.leaves_left -= 1
            node.outbox.append(messages.Leaving(node=node.id, reason="SIGTERM"))

    @precondition(lambda self: self.faults_left and not self.simulation.end)
    @rule(num_rounds=st.integers(0, 8))
    def coordinator_dies(self, num_rounds: int) -> None:
        self.faults_left -= 1
        self.simulation.restart()
        if num_rounds:
            self.simulation.reattach()
            self.play_on(num_rounds)

    @precondition(lambda self: self.simulation.num_restarts)
    @rule(index=index)
    def agent_comes_back(self, index: int) -> None:
        node = self.pick(index)
        if node.has_agent and node.id >= 0 and not self.simulation.knows(node):
            self.simulation.rejoin(node)

    @precondition(lambda self: self.faults_left)
    @rule(index=index)
    def worker_is_stopped(self, index: int) -> None:
        self.faults_left -= 1
        node = self.pick(index)
        node.is_alive, node.is_stopped = False, True

    @precondition(lambda self: self.faults_left)
    @rule(index=index)
    def node_freezes(self, index: int) -> None:
        self.faults_left -= 1
        node = self.pick(index)
        node.is_alive = node.has_agent = False

    @rule(wish=st.none() | st.integers(0, 4))
    def node_joins(self, wish: int | None) -> None:
        if len(self.simulation.nodes) < 12:
            self.simulation.join(wish)

    @precondition(lambda self: any(not node.is_alive for node in self.simulation.nodes.values()))
    @rule()
    def node_comes_back(self) -> None:
        if len(self.simulation.nodes) < 12:
            self.simulation.join()
            self.play_on(num_rounds=3)

    @rule(index=index, generation=st.integers(0, 4), step=st.integers(0, 6))
    def node_votes_for_anything(self, index: int, generation: int, step: int) -> None:
        node = self.pick(index)
        machine = self.simulation.machine
        if node.plan is not None and (generation, step) != (machine.generation, machine.step):
            self.simulation.say(node, vote(node.id, node.plan, generation, step))
            self.simulation.say(
                node, messages.Waiting(node=node.id, generation=generation, step=step, waits_for=node.id)
            )

    @precondition(lambda self: self.faults_left and self.simulation.fabrics)
    @rule(error=st.just("no port"))
    def fabric_fails(self, error: str) -> None:
        self.faults_left -= 1
        wanted = self.simulation.fabrics.pop(0)
        if len(self.simulation.nodes) % 3 == 0:  # not too often, since that is the end
            self.simulation.feed(FabricFailed(generation=wanted.generation, error=error))
        else:
            self.simulation.fabrics.append(wanted)

    @rule(seconds=st.floats(0.01, 20.0))
    def time_passes(self, seconds: float) -> None:
        end_s = self.simulation.now_s + seconds
        while self.simulation.now_s < end_s:
            self.simulation.now_s = min(end_s, self.simulation.now_s + 2.0)
            self.simulation.beat()

    @precondition(lambda self: self.faults_left and len(self.simulation.nodes) > 6)
    @rule()
    def user_interrupts(self) -> None:
        self.faults_left -= 1
        self.simulation.feed(Interrupted(reason="interrupted", exit_code=130))

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            type(self).check(self.simulation)


def whatever_happens(check: Callable[[Simulation], None], *, max_examples: int = 60, number: int = 0) -> None:
    """Play many runs, the same ones each time for the same number, and check each of them at its end."""
    machine = seed(number)(type("AnyRun", (AnyRun,), {"check": staticmethod(check)}))
    profile = settings(
        max_examples=max_examples, stateful_step_count=40, deadline=None, database=None, derandomize=True
    )
    run_state_machine_as_test(machine, settings=profile)


def test_generations_only_grow_M1() -> None:
    def check(simulation: Simulation) -> None:
        planned = [record.generation for record in simulation.records(events.Planned)]
        assert planned == list(range(1, len(planned) + 1))
        last = started = 0
        for effect in simulation.history:
            match effect:
                case Write(record=events.Planned(generation=generation)):
                    assert generation > last
                    last = generation
                case StartFabric(generation=generation):
                    assert started < generation == last
                    started = generation
                case Send(message=messages.Begin() | messages.Run() | messages.Abandon() as message):
                    assert message.generation == last
                case Send(message=messages.Commit() as message):
                    assert message.generation <= last  # an old one is sent again to whom it did not reach
                case _:
                    pass

    whatever_happens(check)


def test_a_committed_step_is_never_undone_and_never_done_twice_M2() -> None:
    def check(simulation: Simulation) -> None:
        num_committed, decided = 0, (0, -1)
        for effect in simulation.history:
            match effect:
                case Write(record=events.Restored() as record):  # the only way back
                    assert 0 < record.step <= num_committed
                    num_committed, decided = record.step, (0, -1)
                case Write(record=events.Committed() as record):
                    assert record.step == num_committed
                    num_committed += 1
                    decided = (record.generation, record.step)
                case Send(message=messages.Commit() as commit):
                    assert (commit.generation, commit.step) == decided, "sent before it was written"
                case Send(message=messages.Begin() | messages.Run() as message):
                    assert message.step == num_committed
                    if isinstance(message, messages.Begin) and message.restore is not None:
                        assert message.restore.next_step == num_committed
                case Finish(exit_code=0):
                    assert num_committed == simulation.terms.steps
                case _:
                    pass

    whatever_happens(check)


def test_every_change_has_a_reason_M3() -> None:
    def check(simulation: Simulation) -> None:
        for effect in simulation.history:
            match effect:
                case Write(record=events.Planned() as record):
                    assert record.reason
                    assert record.plan_reason
                case Write(record=events.Failed() as record):
                    assert record.cause
                case Write(
                    record=events.Abandoned() | events.Rejected() | events.Gathering() | events.Finished() as record
                ):
                    assert record.reason
                case Send(message=messages.Stop() | messages.Refused() | messages.Abandon() as message):
                    assert message.reason
                case Finish():
                    assert effect.reason
                case _:
                    pass
        # A run that failed says so in exactly one record that is not a consequence of another, if it may lose nobody.
        guilty = [record for record in simulation.records(events.Failed) if not record.is_collateral]
        if simulation.terms.on_loss is OnLoss.STOP and simulation.end and simulation.end.exit_code == 1:
            assert [record.cause for record in guilty] == [simulation.end.reason]

    whatever_happens(check)


def test_nobody_waits_without_a_deadline_M4() -> None:
    def check(simulation: Simulation) -> None:
        """With nothing but time the machine comes to its end, also when all agents are well but nothing goes on."""
        for _ in range(500):
            if simulation.machine.phase is Phase.FINISHED:
                break
            simulation.beat()
            assert math.isfinite(simulation.machine.wake_s)
            simulation.now_s = max(simulation.now_s, min(simulation.machine.wake_s, simulation.now_s + 3.0))
            simulation.feed(Tick())
        assert simulation.machine.phase is Phase.FINISHED
        assert simulation.machine.wake_s == math.inf
        assert simulation.end is not None
        assert simulation.feed(Tick()) == ()

    whatever_happens(check)


def test_the_simulation_reaches_what_the_properties_are_about() -> None:
    """The other tests would prove little if runs never committed, recovered or ended."""
    seen: set[str] = set()

    def check(simulation: Simulation) -> None:
        seen.add(f"policy {simulation.terms.on_loss}")
        if simulation.end:
            seen.add(f"exit {simulation.end.exit_code}")
        if simulation.records(events.Committed):
            seen.add("commits")
        if any(record.generation > 1 for record in simulation.records(events.Committed)):
            seen.add("commits after a recovery")
        if any("ready to take part" in record.reason for record in simulation.records(events.Planned)):
            seen.add("newcomers")
        if any(record.incarnation > 1 for record in simulation.records(events.Ready)):
            seen.add("a worker is replaced twice")
        if any("was excluded after" in record.reason for record in simulation.records(events.Rejected)):
            seen.add("an exclusion")
        if any(stop.exit_code == 0 and "leaves" in stop.reason for stop in simulation.sent(messages.Stop)):
            seen.add("a node leaves")
        seen.update(incident.kind for incident in simulation.records(events.Incident))
        sent = [(commit.generation, commit.step) for commit in simulation.sent(messages.Commit)]
        planned = [record.generation for record in simulation.records(events.Planned)]
        if simulation.num_restarts and sent and planned and sent[-1][0] == planned[-1]:
            seen.add("commits after a restart")
        restored = [record.generation for record in simulation.records(events.Restored)]
        if restored and sent and sent[-1][0] >= restored[-1]:
            seen.add("commits after a restore")
        if simulation.records(events.Checkpointed):
            seen.add("a checkpoint")
        if simulation.num_sent_again:
            seen.add("a decision is sent again")

    wanted = {
        "commits",
        "commits after a recovery",
        "exit 0",
        "exit 1",
        "newcomers",
        "a worker is replaced twice",
        "an exclusion",
        "a node leaves",
        "loss",
        "join",
        "leave",
        "coordinator",
        "commits after a restart",
        "a decision is sent again",
        "a checkpoint",
        "commits after a restore",
    }
    # Which runs there are depends on the modules that are imported, because hypothesis takes constants from them.
    for number in range(10):
        if not seen >= wanted:
            whatever_happens(check, max_examples=100, number=number)
    assert seen >= wanted
