"""The fabric: sums over nodes, made anew for each generation and thrown away with it.

A fabric is an extra CPU client beside the home runtime, whose devices span the nodes of the generation; XLA's
collectives run over Gloo. A sum is an ordinary jitted all-reduce over a mesh of one fabric device per member.

    connect   meet through the coordination service; make the client        all nodes together
    warm      compile and run each sum once, which makes the communicators   all nodes together, in one order
    detach    leave the coordination service, whose end can now harm nobody
    sum ...   until a node dies
    drop      leave everything, however stuck

A CPU program as cheap as a sum runs inside the thread that calls it, and a collective then blocks that thread, for ever
if the wrong node dies: in Gloo's ring only the neighbours of the dead node get an error. So each channel has a thread
and a device of its own, and nobody waits for such a thread but by `SumHandle.wait`. A thread that is stuck when the
fabric is dropped ends when its collective does (`XLA_FLAGS=--xla_cpu_collective_timeout_seconds=N` bounds that), and
what it holds is freed then.
"""

import contextlib
import gc
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from oobleck_jax.execution.jaxlib_private import CoordinationClient, make_fabric_client
from oobleck_jax.execution.waiting import raise_transport_error, wait_event


Ranks: TypeAlias = tuple[int, ...]  # members of a sum, ascending positions in the fabric
Vector: TypeAlias = Callable[[], Float[np.ndarray, " n"]]

_AXIS = "member"
# Numbers that a program adds up at once. Longer vectors are summed part by part, so that to try the program is cheap,
# and its communicator and its memory are there before the first step: 25 MB in parts take no longer than as a whole.
_LONGEST = 1 << 20
_NUM_TRIES, _TRY_AGAIN_S = 20, 0.25  # to free what is stuck
_JOIN_LIMIT_S = 0.02  # an idle channel's thread ends at once, and a stuck one not at all

_dropped: list["weakref.ref[Any]"] = []  # clients of fabrics that were dropped
_dropped_lock = threading.Lock()


class SumHandle(Protocol):
    """A sum on its way.

    Attributes:
        ended_s: when it was there (`time.monotonic`); 0.0: not yet.
    """

    ended_s: float

    def wait(self, limit_s: float, abandoned: threading.Event) -> Float[np.ndarray, " n"]:
        """Return the sum, read-only and the same to the bit on all members. It may be waited for again.

        Raises:
            Abandoned: `abandoned` was set.
            PeerLost: a member is gone.
            Stalled: it took more than `limit_s` seconds.
        """
        ...


class Fabric(Protocol):
    """Sums over the nodes of one generation."""

    def warm(self, sums: Sequence[tuple[Ranks, int]], limit_s: float, abandoned: threading.Event) -> None:
        """Get every sum ready that will be asked for. All nodes of the generation call this with the same argument.

        Args:
            sums: ranks and length of each; those without this node are skipped.

        Raises:
            Abandoned, PeerLost, Stalled: as `SumHandle.wait`.
        """
        ...

    def detach(self) -> None:
        """Become independent of the coordination service. Comes after `warm`."""
        ...

    def sum(self, ranks: Ranks, length: int, vector: Vector, channel: int = 0) -> SumHandle:
        """Begin to sum the vectors of the given ranks. Returns at once.

        The sums of a channel run one after the other, so all members must ask for them in the same order.

        Args:
            ranks: of all members.
            length: of each vector.
            vector: gives this member's, which must not change before the sum is there. Called when it is its turn, and
                may wait until the vector has been computed.
        """
        ...

    def drop(self) -> None:
        """Drop the fabric, at once. Sums on their way are lost, and results hold on to it: copy what should stay."""
        ...


