"""Two nodes do a step in 72 s, one alone in 144 s; each holds all four layers (300 bytes each, when copied)."""

from dataclasses import replace

import pytest

from oobleck_jax.replay.policies.ours import Ours
from oobleck_jax.replay.recovery_costs import CheckpointCosts
from oobleck_jax.replay.simulator import Replay, simulate
from oobleck_jax.replay.timeline import Spending
from oobleck_jax.replay.trace import Trace
from tests.replay.workloads import COSTS, FREE, STAYS, layouts, trace_of


def play(trace: Trace, *, every_s: float = 1e9, checkpoints: CheckpointCosts = FREE, memory: int = 10_000) -> Replay:
    policy = Ours(
        layouts=layouts(trace.most_nodes, memory_bytes=memory),
        costs=COSTS,
        checkpoints=checkpoints,
        fault_tolerance=1,
        checkpoint_every_s=every_s,
    )
    return simulate(policy, trace)


def test_a_loss_costs_the_step_in_progress_detection_and_regrouping() -> None:
    recovery_s = 4 + 0.3 + 1  # detection, plan and fabric of one node, the rest; nothing to copy
    replay = play(trace_of(100 + recovery_s + 288, (0, STAYS), (0, 100)))
    spent = replay.breakdown()
    assert spent[Spending.REDONE] == pytest.approx(28)
    assert spent[Spending.RECOVERY] == pytest.approx(recovery_s)
    assert spent[Spending.USEFUL] == pytest.approx(72 + 288)
    assert replay.samples == pytest.approx(12 + 24)


def test_a_node_that_joins_gets_ready_and_takes_part_from_a_step_boundary_on() -> None:
    # Ready at 210; the boundary is at 288. Plan and fabric of two, the rest, its programs; 1200 bytes to be checked.
    regroup_s = 0.6 + 1 + 2 + 12
    replay = play(trace_of(288 + regroup_s + 72, (0, STAYS), (200, STAYS)))
    assert replay.breakdown()[Spending.RECOVERY] == pytest.approx(regroup_s)
    assert replay.breakdown()[Spending.REDONE] == 0
    assert replay.samples == pytest.approx(24 + 12)


def test_a_loss_while_others_recover_begins_the_recovery_anew() -> None:
    # Three nodes: the best plan is three pipelines with 4 microbatches each, 48 s. Losses at 50 and, within the
    # detection of the first, at 53.
    replay = play(trace_of(53 + 5.3 + 144, (0, STAYS), (0, 50), (0, 53)))
    assert replay.breakdown()[Spending.REDONE] == pytest.approx(2)
    assert replay.breakdown()[Spending.RECOVERY] == pytest.approx(3 + 5.3)
    assert replay.samples == pytest.approx(12 + 12)


def test_without_a_holder_of_some_layer_the_last_durable_checkpoint_is_restored() -> None:
    trace = trace_of(163.3 + 144, (0, 100), (0, 100), (150, STAYS))
    replay = play(trace, every_s=72)
    # Detected at 104; idle until the new node is ready at 160; 3.3 s with its programs.
    assert replay.breakdown()[Spending.IDLE] == pytest.approx(56)
    assert replay.breakdown()[Spending.RECOVERY] == pytest.approx(4 + 3.3)
    assert replay.breakdown()[Spending.REDONE] == pytest.approx(28)
    assert replay.samples == pytest.approx(12 + 12)


def test_a_checkpoint_that_is_not_durable_yet_is_of_no_use_and_restoring_takes_its_time() -> None:
    slow = CheckpointCosts(steps_per_save=0.0, write_bytes_per_s=20, read_bytes_per_s=100)
    trace = trace_of(163.3 + 12 + 144, (0, 100), (0, 100), (150, STAYS))
    replay = play(trace, every_s=72, checkpoints=slow)  # 600 bytes of each node take 30 s: until 102
    assert replay.breakdown()[Spending.REDONE] == pytest.approx(100)
    assert replay.breakdown()[Spending.RECOVERY] == pytest.approx(4 + 3.3 + 12)
    assert replay.samples == pytest.approx(12)


def test_checkpoints_slow_training_by_what_was_measured() -> None:
    costs = replace(FREE, steps_per_save=0.2)
    replay = play(trace_of(72 * 10 * 1.1, (0, STAYS), (0, STAYS)), every_s=144, checkpoints=costs)
    assert replay.samples == pytest.approx(120)
    assert replay.breakdown()[Spending.CHECKPOINT] == pytest.approx(72)


def test_a_node_that_was_told_to_leave_costs_no_work() -> None:
    replay = play(trace_of(144 + 1.3 + 144, (0, STAYS), (0, 200), notice_s=100))
    assert replay.breakdown()[Spending.REDONE] == 0
    assert replay.breakdown()[Spending.RECOVERY] == pytest.approx(1.3)
    assert replay.samples == pytest.approx(24 + 12)


def test_missing_layers_are_copied_and_checked() -> None:
    # A node holds two layers at most (800 of 900 bytes), so pipelines have two nodes: 6 s each microbatch. Of four
    # nodes, one is lost: three make one pipeline of 2, 1 and 1 layers, for which nothing is missing but one layer of
    # 300 bytes at most, or a pipeline of two and a spare.
    replay = play(trace_of(1000, (0, STAYS), (0, STAYS), (0, STAYS), (0, 100)), memory=900)
    assert replay.breakdown()[Spending.RECOVERY] in (
        pytest.approx(4 + 0.9 + 1),
        pytest.approx(4 + 0.9 + 1 + 3),
    )
