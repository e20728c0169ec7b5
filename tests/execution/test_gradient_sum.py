"""Sums of gradients begin one by one while backward still runs, in one order on all nodes."""

import threading

import numpy as np
import pytest

from oobleck_jax.execution import layout
from oobleck_jax.execution.fabric import Ranks, Vector
from oobleck_jax.execution.gradient_sum import GradientSums, report
from oobleck_jax.execution.layout import Bucket, Group, buckets_of
from oobleck_jax.execution.patience import Patience
from oobleck_jax.planning.plan import NodeId
from tests.execution.thread_cluster import plan_of


NODES = tuple(NodeId(number) for number in range(3))
SIZES = {"layer-000": 3, "layer-001": 4, "layer-002": 4, "tied": 5}


class Echo:
    """A fabric whose other members all have zeros."""

    ended_s = 1.0

    def __init__(self) -> None:
        self.asked: list[tuple[Ranks, int]] = []
        self._vectors: list[Vector] = []

    def sum(self, ranks: Ranks, length: int, vector: Vector, channel: int = 0) -> "Echo":
        self.asked.append((ranks, length))
        handle = Echo()
        handle._vectors = [vector]
        return handle

    def wait(self, limit_s: float, abandoned: threading.Event) -> np.ndarray:
        return self._vectors[0]()


def row(group: str, value: float) -> np.ndarray:
    return np.full(SIZES[group], value, np.float32)


def test_a_sum_begins_when_its_bucket_is_complete_and_those_before_it_have_begun() -> None:
    both, alone = NODES[:2], NODES[:1]
    buckets = (
        Bucket(groups=("layer-002",), holders=both, size=4),
        Bucket(groups=("layer-001",), holders=alone, size=4),
        Bucket(groups=("layer-000", "tied"), holders=both, size=8),
        Bucket(groups=("elsewhere",), holders=NODES[2:], size=4),
    )
    fabric = Echo()
    sums = GradientSums(
        buckets,
        sizes=SIZES,
        num_rows={"layer-000": 1, "layer-001": 1, "layer-002": 1, "tied": 2},
        node=NODES[0],
        ranks={NODES[0]: 0, NODES[1]: 1},
        fabric=fabric,  # pyright: ignore[reportArgumentType]
    )
    sums.add("tied", lambda: row("tied", 1))
    assert fabric.asked == []
    sums.add("layer-002", lambda: row("layer-002", 2))
    assert fabric.asked == [((0, 1), 4)]
    sums.add("layer-000", lambda: row("layer-000", 3))
    sums.add("tied", lambda: row("tied", 4))
    assert len(fabric.asked) == 1  # complete, but it is not the turn of the bucket
    sums.add("layer-001", lambda: row("layer-001", 5))
    assert fabric.asked == [((0, 1), 4), ((0, 1), 8)]
    patience = Patience(abandoned=threading.Event(), limit_s=1.0, on_waiting=lambda node: None)
    ran: list[tuple[float, float]] = []
    totals, reports = sums.finish(patience, lambda began_s, ended_s: ran.append((began_s, ended_s)))
    expected = {"layer-000": 3.0, "layer-001": 5.0, "layer-002": 2.0, "tied": 5.0}
    assert {group: total.tolist() for group, total in totals.items()} == {
        group: [value] * SIZES[group] for group, value in expected.items()
    }
    assert [(item.group, item.squared_norm) for item in reports] == [
        (group, value**2 * SIZES[group]) for group, value in expected.items()
    ]
    assert len(ran) == 2  # a bucket that nobody else holds is no sum over nodes


@pytest.mark.parametrize("bucket_size", [1, 8, 1000])
def test_buckets_hold_every_group_once_and_follow_backward(monkeypatch: pytest.MonkeyPatch, bucket_size: int) -> None:
    monkeypatch.setattr(layout, "_BUCKET_SIZE", bucket_size)
    groups = [Group(name=f"layer-{number:03d}", layers=(number,)) for number in range(6)]
    groups.append(Group(name="tied", layers=(0, 5), attribute="embedding"))
    plan = plan_of(([3, 3], 4), ([2, 2, 2], 4))
    buckets = buckets_of(groups, {group.name: 4 for group in groups}, plan)
    assert sorted(name for bucket in buckets for name in bucket.groups) == sorted(group.name for group in groups)
    lowest = {group.name: group.layers[0] for group in groups}
    ends = [min(lowest[name] for name in bucket.groups) for bucket in buckets]
    assert ends == sorted(ends, reverse=True)
    for bucket in buckets:
        is_large = 4 * len(bucket.groups) >= bucket_size
        assert is_large or [other.holders for other in buckets].count(bucket.holders) == 1
    if bucket_size == 1:
        assert all(len(bucket.groups) == 1 for bucket in buckets)


def test_a_report_sees_signs_that_changed_in_pairs():
    """Squares do not, and a sum of wider words would drop the sign bits of every second number."""
    gradient = np.linspace(-1, 2, 70_001, dtype=np.float32)
    for changed in (slice(1, None, 2), slice(0, None, 2), slice(3, 7, 2), slice(70_000, None)):
        other = gradient.copy()
        other[changed] *= -1
        assert report("wte", other).checksum != report("wte", gradient).checksum


def test_a_report_does_not_depend_on_where_the_gradient_lies():
    whole = np.arange(100_001, dtype=np.float32)
    assert report("wte", whole[1:]) == report("wte", whole[1:].copy())
    assert report("none", whole[:0]).checksum == 0
    assert report("wte", whole).squared_norm == float(np.sum(np.square(np.arange(100_001.0))))
