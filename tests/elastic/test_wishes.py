"""What people want to happen to nodes."""

import pytest

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.effects import Asked, Interrupted, Wish
from oobleck_jax.planning.plan import NodeId
from tests.elastic.simulation import Simulation, committing, regrouping


def ask(simulation: Simulation, node: int, wish: Wish) -> str | None:
    asked = Asked(node=NodeId(node), wish=wish)
    if why := simulation.machine.why_not(asked):
        return why
    simulation.feed(asked)
    return None


def test_a_node_that_is_drained_leaves_after_the_step_and_nothing_is_redone() -> None:
    simulation, _ = regrouping()
    assert ask(simulation, 1, Wish.DRAIN) is None
    simulation.pump_steps(3)
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 2, 3)
    (incident,) = simulation.records(events.Incident)
    assert (incident.kind, incident.nodes, incident.num_redone_microbatches) == ("leave", (1,), 0)
    assert "a person" in incident.cause
    assert [stop.exit_code for stop in simulation.sent(messages.Stop)] == [0]


def test_a_worker_that_is_killed_is_replaced_and_the_others_go_on() -> None:
    simulation, _ = regrouping()
    assert ask(simulation, 1, Wish.KILL) is None
    (respawn,) = simulation.sent(messages.Respawn)
    assert "a person asked for it" in respawn.reason
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 2, 3)
    simulation.pump_steps(3)
    assert simulation.records(events.Planned)[-1].plan.nodes == (0, 1, 2, 3)


@pytest.mark.parametrize("wish", Wish)
def test_what_cannot_be_done_is_refused_and_changes_nothing(wish: Wish) -> None:
    simulation, _ = regrouping()
    assert ask(simulation, 7, wish) == "there is no node 7 (there are [0, 1, 2, 3])"
    assert ask(simulation, 2, Wish.DRAIN) is None
    assert ask(simulation, 2, wish) == "node 2 leaves already (a person asked for it)"
    simulation.feed(Interrupted(reason="enough", exit_code=0))
    assert ask(simulation, 0, wish) == "the run is over"
    stopping, _ = committing(2)
    assert "--fault-tolerance 0" in (ask(stopping, 0, wish) or "")


def test_a_worker_that_is_only_starting_is_not_killed() -> None:
    simulation, _ = regrouping()
    ask(simulation, 1, Wish.KILL)
    assert ask(simulation, 1, Wish.KILL) == "the worker of node 1 is only starting"
    simulation.feed(Asked(node=NodeId(1), wish=Wish.KILL))  # it was fine when somebody looked
    assert len(simulation.sent(messages.Respawn)) == 1
