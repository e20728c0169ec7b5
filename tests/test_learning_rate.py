from dataclasses import replace

import pytest

from models.presets import load_preset
from oobleck_jax.config import OptimizerConfig
from oobleck_jax.learning_rate import learning_rate


def rates(*, steps: int, warmup_steps: int) -> list[float]:
    optimizer = OptimizerConfig(peak_learning_rate=2.0, final_learning_rate_fraction=0.25, warmup_steps=warmup_steps)
    config = replace(load_preset("gpt-test"), optimizer=optimizer, steps=steps)
    return [learning_rate(config, step) for step in range(steps)]


def test_it_rises_to_the_peak_and_falls_to_the_final_fraction() -> None:
    found = rates(steps=50, warmup_steps=10)
    assert found[0] == pytest.approx(0.2)
    assert found[9] == pytest.approx(2.0)
    assert found[-1] == pytest.approx(0.5)
    assert found[:10] == sorted(found[:10])
    assert found[9:] == sorted(found[9:], reverse=True)
    assert found[29] == pytest.approx(0.5 + 1.5 / 2, rel=0.05)  # half-way down the cosine


@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (1, 10), (5, 5), (5, 10), (2, 0), (10, 1)])
def test_it_is_never_zero_and_never_above_the_peak(steps: int, warmup_steps: int) -> None:
    found = rates(steps=steps, warmup_steps=warmup_steps)
    assert all(0 < rate <= 2.0 for rate in found)
