"""Ways to run consecutive layers on one node: its devices split among one or more stages.

A stage has any power of two of the node's devices; parts may be unequal, and devices may stay idle. For each run of
layers only those splits are kept that can be part of a best partition (see partition.py): stages are added from the
last layer of the run to its first, and a split that another one beats is dropped at once. Runs that look the same,
such as any five blocks of a transformer, are split once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from oobleck_jax.planning.bound import Bound
from oobleck_jax.planning.costs import UNLIMITED, Costs, Ints
from oobleck_jax.planning.pareto import join, unbeaten


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Splits:
    """Splits of runs of layers `[first, end)`; one row for each. Times are of one microbatch, in nanoseconds."""

    first: Ints
    end: Ints
    fill_ns: Ints  # sum over the stages
    slowest_ns: Ints
    tail_ns: Ints  # sum over the stages of the time from each on; smaller: later stages are lighter
    room: Ints  # at most so many stages may follow the node, or residuals would not fit
    used: Ints  # devices
    stage_layers: Ints  # [row, stage]: layers of each stage, in order, then zeros
    stage_devices: Ints

    @property
    def num_stages(self) -> Ints:
        return np.count_nonzero(self.stage_layers, axis=1).astype(np.int64)

    @property
    def is_tight(self) -> bool:
        """Whether memory may limit how many stages follow."""
        return bool((self.room < UNLIMITED).any())

    def take(self, rows: Ints) -> "Splits":
        return Splits(
            first=self.first[rows],
            end=self.end[rows],
            fill_ns=self.fill_ns[rows],
            slowest_ns=self.slowest_ns[rows],
            tail_ns=self.tail_ns[rows],
            room=self.room[rows],
            used=self.used[rows],
            stage_layers=self.stage_layers[rows],
            stage_devices=self.stage_devices[rows],
        )


def concatenate(parts: Sequence[Splits]) -> Splits:
    """Return the rows of all parts."""
    return Splits(
        first=np.concatenate([part.first for part in parts]),
        end=np.concatenate([part.end for part in parts]),
        fill_ns=np.concatenate([part.fill_ns for part in parts]),
        slowest_ns=np.concatenate([part.slowest_ns for part in parts]),
        tail_ns=np.concatenate([part.tail_ns for part in parts]),
        room=np.concatenate([part.room for part in parts]),
        used=np.concatenate([part.used for part in parts]),
        stage_layers=np.concatenate([part.stage_layers for part in parts]),
        stage_devices=np.concatenate([part.stage_devices for part in parts]),
    )


def node_splits(costs: Costs, bound: Bound | None = None, *, is_exact: bool = True) -> Splits:
    """Return the splits worth having of every run of layers, ascending by the end of the run.

    Args:
        costs: of the layers.
        bound: if given, splits that cannot be part of a partition that wins are dropped.
        is_exact: keep also splits that are only better because memory is tight.
    """
    runs = _distinct_runs(costs, bound)
    level = _empty(costs, runs)
    found = level.take(np.zeros(0, dtype=np.int64))
    for _ in range(costs.devices_per_node):
        longer = _in_front_of(level, costs, runs)
        together = concatenate([found, longer])
        columns = [together.fill_ns, together.slowest_ns, together.used]
        columns += [together.num_stages, UNLIMITED - together.room] if is_exact and together.is_tight else []
        kept = unbeaten(runs.of(together), columns, ties=(together.num_stages, together.tail_ns))
        level = together.take(kept[kept >= len(found.first)])
        found = together.take(kept)
        if not len(level.first):
            break
    columns = [found.fill_ns, found.slowest_ns]
    columns += [found.num_stages, UNLIMITED - found.room] if is_exact and found.is_tight else []
    found = found.take(unbeaten(runs.of(found), columns, ties=(found.num_stages, found.tail_ns, found.used)))
    first, end = np.nonzero(np.triu(np.ones_like(runs.table), 1))
    order = np.argsort(end, kind="stable")
    first, end = first[order], end[order]
    pair, row = join(runs.table[first, end], runs.of(found))
    return replace(found.take(row), first=first[pair], end=end[pair])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Runs:
    """Numbers for runs of layers, the same for runs that look the same, and an example of each."""

    table: Ints  # [first, end]: the number; -1 where end < first
    first: Ints  # [number]: the example
    end: Ints
    most_after: Ints  # [number]: the most stages that may follow it
    allowance_ns: Ints | None  # [number, used, bin]: the largest fill that may win
    bound: Bound | None

    def of(self, splits: Splits) -> Ints:
        return self.table[splits.first, splits.end]

    def may_win(self, number: Ints, used: Ints, fill_ns: Ints, slowest_ns: Ints) -> Ints:
        if self.bound is None or self.allowance_ns is None:
            return np.arange(len(number))
        return np.flatnonzero(fill_ns <= self.allowance_ns[number, used, self.bound.bin_of(slowest_ns)])


def _distinct_runs(costs: Costs, bound: Bound | None) -> _Runs:
    size = costs.num_layers + 1
    table = np.full((size, size), -1, dtype=np.int64)
    numbers: dict[tuple[object, ...], int] = {}
    examples: list[tuple[int, int]] = []
    for first in range(size):
        for end in range(first, size):
            # The last layer hands nothing on, and the gradient sum of the first stage is not hidden.
            key = (first == 0, end == costs.num_layers, costs.layer_classes[first:end])
            number = numbers.setdefault(key, len(numbers))
            table[first, end] = number
            if number == len(examples):
                examples.append((first, end))
    firsts, ends = np.array(examples, dtype=np.int64).T
    if bound is None:
        most_after = np.full_like(firsts, costs.num_layers)
        return _Runs(table=table, first=firsts, end=ends, most_after=most_after, allowance_ns=None, bound=None)
    used = np.tile(np.arange(costs.devices_per_node + 1), len(examples))
    rows = np.repeat(np.arange(len(examples)), costs.devices_per_node + 1)
    allowance_ns = bound.allowance(firsts[rows], ends[rows], np.ones_like(used), used)
    shape = (len(examples), costs.devices_per_node + 1, -1)
    return _Runs(
        table=table,
        first=firsts,
        end=ends,
        most_after=costs.devices_per_node * (bound.most_nodes(firsts, ends) - 1),
        allowance_ns=allowance_ns.reshape(shape),
        bound=bound,
    )


def _empty(costs: Costs, runs: _Runs) -> Splits:
    """Return the splits of empty runs: at the end of the model, and before."""
    ends = np.array(sorted({1, costs.num_layers}), dtype=np.int64)
    ends = ends[np.argsort(runs.table[ends, ends])]
    zeros = np.zeros_like(ends)
    shape = (len(ends), costs.devices_per_node)
    return Splits(
        first=ends,
        end=ends,
        fill_ns=zeros,
        slowest_ns=zeros,
        tail_ns=zeros,
        room=zeros + UNLIMITED,
        used=zeros,
        stage_layers=np.zeros(shape, dtype=np.int64),
        stage_devices=np.zeros(shape, dtype=np.int64),
    )


def _in_front_of(level: Splits, costs: Costs, runs: _Runs) -> Splits:
    """Put one more stage in front of each split of a level, in every way that gives an example run."""
    layers = np.arange(costs.num_layers + 1)
    run, cut = np.nonzero((layers > runs.first[:, None]) & (layers <= runs.end[:, None]))
    pair, row = join(runs.table[cut, runs.end[run]], runs.of(level))
    run, cut = run[pair], cut[pair]
    return concatenate(
        [_with_devices(index, level, row, run, cut, costs, runs) for index in range(len(costs.device_counts))]
    )


def _with_devices(index: int, level: Splits, row: Ints, run: Ints, cut: Ints, costs: Costs, runs: _Runs) -> Splits:
    """Put the stage `[first of run, cut)` in front of rows of a level, on one of the device counts."""
    count = costs.device_counts[index]
    limit = costs.in_flight_limit[index, runs.first[run], cut]
    fits = (limit > level.num_stages[row]) & (level.used[row] + count <= costs.devices_per_node)
    row, run, cut, limit = row[fits], run[fits], cut[fits], limit[fits]
    first, end = runs.first[run], runs.end[run]
    work_ns = costs.work_ns[index, first, cut] + np.where(cut == end, 2 * costs.link_ns[end], 0)
    fill_ns = level.fill_ns[row] + work_ns + np.where(first == 0, costs.sum_ns[first, cut], 0)
    slowest_ns = np.maximum(level.slowest_ns[row], work_ns)
    keep = runs.may_win(run, level.used[row] + count, fill_ns, slowest_ns)
    rest, first, cut, limit, work_ns = level.take(row[keep]), first[keep], cut[keep], limit[keep], work_ns[keep]
    room = np.minimum(rest.room, np.where(limit < UNLIMITED, limit - rest.num_stages - 1, UNLIMITED))
    return Splits(
        first=first,
        end=end[keep],
        fill_ns=fill_ns[keep],
        slowest_ns=slowest_ns[keep],
        tail_ns=rest.tail_ns + rest.fill_ns + work_ns,
        room=np.where(room < runs.most_after[run[keep]], room, UNLIMITED),
        used=rest.used + count,
        stage_layers=np.concatenate([(cut - first)[:, None], rest.stage_layers[:, :-1]], axis=1),
        stage_devices=np.concatenate([np.full_like(cut, count)[:, None], rest.stage_devices[:, :-1]], axis=1),
    )
