"""One node of the transport tests, in a process of its own: does what the test tells it, a JSON line at a time.

Each command gets one answer: {"value": ...}, or {"error": type, "message": ...}; both with "seconds". The command
"abandon" is obeyed at once, while another one is under way, and gets no answer.
"""

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from oobleck_jax.errors import OobleckError
from oobleck_jax.execution.fabric import GlooFabric
from oobleck_jax.execution.link import LinkKey, Payload, TransferLink


class Node:
    """The home, the link and the fabric of this process."""

    def __init__(self) -> None:
        self.abandoned = threading.Event()
        self._link = TransferLink()
        self._fabric: GlooFabric | None = None
        # The home: an array and a compiled program that must outlive every fabric.
        self._weights = jnp.arange(1000, dtype=jnp.float32)
        self._grow = jax.jit(lambda weights: weights + 1).lower(self._weights).compile()

    def grow(self) -> float:
        self._weights = self._grow(self._weights)
        return float(self._weights[0])

    def usage(self) -> dict[str, int]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "rss_mb": pages * 4096 >> 20,
            "num_threads": len(os.listdir("/proc/self/task")),
            "num_files": len(os.listdir("/proc/self/fd")),
        }

    def reset(self) -> None:
        self.close()
        self.drain()
        self.abandoned.clear()

    # -- fabric

    def connect(
        self, address: str, rank: int, num_nodes: int, sums: list[tuple[list[int], int]], limit_s: float
    ) -> None:
        self.abandoned.clear()
        self._fabric = GlooFabric.connect(
            address,
            rank=rank,
            num_nodes=num_nodes,
            hostname="127.0.0.1",
            limit_s=limit_s,
            abandoned=self.abandoned,
        )
        self._fabric.warm([(tuple(ranks), length) for ranks, length in sums], limit_s, self.abandoned)
        self._fabric.detach()

    def sum(self, ranks: list[int], length: int, seed: int, limit_s: float, repeats: int = 1) -> str:
        """Return the bytes of the sum of one random vector per member, in hex (of the last of the repeats)."""
        assert self._fabric is not None
        vector = np.random.default_rng(seed).standard_normal(length, dtype=np.float32)
        for _ in range(repeats):
            total = self._fabric.sum(tuple(ranks), vector.size, lambda: vector).wait(limit_s, self.abandoned)
        return total[:1000].tobytes().hex()

    def close(self) -> None:
        fabric, self._fabric = self._fabric, None
        if fabric is not None:
            fabric.close()

    # -- link

    def address(self) -> str:
        return self._link.address

    def offer(self, item: int, num_bytes: int) -> None:
        self._link.offer(_key(item), [jnp.full(num_bytes // 4, float(item), jnp.float32)])

    def pull(self, address: str, item: int, num_bytes: int, limit_s: float) -> list[float]:
        """Return the first and the last element of what came."""
        sharding = SingleDeviceSharding(jax.local_devices()[0])
        spec = jax.ShapeDtypeStruct((num_bytes // 4,), jnp.float32, sharding=sharding)
        (array,) = self._link.pull(address, _key(item), [spec]).wait(limit_s, self.abandoned)
        return [float(array[0]), float(array[-1])]

    def drain(self) -> None:
        self._link.drain()


def _key(item: int) -> LinkKey:
    return LinkKey(generation=1, step=1, payload=Payload.ACTIVATION, consumer=0, item=item)


def main() -> None:
    node = Node()
    commands: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "abandon":
                node.abandoned.set()
            else:
                commands.put(command)
        os._exit(0)  # the test is over

    threading.Thread(target=listen, daemon=True).start()
    print(json.dumps({"value": "up", "seconds": 0.0}), flush=True)
    while True:
        command = commands.get()
        began_s = time.monotonic()
        try:
            answer = {"value": getattr(node, command.pop("do"))(**command)}
        except OobleckError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer | {"seconds": time.monotonic() - began_s}), flush=True)


if __name__ == "__main__":
    main()
