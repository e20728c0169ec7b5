"""Numbers of the other policies, computed by hand; see workloads.py for the steps of grids."""

import pytest

from oobleck_jax.replay.layouts import Grid, Layouts
from oobleck_jax.replay.policies.bamboo import Bamboo
from oobleck_jax.replay.policies.checkpointing import Checkpointing
from oobleck_jax.replay.policies.oobleck import Oobleck, regroup
from oobleck_jax.replay.policies.oracle import Oracle
from oobleck_jax.replay.policies.recycle import Recycle
from oobleck_jax.replay.policies.restart import Restart
from oobleck_jax.replay.policies.varuna import Varuna
from oobleck_jax.replay.published import BAMBOO_USEFUL
from oobleck_jax.replay.simulator import CannotRun, Policy, Replay, simulate
from oobleck_jax.replay.timeline import Spending
from oobleck_jax.replay.trace import Trace
from tests.replay.workloads import STAYS, layouts, trace_of


EVERY_TWO = Checkpointing(every=2, save_s=10, save_steps=0, restart_s=50)


def spent(policy: Policy, trace: Trace) -> tuple[Replay, dict[str, float]]:
    replay = simulate(policy, trace)
    return replay, {
        str(spending): pytest.approx(seconds) for spending, seconds in replay.breakdown().items() if seconds
    }


def grid_of(found: Layouts, num_pipelines: int, depth: int) -> Grid:
    return next(grid for grid in found.grids if (grid.num_pipelines, grid.depth) == (num_pipelines, depth))


def test_the_oracle_uses_every_node_at_once_and_loses_nothing() -> None:
    replay, seconds = spent(Oracle(layouts=layouts(2), fault_tolerance=0), trace_of(180, (0, STAYS), (36, 108)))
    assert seconds == {"useful": 180}
    assert replay.samples == pytest.approx(12 * (36 / 144 + 72 / 72 + 72 / 144))


def test_varuna_loses_the_steps_since_the_checkpoint_and_restarts() -> None:
    replay, seconds = spent(Varuna(layouts=layouts(2), checkpointing=EVERY_TWO), trace_of(548, (0, STAYS), (0, 200)))
    lost_s = 200 - 154  # a cycle is two steps of 72 s, and 10 s; alone it is 298 s
    assert seconds == {
        "useful": 144 + 288,
        "redone": lost_s * 144 / 154,
        "checkpoint": 10 + lost_s * 10 / 154 + 10,
        "recovery": 50,
    }
    assert replay.samples == pytest.approx(48)


def test_varuna_begins_a_restart_anew_when_nodes_are_lost_meanwhile() -> None:
    trace = trace_of(500, (0, STAYS), (0, 200), (0, 230))
    _, seconds = spent(Varuna(layouts=layouts(3), checkpointing=EVERY_TWO), trace)
    assert seconds["recovery"] == 30 + 50


def test_varuna_takes_nodes_in_after_a_checkpoint_only_if_told_to() -> None:
    trace = trace_of(298 + 50 + 154, (0, STAYS), (100, STAYS))
    waiting, _ = spent(Varuna(layouts=layouts(2), checkpointing=EVERY_TWO), trace)
    taking, seconds = spent(Varuna(layouts=layouts(2), checkpointing=EVERY_TWO, takes_joins=True), trace)
    assert seconds["recovery"] == 50
    assert taking.samples == pytest.approx(48)
    assert waiting.samples == pytest.approx(24 * (298 + 50 + 154) / 298)


def test_a_job_of_fixed_size_takes_spares_and_then_waits() -> None:
    policy = Restart(layouts=layouts(3), checkpointing=EVERY_TWO, num_nodes=2)
    # Node 2 is spare. Node 0 is lost at 200, and node 1 at 404, after one more cycle; node 3 comes at 500.
    trace = trace_of(550 + 154, (0, 200), (0, 404), (0, STAYS), (500, STAYS))
    replay, seconds = spent(policy, trace)
    assert seconds["recovery"] == 50 + 50
    assert seconds["idle"] == 96
    assert replay.samples == pytest.approx(24 * 3)


def test_the_loss_of_a_spare_costs_nothing() -> None:
    policy = Restart(layouts=layouts(3), checkpointing=EVERY_TWO, num_nodes=2)
    replay, seconds = spent(policy, trace_of(308, (0, STAYS), (0, STAYS), (0, 100)))
    assert seconds == {"useful": 288, "checkpoint": 20}
    assert replay.samples == pytest.approx(48)


def test_oobleck_loses_the_step_and_pauses() -> None:
    policy = Oobleck(layouts=layouts(2), fault_tolerance=0, loss_s=2, join_s=3)
    replay, seconds = spent(policy, trace_of(102 + 144, (0, STAYS), (0, 100)))
    assert seconds == {"useful": 72 + 144, "redone": 28, "recovery": 2}
    assert replay.samples == pytest.approx(24)


