"""The membership machine: workers that are replaced, nodes that join, and nodes that leave."""

import re

import pytest

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.effects import Close, Disconnected, FabricFailed, FabricStarted, StartFabric, Tick
from oobleck_jax.elastic.limits import Limits
from oobleck_jax.elastic.phase import Phase
from oobleck_jax.elastic.terms import Proposal
from oobleck_jax.planning.plan import NodeId, Plan, Stage
from tests.elastic import plans
from tests.elastic.simulation import (
    Node,
    Simulation,
    committing,
    exited,
    failure,
    kill,
    prepared,
    ready,
    regrouping,
    vote,
)


def disconnect(simulation: Simulation, node: Node) -> None:
    node.is_alive = node.has_agent = False
    simulation.feed(Disconnected(connection=node.connection, reason="gone"))


def pass_time(simulation: Simulation, seconds: float) -> None:
    end_s = simulation.now_s + seconds
    while simulation.now_s < end_s:
        simulation.now_s = min(simulation.now_s + 1.0, end_s)
        simulation.beat()


# ------------------------------------------------------------------------------------------------------ respawning


def test_a_worker_that_died_is_replaced_and_its_node_taken_in_again() -> None:
    simulation, nodes = regrouping()
    kill(simulation, nodes[1])
    (respawn,) = simulation.sent(messages.Respawn)
    assert (respawn.incarnation, respawn.delay_s) == (1, 0.0)
    assert "killed by SIGKILL" in respawn.reason
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 2, 3)
    simulation.pump_steps(3)
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 1, 2, 3)
    assert [record.incarnation for record in simulation.records(events.Ready) if record.node == 1] == [0, 1]
    holds = {member.node: member.holds for member in simulation.sent(messages.Begin)[-1].members}
    assert holds[NodeId(1)] == ()  # a new worker has no state


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "worker of node 1 failed: ValueError: boom"),
        ("stopped", "worker of node 1 has been stopped by a signal"),
        ("stuck", "no progress for .* node 1 holds it up"),
        ("blamed", "worker of node 0 lost node 1"),
    ],
)
def test_a_worker_is_replaced_whatever_is_wrong_with_it(how: str, words: str) -> None:
    simulation, nodes = regrouping()
    for node in nodes:
        node.outbox.clear()
    match how:
        case "raises":
            simulation.say(nodes[1], failure(nodes[1].id, "ValueError: boom"))
        case "stopped":
            nodes[1].is_alive, nodes[1].is_stopped = False, True
            pass_time(simulation, 4.0)
        case "stuck":
            for node in (nodes[0], nodes[2], nodes[3]):
                simulation.say(node, vote(node.id, node.plan, 1, 2)) if node.plan else None
            pass_time(simulation, 7.0)
        case _:
            simulation.say(nodes[0], failure(nodes[0].id, "PeerLost: the link broke", blames=NodeId(1)))
            pass_time(simulation, 1.0)
    (respawned,) = simulation.records(events.Respawned)
    assert (respawned.node, respawned.incarnation) == (1, 1)
    assert re.search(words, respawned.reason)
    assert simulation.machine.phase is Phase.MEETING


def test_what_an_old_worker_has_left_to_say_has_no_consequence() -> None:
    simulation, nodes = regrouping()
    node, plan = nodes[1], nodes[1].plan
    assert plan is not None
    kill(simulation, node)
    before = len(simulation.records(events.Failed))
    for message in (
        vote(node.id, plan, 1, 2),
        vote(node.id, plan, 2, 2),
        prepared(node.id, 1),
        prepared(node.id, 2),
        ready(node.id, incarnation=0),
        failure(node.id, "ValueError: boom"),
        exited(node.id, -9, incarnation=0),
    ):
        simulation.say(node, message)
    assert len(simulation.records(events.Failed)) == before
    assert len(simulation.records(events.Respawned)) == 1
    assert len(simulation.records(events.Left)) == 2  # the end of a worker is written down, whichever it was
    assert (simulation.machine.phase, simulation.machine.generation) == (Phase.MEETING, 2)


def test_a_new_worker_that_fails_before_it_is_ready_says_why() -> None:
    simulation, nodes = regrouping()
    kill(simulation, nodes[1])
    simulation.say(nodes[1], failure(nodes[1].id, "ValueError: boom", incarnation=1))
    simulation.say(nodes[1], exited(nodes[1].id, 1, incarnation=1))
    _, failed = simulation.records(events.Failed)
    assert (failed.cause, failed.detail) == ("the worker of node 1 failed: ValueError: boom", "traceback")
    assert failed.is_error
    assert [respawned.incarnation for respawned in simulation.records(events.Respawned)] == [1, 2]


