"""What the page is told of a run: the same as what its membership machine knows."""

import msgspec
import pytest

from oobleck_jax import events
from oobleck_jax.dashboard.facts import peak_flops_per_s
from oobleck_jax.dashboard.run_state import RunState
from oobleck_jax.dashboard.snapshot import NodeState, RunPhase, Snapshot
from oobleck_jax.elastic import node as machine
from oobleck_jax.elastic.effects import Asked, Interrupted, Tick, Wish
from oobleck_jax.elastic.messages import Leaving
from oobleck_jax.elastic.terms import OnLoss
from oobleck_jax.planning.plan import NodeId
from tests.dashboard.states import facts, started, watch
from tests.elastic.simulation import Simulation, committing, kill, regrouping
from tests.test_progress import incident


EXPECTED = {
    machine.NodeState.STARTING: {NodeState.STARTING},
    machine.NodeState.IDLE: {NodeState.WAITING, NodeState.SPARE, NodeState.PREPARING, NodeState.LEAVING},
    machine.NodeState.PREPARING: {NodeState.PREPARING, NodeState.LEAVING, NodeState.SPARE},
    machine.NodeState.RUNNING: {NodeState.WORKING, NodeState.LEAVING, NodeState.SPARE, NodeState.PREPARING},
}


def seen(simulation: Simulation) -> Snapshot:
    return watch(simulation).snapshot(2000.0)


def states(simulation: Simulation) -> dict[int, NodeState]:
    return {view.node: view.state for view in seen(simulation).nodes}


def assert_true(simulation: Simulation) -> None:
    """Compare with what the machine knows."""
    told = states(simulation)
    roster = {node.node: node.state for node in simulation.machine._roster}
    for number, state in roster.items():
        assert told[number] in EXPECTED[state], (number, state, told)
    gone = {number for number, state in told.items() if state in (NodeState.LOST, NodeState.LEFT)}
    assert gone == told.keys() - roster.keys()


def test_a_healthy_run_is_shown_with_its_pipelines() -> None:
    simulation, _ = committing(3, num_nodes=4, on_loss=OnLoss.REGROUP, steps=20)
    run = seen(simulation)
    assert (run.phase, run.step, run.steps, run.generation) == (RunPhase.TRAINING, 3, 20, 1)
    assert [[stage.node for stage in pipeline.stages] for pipeline in run.pipelines] == [[0, 1], [2, 3]]
    assert [pipeline.num_microbatches for pipeline in run.pipelines] == [4, 4]
    assert [stage.layers for stage in run.pipelines[0].stages] == ["embedding, block 0", "block 1, head"]
    assert set(states(simulation).values()) == {NodeState.WORKING}
    assert run.survivable == 1
    assert run.curve.steps == (0, 1, 2)
    assert_true(simulation)


def test_the_age_of_the_newest_checkpoint_is_shown() -> None:
    run = watch(committing(3)[0])
    assert run.snapshot(2000.0).checkpoint is None
    for step, time in ((1, 1990.0), (2, 1995.0)):
        written = events.Checkpointed(generation=1, step=step, folder=f"step-{step}", num_bytes=9, seconds={})
        run.take(written, time)
    newest = run.snapshot(2000.0).checkpoint
    assert newest is not None
    assert (newest.step, newest.time) == (2, 1995.0)


def test_the_snapshot_travels_as_json() -> None:
    run = seen(committing(3)[0])
    assert msgspec.json.decode(msgspec.json.encode(run), type=Snapshot) == run


def test_a_loss_is_shown_from_the_first_notice_to_the_incident() -> None:
    simulation, nodes = regrouping()
    kill(simulation, nodes[1])
    run = seen(simulation)
    assert run.phase is RunPhase.REGROUPING
    assert "SIGKILL" in run.reason
    assert states(simulation)[1] is NodeState.STARTING
    assert run.survivable == 0  # its layers have one holder until they are copied
    assert_true(simulation)
    simulation.pump_steps(3)
    run = seen(simulation)
    assert run.phase is RunPhase.TRAINING
    assert [it.kind for it in run.incidents] == ["join", "loss"]
    assert run.num_incidents == {"loss": 1, "join": 1}
    assert run.num_redone_microbatches == sum(it.num_redone_microbatches for it in run.incidents)
    assert run.survivable == 1
    assert_true(simulation)


def test_who_leaves_is_shown_until_it_has_left() -> None:
    simulation, nodes = regrouping()
    simulation.say(nodes[2], Leaving(node=nodes[2].id, reason="SIGTERM"))
    assert states(simulation)[2] is NodeState.LEAVING
    assert_true(simulation)
    simulation.pump_steps(2)
    assert states(simulation)[2] is NodeState.LEFT
    assert_true(simulation)


