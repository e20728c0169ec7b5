"""What the records of changes say: each change once, with its cause and its cost."""

from typing import Any

import pytest
from msgspec import structs

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.blame import Cause, Weight
from oobleck_jax.elastic.effects import Disconnected
from oobleck_jax.elastic.incidents import Incidents
from oobleck_jax.elastic.limits import Limits
from oobleck_jax.elastic.terms import OnLoss, Proposal
from oobleck_jax.planning.plan import NodeId
from tests.elastic import plans
from tests.elastic.plans import NUM_MICROBATCHES
from tests.elastic.simulation import Node, Simulation, committing, kill, regrouping


def prepare(simulation: Simulation, node: Node, generation: int, **values: Any) -> None:
    simulation.say(node, messages.Prepared(node=node.id, generation=generation, num_compilations=9, **values))


def test_a_loss_is_told_with_its_cause_and_its_cost() -> None:
    def replan(*given: object) -> Proposal:
        proposal = plans.replan(*given)  # pyright: ignore[reportArgumentType]
        return Proposal(plan=proposal.plan, reason=proposal.reason, plan_s=0.25)

    simulation, nodes = regrouping(replan=replan)
    for node in nodes:
        node.outbox.clear()
    simulation.now_s += 0.5
    kill(simulation, nodes[1])
    simulation.now_s += 0.125
    simulation.start_fabric()
    for node, copy_s in ((nodes[0], 0.1), (nodes[2], 0.3), (nodes[3], 0.2)):
        node.work()
        node.outbox.clear()
        seconds = {"compile": 0.0, "copy": copy_s, "fabric": 0.05}
        prepare(simulation, node, 2, seconds=seconds, received_bytes=1000, num_new_compilations=1)
    simulation.now_s += 0.5
    simulation.pump_steps(1)
    (incident,) = simulation.records(events.Incident)
    assert incident == events.Incident(
        kind="loss",
        cause="the worker of node 1 was killed by SIGKILL (kill -9, or out of memory)",
        nodes=(NodeId(1),),
        collateral=(),
        generation=2,
        num_generations=1,
        step=2,
        seconds={"plan": 0.25, "compile": 0.0, "copy": 0.3, "fabric": 0.05, "first_step": 0.5, "total": 0.625},
        received_bytes=3000,
        num_redone_microbatches=NUM_MICROBATCHES,
        num_compilations=3,
    )


def test_programs_that_the_step_waited_for_count_too() -> None:
    simulation, nodes = regrouping()
    kill(simulation, nodes[1])
    simulation.start_fabric()
    alive = [nodes[0], nodes[2], nodes[3]]
    for node in alive:
        node.work()
        simulation.deliver(node)
    for node in alive:
        node.work()
        (cast,) = node.outbox
        assert isinstance(cast, messages.Vote)
        node.outbox.clear()
        simulation.say(node, structs.replace(cast, num_new_compilations=2))
    (incident,) = simulation.records(events.Incident)
    assert incident.num_compilations == 6


def test_how_long_it_took_to_notice_is_told_where_it_is_known() -> None:
    simulation, nodes = regrouping()
    nodes[1].has_agent = nodes[1].is_alive = False
    for _ in range(5):
        simulation.now_s += 1.0
        simulation.beat()
    simulation.pump_steps(1)
    (incident,) = simulation.records(events.Incident)
    assert incident.cause == "the agent of node 1 has been silent for 4.0 s"
    assert incident.seconds["notice"] == 4.0


def test_losses_before_the_next_commit_are_one_incident() -> None:
    simulation, nodes = regrouping(num_nodes=5)
    kill(simulation, nodes[0])
    simulation.start_fabric()
    simulation.feed(Disconnected(connection=nodes[3].connection, reason="gone"))
    nodes[3].is_alive = nodes[3].has_agent = False
    simulation.pump_steps(1)
    (incident,) = simulation.records(events.Incident)
    assert (incident.nodes, incident.num_generations, incident.generation) == ((0, 3), 2, 3)
    assert "worker of node 0" in incident.cause
    assert incident.num_redone_microbatches == NUM_MICROBATCHES  # the second time, none was in progress


def test_a_worker_that_aborts_because_another_died_is_collateral() -> None:
    simulation, nodes = regrouping(num_nodes=5)
    kill(simulation, nodes[0])
    simulation.now_s += 0.1
    kill(simulation, nodes[3], exit_code=-6)  # SIGABRT, by a library
    failed = simulation.records(events.Failed)
    assert [(record.node, record.is_collateral) for record in failed] == [(0, False), (3, True)]
    assert [record.node for record in simulation.records(events.Respawned)] == [0, 3]
    simulation.pump_steps(1)
    (incident,) = simulation.records(events.Incident)
    assert (incident.nodes, incident.collateral) == ((0,), (3,))


def test_a_rejoin_is_an_incident_of_its_own_that_redoes_nothing() -> None:
    simulation, nodes = regrouping()
    kill(simulation, nodes[1])
    simulation.pump_steps(3)
    loss, join = simulation.records(events.Incident)
    assert (loss.kind, join.kind) == ("loss", "join")
    assert (join.nodes, join.num_redone_microbatches, join.num_generations) == ((1,), 0, 1)
    assert join.cause == "nodes [1] are ready to take part"


def test_a_loss_while_nodes_join_is_told_besides() -> None:
    simulation, nodes = regrouping(num_nodes=3, max_nodes=4)
    simulation.join()
    while not simulation.fabrics:
        simulation.round()
    kill(simulation, nodes[0])
    simulation.pump_steps(1)
    assert [record.kind for record in simulation.records(events.Incident)] == ["join", "loss"]


def test_the_loss_of_a_node_that_did_not_work_costs_no_generation() -> None:
    simulation, nodes = regrouping(num_nodes=5)
    kill(simulation, nodes[4])
    simulation.pump_steps(1)
    (incident,) = simulation.records(events.Incident)
    assert (incident.nodes, incident.num_generations, incident.num_redone_microbatches) == ((4,), 0, 0)
    assert set(incident.seconds) == {"first_step", "total"}


def test_a_change_in_the_last_evaluation_is_told_when_the_run_ends() -> None:
    simulation, nodes = committing(
        2, num_nodes=4, steps=3, on_loss=OnLoss.REGROUP, evaluates_after=lambda step: step == 2
    )
    for node in nodes:
        simulation.deliver(node)
    kill(simulation, nodes[1])
    for _ in range(4):
        if simulation.fabrics:
            simulation.start_fabric()
        simulation.round()
    (incident,) = simulation.records(events.Incident)
    assert (incident.kind, incident.step, incident.num_redone_microbatches) == ("loss", 2, 0)


@pytest.mark.parametrize(
    ("weight", "after_s", "is_consequence"),
    [
        (Weight.OWN, 0.5, True),
        (Weight.OWN, 1.5, False),
        (Weight.FIRM, 0.5, False),
    ],
)
def test_only_what_fails_by_itself_in_a_moment_is_a_consequence(
    weight: Weight, after_s: float, is_consequence: bool
) -> None:
    incidents = Incidents()
    cause = Cause(node=NodeId(2), weight=weight, what="it failed", noticed_s=10.0 + after_s)
    assert not incidents.is_consequence(cause, Limits(verdict_s=1.0))
    incidents.open("loss", "another one died", [NodeId(1)], 10.0)
    assert incidents.is_consequence(cause, Limits(verdict_s=1.0)) is is_consequence
