"""What is compared; that real runs are killed and joined is shown by `scripts/replay.py --live`."""

import pytest

from oobleck_jax.live_replay import compare, short_trace
from oobleck_jax.replay.trace import Change
from tests.replay.workloads import COSTS, STAYS, trace_of, workload


def test_the_short_trace_has_a_loss_a_join_and_another_loss() -> None:
    assert short_trace(3, 100.0).changes == (
        Change(time_s=0.0, joined=(0, 1, 2)),
        Change(time_s=25.0, left=(2,)),
        Change(time_s=50.0, joined=(3,)),
        Change(time_s=75.0, left=(3,)),
    )


def test_computing_is_taken_to_be_as_slow_as_steps_were_before_the_trace() -> None:
    """Forecast are 72 s for a step of two nodes, measured 36: half. Alone, a step takes 72 s."""
    result = compare(
        trace_of(90 + 5.3 + 144, (0, STAYS), (0, 90)),
        workload(),
        fault_tolerance=1,
        costs=COSTS,
        usual_step_s=36.0,
        measured_steps=5,
        recoveries_s=(5.0,),
    )
    assert result.forecast_step_s == 72
    assert result.simulated_steps == pytest.approx(2 + 2)  # two of 36 s, one lost, two of 72 s
    assert result.error == pytest.approx(-0.2)
