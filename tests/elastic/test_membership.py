"""The membership machine: its single decisions. Its properties are in test_membership_properties.py."""

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.effects import (
    Close,
    ConnectionId,
    Disconnected,
    Effect,
    FabricFailed,
    Finish,
    Ignored,
    Interrupted,
    Send,
    Tick,
    Write,
)
from oobleck_jax.elastic.phase import Phase
from oobleck_jax.elastic.terms import OnLoss
from oobleck_jax.planning.plan import NodeId
from tests.elastic.plans import NUM_LAYERS, terms
from tests.elastic.simulation import Node, Simulation, committing, exited, failure, prepared, ready, running, vote


def reasons(effects: Sequence[Effect]) -> str:
    """Why inputs were of no consequence."""
    return "\n".join(effect.reason for effect in effects if isinstance(effect, Ignored))


# ------------------------------------------------------------------------------------------------------- joining


def test_a_run_goes_from_joins_to_its_last_commit() -> None:
    simulation = Simulation(terms(steps=3, evaluates_after=lambda step: step == 2))
    for node in range(3):
        simulation.join(node)
    simulation.pump()
    simulation.feed(Disconnected(connection=ConnectionId(0), reason="bye"))
    simulation.feed(Disconnected(connection=ConnectionId(1), reason="bye"))
    assert simulation.end is None
    simulation.feed(Disconnected(connection=ConnectionId(2), reason="bye"))

    assert simulation.end == Finish(reason="all 3 steps are done", exit_code=0, node=None)
    assert [record.step for record in simulation.records(events.Committed)] == [0, 1, 2]
    assert [record.loss for record in simulation.records(events.Committed)] == [3.0, 3.0, 3.0]
    assert simulation.records(events.Committed)[0].grad_norm == math.sqrt(NUM_LAYERS)
    assert [record.loss for record in simulation.records(events.Evaluated)] == [1.0]
    assert simulation.machine.phase is Phase.FINISHED


def test_steps_that_are_not_finite_are_skipped_by_all_alike_but_not_too_many_in_a_row() -> None:
    simulation, nodes = running(max_skipped=2)

    def step(*, is_finite: bool) -> None:
        for node in nodes:
            if not is_finite and node.id == 1:
                node.outbox[-1] = msgspec.structs.replace(node.outbox[-1], is_finite=False)
            simulation.deliver(node)
        for node in nodes:
            node.work()

    for is_finite in (False, False, True, False, False):
        step(is_finite=is_finite)
    norms = [None, None, math.sqrt(NUM_LAYERS), None, None]
    assert [record.grad_norm for record in simulation.records(events.Committed)] == norms
    assert [message.global_norm for message in simulation.sent(messages.Commit)] == [
        norm for norm in norms for _ in nodes
    ]
    step(is_finite=False)
    assert [record.step for record in simulation.records(events.Committed)] == [0, 1, 2, 3, 4]
    assert "step 5 diverged: a gradient on node 1 is not finite" in simulation.records(events.Failed)[0].cause


def test_the_last_step_waits_for_its_evaluation() -> None:
    simulation, _ = running(steps=1, evaluates_after=lambda step: True)
    simulation.round()
    assert [record.step for record in simulation.records(events.Committed)] == [0]
    assert simulation.machine.phase is Phase.RUNNING
    simulation.round()
    assert simulation.machine.phase is Phase.STOPPING


def test_nodes_without_a_wish_get_the_lowest_free_ids() -> None:
    simulation = Simulation(terms(num_nodes=3))
    for wish in (1, None, None):
        simulation.join(wish)
    assert [message.node for message in simulation.sent(messages.Welcome)] == [1, 0, 2]


