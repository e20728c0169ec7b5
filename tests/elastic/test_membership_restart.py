"""The membership machine: a coordinator that takes over from one that died, and connections that are replaced."""

import msgspec
import pytest

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.effects import Close, Disconnected, Tick
from oobleck_jax.elastic.phase import Phase
from oobleck_jax.elastic.resumption import recall
from oobleck_jax.elastic.terms import OnLoss
from oobleck_jax.planning.plan import NodeId
from tests.elastic.plans import terms
from tests.elastic.simulation import Node, Simulation, exited, regrouping


def committed(generation: int, step: int) -> events.Committed:
    return events.Committed(generation=generation, step=step, loss=1.0, grad_norm=2.0, step_time_s=0.1)


@pytest.mark.parametrize(
    ("held", "holds", "is_sent"),
    [
        ((3, 7), (0, 1), False),  # it has applied the decision
        ((2, 7), (0, 1), False),  # ... in an earlier generation, and nothing came since
        ((3, 6), (0, 1), True),  # it has voted, and waits for the decision
        ((2, 6), (), False),  # it was not there when the step was decided
        ((3, 5), (), False),
        ((4, 8), (), False),
    ],
)
def test_what_a_worker_that_comes_back_is_good_for(
    held: tuple[int, int], holds: tuple[int, ...], is_sent: bool
) -> None:
    generation, step = held
    what = messages.Held(generation=generation, step=step, layers=(0, 1))
    recalled = recall(what, step=8, committed=committed(3, 7), valid_since=0)
    assert recalled.holds == holds
    sent = messages.Commit(generation=3, step=7, global_norm=2.0) if is_sent else None
    assert recalled.commit == sent
    assert recall(None, step=8, committed=committed(3, 7), valid_since=0).holds == ()
    assert recall(what, step=0, committed=None, valid_since=0).holds == ()
    # What is older than the last restore counts no more, were it of the right step.
    assert recall(what, step=8, committed=None, valid_since=generation + 1).holds == ()


def test_the_next_coordinator_goes_on_with_the_next_step_and_no_worker_starts_anew() -> None:
    simulation, nodes = regrouping()
    simulation.restart()
    (resumed,) = simulation.records(events.Resumed)
    assert (resumed.generation, resumed.step, resumed.nodes) == (1, 2, (0, 1, 2, 3))
    assert simulation.machine.phase is Phase.GATHERING
    simulation.reattach()
    planned = simulation.records(events.Planned)[-1]
    assert (planned.generation, planned.step, planned.reason) == (2, 2, "the coordinator was restarted")
    simulation.pump_steps(3)
    assert [record.step for record in simulation.records(events.Committed)] == [0, 1, 2, 3, 4]
    assert {node.incarnation for node in nodes} == {0}
    begin = simulation.sent(messages.Begin)[-1]
    assert [member.holds for member in begin.members] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    (incident,) = simulation.records(events.Incident)
    assert (incident.kind, incident.nodes, incident.step) == ("coordinator", (), 2)


def test_a_decision_that_reached_nobody_counts_and_is_sent_again() -> None:
    simulation, nodes = regrouping()
    simulation.dies_at_commit = True
    for node in nodes:
        simulation.deliver(node)
    assert [record.step for record in simulation.records(events.Committed)] == [0, 1, 2]
    assert [message.step for message in simulation.sent(messages.Commit)].count(2) == 0
    simulation.reattach()
    assert [message.step for message in simulation.sent(messages.Commit)].count(2) == 4
    assert simulation.records(events.Planned)[-1].step == 3
    simulation.pump_steps(2)  # the nodes check that they apply each step once
    assert [record.step for record in simulation.records(events.Committed)] == [0, 1, 2, 3, 4]