def test_a_coordinator_that_took_over_shows_who_is_expected_back() -> None:
    simulation, _ = regrouping()
    simulation.restart()
    assert set(states(simulation).values()) == {NodeState.RETURNING}
    assert seen(simulation).phase is RunPhase.REGROUPING
    simulation.reattach()
    simulation.pump_steps(2)
    assert set(states(simulation).values()) == {NodeState.WORKING}
    assert seen(simulation).num_incidents == {"coordinator": 1}
    assert_true(simulation)


@pytest.mark.parametrize(
    ("exit_code", "phase"), [(0, RunPhase.FINISHED), (130, RunPhase.STOPPED), (1, RunPhase.FAILED)]
)
def test_the_end_is_shown(exit_code: int, phase: RunPhase) -> None:
    simulation, _ = committing(2, steps=20)
    simulation.feed(Interrupted(reason="enough", exit_code=exit_code))
    simulation.now_s += 60.0  # the simulated nodes stay connected
    simulation.feed(Tick())
    run = seen(simulation)
    assert (run.phase, run.reason) == (phase, "enough")
    assert not run.has_actions
    assert run.survivable is None
    assert {view.state for view in run.nodes} == {NodeState.LEFT}


def test_without_fault_tolerance_no_loss_is_survived() -> None:
    state = watch(committing(2, num_nodes=4)[0], fault_tolerance=0)
    assert state.snapshot(0.0).survivable == 0


def test_fewer_nodes_than_a_plan_needs_are_not_survived() -> None:
    simulation, _ = committing(3, num_nodes=4, on_loss=OnLoss.REGROUP, steps=20)
    assert watch(simulation, smallest_num_nodes=4).snapshot(0.0).survivable == 0


def test_goodput_is_the_share_of_time_in_steps_that_count() -> None:
    state = RunState(facts(layer_names=("embedding", "block 0", "block 1", "head")))
    simulation, _ = committing(1, steps=20)
    records = [*simulation.records(events.Joined), *simulation.records(events.Planned)]
    state.take_all([(100.0, started()), *((100.0, record) for record in records)])
    assert state.snapshot(105.0).goodput is None
    state.take(simulation.records(events.Prepared)[0], 110.0)
    for step in range(8):
        state.take(events.Committed(generation=1, step=step, loss=2.0, grad_norm=1.0, step_time_s=1.0), 111.0 + step)
    assert state.snapshot(120.0).goodput == pytest.approx(0.8)
    assert state.snapshot(120.0).tokens_per_s == pytest.approx(1000.0)
    assert state.snapshot(120.0).seconds_left == pytest.approx(12.0)
    state.take(events.Restored(generation=2, step=4, checkpoint="a", reason="all holders of layer 1 are lost"), 120.0)
    assert state.snapshot(120.0).goodput == pytest.approx(0.4)
    assert state.snapshot(120.0).step == 4


@pytest.mark.parametrize(("kind", "mfu"), [("NVIDIA H100 80GB HBM3", 2e12 / (3 * 495e12)), ("cpu", None)])
def test_mfu_is_told_where_the_peak_is_known(kind: str, mfu: float | None) -> None:
    state = RunState(facts(flops_per_step=1e12, peak_flops_per_s=peak_flops_per_s))
    simulation, _ = committing(1, num_nodes=3, steps=20)
    for record in [*simulation.records(events.Joined), *simulation.records(events.Ready)]:
        if isinstance(record, events.Ready):
            record = msgspec.structs.replace(record, device_kind=kind)
        state.take(record, 0.0)
    state.take(simulation.records(events.Planned)[0], 0.0)
    state.take(simulation.records(events.Prepared)[0], 0.0)
    state.take(events.Committed(generation=1, step=0, loss=2.0, grad_norm=1.0, step_time_s=0.5), 1.0)
    assert state.snapshot(1.0).mfu == (None if mfu is None else pytest.approx(mfu))


def test_only_the_last_incidents_are_shown_but_all_are_counted() -> None:
    state = RunState(facts())
    for number in range(250):
        state.take(incident(cause=f"number {number}"), float(number))
    run = state.snapshot(300.0)
    assert len(run.incidents) == 100
    assert run.incidents[0].cause == "number 249"
    assert run.num_incidents == {"loss": 250}


@pytest.mark.parametrize("wish", [Wish.DRAIN, Wish.KILL])
def test_wishes_of_people_are_shown_like_any_other_change(wish: Wish) -> None:
    simulation, _ = regrouping()
    simulation.feed(Asked(node=NodeId(1), wish=wish))
    assert_true(simulation)
    assert states(simulation)[1] is (NodeState.LEAVING if wish is Wish.DRAIN else NodeState.STARTING)
