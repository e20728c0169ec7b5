"""The sum of gradients over the holders of each parameter group, and what a holder reports of it.

Contributions are sums over tokens, already divided by the tokens of the global batch: the result is the gradient of the
mean loss, whatever the shares of the pipelines. Buckets are summed in one order that all nodes share.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from oobleck_jax.execution.fabric import Fabric, SumHandle
from oobleck_jax.execution.layout import Bucket
from oobleck_jax.execution.patience import Patience
from oobleck_jax.planning.plan import NodeId


_CHUNK = 1 << 15  # elements whose squares fit the first cache


@dataclass(frozen=True, kw_only=True, slots=True)
class SumReport:
    """What a holder saw of a group's summed gradient; equal on all holders, to the bit."""

    group: str
    squared_norm: float
    checksum: int


Row: TypeAlias = Callable[[], Float[np.ndarray, " P"]]
"""Gives a contribution to the gradient of a group; waits until it has been computed."""

Emit: TypeAlias = Callable[[str, Row], None]
"""Takes a contribution to the gradient of a group."""


class GradientSums:
    """The sums of one step. That of a bucket begins as soon as this node has its share, beside the rest of backward."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        sizes: Mapping[str, int],
        num_rows: Mapping[str, int],
        node: NodeId,
        ranks: Mapping[NodeId, int],
        fabric: Fabric | None,
    ) -> None:
        """Begin without any contribution.

        Args:
            buckets: of the generation.
            sizes: number of parameters of each group.
            num_rows: how many contributions this node has to each group that it holds.
            ranks: rank of each node in the fabric; None where this node shares no group with another.
        """
        self._sizes, self._num_rows, self._node, self._ranks, self._fabric = sizes, num_rows, node, ranks, fabric
        self._waiting = deque(bucket for bucket in buckets if node in bucket.holders)
        self._rows: dict[str, list[Row]] = {}
        self._begun: list[_BucketSum] = []

    def add(self, group: str, row: Row) -> None:
        """Take a contribution, which may not have been computed yet."""
        self._rows.setdefault(group, []).append(row)
        while self._waiting and self._has_all(self._waiting[0]):
            bucket = self._waiting.popleft()
            found = _BucketSum(bucket, [self._rows.pop(name) for name in bucket.groups])
            if bucket.is_shared:
                assert self._fabric is not None, "a bucket with several holders needs a fabric"
                ranks = tuple(self._ranks[holder] for holder in bucket.holders)
                found.handle = self._fabric.sum(ranks, bucket.size, found.contribution)
            self._begun.append(found)

    def finish(
        self, patience: Patience, on_summed: Callable[[float, float], None]
    ) -> tuple[dict[str, Float[np.ndarray, " P"]], tuple[SumReport, ...]]:
        """Wait for all sums; return each group's gradient summed over its holders, and what to report of it.

        Args:
            on_summed: told from when to when each sum over several nodes ran (`time.monotonic`), waits included.

        Raises:
            Abandoned, PeerLost, Stalled: as `Patience.wait`.
        """
        assert not self._waiting, f"contributions are missing to {self._waiting[0]}"
        sums: dict[str, np.ndarray] = {}
        reports: list[SumReport] = []
        for begun in self._begun:
            others = [holder for holder in begun.bucket.holders if holder != self._node]
            handle = begun.handle
            total = begun.contribution() if handle is None else patience.wait(handle.wait, others)
            if handle is not None:
                on_summed(begun.began_s, handle.ended_s)
            offset = 0
            for name in begun.bucket.groups:
                sums[name] = total[offset : offset + self._sizes[name]]
                offset += self._sizes[name]
                reports.append(report(name, sums[name]))
        return sums, tuple(sorted(reports, key=lambda item: item.group))

    def _has_all(self, bucket: Bucket) -> bool:
        return all(len(self._rows.get(name, ())) == self._num_rows[name] for name in bucket.groups)


class _BucketSum:
    """A bucket to which this node has given its share."""

    def __init__(self, bucket: Bucket, rows: list[list[Row]]) -> None:
        self.bucket = bucket
        self.handle: SumHandle | None = None
        self.began_s = 0.0
        self._rows = rows

    def contribution(self) -> Float[np.ndarray, " n"]:
        """Return the node's share, once it has been computed."""
        parts = [sum((row() for row in others), first()) for first, *others in self._rows]
        self._rows = []
        self.began_s = time.monotonic()
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def report(group: str, gradient: Float[np.ndarray, " P"]) -> SumReport:
    """Return the squared norm and the checksum of a summed gradient.

    Both are the same on every machine: numpy adds float64 in a fixed pairwise order, and integers exactly.
    """
    squared_norm, checksum = 0.0, 0
    squares = np.empty(min(_CHUNK, gradient.size), np.float64)
    for start in range(0, gradient.size, _CHUNK):
        chunk = gradient[start : start + _CHUNK]
        squared_norm += float(np.add.reduce(np.square(chunk, out=squares[: chunk.size], dtype=np.float64)))
        checksum += int(np.add.reduce(chunk.view(np.uint32), dtype=np.uint64))
    return SumReport(group=group, squared_norm=squared_norm, checksum=checksum)
