"""The membership machine: checkpoints are written while steps go on, and the run goes back to one when it must."""

from typing import Any

import msgspec
import pytest

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.effects import (
    CheckpointFailed,
    CheckpointFound,
    CommitCheckpoint,
    Disconnected,
    FindCheckpoint,
    Tick,
)
from oobleck_jax.elastic.limits import Limits
from oobleck_jax.elastic.membership import Membership
from oobleck_jax.elastic.phase import Phase
from oobleck_jax.elastic.resumption import Resumption
from oobleck_jax.elastic.terms import OnLoss
from oobleck_jax.planning.plan import NodeId
from tests.elastic.plans import terms
from tests.elastic.simulation import Node, Simulation, checkpoints, folder_of, kill, regrouping


def saving(every_steps: int | None = 2, **changes: Any) -> tuple[Simulation, list[Node]]:
    """A run of four nodes, in two pipelines of two, that writes checkpoints; no step is committed."""
    return regrouping(num_steps=0, checkpoints=checkpoints(every_steps), **changes)


def beat_for(simulation: Simulation, seconds: float) -> None:
    """Let time pass in which all agents are well."""
    end_s = simulation.now_s + seconds
    while simulation.now_s < end_s:
        simulation.beat()
        simulation.now_s = min(end_s, simulation.now_s + 2.0)
    simulation.beat()
    simulation.feed(Tick())


def saved_steps(simulation: Simulation) -> list[int]:
    return [record.step for record in simulation.records(events.Checkpointed)]


def kill_holders(simulation: Simulation, nodes: list[Node]) -> None:
    """Kill nodes 1 and 3, which have the layers 2 and 3."""
    kill(simulation, nodes[1])
    kill(simulation, nodes[3])


def begin_to_restore(simulation: Simulation) -> None:
    """Let the checkpoint be found, and nodes be told of it."""
    simulation.use_whole_disk()
    while simulation.fabrics:
        simulation.start_fabric()


# ------------------------------------------------------------------------------------------------------------- saving


def test_a_checkpoint_counts_when_every_worker_has_written_its_part() -> None:
    simulation, nodes = saving()
    simulation.pump_steps(2)
    asked = simulation.sent(messages.SaveCheckpoint)
    assert [(save.generation, save.step, save.folder) for save in asked] == [(1, 1, folder_of(1, 1))] * 4
    for node in nodes[:3]:
        node.work()
        simulation.deliver(node)
    assert simulation.wishes == []
    simulation.round()
    assert simulation.wishes == [CommitCheckpoint(generation=1, step=1, groups={})]
    assert simulation.records(events.Checkpointed) == []
    simulation.use_whole_disk()
    (record,) = simulation.records(events.Checkpointed)
    assert (record.step, record.folder, record.num_bytes) == (1, folder_of(1, 1), 8)
    assert record.seconds["copy"] == 0.1


def test_steps_do_not_wait_for_a_checkpoint_and_the_next_one_is_left_out_once() -> None:
    simulation, nodes = saving()
    for _ in range(8):
        for node in nodes:
            node.work()
            saves = [message for message in node.outbox if isinstance(message, messages.Saved)]
            node.outbox = type(node.outbox)(message for message in node.outbox if message not in saves)
            simulation.deliver(node)
    assert simulation.machine.step == 8
    skipped = simulation.records(events.NotCheckpointed)
    assert [record.step for record in skipped] == [3, 5, 7]
    assert {record.reason for record in skipped} == {"that of step 1 is still being written"}


def test_minutes_decide_where_they_are_given() -> None:
    simulation, nodes = regrouping(num_steps=0, checkpoints=checkpoints(every_s=2.5))
    for _ in range(8):
        simulation.now_s += 1.0
        for node in nodes:
            simulation.deliver(node)
        for node in nodes:
            node.work()
        simulation.use_whole_disk()
    assert [record.step for record in simulation.records(events.Checkpointed)] == [2, 5]


