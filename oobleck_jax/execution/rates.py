"""How fast two node processes of this machine exchange activations and sum gradients.

The parent measures; the peer, a second process, offers arrays and takes part in the sums. While its arrays are fetched
it computes, as a stage goes on with the next microbatch: where a node has one core, JAX sends nothing before the
program that runs there has ended.

    python -m oobleck_jax.execution.rates ADDRESS_OF_THE_COORDINATION_SERVICE SECONDS_OF_A_PROGRAM [CORE]
"""

import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from oobleck_jax.errors import PeerLost
from oobleck_jax.execution.fabric import GlooFabric
from oobleck_jax.execution.jaxlib_private import start_coordination_service
from oobleck_jax.execution.link import LinkKey, Payload, TransferLink
from oobleck_jax.planning.profile import Rate


_LIMIT_S = 60.0
_SMALL, _LARGE = 1 << 10, 1 << 20  # float32 numbers
_REPETITIONS = 16
_WIDTH, _SOME = 256, 10  # of the matrices that are multiplied meanwhile; how many products are timed
_SUMS = tuple(((0, 1), size) for size in (_SMALL, _LARGE))


def measure_rates(*, program_s: float, peer_core: int | None = None) -> tuple[Rate, Rate]:
    """Return the rates of the link and of sums between two processes of this machine.

    Args:
        program_s: what a program takes that the second process computes meanwhile.
        peer_core: where the second process runs; None: where this one does.

    Raises:
        PeerLost, Stalled: the second process ended, or took more than a minute.
    """
    service = start_coordination_service("127.0.0.1:0", 2)
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        service.address,
        str(program_s),
        *([] if peer_core is None else [str(peer_core)]),
    ]
    peer = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    watchdog = threading.Timer(_LIMIT_S, peer.kill)  # so that reading its output ends
    watchdog.start()
    try:
        assert peer.stdout is not None
        # Gloo writes to standard output, too: the peer's own line is the one with the address of its link.
        address = next((line.split()[1] for line in peer.stdout if line.startswith("link ")), None)
        if address is None:
            raise PeerLost("the second process ended before it offered anything", what="address of its link")
        link_s = _pull_times(address)
        print("", file=peer.stdin, flush=True)
        fabric = _connect(service.address, rank=0)
        sum_s = {size: _median_s(lambda size=size: _sum(fabric, size)) for size in (_SMALL, _LARGE)}
        fabric.close()
    finally:
        watchdog.cancel()
        peer.kill()
        peer.communicate()
        service.close()
    # A ring of two moves the vector once: half of it in each of two turns.
    return _rate(link_s, num_bytes=4), _rate({size: seconds / 2 for size, seconds in sum_s.items()}, num_bytes=2)


def _rate(seconds: dict[int, float], *, num_bytes: int) -> Rate:
    """Return the line through two measurements; `num_bytes` of each number travel."""
    slope = max(seconds[_LARGE] - seconds[_SMALL], 1e-9) / (num_bytes * (_LARGE - _SMALL))
    latency_s = max(seconds[_SMALL] - slope * num_bytes * _SMALL, 0.0)
    return Rate(bytes_per_s=1 / slope, latency_s=latency_s)


def _pull_times(address: str) -> dict[int, float]:
    link = TransferLink()
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    never = threading.Event()
    times: dict[int, list[float]] = {_SMALL: [], _LARGE: []}
    for size, item in _offers():
        began_s = time.perf_counter()
        link.pull(address, _key(item), [jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding)]).wait(
            _LIMIT_S, never
        )
        times[size].append(time.perf_counter() - began_s)
    return {size: statistics.median(found) for size, found in times.items()}


@contextlib.contextmanager
def _computing(program_s: float) -> Iterator[None]:
    """Compute meanwhile, in programs that take so long."""
    program = jax.jit(lambda x, num_products: jax.lax.fori_loop(0, num_products, lambda _, y: y @ x, x))
    x = jnp.eye(_WIDTH)
    product_s = _median_s(lambda: program(x, _SOME).block_until_ready()) / _SOME
    num_products = max(round(program_s / product_s), 1)
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            program(x, num_products).block_until_ready()

    thread = threading.Thread(target=compute, name="computing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _offers() -> list[tuple[int, int]]:
    """Return (size, item) of every offer of the peer."""
    return [(size, place * 100 + turn) for place, size in enumerate((_SMALL, _LARGE)) for turn in range(_REPETITIONS)]


def _key(item: int) -> LinkKey:
    return LinkKey(generation=0, step=0, payload=Payload.ACTIVATION, consumer=0, item=item)


def _connect(address: str, *, rank: int) -> GlooFabric:
    fabric = GlooFabric.connect(address, rank=rank, num_nodes=2, hostname="127.0.0.1", limit_s=_LIMIT_S)
    fabric.warm(_SUMS, _LIMIT_S, threading.Event())
    fabric.detach()
    return fabric


def _sum(fabric: GlooFabric, size: int) -> None:
    # Memory that has been written: all that was not is one page of zeros, which no cache loses.
    fabric.sum((0, 1), size, lambda: np.ones(size, np.float32)).wait(_LIMIT_S, threading.Event())


def _median_s(call: Callable[[], None]) -> float:
    times_s: list[float] = []
    for _ in range(_REPETITIONS):
        began_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s)


def _be_peer(address: str, program_s: float) -> None:
    link = TransferLink()
    for size, item in _offers():
        link.offer(_key(item), [jnp.zeros(size, jnp.float32)])
    with _computing(program_s):
        print("link", link.address, flush=True)  # noqa: T201
        sys.stdin.readline()  # until the parent has them
    fabric = _connect(address, rank=1)
    for size in (_SMALL, _LARGE):
        for _ in range(_REPETITIONS):
            _sum(fabric, size)
    sys.stdin.read()  # until the parent has had enough


if __name__ == "__main__":
    if len(sys.argv) > 3:
        os.sched_setaffinity(0, {int(sys.argv[3])})
    _be_peer(sys.argv[1], float(sys.argv[2]))
