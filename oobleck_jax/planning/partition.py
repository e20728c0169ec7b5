"""All partitions of the layers into stages that can be the best for some number of microbatches.

Cost model. A pipeline of stages with times w_i (forward, backward, and the link to the next stage there and back)
does m microbatches in

    fill + (m - 1) * slowest        fill = sum of all w_i + time to sum the first stage's gradients
                                    slowest = max w_i

One microbatch passes through all stages, and each further one takes the time of the slowest stage. The gradient sum
of the first stage counts because its last backward ends the step; those of the others hide behind it. So a partition
is a pair (fill, slowest), whatever m is, and those on the lower convex hull of all pairs are the best: few.

The paper's formula (Oobleck, section 4.1) subtracts from this the time that stages after the slowest one are idle.
That is right with more microbatches than stages. With about as many it prefers partitions that really are a third
slower than the best, where the pair above is 3 % off; from two microbatches per stage on both choose equally well
(tests/planning/test_cost_model.py). The formula's preference for heavy early stages is kept where partitions have the
same pair: of these the one with the smallest `tail` is taken.

Algorithm. Whole nodes are added from the last layer to the first. A label is a partition of the layers from some
layer on to some number of nodes; its values are fill, slowest, and the number of stages, because the i-th stage from
the end keeps i microbatches in flight, so that the number limits what fits in front. A label that another one of the
same layers and nodes beats in every value is dropped. What is left at layer 0 after n nodes is the answer for n
nodes: one pass answers all n, exactly. How a node splits its own devices is found beforehand (node_splits.py).
"""

from dataclasses import dataclass

import numpy as np