@pytest.mark.parametrize("has_said", [False, True])
def test_the_death_of_a_writer_gives_a_checkpoint_up_unless_its_part_is_on_disk(has_said: bool) -> None:
    simulation, nodes = saving()
    simulation.pump_steps(2)
    if has_said:
        nodes[1].work()
        simulation.deliver(nodes[1])
    kill(simulation, nodes[1])
    simulation.pump_steps(3)
    refused = [record for record in simulation.records(events.NotCheckpointed) if record.step == 1]
    assert [record.reason for record in refused] == (
        [] if has_said else ["node 1 was lost before it had written its part"]
    )
    assert (1 in saved_steps(simulation)) == has_said
    simulation.pump_steps(1)
    assert 3 in saved_steps(simulation)


def test_a_disk_that_refuses_does_not_stop_the_run_and_is_tried_again() -> None:
    simulation, nodes = saving()
    simulation.pump_steps(2)
    for node in nodes:
        node.work()
        node.outbox = type(node.outbox)(
            messages.NotSaved(node=node.id, generation=1, step=1, reason="the disk is full")
            if isinstance(message, messages.Saved)
            else message
            for message in node.outbox
        )
        simulation.deliver(node)
    (record,) = simulation.records(events.NotCheckpointed)
    assert (record.step, record.reason) == (1, "node 0: the disk is full")
    simulation.pump_steps(3)
    assert saved_steps(simulation) == [3]


def test_a_manifest_that_cannot_be_written_is_told() -> None:
    simulation, _ = saving()
    simulation.pump_steps(2)
    simulation.round()
    simulation.wishes.clear()
    simulation.feed(CheckpointFailed(generation=1, step=1, reason="read-only"))
    assert [record.reason for record in simulation.records(events.NotCheckpointed)] == ["read-only"]


def test_a_checkpoint_that_takes_too_long_is_given_up_M4() -> None:
    simulation, _ = saving(limits=Limits(step_s=1000.0, save_s=10.0, first_step_s=1000.0))
    simulation.pump_steps(2)
    beat_for(simulation, 11.0)
    (record,) = simulation.records(events.NotCheckpointed)
    assert record.reason == "it was not written within 10 s (nodes [0, 1, 2, 3] missing)"
    simulation.round()  # too late
    assert simulation.wishes == []


def test_a_run_ends_with_a_checkpoint_of_its_last_step() -> None:
    simulation, nodes = saving(every_steps=None, steps=3)
    simulation.pump_steps(3)
    assert simulation.machine.phase is Phase.RUNNING
    beat_for(simulation, 20.0)  # nobody holds anything up
    assert simulation.machine.phase is Phase.RUNNING
    simulation.pump()
    assert saved_steps(simulation) == [2]
    assert simulation.machine.phase is Phase.STOPPING
    assert all(not node.has_agent for node in nodes)


def test_a_death_while_the_last_checkpoint_is_written_does_not_end_the_run_without_one() -> None:
    simulation, nodes = saving(every_steps=None, steps=3)
    simulation.pump_steps(3)
    kill(simulation, nodes[1])
    simulation.pump()
    assert saved_steps(simulation) == [2]
    assert [record.step for record in simulation.records(events.Committed)] == [0, 1, 2]
    assert simulation.machine.phase is Phase.STOPPING


def test_a_run_without_checkpoints_ends_without_one() -> None:
    simulation, _ = saving(every_steps=None, steps=2)
    simulation.pump()
    assert saved_steps(simulation) == [1]
    simulation, _ = regrouping(num_steps=0, steps=2, checkpoints=checkpoints(at_end=False))
    simulation.pump()
    assert saved_steps(simulation) == []
    assert simulation.machine.phase is Phase.STOPPING


# ----------------------------------------------------------------------------------------------------------- restoring


def test_a_layer_without_holder_brings_the_run_back_to_the_newest_checkpoint_T4() -> None:
    simulation, nodes = saving()
    simulation.pump_steps(5)
    simulation.use_whole_disk()
    assert saved_steps(simulation) == [1, 3]
    kill_holders(simulation, nodes)
    assert simulation.machine.step == 5
    simulation.pump_steps(4)
    (restored,) = simulation.records(events.Restored)
    assert (restored.step, restored.checkpoint) == (4, folder_of(3, 1))
    assert "was killed by SIGKILL" in restored.reason
    begin = next(message for message in simulation.sent(messages.Begin) if message.restore)
    assert (begin.step, begin.restore) == (4, messages.RestorePoint(folder=folder_of(3, 1), step=3))
    assert [record.step for record in simulation.records(events.Committed)] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8][
        : len(simulation.records(events.Committed))
    ]
    incident = simulation.records(events.Incident)[0]
    assert (incident.kind, incident.num_redone_steps, incident.step) == ("loss", 1, 4)


