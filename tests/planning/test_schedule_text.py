import pytest
from hypothesis import given

from oobleck_jax.errors import PlanError
from oobleck_jax.planning.schedule import StageCost
from oobleck_jax.planning.schedule_kinds import one_f_one_b
from oobleck_jax.planning.schedule_text import parse, render, render_grid
from tests.planning.schedule_forms import Form, forms


@given(forms)
def test_parse_undoes_render(form: Form) -> None:
    for row in form.schedule:
        assert parse(render(row)) == row


def test_text_that_is_no_action_is_refused() -> None:
    with pytest.raises(PlanError, match="'0X1' is not an action; write stage, F, B or W"):
        parse("0F0 0X1")


def test_grid_is_golden() -> None:
    grid = render_grid(one_f_one_b(3, 4), [StageCost(forward_s=1.0, backward_s=2.0)] * 3)
    assert grid == (
        "stage 0 F0 F1 F2             B0--- F3 B1---    B2---    B3---\n"
        "stage 1    F0 F1       B0--- F2 B1--- F3 B2---    B3---\n"
        "stage 2       F0 B0--- F1 B1--- F2 B2--- F3 B3---"
    )


def test_long_grid_continues_in_a_second_band() -> None:
    grid = render_grid(one_f_one_b(2, 30), [StageCost(forward_s=1.0, backward_s=1.0)] * 2, width=80)
    assert max(len(line) for line in grid.splitlines()) <= 80
    assert len(grid.split("\n\n")) == 4