def test_a_worker_that_is_not_ready_in_time_is_replaced_again() -> None:
    limits = Limits(ready_s=10.0, step_s=1000.0, first_step_s=1000.0)
    simulation, nodes = regrouping(limits=limits)
    kill(simulation, nodes[1])
    simulation.start_fabric()
    pass_time(simulation, 11.0)
    last = simulation.records(events.Respawned)[-1]
    assert (last.incarnation, last.delay_s) == (2, 2.0)
    assert last.reason == "the worker of node 1 was not ready 10 s after its start as incarnation 1"
    pass_time(simulation, 10.5)  # the wait before the start does not count
    assert simulation.records(events.Respawned)[-1].incarnation == 2
    pass_time(simulation, 1.0)
    assert simulation.records(events.Respawned)[-1].incarnation == 3


def test_when_every_node_is_excluded_the_run_ends_at_once_M4() -> None:
    simulation, nodes = regrouping(num_steps=0, limits=Limits(backoff_s=0.0, max_failures=1))
    for node in nodes:
        kill(simulation, node, exit_code=1)
    assert simulation.machine.phase is Phase.FINISHED
    cause = simulation.records(events.Failed)[-1].cause
    assert "none can come: node 0 was excluded after 1 failures in 0 s; node 1 was excluded" in cause


def test_a_node_that_crashes_in_a_loop_is_backed_off_and_then_excluded_by_name() -> None:
    simulation, nodes = regrouping(limits=Limits(backoff_s=2.0, max_failures=5))
    node = nodes[1]
    for _ in range(5):
        kill(simulation, node, exit_code=1)
        simulation.pump_steps(2)
        pass_time(simulation, 1.0)
    assert [record.delay_s for record in simulation.records(events.Respawned)] == [0.0, 2.0, 4.0, 8.0]
    assert not node.has_agent  # it got its Stop
    assert simulation.records(events.Rejected)[-1].reason.startswith("node 1 was excluded after 5 failures in 4 s")
    simulation.join(1)
    assert simulation.sent(messages.Refused)[-1].reason == "node 1 was excluded after 5 failures in 4 s"
    simulation.join()
    assert "at most 4 nodes, and node 1 was excluded" in simulation.sent(messages.Refused)[-1].reason
    assert simulation.machine.phase is not Phase.STOPPING


def test_a_long_time_of_good_work_makes_up_for_failures() -> None:
    simulation, nodes = regrouping(limits=Limits(forgive_s=50.0, step_s=1000.0, first_step_s=1000.0))
    for _ in range(7):
        kill(simulation, nodes[1])
        simulation.pump_steps(3)
        pass_time(simulation, 60.0)
    assert {record.delay_s for record in simulation.records(events.Respawned)} == {0.0}


def test_a_step_that_fails_again_and_again_ends_the_run_with_the_history() -> None:
    simulation, nodes = regrouping(num_nodes=5, limits=Limits(max_attempts_per_step=3, max_failures=99, backoff_s=0.0))
    for number in range(4):
        assert simulation.machine.phase is Phase.RUNNING
        for node in nodes:
            node.outbox.clear()  # no votes: the step never ends
        kill(simulation, nodes[number])
        if simulation.fabrics:
            simulation.start_fabric()
        for _ in range(2):
            for node in nodes:
                node.work()
                while node.outbox and not isinstance(node.outbox[0], messages.Vote):
                    simulation.say(node, node.outbox.popleft())
    failed = simulation.records(events.Failed)[-1]
    assert failed.cause.startswith("step 2 failed 4 times; something in this step may bring its nodes down: (1) the")
    assert all(f"worker of node {number} was killed" in failed.cause for number in range(4))
    assert simulation.machine.phase is Phase.STOPPING


def test_a_step_that_fails_with_nobody_to_blame_is_tried_three_times() -> None:
    simulation, nodes = regrouping()
    for attempt in range(4):
        assert simulation.machine.generation == attempt + 1
        message = messages.Failed(
            node=nodes[0].id, incarnation=0, generation=attempt + 1, error="Stalled: nothing came", traceback=""
        )
        simulation.say(nodes[0], message)
        pass_time(simulation, simulation.terms.limits.verdict_s)
        simulation.feed(Tick())
        if simulation.fabrics:
            simulation.start_fabric()
    failed = simulation.records(events.Failed)[-1]
    assert failed.cause.startswith(
        "step 2 failed 4 times in a row, and no node is known to be at fault: (1) the worker"
    )
    assert simulation.machine.phase is Phase.STOPPING