def test_what_is_written_comes_before_what_is_sent() -> None:
    simulation, nodes = saving()
    simulation.pump_steps(3)
    kill_holders(simulation, nodes)
    simulation.pump_steps(1)
    kinds = [
        type(getattr(effect, "record", getattr(effect, "message", effect)))
        for effect in simulation.history
        if isinstance(getattr(effect, "record", None), events.Restored)
        or (isinstance(getattr(effect, "message", None), messages.Begin) and effect.message.restore)  # type: ignore[union-attr]
    ]
    assert kinds[0] is events.Restored
    assert messages.Begin in kinds


def test_without_a_checkpoint_the_run_ends_with_what_is_lost() -> None:
    simulation, nodes = saving(every_steps=50)
    simulation.pump_steps(3)
    kill_holders(simulation, nodes)
    simulation.use_whole_disk()
    cause = simulation.records(events.Failed)[-1].cause
    assert cause == "no live node has the state of layers [2, 3] after step 2 any more, and there is no checkpoint"


def test_too_few_nodes_wait_for_others_and_say_how_many_are_missing_M4() -> None:
    simulation, nodes = saving(limits=Limits(wait_s=100.0))
    simulation.pump_steps(3)
    for node in nodes[1:]:
        node.is_alive = node.has_agent = False
        simulation.feed(Disconnected(connection=node.connection, reason="gone"))
    beat_for(simulation, 6.0)  # they might have come back with their workers
    simulation.pump()
    waits = simulation.records(events.Gathering)[-1].reason
    assert "1 more needed, then it goes on from the checkpoint of step 1" in waits
    beat_for(simulation, 50.0)
    assert simulation.machine.phase is Phase.GATHERING
    simulation.join(1)
    simulation.pump_steps(1)
    planned = simulation.records(events.Planned)[-1]
    assert (planned.step, planned.plan.nodes) == (2, (0, 1))

    simulation, nodes = saving(limits=Limits(wait_s=100.0))
    simulation.pump_steps(3)
    for node in nodes[1:]:
        node.is_alive = node.has_agent = False
        simulation.feed(Disconnected(connection=node.connection, reason="gone"))
    beat_for(simulation, 6.0)
    simulation.pump()
    beat_for(simulation, 101.0)
    assert "waited 100 s for nodes" in simulation.records(events.Failed)[-1].cause
    assert "1 more needed" in simulation.records(events.Failed)[-1].cause


def test_without_any_node_the_run_waits_for_some() -> None:
    simulation, nodes = saving()
    simulation.pump_steps(3)
    for node in nodes:
        node.is_alive = node.has_agent = False
        simulation.feed(Disconnected(connection=node.connection, reason="gone"))
    simulation.now_s += 6.0
    simulation.pump()
    assert "no node is left" in simulation.records(events.Gathering)[-1].reason


def test_a_damaged_checkpoint_is_named_and_an_older_one_taken() -> None:
    simulation, nodes = saving()
    simulation.pump_steps(5)
    kill_holders(simulation, nodes)
    begin_to_restore(simulation)
    begin = simulation.sent(messages.Begin)[-1]
    assert begin.restore is not None
    failed = messages.RestoreFailed(node=NodeId(0), generation=begin.generation, reason="layer-000 is damaged")
    simulation.say(nodes[0], failed)
    assert simulation.records(events.Damaged)[-1].what == "node 0 cannot restore: layer-000 is damaged"
    simulation.pump_steps(3)
    assert [record.step for record in simulation.records(events.Restored)] == [4, 2]
    assert simulation.records(events.Incident)[0].num_redone_steps == 3
    simulation.say(nodes[0], failed)  # late: of no consequence
    assert len(simulation.records(events.Damaged)) == 1


def fail_to_restore(simulation: Simulation, node: Node, *, may_be_intact: bool) -> str:
    """Let a node fail with the checkpoint that is found; return its folder."""
    begin_to_restore(simulation)
    begin = simulation.sent(messages.Begin)[-1]
    assert begin.restore is not None
    failed = messages.RestoreFailed(
        node=node.id, generation=begin.generation, reason="the network is down", may_be_intact=may_be_intact
    )
    simulation.say(node, failed)
    return begin.restore.folder


