"""What people want to happen to nodes."""

from collections import deque

import pytest

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.effects import Asked, Interrupted, Wish
from oobleck_jax.planning.plan import NodeId
from tests.elastic.simulation import Node, Simulation, checkpoints, committing, regrouping


OF_NODES = (Wish.DRAIN, Wish.KILL)


def ask(simulation: Simulation, node: int | None, wish: Wish) -> str | None:
    asked = Asked(node=None if node is None else NodeId(node), wish=wish)
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


@pytest.mark.parametrize("wish", OF_NODES)
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


def test_a_checkpoint_that_is_asked_for_is_that_of_the_step_in_progress() -> None:
    simulation, _ = regrouping(num_steps=0, checkpoints=checkpoints(None))
    simulation.pump_steps(3)
    step = simulation.machine.step
    assert ask(simulation, None, Wish.CHECKPOINT) is None
    assert ask(simulation, None, Wish.CHECKPOINT) is None  # the same one
    simulation.pump_steps(4)
    simulation.use_whole_disk()
    assert [record.step for record in simulation.records(events.Checkpointed)] == [step]
    assert simulation.records(events.NotCheckpointed) == []


def test_a_checkpoint_that_is_asked_for_waits_for_the_one_that_is_being_written() -> None:
    simulation, nodes = regrouping(num_steps=0, checkpoints=checkpoints(None))
    held: list[tuple[Node, messages.Saved]] = []
    for _ in range(4):
        ask(simulation, None, Wish.CHECKPOINT)
        for node in nodes:
            node.work()
            held += [(node, message) for message in node.outbox if isinstance(message, messages.Saved)]
            node.outbox = deque(message for message in node.outbox if not isinstance(message, messages.Saved))
            simulation.deliver(node)
    (first,) = {save.step for save in simulation.sent(messages.SaveCheckpoint)}
    assert simulation.records(events.NotCheckpointed) == []
    for node, message in held:
        node.outbox.append(message)
    simulation.pump_steps(3)
    simulation.use_whole_disk()
    saved = [record.step for record in simulation.records(events.Checkpointed)]
    assert saved[0] == first
    assert len(saved) == 2


def test_a_run_without_checkpoints_says_so() -> None:
    simulation, _ = regrouping()
    assert "--checkpoint-every 0" in (ask(simulation, None, Wish.CHECKPOINT) or "")