def test_deaths_in_the_same_moment_start_one_fabric_at_a_time() -> None:
    simulation, nodes = regrouping(num_nodes=5, num_steps=1)
    simulation.fabrics.clear()
    for number in (0, 3, 4):
        kill(simulation, nodes[number])
    assert simulation.machine.generation == 4
    assert [fabric.generation for fabric in simulation.fabrics] == [2]
    effects = simulation.feed(FabricFailed(generation=2, error="no port"))
    assert [effect.generation for effect in effects if isinstance(effect, StartFabric)] == [4]
    simulation.feed(FabricStarted(generation=4, address="127.0.0.1:1"))
    assert simulation.machine.phase is Phase.PREPARING


def test_a_death_during_recovery_is_the_next_generation() -> None:
    simulation, nodes = regrouping(num_nodes=5)
    kill(simulation, nodes[0])
    simulation.start_fabric()
    assert simulation.machine.phase is Phase.PREPARING
    kill(simulation, nodes[3])
    planned = simulation.records(events.Planned)[-1]
    assert (planned.generation, planned.step, planned.plan.nodes) == (3, 2, (1, 2, 4))


# ----------------------------------------------------------------------------------------------------------- joining


def test_more_nodes_than_at_start_are_welcome_up_to_max_nodes() -> None:
    simulation, _ = regrouping(num_nodes=3, max_nodes=4)
    assert simulation.join().id == -1
    simulation.pump_steps(3)
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 1, 2, 3)
    simulation.join()
    assert simulation.sent(messages.Refused)[-1].reason == "the run has 4 of at most 4 nodes; raise --max-nodes"
    simulation.join(4)
    assert "nodes 0 to 3; raise --max-nodes" in simulation.sent(messages.Refused)[-1].reason


def test_a_node_that_comes_when_the_run_is_over_is_told_so() -> None:
    simulation, _ = regrouping(num_steps=1, steps=1)
    simulation.join()
    assert simulation.sent(messages.Refused)[-1].reason == "it comes too late: the run is over"


def test_a_newcomer_that_would_only_be_spare_disturbs_nobody() -> None:
    simulation, _ = regrouping(num_nodes=4, max_nodes=5)
    newcomer = simulation.join()
    simulation.pump_steps(5)
    assert newcomer.is_ready
    assert simulation.machine.generation == 1
    disconnect(simulation, newcomer)  # and nobody misses it
    simulation.pump_steps(2)
    assert simulation.machine.generation == 1


def test_a_spare_newcomer_takes_the_place_of_a_node_that_is_lost() -> None:
    simulation, nodes = regrouping(num_nodes=4, max_nodes=5)
    simulation.join()
    simulation.pump_steps(2)
    disconnect(simulation, nodes[0])
    assert simulation.records(events.Planned)[-1].plan.nodes == (1, 2, 3, 4)


def test_newcomers_within_a_moment_are_taken_in_by_one_generation() -> None:
    simulation, _ = regrouping(num_nodes=2, max_nodes=4)
    simulation.join()
    late = simulation.join()
    for _ in range(3):  # steps of 0.5 s; the last newcomer is not ready yet
        simulation.now_s += 0.5
        for node in list(simulation.nodes.values()):
            if node is not late:
                node.work()
                simulation.deliver(node)
    assert simulation.machine.generation == 1
    simulation.pump_steps(3)
    assert simulation.machine.generation == 2
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 1, 2, 3)


def test_a_newcomer_does_not_wait_for_ever_for_another_one() -> None:
    simulation, _ = regrouping(num_nodes=2, max_nodes=4)
    simulation.join()
    late = simulation.join()
    for _ in range(8):
        simulation.now_s += 0.5
        simulation.say(late, messages.Heartbeat(node=NodeId(3)))
        if simulation.fabrics:
            simulation.start_fabric()
        for node in list(simulation.nodes.values()):
            if node is not late:
                node.work()
                simulation.deliver(node)
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 1, 2)


def test_faults_are_for_the_first_worker_of_a_node_only() -> None:
    simulation, nodes = regrouping(faults_of=lambda node: (f"kill:{node}@3",))
    assert [message.faults for message in simulation.sent(messages.Welcome)][:2] == [("kill:0@3",), ("kill:1@3",)]
    simulation.rejoin(nodes[1])
    assert simulation.sent(messages.Welcome)[-1].faults == ()