from oobleck_jax.planning.bound import Bound, lower_hull, make_bound
from oobleck_jax.planning.costs import UNLIMITED, Costs, Ints
from oobleck_jax.planning.node_splits import Splits, concatenate, node_splits
from oobleck_jax.planning.pareto import join, unbeaten


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShape:
    """A stage of a partition: how many layers on how many devices."""

    num_layers: int
    num_devices: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A partition of all layers into stages: those of each node, from the first node to the last."""

    nodes: tuple[tuple[StageShape, ...], ...]
    fill_ns: int
    slowest_ns: int

    def step_ns(self, num_microbatches: int) -> int:
        """Return the time of a step by the cost model."""
        return self.fill_ns + (num_microbatches - 1) * self.slowest_ns

    def num_microbatches_in(self, limit_ns: int) -> int:
        """Return how many microbatches fit into a time by the cost model."""
        if limit_ns < self.fill_ns:
            return 0
        return 1 + (limit_ns - self.fill_ns) // self.slowest_ns if self.slowest_ns else UNLIMITED


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Labels:
    """Partitions of the layers from `first` on; one row for each. All are of the same number of nodes."""

    first: Ints
    fill_ns: Ints
    slowest_ns: Ints
    tail_ns: Ints
    num_stages: Ints
    split: Ints  # of the first node: row of the splits
    rest: Ints  # of the other nodes: row of the labels of one node less

    def take(self, rows: Ints) -> "_Labels":
        return _Labels(
            first=self.first[rows],
            fill_ns=self.fill_ns[rows],
            slowest_ns=self.slowest_ns[rows],
            tail_ns=self.tail_ns[rows],
            num_stages=self.num_stages[rows],
            split=self.split[rows],
            rest=self.rest[rows],
        )


def best_partitions(costs: Costs, *, max_nodes: int, num_microbatches: int) -> tuple[tuple[Partition, ...], ...]:
    """Return for 1, 2, ... max_nodes nodes the partitions that are the best for some number of microbatches.

    For each number of nodes they descend by fill and ascend by slowest stage; for each number of microbatches up to
    `num_microbatches` one of them is a best one. There are none where no partition fits memory.
    """
    if len(costs.device_counts) == 1:
        found = _pass(costs, node_splits(costs), max_nodes)
    else:
        known = _pass(costs, _alike_splits(costs), max_nodes, is_exact=False)
        points = [[(partition.slowest_ns, partition.fill_ns) for partition in partitions] for partitions in known]
        bound = make_bound(costs, points, num_microbatches=num_microbatches)
        better = _pass(costs, node_splits(costs, bound), max_nodes, bound)
        found = [(*pair[0], *pair[1]) for pair in zip(known, better, strict=True)]
    return tuple(_best_for_some(partitions, num_microbatches) for partitions in found)


def _alike_splits(costs: Costs) -> Splits:
    """Return splits of each run of layers into stages of equal numbers of devices.

    They are few and found fast, and what is built of them is good to know, because much can be dropped that cannot
    become better.
    """
    parts: list[Splits] = []
    for index in range(len(costs.device_counts)):
        splits = node_splits(costs.with_device_count(index), is_exact=False)
        run = splits.first * (costs.num_layers + 1) + splits.end
        parts.append(splits.take(unbeaten(run, [splits.fill_ns, splits.slowest_ns])))
    alike = concatenate(parts)
    return alike.take(np.argsort(alike.end, kind="stable"))


def _best_for_some(partitions: tuple[Partition, ...], num_microbatches: int) -> tuple[Partition, ...]:
    by_values = {(partition.slowest_ns, partition.fill_ns): partition for partition in partitions}
    return tuple(by_values[point] for point in lower_hull(by_values, num_microbatches=num_microbatches))


def _pass(
    costs: Costs, splits: Splits, max_nodes: int, bound: Bound | None = None, *, is_exact: bool = True
) -> tuple[tuple[Partition, ...], ...]:
    """Return the best partitions into nodes with the given splits; good ones only, unless exact."""
    zero = np.zeros(1, dtype=np.int64)
    labels = _Labels(
        first=zero + costs.num_layers,
        fill_ns=zero,
        slowest_ns=zero,
        tail_ns=zero,
        num_stages=zero,
        split=zero,
        rest=zero,
    )
    history: list[_Labels] = []
    found: list[tuple[Partition, ...]] = []
    for num_nodes in range(1, max_nodes + 1):
        labels = _add_node(labels, splits, num_nodes, bound, is_tight=is_exact and splits.is_tight)
        history.append(labels)
        complete = np.flatnonzero(labels.first == 0)
        columns = (labels.fill_ns[complete], labels.slowest_ns[complete])
        rows = complete[unbeaten(labels.first[complete], columns, ties=(labels.tail_ns[complete],))]
        found.append(tuple(_partition(history, splits, int(row)) for row in rows))
    return tuple(found)


def _add_node(labels: _Labels, splits: Splits, num_nodes: int, bound: Bound | None, *, is_tight: bool) -> _Labels:
    """Put one more node in front of each label, in every way; with it there are `num_nodes`."""
    label, split = join(labels.first, splits.end)
    num_stages = splits.num_stages
    fits = labels.num_stages[label] <= splits.room[split]
    label, split = label[fits], split[fits]
    first = splits.first[split]
    fill_ns = labels.fill_ns[label] + splits.fill_ns[split]
    slowest_ns = np.maximum(labels.slowest_ns[label], splits.slowest_ns[split])
    if bound is not None:
        firsts = np.arange(len(bound.fill_ns))
        allowance_ns = bound.allowance(
            firsts,
            np.full_like(firsts, len(firsts) - 1),
            np.full_like(firsts, num_nodes),
            np.full_like(firsts, bound.devices_per_node),
        )
        keep = fill_ns <= allowance_ns[first, bound.bin_of(slowest_ns)]
        label, split, first, fill_ns, slowest_ns = (
            label[keep],
            split[keep],
            first[keep],
            fill_ns[keep],
            slowest_ns[keep],
        )
    longer = _Labels(
        first=first,
        fill_ns=fill_ns,
        slowest_ns=slowest_ns,
        tail_ns=labels.tail_ns[label] + splits.tail_ns[split] + num_stages[split] * labels.fill_ns[label],
        num_stages=labels.num_stages[label] + num_stages[split],
        split=split,
        rest=label,
    )
    columns = (longer.fill_ns, longer.slowest_ns, *([longer.num_stages] if is_tight else []))
    return longer.take(unbeaten(longer.first, columns, ties=(longer.num_stages, longer.tail_ns)))


def _partition(history: list[_Labels], splits: Splits, row: int) -> Partition:
    fill_ns, slowest_ns = int(history[-1].fill_ns[row]), int(history[-1].slowest_ns[row])
    nodes: list[tuple[StageShape, ...]] = []
    for labels in reversed(history):
        split = int(labels.split[row])
        shapes = zip(splits.stage_layers[split], splits.stage_devices[split], strict=True)
        nodes.append(tuple(StageShape(num_layers=int(n), num_devices=int(d)) for n, d in shapes if n))
        row = int(labels.rest[row])
    return Partition(nodes=tuple(nodes), fill_ns=fill_ns, slowest_ns=slowest_ns)
