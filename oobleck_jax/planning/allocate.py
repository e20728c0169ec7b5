"""How many pipelines, of which sizes, with how many microbatches: the split that finishes first, exactly.

A time limit tells how many microbatches a pipeline of each size can do. Whether the pipelines that fit on the nodes
can do all microbatches together is a knapsack: items are sizes, weights are nodes, values are microbatches, and at
least so many items. The least limit for which they can is found by bisection. No multiset of sizes is ever listed,
so a thousand nodes take milliseconds.
"""

import heapq
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
    at_least_ns: int = 0,
) -> tuple[Share, ...]:
    """Return the pipelines whose slowest is as fast as possible, largest first.

    Among equally fast ones it takes one with the most nodes in use.

    Args:
        choices: partitions for each number of nodes.
        num_nodes: nodes to use; some may stay spare.
        min_pipelines: at least so many pipelines.
        num_microbatches: to be done by all pipelines together; each does at least one.
        at_least_ns: a time that is known not to suffice for less; saves searching below it.

    Returns:
        None at all (empty) where `min_pipelines` do not fit on the nodes, or have no microbatch each.
    """
    sizes = tuple(size for size in sorted(choices) if choices[size] and size <= num_nodes)
    if not sizes or min_pipelines * sizes[0] > num_nodes or min_pipelines > num_microbatches:
        return ()
    problem = _problem(sizes, choices, num_nodes, min_pipelines, num_microbatches)
    capacities = problem.capacities(_least_limit(problem, at_least_ns))
    items = sorted(problem.pack(capacities), key=lambda item: (-capacities[item], -sizes[item]))
    return _share_out(problem, sorted(items[:num_microbatches], reverse=True), capacities)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    """Items are the sizes, by index; choices of one item stand together, from `begins[item]` on."""

    sizes: Ints
    choices: tuple[Partition, ...]
    fill_ns: Ints  # of each choice
    slowest_ns: Ints
    begins: Ints
    num_nodes: int
    min_pipelines: int
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
        _, best = self._most(capacities, self._efficient(capacities))
        return int(best.max()) >= self.num_microbatches

    def pack(self, capacities: Ints) -> list[int]:
        """Return items that do all microbatches and use the most nodes; there must be some."""
        items = [item for item, capacity in enumerate(capacities) if capacity]
        levels, best = self._most(capacities, items)
        weight = int(np.flatnonzero(best >= self.num_microbatches)[-1])
        chosen: list[int] = []

        def take(after: Ints, before: Ints) -> int:
            for item in reversed(items):
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

    def _most(self, capacities: Ints, items: Sequence[int]) -> tuple[list[Ints], Ints]:
        """Return the most microbatches by exact weight: of 0, 1, ... min_pipelines items, and of any more."""
        levels = [np.full(self.num_nodes + 1, IMPOSSIBLE, dtype=np.int64)]
        levels[0][0] = 0
        for _ in range(self.min_pipelines):
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
        for item in range(len(self.sizes)):
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
    while low < high:
        middle = (low + high) // 2
        if (problem.capacities(middle) * problem.num_nodes >= problem.num_microbatches * problem.sizes).any():
            high = middle
        else:
            low = middle + 1
    return low


def _share_out(problem: _Problem, items: Sequence[int], capacities: Ints) -> tuple[Share, ...]:
    """Take from what the pipelines can do the microbatches that would end last, until as many are left as there are."""

    def best(item: int, count: int) -> Partition:
        return min(problem.choices_of(item), key=lambda choice: (choice.step_ns(count), choice.slowest_ns))

    counts = [int(capacities[item]) for item in items]
    queue = [
        (-best(item, count).step_ns(count), -number)
        for number, (item, count) in enumerate(zip(items, counts, strict=True))
    ]
    heapq.heapify(queue)
    surplus = sum(counts) - problem.num_microbatches
    while surplus:
        number = -heapq.heappop(queue)[1]
        if counts[number] > 1:
            counts[number] -= 1
            surplus -= 1
            heapq.heappush(queue, (-best(items[number], counts[number]).step_ns(counts[number]), -number))
    pairs = sorted(zip(items, counts, strict=True), reverse=True)
    partitions = {pair: best(*pair) for pair in set(pairs)}
    return tuple(Share(partition=partitions[pair], num_microbatches=pair[1]) for pair in pairs)


def _problem(
    sizes: Sequence[int],
    choices: Mapping[int, Sequence[Partition]],
    num_nodes: int,
    min_pipelines: int,
    num_microbatches: int,
) -> _Problem:
    flat = tuple(choice for size in sizes for choice in choices[size])
    counts = [len(choices[size]) for size in sizes]
    return _Problem(
        sizes=np.array(sizes, dtype=np.int64),
        choices=flat,
        fill_ns=np.array([choice.fill_ns for choice in flat], dtype=np.int64),
        slowest_ns=np.array([choice.slowest_ns for choice in flat], dtype=np.int64),
        begins=np.cumsum([0, *counts[:-1]]),
        num_nodes=num_nodes,
        min_pipelines=min_pipelines,
        num_microbatches=num_microbatches,
    )
