"""Optimistic bounds: whether what is built so far can still become a better partition than those already known.

Known partitions of n nodes, as points (slowest, fill), have a lower convex hull. A partition above the hull is worse
than one of the known ones, whatever the number of microbatches. A part of a partition is completed as if every other
layer ran at its best number of devices, perfectly balanced over all devices that are left; if even that is above the
hull of every number of nodes, the part can be dropped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from oobleck_jax.planning.costs import Costs, Ints


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

    def allowance(self, first: Ints, end: Ints, num_nodes: Ints, used: Ints) -> Ints:
        """Return a table [row, bin] of the largest fill with which a part may still win.

        Args:
            first: the part is of the layers `[first, end)`.
            end: see `first`.
            num_nodes: of the part; the first of them may be incomplete.
            used: devices of its first node.
        """
        other_fill = self.fill_ns[0, -1] - self.fill_ns[first, end]
        other_work = self.device_ns[0, -1] - self.device_ns[first, end]
        num_links = num_nodes - (end == len(self.fill_ns) - 1)
        table = np.full((len(first), len(self.bins_ns)), -1, dtype=np.int64)
        for total, hull in enumerate(self.hulls, 1):
            num_devices = self.devices_per_node * (total - num_nodes + 1) - used
            rows = np.flatnonzero((num_nodes <= total) & ((num_devices > 0) | (other_work == 0)))
            spread = other_work[rows] // np.maximum(num_devices[rows], 1)
            slowest = np.maximum(self.bins_ns, spread[:, None])
            # Rounded up, because one that is as good as a known one must not be dropped: ties are decided later.
            most = (
                np.interp(slowest, hull.slowest_ns, hull.fill_ns) + 1
                if len(hull.fill_ns)
                else np.full(slowest.shape, 2.0**62)
            )
            links = self.link_ns * np.maximum(total - 1 - num_links[rows], 0)
            table[rows] = np.maximum(table[rows], most.astype(np.int64) - (other_fill[rows] + links)[:, None])
        return table

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
