"""Optimistic bounds: whether what is built so far can still become a better partition than those already known.

Known partitions of n nodes, as points (slowest, fill), have a lower convex hull. A partition on or above the hull is
not better than one of the known ones, whatever the number of microbatches. A part of a partition is completed as if
every other layer ran at its best number of devices, perfectly balanced over all devices that are left; if even that is
on or above the hull of every number of nodes, the part can be dropped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from oobleck_jax.planning.costs import NEVER, Costs, Ints


NUM_BINS = 96  # of the slowest stage's time; more bins drop a little more


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Hull:
    """Lower convex hull of the known partitions for one number of nodes; empty where none is known."""

    slowest_ns: Ints  # ascending
    fill_ns: Ints  # descending


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bound:
    """What parts of partitions are compared with."""

    hulls: tuple[Hull, ...]  # for 1, 2, ... nodes
    bins_ns: Ints  # of the slowest stage's time, ascending from 0
    devices_per_node: int
    fill_ns: Ints  # [first, end]: least time of a run of layers, each at its fastest number of devices
    device_ns: Ints  # [first, end]: least time x devices
    link_ns: int  # least of one more node, there and back
    sum_ns: int  # least of the first stage's gradient sum

    def allowance(self, first: Ints, end: Ints, num_nodes: Ints, used: Ints) -> Ints:
        """Return a table [row, bin] of the largest fill with which a part may still become better than all known.

        Args:
            first: the part is of the layers `[first, end)`.
            end: see `first`.
            num_nodes: of the part; the first of them may be incomplete.
            used: devices of its first node.
        """
        table = np.full((len(first), len(self.bins_ns)), -1, dtype=np.int64)
        for total in range(1, len(self.hulls) + 1):
            np.maximum(table, self._allowance_of(total, self.bins_ns, first, end, num_nodes, used), out=table)
        return table

    def most_nodes(self, first: Ints, end: Ints) -> Ints:
        """Return for runs of layers the most nodes of a partition that may win with the run on one node."""
        least_fill = self.fill_ns[first, end]
        least_slowest = (self.device_ns[first, end] // self.devices_per_node)[:, None]
        one, none = np.ones_like(first), np.zeros_like(first)
        most = np.zeros_like(first)
        for total in range(1, len(self.hulls) + 1):
            may_win = self._allowance_of(total, least_slowest, first, end, one, none)[:, 0] >= least_fill
            most = np.where(may_win, total, most)
        return most

    def _allowance_of(self, total: int, slowest_ns: Ints, first: Ints, end: Ints, num_nodes: Ints, used: Ints) -> Ints:
        """Return the largest fill of parts of partitions of `total` nodes; -1 where they are too many or too few.

        It may depend on what a run of layers is, but not on where it is: equal runs share their splits.
        """
        other_fill = self.fill_ns[0, -1] - self.fill_ns[first, end] + np.where(first > 0, self.sum_ns, 0)
        other_work = self.device_ns[0, -1] - self.device_ns[first, end]
        is_last = end == len(self.fill_ns) - 1  # else others follow, on other nodes, because stages are added in front
        num_devices = self.devices_per_node * (total - num_nodes + 1) - used
        is_possible = (num_nodes + ~is_last <= total) & ((num_devices > 0) | (other_work == 0))
        slowest = np.maximum(slowest_ns, (other_work // np.maximum(num_devices, 1))[:, None])
        hull = self.hulls[total - 1]
        if len(hull.fill_ns):
            # Less than on the hull, since what is only as good as a known one does not win.
            most = np.ceil(np.interp(slowest, hull.slowest_ns, hull.fill_ns)).astype(np.int64) - 1
        else:
            most = np.full(slowest.shape, NEVER)
        links = self.link_ns * np.maximum(total - 1 - (num_nodes - is_last), 0)
        return np.where(is_possible[:, None], most - (other_fill + links)[:, None], -1)

    def bin_of(self, slowest_ns: Ints) -> Ints:
        return np.searchsorted(self.bins_ns, slowest_ns, side="right") - 1


def make_bound(costs: Costs, known: Sequence[Sequence[tuple[int, int]]], *, num_microbatches: int) -> Bound:
    """Return the bound set by known partitions.

    Args:
        costs: of the layers.
        known: for 1, 2, ... nodes, pairs (slowest, fill).
        num_microbatches: the most that count.
    """
    counts = np.array(costs.device_counts)[:, None]
    layers = np.arange(costs.num_layers)
    work = costs.work_ns[:, layers, layers + 1]
    inner_links = costs.link_ns[1:-1]
    largest = int(costs.work_ns.max()) + 2 * int(costs.link_ns.max()) + 2
    return Bound(
        hulls=tuple(_hull(points, num_microbatches) for points in known),
        bins_ns=np.concatenate([[0], np.geomspace(max(largest / 1e3, 1), largest, NUM_BINS).astype(np.int64)]),
        devices_per_node=costs.devices_per_node,
        fill_ns=_range_sums(work.min(axis=0)),
        device_ns=_range_sums((work * counts).min(axis=0)),
        link_ns=2 * int(inner_links.min()) if len(inner_links) else 0,
        sum_ns=int(costs.sum_ns[0, 1]),
    )


def lower_hull(points: Iterable[tuple[int, int]], *, num_microbatches: int) -> list[tuple[int, int]]:
    """Return the pairs (slowest, fill) that alone are the best for some number of microbatches, ascending."""
    most = num_microbatches - 1  # a slowest stage that is 1 ns faster saves at most so much
    corners: list[tuple[int, int]] = []
    for point in sorted(points):
        if corners and point[1] >= corners[-1][1]:
            continue
        while len(corners) > 1 and _is_on_or_above(corners[-1], corners[-2], point):
            corners.pop()
        corners.append(point)
    while len(corners) > 1 and corners[0][1] - corners[1][1] >= most * (corners[1][0] - corners[0][0]):
        corners.pop(0)
    return corners


def _hull(points: Iterable[tuple[int, int]], num_microbatches: int) -> Hull:
    corners = lower_hull(points, num_microbatches=num_microbatches)
    if corners:
        slowest, fill = corners[0]
        corners.insert(0, (0, fill + (num_microbatches - 1) * slowest))
    array = np.array(corners, dtype=np.int64).reshape(-1, 2)
    return Hull(slowest_ns=array[:, 0], fill_ns=array[:, 1])


def _is_on_or_above(point: tuple[int, int], left: tuple[int, int], right: tuple[int, int]) -> bool:
    """Tell whether a point is on or above the line through one to its left and one to its right."""
    return (point[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (point[0] - left[0])


def _range_sums(values: Ints) -> Ints:
    sums = np.concatenate([[0], np.cumsum(values)])
    return np.triu(sums[None, :] - sums[:, None])