def test_oobleck_stops_below_its_guarantee() -> None:
    policy = Oobleck(layouts=layouts(2), fault_tolerance=1, loss_s=2, join_s=3)
    _, seconds = spent(policy, trace_of(400, (0, STAYS), (0, 100)))
    assert seconds == {"useful": 72, "redone": 28, "recovery": 2, "idle": 298}


def test_oobleck_takes_nodes_in_at_the_next_loss_or_at_its_best_at_once() -> None:
    trace = trace_of(400, (0, STAYS), (100, STAYS))
    for takes_joins, recovery in ((False, 0), (True, 3)):
        policy = Oobleck(layouts=layouts(2), fault_tolerance=0, loss_s=2, join_s=3, takes_joins=takes_joins)
        _, seconds = spent(policy, trace)
        assert seconds.get("recovery", 0) == recovery


def test_short_pipelines_borrow_from_the_largest_or_merge() -> None:
    """The examples of the authors' own tests."""
    assert regroup([[0], [2], [5, 6, 7, 8], [9, 10, 11, 12, 13]], 2) == [[0, 13], [2, 12], [5, 6, 7, 8], [9, 10, 11]]
    assert [sorted(group) for group in regroup([[0], [4], [8], [12, 13]], 2)] == [[8, 12, 13], [0, 4]]


def test_recycle_loses_nothing_and_fills_bubbles_with_the_work_of_the_dead() -> None:
    found = layouts(8)
    policy = Recycle(layouts=found, grid=grid_of(found, 2, 4), restart_s=50)
    lives = [(0.0, STAYS)] * 7
    replay, seconds = spent(policy, trace_of(40.5 + 39, *lives, (0, 40.5)))
    assert seconds == {"useful": 79.5}
    assert replay.samples == pytest.approx(12 * 1.5 + 12)  # 27 s, then 39 s for a step


def test_recycle_restarts_when_a_stage_is_lost() -> None:
    found = layouts(8)
    policy = Recycle(layouts=found, grid=grid_of(found, 2, 4), restart_s=50)
    lives = [(0.0, 54.0)] * 2 + [(0.0, STAYS)] * 6  # both nodes of the first stage
    _, seconds = spent(policy, trace_of(200, *lives))
    assert seconds == {"useful": 150, "recovery": 50}


def test_bamboo_goes_on_at_half_pace_and_rebalances() -> None:
    # Two pipelines of two: 42 s, and 6 * (6 + 2) - 36 - 4 = 8 s of forward passes that fit into no bubble. Of three
    # nodes, one pipeline of 2, 1 and 1 layers: 74 s, in which the first has no bubble but 2 s, and 12 * 7 - 72 - 4 / 3.
    alone_s = 74 + 12 - 4 / 3
    policy = Bamboo(layouts=layouts(4), is_published=False)
    replay, seconds = spent(policy, trace_of(112.5 + alone_s, (0, 75), (0, STAYS), (0, STAYS), (0, STAYS)))
    assert replay.samples == pytest.approx(36)
    assert seconds["redundant"] == 8 + 62.5 * 8 / 50 + 12 - 4 / 3
    assert "redone" not in seconds


def test_bamboo_loses_the_step_with_two_neighbours() -> None:
    policy = Bamboo(layouts=layouts(4), is_published=False)
    _, seconds = spent(policy, trace_of(300, (0, 75), (0, 75), (0, STAYS), (0, STAYS)))
    assert seconds["redone"] == 25 * 42 / 50
    _, seconds = spent(policy, trace_of(300, (0, 75), (0, STAYS), (0, 75), (0, STAYS)))
    assert "redone" not in seconds


def test_bamboo_as_published_computes_mostly_twice() -> None:
    replay, seconds = spent(Bamboo(layouts=layouts(4), is_published=True), trace_of(1000, *[(0.0, STAYS)] * 4))
    assert seconds == {"useful": 1000 * BAMBOO_USEFUL, "redundant": 1000 * (1 - BAMBOO_USEFUL)}
    assert replay.samples == pytest.approx(12 * 1000 * BAMBOO_USEFUL / 42)


def test_bamboo_cannot_run_a_model_whose_state_does_not_fit_twice() -> None:
    policy = Bamboo(layouts=layouts(4, memory_bytes=799), is_published=False)  # one layer of 400 bytes, not two
    with pytest.raises(CannotRun, match="twice"):
        simulate(policy, trace_of(100, *[(0.0, STAYS)] * 4))


def test_spendings_are_those_of_the_hand_computed_numbers() -> None:
    assert set(map(str, Spending)) == {"useful", "redone", "recovery", "checkpoint", "redundant", "idle"}