class GlooFabric:
    """A `Fabric` of CPU devices and Gloo over TCP."""

    def __init__(self, *, coordination: CoordinationClient, client: Any, rank: int, channels: int) -> None:
        """Take over a connected client; use `connect`."""
        self._coordination: CoordinationClient | None = coordination
        self._client = weakref.ref(client)
        self._rank = rank
        devices: dict[int, list[jax.Device]] = {}
        for device in sorted(client.devices(), key=lambda device: device.id):
            devices.setdefault(device.process_index, []).append(device)
        self._channels = tuple(
            _Channel({member: owned[number] for member, owned in devices.items()}, rank, f"fabric-{number}")
            for number in range(channels)
        )

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        rank: int,
        num_nodes: int,
        hostname: str,
        limit_s: float,
        abandoned: threading.Event | None = None,
        channels: int = 1,
    ) -> "GlooFabric":
        """Meet the other nodes of the generation.

        Args:
            address: host:port of the generation's coordination service.
            rank: position of this node among the `num_nodes`.
            hostname: name or address of this host under which the others reach it.
            channels: how many sums can run at a time.

        Raises:
            Abandoned, PeerLost, Stalled: as `SumHandle.wait`.
        """
        abandoned = abandoned or threading.Event()
        coordination = CoordinationClient(address, rank)

        def meet() -> Any:
            coordination.connect()
            return make_fabric_client(
                coordination, rank=rank, num_nodes=num_nodes, hostname=hostname, channels=channels
            )

        meeting = _Task(meet, what=f"meeting of {num_nodes} nodes at {address}")
        threading.Thread(target=meeting.run, name="fabric-connect", daemon=True).start()
        try:
            client = meeting.wait(limit_s, abandoned)
        except BaseException:
            # Ends the thread, unless it waits in `connect`: nothing ends that but a latecomer, who can do no harm then.
            coordination.shutdown()
            raise
        return cls(coordination=coordination, client=client, rank=rank, channels=channels)

    def warm(self, sums: Sequence[tuple[Ranks, int]], limit_s: float, abandoned: threading.Event) -> None:
        deadline_s = time.monotonic() + limit_s
        mine = dict.fromkeys((ranks, min(length, _LONGEST)) for ranks, length in sums if self._rank in ranks)
        for channel in self._channels:
            for ranks, length in mine:
                channel.warm(ranks, length).wait(deadline_s - time.monotonic(), abandoned)

    def detach(self) -> None:
        coordination, self._coordination = self._coordination, None
        if coordination is not None:
            coordination.shutdown()

    def sum(self, ranks: Ranks, length: int, vector: Vector, channel: int = 0) -> SumHandle:
        return self._channels[channel].sum(ranks, length, vector)

    def close(self) -> None:
        """Drop the fabric and free what it had."""
        channels = self._channels
        self.drop()
        for channel in channels:
            channel.join(_JOIN_LIMIT_S)
        del channels
        free_dropped_fabrics()

    def drop(self) -> None:
        self.detach()
        channels, self._channels = self._channels, ()
        for channel in channels:
            channel.stop()
        with _dropped_lock:
            _dropped.append(self._client)


def free_dropped_fabrics() -> bool:
    """Free the threads, descriptors and memory of fabrics that were dropped.

    Returns:
        False if something still holds one: a thread that is stuck in a collective, until the peer has freed its own
        fabric; or another thread was collecting just now.

    JAX's caches of shardings and the like refer to a client (the home's programs are compiled ahead of time and are not
    touched by clearing them), and a client and its devices refer to each other. The collection takes 100 ms in a
    process that has imported jax, and 10 ms in one that has frozen what it imported (`gc.freeze`).
    """
    jax.clear_caches()
    gc.collect()
    with _dropped_lock:
        dropped = list(_dropped)
    freed = [client for client in dropped if client() is None]  # without the lock: the last reference may be here
    with _dropped_lock:
        _dropped[:] = [client for client in _dropped if client not in freed]
        return not _dropped


def free_stuck_fabrics() -> Iterator[None]:
    """Try again, piece by piece and for some seconds: two nodes may each wait for what the other frees."""
    for _ in range(_NUM_TRIES):
        time.sleep(_TRY_AGAIN_S)
        yield
        if free_dropped_fabrics():
            return