@pytest.mark.parametrize(("may_be_intact", "step"), [(True, 3), (False, 1)])
def test_what_could_not_be_read_is_taken_when_the_run_goes_back_another_time(may_be_intact: bool, step: int) -> None:
    simulation, nodes = saving()
    simulation.pump_steps(5)
    kill_holders(simulation, nodes)
    assert fail_to_restore(simulation, nodes[0], may_be_intact=may_be_intact) == folder_of(3, 1)
    simulation.pump_steps(1)
    assert simulation.records(events.Restored)[-1].checkpoint == folder_of(1, 1)
    while simulation.machine.step < 6:
        simulation.pump_steps(1)
        for folder in set(simulation.disk) - {folder_of(1, 1), folder_of(3, 1)}:
            del simulation.disk[folder]  # as if nothing newer were intact
    kill_holders(simulation, nodes)
    begin_to_restore(simulation)
    assert simulation.records(events.Restored)[-1].checkpoint == folder_of(step, 1)
    simulation.pump_steps(1)
    simulation.restart()  # the journal is sound
    assert simulation.machine.step == step + 2


def test_a_run_none_of_whose_checkpoints_could_be_read_does_not_say_that_all_are_damaged() -> None:
    simulation, nodes = saving()
    simulation.pump_steps(5)
    kill_holders(simulation, nodes)
    for step in (3, 1):
        assert fail_to_restore(simulation, nodes[0], may_be_intact=step == 1) == folder_of(step, 1)
    simulation.use_whole_disk()
    cause = simulation.records(events.Failed)[-1].cause
    assert cause.endswith(
        "no checkpoint could be read, though some may be intact; give the same command again when they can be"
    )


def test_a_run_without_any_intact_checkpoint_ends_and_names_the_damage() -> None:
    simulation, nodes = saving()
    simulation.pump_steps(3)
    kill_holders(simulation, nodes)
    simulation.wishes.clear()
    simulation.feed(CheckpointFound(point=None, damaged=("the checkpoint of step 1 is damaged: wte is missing",)))
    cause = simulation.records(events.Failed)[-1].cause
    assert "no intact checkpoint is left; the checkpoint of step 1 is damaged: wte is missing" in cause


def test_a_run_whose_checkpoints_cannot_be_read_ends_and_does_not_say_that_there_are_none() -> None:
    simulation, nodes = saving()
    simulation.pump_steps(3)
    kill_holders(simulation, nodes)
    simulation.wishes.clear()
    simulation.feed(CheckpointFound(point=None, unread="s3://bucket/a cannot be read: not now"))
    cause = simulation.records(events.Failed)[-1].cause
    assert cause.endswith(", and s3://bucket/a cannot be read: not now")


def test_a_death_while_nodes_restore_is_the_next_generation() -> None:
    simulation, nodes = saving()
    simulation.pump_steps(3)
    kill_holders(simulation, nodes)
    begin_to_restore(simulation)
    for node in nodes:
        node.work()
    assert simulation.machine.phase is Phase.PREPARING
    kill(simulation, nodes[0])
    simulation.pump_steps(2)
    begins = [message for message in simulation.sent(messages.Begin) if message.restore]
    assert len({message.generation for message in begins}) >= 2
    assert len(simulation.records(events.Restored)) == 1
    assert simulation.records(events.Committed)[-1].step >= 3


def test_a_coordinator_that_dies_after_a_restore_goes_on_where_the_journal_ends_M2() -> None:
    simulation, nodes = saving()
    simulation.pump_steps(5)
    away = nodes[2]  # its connection breaks, and it comes back with a state that counts no more
    kill_holders(simulation, nodes)
    simulation.use_whole_disk()
    simulation.restart()
    assert simulation.machine.step == 4
    simulation.reattach()
    simulation.pump_steps(3)
    assert away.incarnation == 0
    steps = [record.step for record in simulation.records(events.Committed)]
    assert steps == [0, 1, 2, 3, 4, *range(4, steps[-1] + 1)]