@pytest.mark.parametrize(
    ("join", "words"),
    [
        ({"versions": {"jax": "0.9"}}, "jax 0.9 on host-1, but the run uses jax 0.10"),
        ({"versions": {}}, r"jax \(unknown\) on host-1"),
        ({"config_digest": "other"}, "started with other flags"),
        ({"num_devices": 2}, "host-1 offers 2 devices, but the run uses 1"),
        ({"node": 0}, "node 0 takes part already"),
        ({"node": 7}, "there is no node 7: the run has nodes 0 to 2"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_with_the_reason(join: dict[str, Any], words: str) -> None:
    simulation = Simulation(terms())
    simulation.join(0)
    refused = simulation.join(**join)
    (message,) = refused.inbox
    assert isinstance(message, messages.Refused)
    assert re.search(words, message.reason)
    assert simulation.history[-1] == Close(connection=refused.connection)
    assert simulation.records(events.Rejected)[0].reason == message.reason


def test_one_node_too_many_and_a_late_one_are_refused() -> None:
    simulation = Simulation(terms(num_nodes=2))
    simulation.join()
    simulation.join()
    simulation.join()
    assert simulation.sent(messages.Refused)[-1].reason == "the run has 2 of at most 2 nodes; raise --max-nodes"
    simulation.round()
    simulation.join()
    assert "the run has begun" in simulation.sent(messages.Refused)[-1].reason


def test_nodes_are_not_waited_for_for_ever() -> None:
    simulation = Simulation(terms(num_nodes=3))
    simulation.join(0)
    for _ in range(101):
        simulation.round()
        simulation.now_s += 3.0
        simulation.beat()
    cause = simulation.records(events.Failed)[-1].cause
    assert cause.startswith("only 1 of 3 nodes were ready after 300 s (ready: [0], joined: [0])")


def test_a_worker_with_too_few_devices_ends_the_run() -> None:
    simulation = Simulation(terms(num_devices=2))
    node = simulation.join(0, num_devices=2)
    simulation.say(node, ready(NodeId(0), num_devices=1))
    assert simulation.records(events.Failed)[0].cause == "node 0 has 1 devices, but the run uses 2"


# -------------------------------------------------------------------------------------------------------- votes


def test_what_is_of_another_generation_step_or_node_has_no_consequence() -> None:
    simulation, (node, other, _) = running()
    assert node.plan is not None
    before = simulation.machine.step
    for message, words in (
        (vote(node.id, node.plan, 0, 0), "Vote of generation 0, step 0; now running, generation 1, step 0"),
        (vote(node.id, node.plan, 1, 7), "Vote of generation 1, step 7"),
        (vote(other.id, node.plan, 1, 0), "node 0 sent a Vote in the name of node 1"),
        (prepared(node.id, 1), "Prepared of generation 1, which is over"),
        (ready(node.id, 0), "worker 0 is ready, which is known or over"),
    ):
        effects = simulation.say(node, message)
        assert words in reasons(effects)
        assert len(effects) == 1
    assert simulation.machine.step == before


def test_a_second_vote_is_ignored() -> None:
    simulation, (node, *_) = running()
    assert node.plan is not None
    simulation.say(node, vote(node.id, node.plan, 1, 0))
    assert "now running" in reasons(simulation.say(node, vote(node.id, node.plan, 1, 0)))


def test_a_decision_is_written_before_it_is_sent() -> None:
    simulation, nodes = running()
    for node in nodes:
        simulation.deliver(node)
    (committed,) = simulation.records(events.Committed)
    written = simulation.history.index(Write(record=committed))
    sends = [
        i
        for i, effect in enumerate(simulation.history)
        if isinstance(effect, Send) and isinstance(effect.message, messages.Commit)
    ]
    assert len(sends) == 3
    assert min(sends) > written


def test_holders_that_disagree_end_the_run() -> None:
    simulation, nodes = running()
    for node in nodes[:2]:
        simulation.deliver(node)
    last = nodes[2]
    assert last.plan is not None
    reports = tuple(
        messages.GroupReport(group=f"layer {layer}", squared_norm=1.0, checksum=99)
        for layer in last.plan.layers_of(last.id)
    )
    simulation.say(last, vote(last.id, last.plan, 1, 0, groups=reports))
    (failed,) = simulation.records(events.Failed)
    assert "step 0: the summed gradient of layer 2 is not the same everywhere" in failed.cause
    assert simulation.records(events.Committed) == []


# -------------------------------------------------------------------------------------------------------- losses


def test_a_killed_worker_is_blamed_although_its_peers_complained_first() -> None:
    simulation, (first, second, third) = running()
    simulation.say(first, failure(first.id, "PeerLost: the link to node 1 is broken", blames=second.id))
    simulation.now_s += 0.3
    simulation.say(third, failure(third.id, "XlaRuntimeError: connection reset"))
    assert simulation.machine.phase is Phase.RUNNING  # the evidence is still coming in
    simulation.now_s += 0.3
    simulation.say(second, exited(second.id, -9))
    assert simulation.machine.phase is Phase.STOPPING
    assert [(record.node, record.is_collateral) for record in simulation.records(events.Failed)] == [
        (1, True),
        (2, True),
        (1, False),
    ]
    assert all(message.exit_code == 1 for message in simulation.sent(messages.Stop))


def test_a_worker_that_raises_is_blamed_although_its_peers_complained_first() -> None:
    simulation, (first, second, _) = running()
    simulation.say(first, failure(first.id, "Stalled: nothing from node 1 for 3 s"))
    simulation.now_s += 0.2
    simulation.say(second, failure(second.id, "ValueError: boom"))
    simulation.say(second, exited(second.id, 1))
    simulation.now_s += simulation.terms.limits.verdict_s
    simulation.feed(Tick())
    guilty = [record for record in simulation.records(events.Failed) if not record.is_collateral]
    assert [(record.node, record.cause) for record in guilty] == [(1, "the worker of node 1 failed: ValueError: boom")]
    assert guilty[0].detail == "traceback"


def test_without_a_better_cause_the_first_complaint_is_taken() -> None:
    simulation, (first, *_) = running()
    simulation.say(first, failure(first.id, "PeerLost: the link to node 1 is broken", blames=NodeId(1)))
    simulation.now_s = simulation.machine.wake_s
    simulation.feed(Tick())
    (failed,) = simulation.records(events.Failed)
    assert failed.cause == "the worker of node 0 lost node 1: PeerLost: the link to node 1 is broken"
    assert failed.node == 1


def test_a_silent_agent_is_lost() -> None:
    simulation, nodes = running()
    for _ in range(10):
        simulation.now_s += 0.9
        for node in nodes[:2]:
            simulation.say(node, messages.Heartbeat(node=node.id))
    (failed,) = simulation.records(events.Failed)
    assert failed.cause == "the agent of node 2 has been silent for 4.0 s"


def test_a_stopped_worker_is_lost_but_one_that_goes_on_is_not() -> None:
    simulation, nodes = running()

    def beat(seconds: float, *, is_stopped: bool) -> None:
        for _ in range(round(seconds * 2)):
            simulation.now_s += 0.5
            for node in nodes:
                simulation.say(node, messages.Heartbeat(node=node.id, is_worker_stopped=is_stopped and node.id == 1))

    beat(2.5, is_stopped=True)
    beat(2.5, is_stopped=False)
    assert simulation.machine.phase is Phase.RUNNING
    beat(3.5, is_stopped=True)
    assert "worker of node 1 has been stopped by a signal" in simulation.records(events.Failed)[0].cause


def test_the_node_that_the_others_wait_for_is_blamed() -> None:
    simulation, nodes = committing(3)
    for node in nodes:
        node.outbox.clear()
    first, _, third = nodes
    simulation.say(first, messages.Waiting(node=first.id, generation=1, step=3, waits_for=NodeId(2)))
    for _ in range(13):  # the limit is 6 s here: four times the usual second is less
        simulation.now_s += 0.5
        for node in nodes:
            simulation.say(node, messages.Heartbeat(node=node.id))
        if simulation.now_s > 106.0:  # what the first said before is over
            for node in (first, third):
                simulation.say(node, messages.Waiting(node=node.id, generation=1, step=3, waits_for=NodeId(1)))
    (failed,) = simulation.records(events.Failed)
    assert failed.node == 1
    assert failed.cause == "no progress for 6.0 s in step 3: node 1 holds it up"


def test_an_interrupt_is_passed_on() -> None:
    simulation, _ = running()
    simulation.feed(Interrupted(reason="interrupted", exit_code=130))
    simulation.feed(Interrupted(reason="again", exit_code=143))
    assert {message.exit_code for message in simulation.sent(messages.Stop)} == {130}
    simulation.now_s = simulation.machine.wake_s
    simulation.feed(Tick())
    assert simulation.end == Finish(reason="interrupted", exit_code=130, node=None)


def test_a_fabric_that_cannot_start_ends_the_run() -> None:
    simulation = Simulation(terms(num_nodes=2))
    for node in (simulation.join(), simulation.join()):
        node.work()
        simulation.deliver(node)
    simulation.feed(FabricFailed(generation=1, error="no port"))
    assert "coordination service of generation 1 could not start: no port" in simulation.records(events.Failed)[0].cause


# ------------------------------------------------------------------------------------------------------ regrouping


def test_survivors_redo_the_step_in_the_next_generation() -> None:
    simulation, nodes = committing(2, num_nodes=4, on_loss=OnLoss.REGROUP)
    simulation.deliver(nodes[0])
    nodes[1].is_alive = False
    simulation.say(nodes[1], exited(nodes[1].id, -9))
    assert [message.generation for message in simulation.sent(messages.Abandon)] == [1, 1, 1]
    assert simulation.machine.generation == 2
    simulation.start_fabric()
    begin = simulation.sent(messages.Begin)[-1]
    assert begin.step == 2
    assert [(member.node, member.holds) for member in begin.members] == [(0, (0, 1)), (2, (0, 1)), (3, (2, 3))]
    simulation.pump_steps(1)
    assert [record.step for record in simulation.records(events.Committed)][:3] == [0, 1, 2]


def test_the_state_of_a_node_that_became_spare_is_not_believed_in() -> None:
    simulation, nodes = committing(1, num_nodes=5, on_loss=OnLoss.REGROUP)
    assert simulation.machine.generation == 1

    def replace_first(node: Node) -> None:
        node.is_alive = node.has_agent = False
        simulation.feed(Disconnected(connection=node.connection, reason="gone"))
        simulation.pump_steps(2)

    replace_first(nodes[0])  # node 4, the spare one, takes part
    simulation.join(0)
    simulation.pump_steps(3)  # and is spare again, so that its state falls behind
    replace_first(nodes[1])
    begin = simulation.sent(messages.Begin)[-1]
    assert {member.node: member.holds for member in begin.members}[NodeId(4)] == ()


def test_who_only_lost_a_peer_stays_and_the_peer_is_excluded() -> None:
    simulation, nodes = committing(2, num_nodes=4, on_loss=OnLoss.REGROUP)
    simulation.say(nodes[0], failure(nodes[0].id, "PeerLost: the link broke", blames=nodes[1].id))
    assert simulation.machine.generation == 1  # a better cause may come
    simulation.now_s += simulation.terms.limits.verdict_s
    simulation.feed(Tick())
    planned = simulation.records(events.Planned)[-1]
    assert (planned.generation, planned.plan.nodes) == (2, (0, 2, 3))


def test_who_lost_a_peer_in_a_generation_that_is_over_says_nothing_new() -> None:
    simulation, nodes = committing(2, num_nodes=4, on_loss=OnLoss.REGROUP)
    simulation.say(nodes[1], exited(nodes[1].id, -9))
    effects = simulation.say(nodes[0], failure(nodes[0].id, "PeerLost: the link broke", blames=nodes[1].id))
    assert reasons(effects) == "node 0 lost a peer in generation 1, which is over"
    simulation.now_s += simulation.terms.limits.verdict_s
    simulation.feed(Tick())
    assert simulation.machine.generation == 2


def test_if_nobody_is_found_to_be_lost_all_try_again() -> None:
    simulation, nodes = committing(2, num_nodes=4, on_loss=OnLoss.REGROUP)
    simulation.say(nodes[0], failure(nodes[0].id, "Stalled: nothing came"))
    simulation.now_s += simulation.terms.limits.verdict_s
    simulation.feed(Tick())
    planned = simulation.records(events.Planned)[-1]
    assert (planned.generation, planned.plan.nodes) == (2, (0, 1, 2, 3))


def test_a_layer_without_a_holder_ends_the_run() -> None:
    simulation, nodes = committing(2, num_nodes=4, on_loss=OnLoss.REGROUP)
    for node in (nodes[1], nodes[3]):
        simulation.say(node, exited(node.id, -9))
    cause = simulation.records(events.Failed)[-1].cause
    assert "no live node has the state of layers [2, 3] after step 1 any more, and there is no checkpoint" in cause
    assert simulation.machine.phase is Phase.STOPPING


def test_nodes_that_lost_their_connection_may_bring_their_layers_back_for_a_while() -> None:
    simulation, nodes = committing(2, num_nodes=4, on_loss=OnLoss.REGROUP)
    for node in (nodes[1], nodes[3]):
        simulation.feed(Disconnected(connection=node.connection, reason="gone"))
    assert simulation.machine.phase is Phase.GATHERING
    assert "nodes [1, 3] may come back with it" in simulation.records(events.Gathering)[-1].reason
    for _ in range(6):
        simulation.now_s += 1.0
        for node in (nodes[0], nodes[2]):
            simulation.say(node, messages.Heartbeat(node=node.id))
    cause = simulation.records(events.Failed)[-1].cause
    assert "layers [2, 3] after step 1 any more, and there is no checkpoint (nodes [1, 3] did not come back)" in cause


def test_an_evaluation_that_was_cut_short_is_done_again() -> None:
    simulation, nodes = committing(0, num_nodes=4, on_loss=OnLoss.REGROUP, evaluates_after=lambda step: True)
    for node in nodes:
        simulation.deliver(node)
    simulation.feed(Disconnected(connection=nodes[1].connection, reason="gone"))
    simulation.start_fabric()
    assert simulation.sent(messages.Begin)[-1].evaluate_first
    nodes[1].is_alive = False
    for _ in range(4):
        simulation.round()
    assert simulation.records(events.Evaluated)[0].step == 0
    assert simulation.records(events.Evaluated)[0].generation == 2


def test_a_node_that_comes_late_is_taken_in_after_the_next_commit() -> None:
    simulation, nodes = committing(2, num_nodes=4, on_loss=OnLoss.REGROUP)
    simulation.feed(Disconnected(connection=nodes[1].connection, reason="gone"))
    nodes[1].is_alive = False
    simulation.join(1)
    simulation.round()
    assert simulation.machine.generation == 2
    simulation.start_fabric()
    for _ in range(4):
        simulation.round()
    assert simulation.machine.generation == 3
    assert simulation.records(events.Planned)[-1].step == 3
    assert simulation.records(events.Planned)[-1].reason == "nodes [1] are ready to take part"
