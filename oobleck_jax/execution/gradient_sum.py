"""The sum of gradients over the holders of each parameter group, and what a holder reports of it.

Contributions are sums over tokens, already divided by the tokens of the global batch: the result is the gradient of the
mean loss, whatever the shares of the pipelines. Buckets are summed in one order that all nodes share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from oobleck_jax.execution.fabric import Fabric
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


def sum_gradients(
    gradients: Mapping[str, Float[np.ndarray, " P"]],
    *,
    buckets: Sequence[Bucket],
    node: NodeId,
    ranks: Mapping[NodeId, int],
    fabric: Fabric | None,
    patience: Patience,
) -> dict[str, Float[np.ndarray, " P"]]:
    """Return each group's gradient summed over its holders.

    Args:
        gradients: this node's contributions, by group.
        ranks: rank of each node in the fabric; None where this node shares no group with another.

    Raises:
        Abandoned, PeerLost, Stalled: as `Patience.wait`.
    """
    mine = [bucket for bucket in buckets if node in bucket.holders]
    pending = []
    for bucket in mine:
        parts = [gradients[name] for name in bucket.groups]
        vector = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(bucket.holders) == 1 or not vector.size:
            pending.append((bucket, vector, None))
        else:
            assert fabric is not None, "a bucket with several holders needs a fabric"
            pending.append((bucket, vector, fabric.sum(tuple(ranks[holder] for holder in bucket.holders), vector)))
    sums: dict[str, np.ndarray] = {}
    for bucket, vector, handle in pending:
        others = [holder for holder in bucket.holders if holder != node]
        total = vector if handle is None else patience.wait(handle.wait, others)
        offset = 0
        for name in bucket.groups:
            sums[name] = total[offset : offset + gradients[name].size]
            offset += gradients[name].size
    return sums


def report(group: str, gradient: Float[np.ndarray, " P"]) -> SumReport:
    """Return the squared norm and the checksum of a summed gradient.

    Both are the same on every machine: numpy adds float64 in a fixed pairwise order, and integers wrap around.
    """
    squared_norm = 0.0
    for start in range(0, gradient.size, _CHUNK):
        squared_norm += float(np.add.reduce(np.square(gradient[start : start + _CHUNK], dtype=np.float64)))
    checksum = int(np.add.reduce(gradient.view(np.uint32), dtype=np.uint64))
    return SumReport(group=group, squared_norm=squared_norm, checksum=checksum)
