"""What holds for every policy, on every trace."""

from functools import lru_cache

import pytest
from hypothesis import given, strategies as st

from oobleck_jax.replay.layouts import Layouts
from oobleck_jax.replay.policies.entries import MAKERS
from oobleck_jax.replay.recovery_costs import CheckpointCosts
from oobleck_jax.replay.score import SLOWER, Contest, hold
from oobleck_jax.replay.timeline import Spending
from oobleck_jax.replay.trace import Trace
from tests.replay.workloads import COSTS, STAYS, layouts, trace_of


CHECKPOINTS = CheckpointCosts(steps_per_save=0.2, write_bytes_per_s=50, read_bytes_per_s=50)
MOST_NODES = 7


@lru_cache
def shared_layouts() -> Layouts:
    return layouts(MOST_NODES, memory_bytes=900)  # a pipeline needs two nodes


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    duration_s = draw(st.floats(100, 20_000))
    moments = st.one_of(st.floats(0, duration_s), st.integers(0, 20).map(lambda part: duration_s * part / 20))
    lives = [(0.0, draw(moments | st.just(STAYS)))]
    for _ in range(draw(st.integers(0, MOST_NODES - 1))):
        begin_s = draw(st.just(0.0) | moments)
        lives.append((begin_s, begin_s + draw(moments | st.just(STAYS)) + 1e-3))
    lives[0] = (0.0, max(lives[0][1], 1.0))
    return trace_of(duration_s, *lives, notice_s=draw(st.sampled_from([0.0, 30.0, 500.0])))


def contest(trace: Trace, policies: tuple[str, ...] = tuple(MAKERS), fault_tolerance: int = 1) -> Contest:
    return hold(
        trace,
        shared_layouts(),
        policies=policies,
        fault_tolerance=fault_tolerance,
        recovery=COSTS,
        checkpoints=CHECKPOINTS,
    )


@given(traces(), st.integers(0, 2))
def test_time_is_conserved_and_nobody_beats_the_oracle(trace: Trace, fault_tolerance: int) -> None:
    found = contest(trace, fault_tolerance=fault_tolerance)
    for name, score in found.scores.items():
        assert sum(score.breakdown.values()) == pytest.approx(trace.duration_s), name
        assert min(score.breakdown.values()) >= -1e-9, name
        if found.scores["oracle"].samples:
            assert score.share_of_oracle <= 1 + 1e-9, name
            assert score.share_of_oracle + sum(score.lost.values()) == pytest.approx(1), name
        assert score.effective_time == pytest.approx(score.breakdown[Spending.USEFUL] / trace.duration_s), name
    for name, replay in found.replays.items():
        ends = [segment.end_s for segment in replay.segments]
        assert [0.0, *ends[:-1]] == [segment.begin_s for segment in replay.segments], name
        assert ends[-1] == pytest.approx(trace.duration_s), name


@given(traces(), st.permutations(tuple(MAKERS)))
def test_equal_inputs_give_equal_results_in_whatever_order(trace: Trace, order: list[str]) -> None:
    assert contest(trace, tuple(order)).scores == contest(trace).scores


@pytest.mark.parametrize("num_nodes", [4, 5, 7])
def test_without_failures_nothing_is_lost(num_nodes: int) -> None:
    trace = trace_of(5000, *[(0.0, STAYS)] * num_nodes)
    for name, score in contest(trace, fault_tolerance=0).scores.items():
        if score.note:
            continue
        for spending in (Spending.REDONE, Spending.RECOVERY, Spending.IDLE):
            assert score.breakdown[spending] == 0, name
    ours = contest(trace, ("ours",), fault_tolerance=0).scores["ours"]
    assert ours.share_of_oracle + ours.lost[Spending.CHECKPOINT] + ours.lost[SLOWER] == pytest.approx(1)
    assert ours.share_of_plans + ours.lost[Spending.CHECKPOINT] == pytest.approx(1, abs=0.01)
