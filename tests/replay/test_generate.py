import statistics
from itertools import pairwise

import pytest

from oobleck_jax.errors import ConfigError
from oobleck_jax.replay.generate import Recipe, generate_trace, parse_recipe


def recipe(text: str) -> Recipe:
    found = parse_recipe(text)
    assert found is not None
    return found


def test_periodic_losses_are_the_experiments_of_the_paper() -> None:
    trace = generate_trace(recipe("periodic:mtbf=600"), num_nodes=30)
    assert (trace.duration_s, trace.num_losses) == (9000, 14)  # the last one is at the end
    losses = [change for change in trace.changes if change.left]
    assert [change.time_s for change in losses] == [600.0 * number for number in range(1, 15)]
    assert all(len(change.left) == 1 for change in losses)


def test_poisson_gaps_have_the_mean_and_nodes_come_back() -> None:
    trace = generate_trace(recipe("poisson:mtbf=100,return=50"), num_nodes=40, duration_s=200_000, seed=3)
    losses = [change.time_s for change in trace.changes if change.left]
    gaps = [after - before for before, after in pairwise(losses)]
    assert statistics.mean(gaps) == pytest.approx(100, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(100, rel=0.1)
    assert trace.mean_nodes == pytest.approx(40 - 50 / 100, abs=0.1)
    assert trace.most_nodes == 40


def test_bursts_take_several_nodes_at_once_and_leave_some() -> None:
    trace = generate_trace(recipe("bursts:mtbf=100,size=4,return=50"), num_nodes=20, duration_s=5000)
    assert {len(change.left) for change in trace.changes[1:] if change.left} == {1, 2, 3, 4}
    trace = generate_trace(recipe("bursts:mtbf=100,size=4,least=3"), num_nodes=20, duration_s=5000)
    assert trace.num_losses == 17


def test_the_seed_decides_everything() -> None:
    wanted = recipe("poisson:mtbf=100,return=50")
    same = [generate_trace(wanted, num_nodes=9, seed=5) for _ in range(2)]
    assert same[0] == same[1] != generate_trace(wanted, num_nodes=9, seed=6)


def test_what_is_no_recipe_may_be_a_file() -> None:
    assert parse_recipe("traces/poisson.csv") is None
    assert parse_recipe("C:traces") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poisson:mtbf", "'mtbf' is not NAME=NUMBER"),
        ("poisson:rate=3", "rate=3 is none of mtbf=SECONDS, size=NODES, return=SECONDS, least=NODES"),
        ("poisson:mtbf=0", "mtbf=0 is none of"),
        ("bursts:mtbf=9,size=0", "size=0 is none of"),
        ("periodic:mtbf=-1", "mtbf=-1 is none of"),
        ("poisson:mtbf=9,size=2", "only bursts have a size; give bursts:mtbf=9,size=2"),
    ],
)
def test_wrong_recipes_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--trace {text}: {message}"):
        parse_recipe(text)


def test_the_name_of_a_recipe_gives_it_back() -> None:
    for text in ("periodic:mtbf=600", "bursts:mtbf=1800,size=4,return=900,least=3"):
        assert recipe(text).name == text