def test_a_step_that_brings_all_down_again_and_again_ends_the_run_with_the_history() -> None:
    simulation, nodes = saving(limits=Limits(max_failures=100))
    simulation.pump_steps(7)
    taken: list[int] = []
    for _ in range(5):
        while simulation.machine.step < 7 and simulation.machine.phase is not Phase.STOPPING:
            simulation.pump_steps(1)
        if simulation.machine.phase is Phase.STOPPING:
            break
        for node in nodes:
            kill(simulation, node)
        simulation.use_whole_disk()
        taken = [record.step for record in simulation.records(events.Restored)]
    # The newest one, then an older one each time, as far as there are any.
    assert taken == [6, 4, 2]
    cause = simulation.records(events.Failed)[-1].cause
    assert "went back to a checkpoint 3 times because of step 7, in vain: (1) in step 7: " in cause
    assert "(4) in step 7" in cause


def test_a_run_that_gets_further_may_go_back_as_often_as_it_must() -> None:
    simulation, nodes = saving(limits=Limits(max_failures=1000))
    for _ in range(8):
        simulation.pump_steps(6)
        for node in nodes:
            kill(simulation, node)
    simulation.pump_steps(1)
    assert len(simulation.records(events.Restored)) == 8
    assert simulation.machine.phase is not Phase.STOPPING


# --------------------------------------------------------------------------------------------- a run that begins again


@pytest.mark.parametrize("on_loss", [OnLoss.REGROUP, OnLoss.STOP])
def test_a_run_whose_processes_are_all_dead_waits_for_all_nodes_and_goes_on(on_loss: OnLoss) -> None:
    simulation = Simulation(terms(num_nodes=3, steps=9, on_loss=on_loss, checkpoints=checkpoints(2)))
    simulation.disk[folder_of(3, 2)] = 2, 3
    resumed = Resumption(generation=2, step=5, restored_generation=0)
    simulation.machine = Membership(simulation.terms, simulation.now_s, resumed)
    for number in range(3):
        assert simulation.records(events.Planned) == []
        simulation.join(number)
        simulation.pump()
    assert [record.step for record in simulation.records(events.Restored)] == [4]
    assert [record.step for record in simulation.records(events.Committed)] == [4, 5, 6, 7, 8]
    incident = simulation.records(events.Incident)[0]
    assert (incident.kind, incident.num_redone_steps) == ("coordinator", 1)
    assert simulation.machine.phase is Phase.STOPPING


def test_steps_that_were_skipped_may_be_so_again_after_the_run_went_back() -> None:
    simulation = Simulation(terms(num_nodes=2, steps=9, max_skipped=1, checkpoints=checkpoints()))
    simulation.disk[folder_of(3, 2)] = 2, 3
    simulation.machine = Membership(simulation.terms, simulation.now_s, Resumption(generation=2, step=5, num_skipped=1))
    nodes = [simulation.join(number) for number in range(2)]
    simulation.round()
    simulation.use_whole_disk()
    simulation.start_fabric()
    simulation.round()
    for node in nodes:
        node.work()
        node.outbox[-1] = msgspec.structs.replace(node.outbox[-1], is_finite=False)
        simulation.deliver(node)
    assert [(record.step, record.grad_norm) for record in simulation.records(events.Committed)] == [(4, None)]


def test_a_new_run_begins_with_the_checkpoint_of_another() -> None:
    simulation = Simulation(terms(num_nodes=2, steps=9, checkpoints=checkpoints()))
    simulation.disk[folder_of(6, 5)] = 5, 6
    simulation.machine = Membership(simulation.terms, simulation.now_s, Resumption(generation=5, is_restore_due=True))
    for number in range(2):
        simulation.join(number)
    simulation.pump()
    assert [(record.generation, record.step) for record in simulation.records(events.Committed)] == [(6, 7), (6, 8)]
    assert saved_steps(simulation) == [8]


def test_a_run_whose_last_checkpoint_is_there_is_done() -> None:
    simulation = Simulation(terms(num_nodes=2, steps=9, checkpoints=checkpoints(2)))
    simulation.disk[folder_of(8, 1)] = 1, 8
    simulation.machine = Membership(simulation.terms, simulation.now_s, Resumption(generation=1, step=9))
    for number in range(2):
        simulation.join(number)
    simulation.pump()
    assert simulation.records(events.Planned) == []
    assert simulation.machine.phase is Phase.STOPPING
    assert isinstance(simulation.history[-1], object)
    assert any(isinstance(effect, FindCheckpoint) for effect in simulation.history)
