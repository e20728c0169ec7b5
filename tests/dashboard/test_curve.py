"""Curves stay small, and keep means and sums."""

import pytest

from oobleck_jax.dashboard.curve import Curve


def filled(num_steps: int, max_points: int = 8) -> Curve:
    curve = Curve(max_points=max_points)
    for step in range(num_steps):
        curve.add(step, float(step), 2.0)
    return curve


def test_few_steps_are_kept_as_they_are() -> None:
    view = filled(5).view(tokens_per_step=10)
    assert view.steps == (0, 1, 2, 3, 4)
    assert view.losses == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert view.tokens_per_s == (5.0,) * 5


@pytest.mark.parametrize("num_steps", [9, 17, 100, 1000])
def test_many_steps_are_merged_and_nothing_is_lost(num_steps: int) -> None:
    curve = filled(num_steps)
    view = curve.view(tokens_per_step=10)
    assert len(view.steps) <= 8
    sizes = [end - first for first, end in zip(view.steps, [*view.steps[1:], num_steps], strict=True)]
    assert len(set(sizes[:-1])) == 1
    total = sum(size * loss for size, loss in zip(sizes, view.losses, strict=True))
    assert total == pytest.approx(num_steps * (num_steps - 1) / 2)
    assert curve.seconds == pytest.approx(2.0 * num_steps)


def test_steps_can_be_taken_back_and_done_again() -> None:
    curve = filled(100)
    curve.take_back(37)
    assert curve.seconds == pytest.approx(2.0 * 37)
    assert max(curve.view(10).steps) < 37
    for step in range(37, 100):
        curve.add(step, float(step), 2.0)
    assert curve.seconds == pytest.approx(200.0)
    curve.take_back(0)
    assert curve.view(10).steps == ()
