"""Link and fabric for tests in which N nodes are N threads of one process, each with virtual CPU devices of its own.

Towards their callers they behave as the real ones do: transfers are keyed, sums are the same to the bit on all members,
every wait has a limit and can be abandoned, and who depends on a node that was declared dead gets `PeerLost`.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from oobleck_jax.errors import PeerLost
from oobleck_jax.execution.fabric import Ranks, SumHandle, Vector
from oobleck_jax.execution.jaxlib_private import is_ready
from oobleck_jax.execution.link import Address, LinkKey, Pull
from oobleck_jax.execution.waiting import wait_event, wait_ready


# ------------------------------------------------------------------------------------------------------- link


class InProcessHub:
    """What all links of the process share: the offers and the pulls that wait for one, by producer and key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offers: dict[tuple[Address, int], list[jax.Array]] = {}
        self._pulls: dict[tuple[Address, int], _InProcessPull] = {}
        self._alive: set[Address] = set()
        self._num_links = 0

    def link(self) -> "InProcessLink":
        """Make the link of one more node."""
        with self._lock:
            address = f"in-process:{self._num_links}"
            self._num_links += 1
            self._alive.add(address)
        return InProcessLink(self, address)

    def kill(self, address: Address) -> None:
        """Let a node die: its offers are gone, and pulls from it end in `PeerLost`."""
        with self._lock:
            self._alive.discard(address)
            self._offers = {place: arrays for place, arrays in self._offers.items() if place[0] != address}
            orphans = [place for place in self._pulls if place[0] == address]
            for place in orphans:
                self._pulls.pop(place).end()

    def put(self, producer: Address, packed: int, arrays: list[jax.Array]) -> None:
        with self._lock:
            pull = self._pulls.pop((producer, packed), None)
            if pull is None:
                self._offers[producer, packed] = arrays
        if pull is not None:
            pull.fill(arrays)

    def take(self, producer: Address, packed: int, pull: "_InProcessPull") -> None:
        with self._lock:
            if producer not in self._alive:
                raise PeerLost(f"nobody listens at {producer}", what=f"connection to {producer}")
            arrays = self._offers.pop((producer, packed), None)
            if arrays is None:
                self._pulls[producer, packed] = pull
        if arrays is not None:
            pull.fill(arrays)

    def drop(self, producer: Address, packed: set[int]) -> None:
        with self._lock:
            for key in packed:
                self._offers.pop((producer, key), None)

    def num_offers(self, producer: Address) -> int:
        """Return how many offers of a node wait for their consumer."""
        with self._lock:
            return sum(place[0] == producer for place in self._offers)


class InProcessLink:
    """A `Link` between threads."""

    def __init__(self, hub: InProcessHub, address: Address) -> None:
        self._hub = hub
        self._address = address
        self._offered: set[int] = set()

    @property
    def address(self) -> Address:
        return self._address

    def offer(self, key: LinkKey, arrays: Sequence[jax.Array]) -> None:
        packed = int(key)
        assert packed not in self._offered, f"{key} is on offer already"
        self._offered.add(packed)
        self._hub.put(self._address, packed, list(arrays))

    def pull(self, address: Address, key: LinkKey, specs: Sequence[jax.ShapeDtypeStruct]) -> Pull:
        pull = _InProcessPull(specs, what=f"pull of {key} from {address}")
        self._hub.take(address, int(key), pull)
        return pull

    def settle(self) -> None:
        self._offered.clear()

    def drain(self) -> None:
        self._hub.drop(self._address, self._offered)
        self._offered.clear()

    def forget(self, address: Address) -> None:
        pass


class _InProcessPull:
    def __init__(self, specs: Sequence[jax.ShapeDtypeStruct], *, what: str) -> None:
        self._specs = tuple(specs)
        self._what = what
        self._done = threading.Event()
        self._arrays: list[jax.Array] | None = None  # None when done: the producer died

    def fill(self, arrays: list[jax.Array]) -> None:
        expected = [(spec.shape, spec.dtype) for spec in self._specs]
        assert [(array.shape, array.dtype) for array in arrays] == expected, f"{self._what}: {arrays} is not {expected}"
        self._arrays = [jax.device_put(array, spec.sharding) for array, spec in zip(arrays, self._specs, strict=True)]
        self._done.set()

    def end(self) -> None:
        self._done.set()

    def is_ready(self) -> bool:
        return self._done.is_set() and all(is_ready(array) for array in self._arrays or ())

    def wait(self, limit_s: float, abandoned: threading.Event) -> list[jax.Array]:
        wait_event(self._done, limit_s=limit_s, abandoned=abandoned, what=self._what)
        if self._arrays is None:
            raise PeerLost(f"{self._what}: the producer is gone", what=self._what)
        wait_ready(self._arrays, limit_s=limit_s, abandoned=abandoned, what=self._what)
        return self._arrays


