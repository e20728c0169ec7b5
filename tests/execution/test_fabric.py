"""A fabric of one node: vectors are taken apart and put together. Of several: test_transport_processes.py."""

import threading
from functools import partial

import numpy as np
import pytest

from oobleck_jax.execution import fabric as fabric_module
from oobleck_jax.execution.fabric import GlooFabric
from oobleck_jax.execution.jaxlib_private import start_coordination_service


LIMIT_S = 60.0


@pytest.mark.process
def test_a_long_vector_is_summed_in_parts_by_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_module, "_LONGEST", 1000)
    lengths = (7, 1000, 2500, 3000)
    abandoned = threading.Event()
    service = start_coordination_service("127.0.0.1:0", 1)
    fabric = GlooFabric.connect(service.address, rank=0, num_nodes=1, hostname="127.0.0.1", limit_s=LIMIT_S)
    try:
        fabric.warm([((0,), length) for length in lengths], LIMIT_S, abandoned)
        (channel,) = fabric._channels
        assert sorted(channel._programs) == [((0,), 7), ((0,), 1000)]
        fabric.detach()
        for length in lengths:
            vector = np.arange(length, dtype=np.float32)
            total = fabric.sum((0,), vector.size, partial(np.copy, vector)).wait(LIMIT_S, abandoned)
            np.testing.assert_array_equal(total, vector)
    finally:
        fabric.close()
        service.close()
