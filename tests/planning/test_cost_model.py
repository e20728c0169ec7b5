"""How good the partitions are that the cost model chooses, in real schedules; and those of the paper's formula.

For random models every partition is played through, and the time of each formula's favourite is compared with the best
time of all. These are the numbers behind the choice of the cost model (see partition.py).
"""

import itertools
import random
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from oobleck_jax.planning.forecast import StageTimes, stage_ends_ns


Formula = Callable[[list[int], int], tuple[int, ...]]
NUM_MODELS = 40


def fill_and_slowest(work: list[int], num_microbatches: int) -> tuple[int, ...]:
    """Return our cost model; ties go to the smaller tail, as in partition.py."""
    tail = sum((stage + 1) * time for stage, time in enumerate(work))
    return (sum(work) + (num_microbatches - 1) * max(work), tail)


def paper(work: list[int], num_microbatches: int) -> tuple[int, ...]:
    """Return the formula of Oobleck, section 4.1, with k the last slowest stage, counted from 0."""
    k = max(stage for stage, time in enumerate(work) if time == max(work))
    return (sum(work) + (num_microbatches - len(work) + k - 1) * work[k] + sum(work[k:]),)


def excess(formula: Formula, microbatches_per_stage: float) -> float:
    """Return by how much the formula's favourites are slower than the best partitions, on average."""
    generator = random.Random(0)
    losses: list[float] = []
    for _ in range(NUM_MODELS):
        num_layers = generator.randint(6, 10)
        num_stages = generator.randint(2, 5)
        layers = [
            generator.choice([1, generator.uniform(0.8, 1.2), generator.expovariate(1)]) for _ in range(num_layers)
        ]
        forwards = [round(1000 * layer) + 1 for layer in layers]
        cuts = [(0, *inner, num_layers) for inner in itertools.combinations(range(1, num_layers), num_stages - 1)]
        sums = [[sum(forwards[a:b]) for a, b in itertools.pairwise(cut)] for cut in cuts]
        count = max(1, round(microbatches_per_stage * num_stages))
        times = [
            StageTimes(
                forward_ns=np.array(work, dtype=np.int64),
                backward_ns=2 * np.array(work, dtype=np.int64),
                weight_ns=np.zeros(num_stages, dtype=np.int64),
                transfer_ns=np.zeros(num_stages, dtype=np.int64),
            )
            for work in sums
        ]
        ends = [int(end.max()) for end in stage_ends_ns([(time, count) for time in times])]
        favourite = min(range(len(cuts)), key=lambda number: formula([3 * time for time in sums[number]], count))
        losses.append(ends[favourite] / min(ends) - 1)
    return statistics.mean(losses)


@pytest.mark.parametrize(("microbatches_per_stage", "most"), [(0.5, 0.03), (1, 0.05), (2, 0.02), (4, 0.01), (8, 0.005)])
def test_favourites_of_the_cost_model_are_near_the_best_in_real_schedules(
    microbatches_per_stage: float, most: float
) -> None:
    assert excess(fill_and_slowest, microbatches_per_stage) < most


def test_favourites_of_the_papers_formula_are_slow_with_as_many_microbatches_as_stages() -> None:
    assert excess(paper, 1) > 0.15


@pytest.mark.parametrize("microbatches_per_stage", [2, 4, 8])
def test_with_more_microbatches_both_formulas_choose_equally_well(microbatches_per_stage: float) -> None:
    ours, papers = (excess(formula, microbatches_per_stage) for formula in (fill_and_slowest, paper))
    assert ours < papers + 0.01
