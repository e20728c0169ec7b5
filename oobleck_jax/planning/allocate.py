"""How many pipelines, of which sizes, with how many microbatches: the split that finishes first, exactly.

A time limit tells how many microbatches a pipeline of each size can do. Whether the pipelines that fit on the nodes
can do all microbatches together is a knapsack: items are sizes, weights are nodes, values are microbatches, and at
least so many items. The least limit for which they can is found by bisection. No multiset of sizes is ever listed,
so a thousand nodes take milliseconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oobleck_jax.planning.costs import UNLIMITED, Ints
from oobleck_jax.planning.partition import Partition


IMPOSSIBLE = -(1 << 40)  # microbatches, where no items weigh exactly so much


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A pipeline to be: its partition and its microbatches."""

    partition: Partition
    num_microbatches: int

    @property
    def num_nodes(self) -> int:
        return len(self.partition.nodes)

    @property
    def step_ns(self) -> int:
        return self.partition.step_ns(self.num_microbatches)


def best_shares(
    choices: Mapping[int, Sequence[Partition]],
    *,
    num_nodes: int,
    min_pipelines: int,
    num_microbatches: int,
    kept: Sequence[Partition] = (),
    at_least_ns: int = 0,
) -> tuple[Share, ...]:
    """Return the pipelines whose slowest is as fast as possible: first those kept, then the others, largest first.

    Among equally fast ones it takes one with the most nodes in use, and of these one with small pipelines.

    Args:
        choices: partitions for each number of nodes.
        num_nodes: nodes to use besides those of the pipelines that are kept; some may stay spare.
        min_pipelines: at least so many pipelines, with those that are kept.
        num_microbatches: to be done by all pipelines together; each does at least one.
        kept: partitions of pipelines that there must be, on nodes of their own.
        at_least_ns: a time that is known not to suffice for less; saves searching below it.

    Returns:
        None at all (empty) where `min_pipelines` do not fit on the nodes, or have no microbatch each.
    """
    sizes = tuple(size for size in sorted(choices) if choices[size] and size <= num_nodes)
    num_more = max(min_pipelines - len(kept), 0)
    is_possible = num_more * min(sizes, default=num_nodes + 1) <= num_nodes and (sizes or kept)
    if not is_possible or max(min_pipelines, len(kept)) > num_microbatches:
        return ()
    problem = _problem(kept, sizes, choices, num_nodes, num_more, num_microbatches)
    capacities = problem.capacities(_least_limit(problem, at_least_ns))
    more = sorted(problem.pack(capacities), key=lambda item: (-capacities[item], -problem.sizes[item]))
    items = [*range(len(kept)), *sorted(more[: num_microbatches - len(kept)], reverse=True)]
    return _share_out(problem, items)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    """Items are the pipelines that are kept, then the sizes; choices of one item stand together."""

    num_kept: int
    sizes: Ints  # of each item; 0 of those that are kept
    choices: tuple[Partition, ...]
    fill_ns: Ints  # of each choice
    slowest_ns: Ints
    begins: Ints  # of each item, its first choice
    num_nodes: int
    num_more: int  # at least so many pipelines besides those kept
    num_microbatches: int

    def capacities(self, limit_ns: int) -> Ints:
        """Return how many microbatches a pipeline of each size does within a time."""
        more = np.where(self.slowest_ns > 0, (limit_ns - self.fill_ns) // np.maximum(self.slowest_ns, 1), UNLIMITED)
        numbers = np.where(self.fill_ns <= limit_ns, 1 + more, 0)
        return np.minimum(np.maximum.reduceat(numbers, self.begins), self.num_microbatches)

    def steps_ns(self, counts: Ints) -> Ints:
        """Return the time that a pipeline of each size takes for some number of microbatches."""
        number = np.repeat(counts, np.diff(self.begins, append=len(self.choices)))
        return np.minimum.reduceat(self.fill_ns + (number - 1) * self.slowest_ns, self.begins)

    def choices_of(self, item: int) -> tuple[Partition, ...]:
        end = self.begins[item + 1] if item + 1 < len(self.begins) else len(self.choices)
        return self.choices[self.begins[item] : end]

    def suffices(self, limit_ns: int) -> bool:
        """Tell whether all microbatches can be done within a time."""
        capacities = self.capacities(limit_ns)
        if not capacities[: self.num_kept].all():
            return False
        _, best = self._most(capacities, self._efficient(capacities))
        return int(best.max()) >= self._missing(capacities)

    def pack(self, capacities: Ints) -> list[int]:
        """Return sizes that do what is left to do, and use the most nodes; there must be some."""
        items = [item for item in range(self.num_kept, len(self.sizes)) if capacities[item]]
        levels, best = self._most(capacities, items)
        weight = int(np.flatnonzero(best >= self._missing(capacities))[-1])
        chosen: list[int] = []

        def take(after: Ints, before: Ints) -> int:
            for item in items:
                rest = weight - int(self.sizes[item])
                if rest >= 0 and before[rest] >= 0 and before[rest] + capacities[item] == after[weight]:
                    chosen.append(item)
                    return rest
            raise AssertionError("the knapsack has no item that leads here")

        while best[weight] != levels[-1][weight]:
            weight = take(best, best)
        for after, before in zip(reversed(levels[1:]), reversed(levels[:-1]), strict=True):
            weight = take(after, before)
        return chosen

    def _missing(self, capacities: Ints) -> int:
        """Return how many microbatches the pipelines that are kept leave to others."""
        return max(self.num_microbatches - int(capacities[: self.num_kept].sum()), 0)

    def _most(self, capacities: Ints, items: Sequence[int]) -> tuple[list[Ints], Ints]:
        """Return the most microbatches by exact weight: of 0, 1, ... num_more items, and of any more."""
        levels = [np.full(self.num_nodes + 1, IMPOSSIBLE, dtype=np.int64)]
        levels[0][0] = 0
        for _ in range(self.num_more):
            longer = np.full_like(levels[0], IMPOSSIBLE)
            for item in items:
                size = int(self.sizes[item])
                np.maximum(longer[size:], levels[-1][:-size] + capacities[item], out=longer[size:])
            levels.append(longer)
        best = levels[-1]
        for item in items:
            best = _with_any_number(best, int(self.sizes[item]), int(capacities[item]))
        return levels, best

    def _efficient(self, capacities: Ints) -> list[int]:
        """Return the items that do more than smaller ones of together at most the same weight."""
        most = [0] * (int(self.sizes[-1]) + 1)  # of items so far, by weight
        efficient: list[int] = []
        for item in range(self.num_kept, len(self.sizes)):
            size, capacity = int(self.sizes[item]), int(capacities[item])
            if capacity <= most[size]:
                continue
            efficient.append(item)
            for weight in range(size, len(most)):
                most[weight] = max(most[weight], most[weight - size] + capacity)
        return efficient


def _with_any_number(best: Ints, size: int, capacity: int) -> Ints:
    """Add any number of copies of an item: best[w] becomes the largest best[w - i * size] + i * capacity."""
    num_rows = -(-len(best) // size)
    padded = np.full(num_rows * size, IMPOSSIBLE, dtype=np.int64)
    padded[: len(best)] = best
    gain = capacity * np.arange(num_rows)[:, None]
    return (np.maximum.accumulate(padded.reshape(num_rows, size) - gain) + gain).reshape(-1)[: len(best)]


def _least_limit(problem: _Problem, at_least_ns: int) -> int:
    """Return the least time in which all microbatches can be done."""
    low = max(_fractional_limit(problem), at_least_ns)
    high, stride = low, low // 256 + 1
    while not problem.suffices(high):
        low = _next_end(problem, high)
        high, stride = max(low, high + stride), stride * 2
    while low < high:
        middle = (low + high) // 2
        if problem.suffices(middle):
            high = _last_end(problem, middle)
        else:
            low = _next_end(problem, middle)
    return high


def _last_end(problem: _Problem, limit_ns: int) -> int:
    """Return the last time up to a limit at which a microbatch of some pipeline may end."""
    capacities = problem.capacities(limit_ns)
    return int(problem.steps_ns(capacities)[capacities > 0].max())


def _next_end(problem: _Problem, limit_ns: int) -> int:
    """Return the first time after a limit at which a microbatch of some pipeline may end."""
    capacities = problem.capacities(limit_ns)
    return int(problem.steps_ns(capacities + 1)[capacities < problem.num_microbatches].min())


def _fractional_limit(problem: _Problem) -> int:
    """Return the least time if a pipeline could have any fraction of its nodes and microbatches: a lower limit."""
    low, high = 0, int(problem.steps_ns(np.full_like(problem.sizes, problem.num_microbatches)).min())
    kept = problem.num_kept
    while low < high:
        middle = (low + high) // 2
        capacities = problem.capacities(middle)
        missing = problem.num_microbatches - int(capacities[:kept].sum())
        if missing <= 0 or (capacities[kept:] * problem.num_nodes >= missing * problem.sizes[kept:]).any():
            high = middle
        else:
            low = middle + 1
    return low


def _share_out(problem: _Problem, items: Sequence[int]) -> tuple[Share, ...]:
    """Give the microbatches that end first to chosen pipelines, at least one to each."""

    def best(item: int, count: int) -> Partition:
        return min(problem.choices_of(item), key=lambda choice: (choice.step_ns(count), choice.slowest_ns))

    copies = np.bincount(items, minlength=len(problem.sizes))
    low, high = 0, int(problem.steps_ns(np.full_like(problem.sizes, problem.num_microbatches)).max())
    while low < high:
        middle = (low + high) // 2
        if int((np.maximum(problem.capacities(middle), 1) * copies).sum()) >= problem.num_microbatches:
            high = middle
        else:
            low = middle + 1
    counts = np.maximum(problem.capacities(high), 1)[list(items)].tolist()
    last = [(best(item, counts[number]).step_ns(counts[number]), number) for number, item in enumerate(items)]
    surplus = sum(counts) - problem.num_microbatches
    while surplus:  # more than one pass only where microbatches take no time
        for _, number in sorted(last, reverse=True):
            if surplus and counts[number] > 1:
                counts[number] -= 1
                surplus -= 1
    pairs = list(zip(items, counts, strict=True))
    partitions = {pair: best(*pair) for pair in set(pairs)}
    shares = [Share(partition=partitions[pair], num_microbatches=pair[1]) for pair in pairs]
    others = sorted(shares[problem.num_kept :], key=lambda share: (-share.num_nodes, -share.num_microbatches))
    return (*shares[: problem.num_kept], *others)


def _problem(
    kept: Sequence[Partition],
    sizes: Sequence[int],
    choices: Mapping[int, Sequence[Partition]],
    num_nodes: int,
    num_more: int,
    num_microbatches: int,
) -> _Problem:
    groups = [*((partition,) for partition in kept), *(tuple(choices[size]) for size in sizes)]
    flat = tuple(choice for group in groups for choice in group)
    return _Problem(
        num_kept=len(kept),
        sizes=np.array([*[0] * len(kept), *sizes], dtype=np.int64),
        choices=flat,
        fill_ns=np.array([choice.fill_ns for choice in flat], dtype=np.int64),
        slowest_ns=np.array([choice.slowest_ns for choice in flat], dtype=np.int64),
        begins=np.cumsum([0, *(len(group) for group in groups[:-1])]),
        num_nodes=num_nodes,
        num_more=num_more,
        num_microbatches=num_microbatches,
    )
