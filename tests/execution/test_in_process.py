"""Sums between threads: what the fabric of real processes promises holds for them too."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np
import pytest

from oobleck_jax.errors import Abandoned, PeerLost, Stalled
from oobleck_jax.execution.in_process import InProcessSums


LIMIT_S = 20.0


@pytest.fixture
def never() -> threading.Event:
    return threading.Event()


def vector(rank: int, length: int = 1000) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(length, dtype=np.float32)


def test_all_members_get_the_same_bits(never: threading.Event) -> None:
    sums = InProcessSums(jax.devices()[:4])
    ranks = (0, 1, 3)

    def member(rank: int) -> list[bytes]:
        fabric = sums.fabric(rank)
        fabric.warm([(ranks, 1000), ((0, 2), 5)][:1], LIMIT_S, never)
        fabric.detach()
        handles = [fabric.sum(ranks, 1000, partial(vector, rank + 10 * step)) for step in range(5)]
        totals = [handle.wait(LIMIT_S, never) for handle in handles]
        assert not any(total.flags.writeable for total in totals)
        return [total.tobytes() for total in totals]

    with ThreadPoolExecutor(len(ranks)) as pool:
        first, *others = pool.map(member, ranks)
    assert all(other == first for other in others)
    for step, total in enumerate(first):
        expected = sum(vector(rank + 10 * step) for rank in ranks)
        np.testing.assert_allclose(np.frombuffer(total, np.float32), expected, atol=1e-5)


def test_sums_of_different_members_and_channels_do_not_mix(never: threading.Event) -> None:
    sums = InProcessSums(jax.devices()[:3])
    fabrics = [sums.fabric(rank) for rank in range(3)]
    one = fabrics[0].sum((0, 1), 1000, partial(vector, 0), channel=0)
    two = fabrics[0].sum((0, 1), 1000, partial(vector, 1), channel=1)
    three = fabrics[0].sum((0, 2), 1000, partial(vector, 2))
    fabrics[2].sum((0, 2), 1000, partial(vector, 0))
    fabrics[1].sum((0, 1), 1000, partial(vector, 0), channel=1)
    fabrics[1].sum((0, 1), 1000, partial(vector, 0), channel=0)
    np.testing.assert_array_equal(one.wait(LIMIT_S, never), 2 * vector(0))
    np.testing.assert_array_equal(two.wait(LIMIT_S, never), vector(0) + vector(1))
    np.testing.assert_array_equal(three.wait(LIMIT_S, never), vector(0) + vector(2))


def test_a_sum_that_a_member_does_not_join_ends(never: threading.Event) -> None:
    sums = InProcessSums(jax.devices()[:2])
    handle = sums.fabric(0).sum((0, 1), 1000, partial(vector, 0))
    with pytest.raises(Stalled, match="ranks"):
        handle.wait(0.05, never)
    over = threading.Event()
    over.set()
    with pytest.raises(Abandoned):
        handle.wait(LIMIT_S, over)
    sums.kill(1)
    with pytest.raises(PeerLost):
        handle.wait(LIMIT_S, never)
    with pytest.raises(PeerLost):  # and so does a sum that begins after the death
        sums.fabric(0).sum((0, 1), 1000, partial(vector, 0), channel=1).wait(LIMIT_S, never)