class _Channel:
    """One device of each member, and the thread that runs the sums over them."""

    def __init__(self, devices: dict[int, jax.Device], rank: int, name: str) -> None:
        self._devices = devices  # by member
        self._rank = rank
        self._programs: dict[tuple[Ranks, int], tuple[NamedSharding, Any]] = {}
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def warm(self, ranks: Ranks, length: int) -> "_Task":
        def get_ready() -> None:
            self._sum_part(ranks, np.zeros(length, np.float32))

        return self._submit(get_ready, what=f"first sum of {length} numbers over ranks {ranks}")

    def sum(self, ranks: Ranks, length: int, vector: Vector) -> "_Task":
        assert self._rank in ranks, f"rank {self._rank} takes no part in a sum over {ranks}"
        assert (ranks, min(length, _LONGEST)) in self._programs, (
            f"the sum of {length} numbers over {ranks} was not warmed"
        )
        return self._submit(lambda: self._sum(ranks, vector()), what=f"sum of {length} numbers over ranks {ranks}")

    def _submit(self, call: Callable[[], Any], *, what: str) -> "_Task":
        task = _Task(call, what=what)
        self._tasks.put(task)
        return task

    def stop(self) -> None:
        """Let the thread end after the sum that it is in; what it has not begun would hold on to the fabric."""
        self._stopped = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        self._tasks.put(None)

    def join(self, limit_s: float) -> None:
        self._thread.join(limit_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None and not self._stopped:
            task.run()
            del task  # the thread must not hold on to the last result

    def _sum(self, ranks: Ranks, vector: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        assert vector.dtype == np.float32, f"sums are of float32, not {vector.dtype}"
        if vector.size <= _LONGEST:
            return self._sum_part(ranks, vector)
        total = np.empty_like(vector)
        for start in range(0, vector.size, _LONGEST):
            part = vector[start : start + _LONGEST]
            missing = _LONGEST - part.size
            whole = np.pad(part, (0, missing)) if missing else part
            total[start : start + part.size] = self._sum_part(ranks, whole)[: part.size]
        return total

    def _sum_part(self, ranks: Ranks, vector: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        sharding, program = self._program(ranks, vector.size)
        mine = jax.device_put(vector, self._devices[self._rank])
        whole = jax.make_array_from_single_device_arrays((len(ranks) * vector.size,), sharding, [mine])
        return np.asarray(program(whole).addressable_data(0))

    def _program(self, ranks: Ranks, length: int) -> tuple[NamedSharding, Any]:
        found = self._programs.get((ranks, length))
        if found is None:
            mesh = Mesh(np.array([self._devices[member] for member in ranks]), (_AXIS,))
            sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
            add = jax.shard_map(_add, mesh=mesh, in_specs=PartitionSpec(_AXIS), out_specs=PartitionSpec())
            spec = jax.ShapeDtypeStruct((len(ranks) * length,), jnp.float32, sharding=sharding)
            found = self._programs[ranks, length] = (sharding, jax.jit(add).lower(spec).compile())
        return found


def _add(vector: jax.Array) -> jax.Array:
    return jax.lax.psum(vector, _AXIS)


class _Task:
    """A call that a thread of its own runs, and its outcome."""

    def __init__(self, call: Callable[[], Any], *, what: str) -> None:
        self._call: Callable[[], Any] | None = call
        self.ended_s = 0.0
        self._what = what
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._call is not None
        try:
            self._result = self._call()
        except BaseException as error:  # goes to whoever waits
            self._error = error.with_traceback(None)  # whose frames would keep the fabric alive
        self._call = None
        self.ended_s = time.monotonic()
        self._done.set()

    def wait(self, limit_s: float, abandoned: threading.Event) -> Any:
        wait_event(self._done, limit_s=limit_s, abandoned=abandoned, what=self._what)
        if self._error is not None:
            raise_transport_error(self._error, what=self._what)
        return self._result


def keep_gloo_quiet() -> None:
    """Drop what C++ prints to standard output: Gloo's lines for each meeting. What Python prints goes into the log."""
    sys.stdout = sys.stderr
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