# ----------------------------------------------------------------------------------------------------- fabric


class InProcessSums:
    """What the fabrics of one generation share: the sums that are not complete yet."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        """Make the meeting place of a generation; `devices[rank]` is a device of each member."""
        self._devices = tuple(devices)
        self._lock = threading.Lock()
        self._open: dict[tuple[Ranks, int, int], _InProcessSum] = {}
        self._programs: dict[tuple[Ranks, int], tuple[NamedSharding, Any]] = {}
        self._dead: set[int] = set()

    def fabric(self, rank: int) -> "InProcessFabric":
        """Make the fabric of one member."""
        return InProcessFabric(self, rank)

    def kill(self, rank: int) -> None:
        """Let a member die: sums that it has not contributed to end in `PeerLost`."""
        with self._lock:
            self._dead.add(rank)
            orphans = [place for place, pending in self._open.items() if rank in place[0] and not pending.has(rank)]
            for place in orphans:
                self._open.pop(place).end()

    def contribute(self, ranks: Ranks, channel: int, count: int, rank: int, vector: np.ndarray) -> "_InProcessSum":
        """Add one member's vector to its `count`-th sum over these ranks; the last one to come adds them up."""
        place = (ranks, channel, count)
        with self._lock:
            pending = self._open.setdefault(place, _InProcessSum(ranks, vector.size))
            pending.vectors[rank] = vector
            is_complete = len(pending.vectors) == len(ranks)
            if is_complete:
                del self._open[place]
            elif any(member in self._dead and not pending.has(member) for member in ranks):
                self._open.pop(place).end()
        if is_complete:
            pending.fill(self._add(ranks, pending.vectors))
        return pending

    def _add(self, ranks: Ranks, vectors: dict[int, np.ndarray]) -> np.ndarray:
        length = vectors[ranks[0]].size
        sharding, program = self._program(ranks, length)
        parts = [jax.device_put(vectors[rank][None], self._devices[rank]) for rank in ranks]
        return np.asarray(program(jax.make_array_from_single_device_arrays((len(ranks), length), sharding, parts)))

    def _program(self, ranks: Ranks, length: int) -> tuple[NamedSharding, Any]:
        with self._lock:
            found = self._programs.get((ranks, length))
            if found is None:
                mesh = Mesh(np.array([self._devices[rank] for rank in ranks]), ("member",))
                sharding = NamedSharding(mesh, PartitionSpec("member"))
                spec = jax.ShapeDtypeStruct((len(ranks), length), np.float32, sharding=sharding)
                add = jax.jit(lambda stacked: stacked.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec()))
                found = self._programs[ranks, length] = (sharding, add.lower(spec).compile())
            return found


class InProcessFabric:
    """A `Fabric` between threads."""

    def __init__(self, sums: InProcessSums, rank: int) -> None:
        self._sums: InProcessSums | None = sums
        self._rank = rank
        self._counts: dict[tuple[Ranks, int], int] = {}

    def warm(self, sums: Sequence[tuple[Ranks, int]], limit_s: float, abandoned: threading.Event) -> None:
        for ranks, length in sums:
            if self._rank in ranks:
                self.sum(ranks, length, lambda length=length: np.zeros(length, np.float32)).wait(limit_s, abandoned)

    def detach(self) -> None:
        pass

    def sum(self, ranks: Ranks, length: int, vector: Vector, channel: int = 0) -> SumHandle:
        assert self._sums is not None, "the fabric is closed"
        assert self._rank in ranks, f"rank {self._rank} takes no part in a sum over {ranks}"
        count = self._counts.get((ranks, channel), 0)
        self._counts[ranks, channel] = count + 1
        return self._sums.contribute(ranks, channel, count, self._rank, vector())

    def drop(self) -> None:
        self._sums = None


class _InProcessSum:
    def __init__(self, ranks: Ranks, length: int) -> None:
        self.vectors: dict[int, np.ndarray] = {}
        self.ended_s = 0.0
        self._what = f"sum of {length} numbers over ranks {ranks}"
        self._done = threading.Event()
        self._total: np.ndarray | None = None  # None when done: a member died

    def has(self, rank: int) -> bool:
        return rank in self.vectors

    def fill(self, total: np.ndarray) -> None:
        self._total, self.ended_s = total, time.monotonic()
        self._done.set()

    def end(self) -> None:
        self._done.set()

    def wait(self, limit_s: float, abandoned: threading.Event) -> Float[np.ndarray, " n"]:
        wait_event(self._done, limit_s=limit_s, abandoned=abandoned, what=self._what)
        if self._total is None:
            raise PeerLost(f"{self._what}: a member is gone", what=self._what)
        return self._total
