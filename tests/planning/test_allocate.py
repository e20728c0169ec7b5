import itertools
from collections.abc import Iterator, Mapping

from hypothesis import given, settings, strategies as st

from oobleck_jax.planning.allocate import best_shares
from oobleck_jax.planning.partition import Partition, StageShape


Choices = Mapping[int, tuple[Partition, ...]]


@st.composite
def choices_of(draw: st.DrawFn) -> Choices:
    """Draw partitions for some sizes from 1 to 7 nodes, with any times."""
    sizes = draw(st.sets(st.integers(1, 7), min_size=1))
    pair = st.tuples(st.integers(1, 60), st.integers(0, 20))
    return {
        size: tuple(
            partition(size, fill + slowest, slowest) for fill, slowest in draw(st.lists(pair, min_size=1, max_size=3))
        )
        for size in sorted(sizes)
    }


def partition(num_nodes: int, fill_ns: int, slowest_ns: int) -> Partition:
    stage = StageShape(num_layers=1, num_devices=1)
    return Partition(nodes=((stage,),) * num_nodes, fill_ns=fill_ns, slowest_ns=slowest_ns)


def multisets(sizes: list[int], num_nodes: int) -> Iterator[tuple[int, ...]]:
    if not sizes:
        yield ()
        return
    for copies in range(num_nodes // sizes[0] + 1):
        for others in multisets(sizes[1:], num_nodes - copies * sizes[0]):
            yield (sizes[0],) * copies + others


def brute_force(
    choices: Choices, num_nodes: int, min_pipelines: int, num_microbatches: int, kept: tuple[Partition, ...] = ()
) -> int | None:
    """Return the least time over all multisets of sizes and all splits of the microbatches."""

    def step_ns(size: int, count: int) -> int:
        return min(choice.step_ns(count) for choice in (kept[-size - 1 :][:1] if size < 0 else choices[size]))

    best = None
    for more in multisets(sorted(choices), num_nodes):
        sizes = (*range(-len(kept), 0), *more)  # negative: kept
        if not min_pipelines <= len(sizes) <= num_microbatches:
            continue
        # least[m]: least time in which the sizes so far do m microbatches
        least = {0: 0}
        for size in sizes:
            pairs = itertools.product(least.items(), range(1, num_microbatches + 1))
            longer: dict[int, int] = {}
            for (done, time), more in pairs:
                if done + more <= num_microbatches:
                    candidate = max(time, step_ns(size, more))
                    longer[done + more] = min(longer.get(done + more, candidate), candidate)
            least = longer
        if num_microbatches in least:
            best = min(least[num_microbatches], best if best is not None else least[num_microbatches])
    return best


def check_shares(
    choices: Choices, num_nodes: int, min_pipelines: int, num_microbatches: int, kept: tuple[Partition, ...] = ()
) -> None:
    shares = best_shares(
        choices, num_nodes=num_nodes, min_pipelines=min_pipelines, num_microbatches=num_microbatches, kept=kept
    )
    best = brute_force(choices, num_nodes, min_pipelines, num_microbatches, kept)
    assert bool(shares) == (best is not None)
    if shares:
        assert max(share.step_ns for share in shares) == best
        assert sum(share.num_microbatches for share in shares) == num_microbatches
        assert all(share.num_microbatches >= 1 for share in shares)
        assert len(shares) >= min_pipelines
        assert tuple(share.partition for share in shares[: len(kept)]) == kept
        assert sum(share.num_nodes for share in shares[len(kept) :]) <= num_nodes
        assert all(share.partition in choices[share.num_nodes] for share in shares[len(kept) :])


@given(choices_of(), st.integers(1, 14), st.integers(1, 4), st.integers(1, 12))
@settings(max_examples=100)
def test_shares_equal_brute_force_over_all_multisets_and_splits_P3_P4_P5(
    choices: Choices, num_nodes: int, min_pipelines: int, num_microbatches: int
) -> None:
    check_shares(choices, num_nodes, min_pipelines, num_microbatches)


@given(choices_of(), st.integers(0, 8), st.integers(1, 4), st.integers(1, 10), st.data())
@settings(max_examples=60)
def test_shares_beside_pipelines_that_stay_equal_brute_force(
    choices: Choices, num_nodes: int, min_pipelines: int, num_microbatches: int, data: st.DataObject
) -> None:
    stay = st.builds(partition, st.integers(1, 7), st.integers(1, 60), st.integers(0, 20))
    kept = data.draw(st.lists(stay, min_size=1, max_size=3))
    check_shares(choices, num_nodes, min_pipelines, num_microbatches, tuple(kept))


def test_a_node_that_makes_the_step_slower_stays_spare() -> None:
    choices = {2: (partition(2, 10, 5),), 3: (partition(3, 100, 50),)}
    shares = best_shares(choices, num_nodes=5, min_pipelines=2, num_microbatches=4)
    assert [share.num_nodes for share in shares] == [2, 2]


def test_no_node_stays_spare_without_need() -> None:
    choices = {2: (partition(2, 10, 5),), 3: (partition(3, 10, 5),)}
    shares = best_shares(choices, num_nodes=5, min_pipelines=2, num_microbatches=4)
    assert [share.num_nodes for share in shares] == [3, 2]


def test_larger_pipelines_get_more_microbatches() -> None:
    choices = {1: (partition(1, 30, 30),), 3: (partition(3, 12, 4),)}
    shares = best_shares(choices, num_nodes=4, min_pipelines=2, num_microbatches=16)
    assert [(share.num_nodes, share.num_microbatches) for share in shares] == [(3, 14), (1, 2)]