def test_a_node_that_comes_when_the_run_has_begun_compiles_ahead_first_and_has_the_time_for_it() -> None:
    ahead = (Stage(first_layer=0, end_layer=2),)
    simulation, nodes = regrouping(ahead=ahead, max_nodes=5, limits=Limits(ready_s=3.0))
    assert [message.ahead for message in simulation.sent(messages.Welcome)] == [()] * 4
    assert {message.ahead for message in simulation.sent(messages.Begin)} == {ahead}
    kill(simulation, nodes[1])
    nodes[1].is_alive = False  # its new worker takes long
    assert simulation.sent(messages.Respawn)[-1].ahead == ahead
    late = simulation.join()
    assert simulation.sent(messages.Welcome)[-1].ahead == ahead
    for done in range(3):
        pass_time(simulation, 2.0)
        for node, number in ((nodes[1], NodeId(1)), (late, NodeId(4))):
            simulation.say(node, messages.CompiledAhead(node=number, generation=0, done=done, total=9))
            simulation.say(node, messages.Heartbeat(node=number))
    assert len(simulation.sent(messages.Respawn)) == 1
    pass_time(simulation, 3.5)
    assert len(simulation.sent(messages.Respawn)) == 3  # no progress of either


@pytest.mark.parametrize(("yield_s", "delay_s"), [(0.0, 0.0), (10.0, 1.5), (0.7, 0.7)])
def test_a_new_worker_leaves_the_cores_to_the_others_for_a_step(yield_s: float, delay_s: float) -> None:
    simulation, nodes = regrouping(limits=Limits(yield_s=yield_s))  # steps of one second
    kill(simulation, nodes[1])
    assert simulation.sent(messages.Respawn)[-1].delay_s == delay_s
    simulation.pump_steps(3)
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 1, 2, 3)


def test_a_spare_node_takes_part_so_that_it_compiles_ahead() -> None:
    simulation, _ = regrouping(num_nodes=5)
    (begun,) = {tuple(member.node for member in message.members) for message in simulation.sent(messages.Begin)}
    assert simulation.records(events.Planned)[-1].plan.spare_nodes == (4,)
    assert begun == (0, 1, 2, 3, 4)


def test_the_planner_is_told_of_the_plan_so_far() -> None:
    told: list[Plan | None] = []

    def replan(nodes: tuple[NodeId, ...], holdings: dict, old: Plan | None) -> Proposal:
        told.append(old)
        return plans.replan(nodes, holdings)

    simulation, nodes = regrouping(replan=replan)
    kill(simulation, nodes[1])
    simulation.pump_steps(3)
    simulation.restart()
    simulation.reattach()
    used = [record.plan for record in simulation.records(events.Planned)]
    assert told == [None, *used[:-1]]


def test_progress_of_compiling_ahead_is_told() -> None:
    simulation, nodes = regrouping()
    simulation.say(nodes[1], messages.CompiledAhead(node=nodes[1].id, generation=1, done=2, total=7))
    assert simulation.records(events.CompiledAhead) == [events.CompiledAhead(node=NodeId(1), done=2, total=7)]


# ----------------------------------------------------------------------------------------------------------- leaving


def leave(simulation: Simulation, *nodes: Node) -> None:
    for node in nodes:
        simulation.say(node, messages.Leaving(node=node.id, reason="SIGTERM"))


def test_a_node_that_leaves_completes_the_step_and_its_layers_are_taken_over() -> None:
    simulation, nodes = regrouping()
    leave(simulation, nodes[1])
    assert simulation.machine.generation == 1
    for node in nodes:
        simulation.deliver(node)
    planned = simulation.records(events.Planned)[-1]
    assert (planned.generation, planned.step, planned.plan.nodes) == (2, 3, (0, 2, 3))
    assert planned.reason == "node 1 leaves (SIGTERM)"
    simulation.start_fabric()
    (begin,) = {message.members for message in simulation.sent(messages.Begin)[-4:]}
    assert {member.node: member.holds for member in begin}[NodeId(1)] == (2, 3)
    simulation.pump_steps(1)
    (stop,) = simulation.sent(messages.Stop)
    assert (stop.exit_code, stop.reason) == (0, "node 1 leaves (SIGTERM)")
    simulation.say(nodes[1], exited(nodes[1].id, 0))
    disconnect(simulation, nodes[1])
    simulation.pump_steps(2)
    assert simulation.records(events.Failed) == []
    assert [record.exit_code for record in simulation.records(events.Left)] == [0]
    assert simulation.machine.generation == 2
    (incident,) = simulation.records(events.Incident)
    assert (incident.kind, incident.nodes, incident.num_redone_microbatches) == ("leave", (1,), 0)