def test_steps_that_were_skipped_before_a_restart_count_after_it() -> None:
    simulation, nodes = regrouping(max_skipped=2)

    def diverge() -> None:
        for node in nodes:
            node.outbox[-1] = msgspec.structs.replace(node.outbox[-1], is_finite=False)
            simulation.deliver(node)

    diverge()
    simulation.restart()
    simulation.reattach()
    simulation.round()
    simulation.start_fabric()
    simulation.round()
    for _ in range(2):
        for node in nodes:
            node.work()
        diverge()
    skipped = [record.step for record in simulation.records(events.Committed) if record.grad_norm is None]
    assert skipped == [2, 3]
    assert "step 4 diverged" in simulation.records(events.Failed)[0].cause


def test_a_worker_that_comes_back_gets_the_decision_and_then_abandon() -> None:
    simulation, nodes = regrouping()
    simulation.dies_at_commit = True
    for node in nodes:
        simulation.deliver(node)
    simulation.rejoin(nodes[0])
    assert [type(message) for message in nodes[0].inbox] == [messages.Welcome, messages.Commit, messages.Abandon]


def test_nodes_that_do_not_come_back_are_waited_for_a_moment_only() -> None:
    simulation, nodes = regrouping()
    simulation.restart()
    for node in (nodes[0], nodes[2], nodes[3]):
        simulation.rejoin(node)
    assert simulation.machine.phase is Phase.GATHERING
    simulation.now_s += simulation.terms.limits.reattach_s - 2.0
    simulation.feed(Tick())
    assert simulation.machine.phase is Phase.GATHERING
    for node in (nodes[0], nodes[2], nodes[3]):
        simulation.say(node, messages.Heartbeat(node=node.id))
    simulation.now_s += 2.0
    simulation.feed(Tick())
    planned = simulation.records(events.Planned)[-1]
    assert planned.plan.nodes == (0, 2, 3)
    assert planned.reason == "the coordinator was restarted; nodes [1] did not come back"


def test_a_node_whose_worker_died_meanwhile_is_not_waited_for() -> None:
    simulation, nodes = regrouping()
    nodes[1].is_alive = False
    simulation.restart()
    simulation.reattach()
    assert nodes[1].incarnation == 1
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 2, 3)
    simulation.pump_steps(3)
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 1, 2, 3)


def test_layers_that_nobody_brought_back_end_the_run() -> None:
    simulation, nodes = regrouping()
    simulation.restart()
    for node in (nodes[0], nodes[2]):
        simulation.rejoin(node)
    simulation.now_s += 3.0
    for node in (nodes[0], nodes[2]):
        simulation.say(node, messages.Heartbeat(node=node.id))
    simulation.now_s += 2.0
    simulation.feed(Tick())
    cause = simulation.records(events.Failed)[-1].cause
    assert "no live node has the state of layers [2, 3] after step 1 any more, and there is no checkpoint" in cause
    assert "nodes [1, 3] did not come back" in cause


def test_an_evaluation_that_the_coordinator_did_not_live_to_see_is_done_again() -> None:
    simulation, nodes = regrouping(num_steps=0, evaluates_after=lambda step: True)
    for node in nodes:
        simulation.deliver(node)
    assert simulation.machine.step == 1
    simulation.restart()
    simulation.reattach()
    simulation.start_fabric()
    assert simulation.sent(messages.Begin)[-1].evaluate_first
    simulation.pump_steps(1)
    assert simulation.records(events.Evaluated)[0].step == 0


def test_a_run_that_was_done_but_for_its_end_ends() -> None:
    simulation, nodes = regrouping(num_steps=2, steps=3)
    simulation.dies_at_commit = True
    for node in nodes:
        simulation.deliver(node)
    simulation.reattach()
    simulation.round()
    assert [message.exit_code for message in simulation.sent(messages.Stop)] == [0, 0, 0, 0]
    for node in nodes:
        simulation.feed(Disconnected(connection=node.connection, reason="bye"))
    assert simulation.end is not None
    assert simulation.end.reason == "all 3 steps are done"


