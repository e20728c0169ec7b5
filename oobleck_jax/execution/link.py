"""The link: keyed transfers between the home runtimes of two nodes.

A producer *offers* arrays under a key and goes on; a consumer *pulls* them by key, before or after the offer. There is
no order to agree on and no world to join, so nothing can deadlock, and a new node is just a new address. An offer
serves one pull.

Over TCP by `jax.experimental.transfer`. What it does, and what follows (jaxlib 0.10.2 and 0.12.0):

- An offer that nobody pulls keeps its arrays for ever, even when the server is dropped. An offer under the same key
  replaces it, so `drain` offers a byte in place of everything that is left, and pulls that byte itself.
- A pull whose key is never offered waits for ever, and so does one whose offered array turned out to be an error. Hence
  every wait has a limit, and no program may run on a pulled array before `Pull.wait` has returned it.
- When a peer dies, what was pulled from it ends in an error within milliseconds. But an attempt to connect to a dead
  address is repeated silently for ever, so the address is tried before it is used for the first time.
- An array must not be donated or deleted while it is on offer; its consumer would get an error.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from oobleck_jax.errors import PeerLost
from oobleck_jax.execution.jaxlib_private import is_ready, start_transfer_server
from oobleck_jax.execution.waiting import wait_ready


Address: TypeAlias = str  # host:port

_CONNECT_LIMIT_S = 3.0
_CHUNK_BYTES = 1 << 20  # the default of 256 MiB stages whole arrays: 16 MiB then take up to twice the time


class Payload(StrEnum):
    """What an offer carries."""

    ACTIVATION = "activation"  # to the next stage
    GRADIENT = "gradient"  # of the activation, to the stage before
    EVALUATION = "evaluation"  # an activation of a batch that is only evaluated
    STATE = "state"  # parameters and optimizer state of a layer


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkKey:
    """Names one offer among all that a node may have at a time.

    Attributes:
        generation: of the plan.
        step: optimizer step.
        payload: what is offered.
        consumer: who pulls it: the stage's index in its pipeline, or for STATE the rank of the node.
        item: the microbatch (numbered over all pipelines, so that it names the pipeline too), or for STATE the layer.
        part: which part of an array that is offered in several.
    """

    generation: int
    step: int
    payload: Payload
    consumer: int
    item: int
    part: int = 0

    def __int__(self) -> int:
        """Pack the key into 64 bits, which is all that the transport takes.

        From the top: payload 2, consumer 12, item 16, part 10, generation 12, step 12 bits. Generation and step are
        taken modulo 4096, so that long runs do not end for want of bits: offers are never 4096 of them apart.
        """
        packed = _PAYLOADS.index(self.payload)
        for name, value, bits in (("consumer", self.consumer, 12), ("item", self.item, 16), ("part", self.part, 10)):
            assert 0 <= value < 1 << bits, f"{name} of {self} is not in 0..{(1 << bits) - 1}"
            packed = packed << bits | value
        return packed << 24 | self.generation % 4096 << 12 | self.step % 4096


_PAYLOADS = tuple(Payload)


class Pull(Protocol):
    """Arrays on their way."""

    def is_ready(self) -> bool:
        """Whether `wait` would return or raise at once."""
        ...

    def wait(self, limit_s: float, abandoned: threading.Event) -> list[jax.Array]:
        """Return the arrays.

        Raises:
            Abandoned: `abandoned` was set.
            PeerLost: the producer is gone.
            Stalled: nothing came within `limit_s` seconds.
        """
        ...


class Link(Protocol):
    """Keyed transfers to and from this node."""

    @property
    def address(self) -> Address:
        """Where others pull from this node."""
        ...

    def offer(self, key: LinkKey, arrays: Sequence[jax.Array]) -> None:
        """Let one consumer pull these arrays, each on a single device. Returns at once; they need not be ready."""
        ...

    def pull(self, address: Address, key: LinkKey, specs: Sequence[jax.ShapeDtypeStruct]) -> Pull:
        """Begin to fetch what the node at `address` offers, or will offer, under `key`.

        Args:
            specs: shape, dtype and `SingleDeviceSharding` of each array.

        Raises:
            PeerLost: nobody listens at the address.
        """
        ...

    def settle(self) -> None:
        """Declare that everything offered so far has been pulled, as is so once its step is committed."""
        ...

    def drain(self) -> None:
        """Free what was offered since `settle` and not pulled: its generation is over."""
        ...

    def forget(self, address: Address) -> None:
        """Drop the connection to a node that is gone."""
        ...


class TransferLink:
    """A `Link` over TCP, on the home runtime of this process. Used by one thread at a time."""

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        """Listen on a free port.

        Args:
            host: name or address of this machine under which the other nodes reach it.

        Raises:
            OSError: there is no such name.
            jax.errors.JaxRuntimeError: it is not of this machine.
        """
        host = _numeric(host)
        device = jax.local_devices()[0]  # stands for the home runtime: arrays on all its devices can travel
        self._byte = jax.device_put(np.zeros(1, np.uint8), device)
        self._server: Any = start_transfer_server(
            device.client,
            address=f"{host}:0",
            transport_addresses=[f"{host}:0"],  # more of them take more threads and CPU time, and are not faster
            chunk_bytes=_CHUNK_BYTES,
        )
        self._connections: dict[Address, Any] = {}
        self._offered: set[int] = set()

    @property
    def address(self) -> Address:
        return self._server.address()

    def offer(self, key: LinkKey, arrays: Sequence[jax.Array]) -> None:
        packed = int(key)
        assert packed not in self._offered, f"{key} is on offer already"
        self._offered.add(packed)
        self._server.await_pull(packed, list(arrays))

    def pull(self, address: Address, key: LinkKey, specs: Sequence[jax.ShapeDtypeStruct]) -> Pull:
        connection = self._connect(address)

        def drop_broken() -> None:  # it stays broken, even if the peer lives
            if self._connections.get(address) is connection:
                self.forget(address)

        arrays: list[jax.Array] = connection.pull(int(key), list(specs))
        return _TransferPull(arrays, what=f"pull of {key} from {address}", on_lost=drop_broken)

    def settle(self) -> None:
        self._offered.clear()

    def drain(self) -> None:
        spec = jax.ShapeDtypeStruct(self._byte.shape, self._byte.dtype, sharding=self._byte.sharding)
        for packed in self._offered:
            self._server.await_pull(packed, [self._byte])
            self._connect(self.address).pull(packed, [spec])
        self._offered.clear()

    def forget(self, address: Address) -> None:
        self._connections.pop(address, None)

    def _connect(self, address: Address) -> Any:
        connection = self._connections.get(address)
        if connection is None:
            _check_listens(address)
            connection = self._connections[address] = self._server.connect(address)
        return connection


class _TransferPull:
    def __init__(self, arrays: list[jax.Array], *, what: str, on_lost: Callable[[], None]) -> None:
        self._arrays = arrays
        self._what = what
        self._on_lost = on_lost

    def is_ready(self) -> bool:
        return all(is_ready(array) for array in self._arrays)

    def wait(self, limit_s: float, abandoned: threading.Event) -> list[jax.Array]:
        try:
            wait_ready(self._arrays, limit_s=limit_s, abandoned=abandoned, what=self._what)
        except PeerLost:
            self._on_lost()
            raise
        return self._arrays


def _numeric(host: str) -> str:
    """Return the address of a host: the transfer server takes any name to mean all addresses of the machine."""
    family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0]
    return f"[{place[0]}]" if family == socket.AF_INET6 else str(place[0])


def _check_listens(address: Address) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_LIMIT_S).close()
    except OSError as error:
        raise PeerLost(f"nobody listens at {address} ({error})", what=f"connection to {address}") from error