def test_a_spare_node_may_leave_at_once_and_one_that_prepares_without_delay() -> None:
    simulation, nodes = regrouping(num_nodes=5)
    leave(simulation, nodes[4])
    assert [message.exit_code for message in simulation.sent(messages.Stop)] == [0]
    assert simulation.machine.generation == 1
    kill(simulation, nodes[0])
    simulation.start_fabric()
    leave(simulation, nodes[1])
    planned = simulation.records(events.Planned)[-1]
    assert (planned.generation, planned.step, planned.plan.nodes) == (3, 2, (2, 3))


def test_a_node_that_dies_while_it_leaves_is_lost() -> None:
    simulation, nodes = regrouping()
    leave(simulation, nodes[1])
    kill(simulation, nodes[1])
    assert simulation.records(events.Respawned) == []
    assert [record.node for record in simulation.records(events.Failed)] == [1]
    assert simulation.records(events.Planned)[-1].step == 2
    assert simulation.sent(messages.Stop)[-1].exit_code == 0
    simulation.pump_steps(2)


def test_a_node_that_dies_while_the_others_copy_from_it_is_lost() -> None:
    simulation, nodes = regrouping()
    leave(simulation, nodes[1])
    for node in nodes:
        simulation.deliver(node)
    simulation.start_fabric()
    disconnect(simulation, nodes[1])
    planned = simulation.records(events.Planned)[-1]
    assert (planned.generation, planned.step, planned.plan.nodes) == (3, 3, (0, 2, 3))
    simulation.pump_steps(2)


def test_several_nodes_may_leave_at_once() -> None:
    simulation, nodes = regrouping()
    leave(simulation, nodes[1], nodes[3])  # the only holders of layers 2 and 3
    simulation.pump_steps(2)
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 2)
    assert not nodes[1].has_agent
    assert not nodes[3].has_agent
    assert simulation.records(events.Failed) == []


def test_if_nobody_can_go_on_without_the_nodes_that_leave_the_run_waits_or_ends() -> None:
    simulation, nodes = regrouping(num_nodes=3)
    leave(simulation, nodes[0], nodes[1])
    simulation.pump_steps(1)
    assert not nodes[0].has_agent or isinstance(nodes[0].inbox[-1], messages.Stop)
    cause = simulation.records(events.Failed)[-1].cause
    assert cause.startswith("no live node has the state of layers [0, 1] after step 2 any more")
    assert "node 0 leaves (SIGTERM); node 1 leaves (SIGTERM)" in cause


def test_the_node_that_stays_keeps_its_layers_while_it_waits_for_others() -> None:
    simulation, nodes = regrouping(num_nodes=3)
    leave(simulation, nodes[0], nodes[2])
    assert nodes[1].plan is not None
    for node in nodes:
        simulation.deliver(node)
    layers = nodes[1].plan.layers_of(nodes[1].id)
    lost = sorted(set(range(4)) - set(layers))
    if lost:
        assert f"the state of layers {lost} after step 2" in simulation.records(events.Failed)[-1].cause
    else:
        assert simulation.machine.phase is Phase.GATHERING


def test_a_node_may_leave_in_the_last_step() -> None:
    simulation, nodes = regrouping(num_steps=2, steps=3, evaluates_after=lambda step: step == 2)
    leave(simulation, nodes[1])
    simulation.round()
    assert simulation.machine.step == 3
    for _ in range(6):
        if simulation.fabrics:
            simulation.start_fabric()
        simulation.round()
    assert [record.step for record in simulation.records(events.Committed)] == [0, 1, 2]
    assert [record.step for record in simulation.records(events.Evaluated)] == [2]
    assert simulation.machine.phase in (Phase.STOPPING, Phase.FINISHED)
    assert simulation.records(events.Failed) == []


def test_a_node_that_leaves_ends_a_run_that_may_lose_nobody() -> None:
    simulation, nodes = committing(1)
    leave(simulation, nodes[1])
    assert simulation.records(events.Failed)[-1].cause == "node 1 leaves (SIGTERM)"
    assert simulation.machine.phase is Phase.STOPPING


def test_an_agent_that_is_silent_gets_no_new_worker() -> None:
    simulation, nodes = regrouping()
    nodes[1].has_agent = nodes[1].is_alive = False
    pass_time(simulation, 5.0)
    assert simulation.records(events.Respawned) == []
    assert Close(connection=nodes[1].connection) in simulation.history
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 2, 3)