def test_a_coordinator_that_died_before_the_first_generation_waits_for_all_nodes() -> None:
    simulation = Simulation(terms(num_nodes=3, on_loss=OnLoss.REGROUP))
    nodes = [simulation.join(number) for number in range(3)]
    for node in nodes[:2]:
        node.work()
    simulation.restart()
    for node in nodes[:2]:
        simulation.rejoin(node)
    assert simulation.machine.generation == 0
    simulation.join(2)
    simulation.pump_steps(2)
    assert simulation.records(events.Planned)[0].plan.nodes == (0, 1, 2)


# ------------------------------------------------------------------------------------------------------- connections


def test_a_connection_that_broke_costs_a_generation_but_no_state() -> None:
    simulation, nodes = regrouping()
    simulation.feed(Disconnected(connection=nodes[1].connection, reason="reset"))
    simulation.rejoin(nodes[1])
    simulation.pump_steps(3)
    assert nodes[1].incarnation == 0
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 1, 2, 3)
    assert simulation.records(events.Respawned) == []


def test_a_worker_that_comes_back_while_the_others_go_on_falls_behind() -> None:
    simulation, nodes = regrouping()
    simulation.feed(Disconnected(connection=nodes[1].connection, reason="reset"))
    simulation.start_fabric()
    for node in (nodes[0], nodes[2], nodes[3]):
        node.work()
        simulation.deliver(node)
    assert simulation.machine.phase is Phase.RUNNING
    simulation.rejoin(nodes[1])
    simulation.pump_steps(1)
    simulation.start_fabric()
    begin = simulation.sent(messages.Begin)[-1]
    assert {member.node: member.holds for member in begin.members}[NodeId(1)] == ()
    simulation.pump_steps(2)


def test_connections_that_break_all_at_once_cost_no_state_either() -> None:
    simulation, nodes = regrouping()
    for node in nodes:
        simulation.feed(Disconnected(connection=node.connection, reason="the network was away"))
    for node in nodes:
        simulation.rejoin(node)
    simulation.pump_steps(3)
    assert [record.step for record in simulation.records(events.Committed)] == [0, 1, 2, 3, 4]
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 1, 2, 3)
    assert {node.incarnation for node in nodes} == {0}


def test_a_new_connection_takes_the_place_of_one_that_is_not_known_to_be_lost() -> None:
    simulation, nodes = regrouping()
    old = nodes[1].connection
    simulation.rejoin(nodes[1])
    assert Close(connection=old) in simulation.history
    planned = simulation.records(events.Planned)[-1]
    assert (planned.generation, planned.step, planned.plan.nodes) == (2, 2, (0, 1, 2, 3))
    simulation.feed(Disconnected(connection=old, reason="closed"))
    simulation.start_fabric()
    begin = simulation.sent(messages.Begin)[-1]
    assert [member.holds for member in begin.members] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    simulation.pump_steps(2)


def test_an_agent_without_a_ready_worker_takes_the_place_of_its_own_old_connection_and_of_no_other() -> None:
    simulation, nodes = regrouping()
    old = nodes[1].connection
    nodes[1].is_alive = False  # it ended while the connection was broken
    simulation.rejoin(nodes[1])
    assert Close(connection=old) in simulation.history
    assert simulation.sent(messages.Refused) == []
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 2, 3)
    simulation.pump_steps(3)
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 1, 2, 3)
    assert nodes[1].incarnation == 1
    simulation.join(1)
    assert "node 1 takes part already" in simulation.sent(messages.Refused)[-1].reason


def test_what_comes_on_the_old_connection_has_no_consequence() -> None:
    simulation, nodes = regrouping()
    old = Node(nodes[1].connection)
    simulation.rejoin(nodes[1])
    simulation.say(old, exited(NodeId(1), -9))
    assert simulation.records(events.Respawned) == []
    assert len(simulation.records(events.Failed)) == 1


def test_the_worker_of_one_node_cannot_join_as_another() -> None:
    simulation, _ = regrouping()
    worker = messages.WorkerReady(
        node=NodeId(2), incarnation=0, link_address="127.0.0.1:1", num_devices=1, device_kind="cpu"
    )
    simulation.join(1, worker=worker)
    assert "has the worker of node 2, but joins as node 1" in simulation.sent(messages.Refused)[-1].reason
