"""How the states of groups come to the nodes that need them, from the memory of nodes that have them.

Who sends what is `planning.reconfigure.copies_of`, a function of (plan, holdings) alone, so nobody asks: sources offer,
destinations pull, by key. Parameters and optimizer state travel together, as one vector of words (a transfer of many
small arrays takes several times as long), with a checksum that the destination checks.

Source: Oobleck (SOSP '23), section 5.2; with optimizer state, and with the load balanced over the sources.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from oobleck_jax.errors import PeerLost, StateDamaged
from oobleck_jax.execution.link import Link, LinkKey, Payload, Pull
from oobleck_jax.execution.patience import Patience
from oobleck_jax.execution.state import GroupState
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.reconfigure import Copy


class StateTransfer:
    """The copies of one generation, as far as this node has a part in them."""

    def __init__(
        self,
        copies: Sequence[Copy],
        *,
        node: NodeId,
        generation: int,
        step: int,
        ranks: Mapping[NodeId, int],
        addresses: Mapping[NodeId, str],
        link: Link,
        device: jax.Device,
    ) -> None:
        self._copies, self._node = copies, node
        self._generation, self._step, self._ranks, self._addresses = generation, step, ranks, addresses
        self._link, self._device = link, device

    @property
    def outgoing(self) -> tuple[str, ...]:
        """Groups that this node sends, each once for every destination."""
        return tuple(copy.name for copy in self._copies if copy.source == self._node)

    @property
    def incoming(self) -> tuple[str, ...]:
        """Groups that this node gets."""
        return tuple(copy.name for copy in self._copies if copy.destination == self._node)

    def offer(self, states: Mapping[str, GroupState]) -> None:
        """Let the destinations have what this node sends. Returns at once."""
        packed: dict[str, list[jax.Array]] = {}
        for number, copy in enumerate(self._copies):
            if copy.source == self._node:
                if copy.name not in packed:  # once for all destinations
                    words = _pack(states[copy.name])
                    packed[copy.name] = jax.device_put([words, _checksum(words)], self._device)
                self._link.offer(self._key(number, copy), packed[copy.name])

    def receive(self, shapes: Mapping[str, Any], patience: Patience) -> dict[str, GroupState]:
        """Return the states that this node gets.

        Args:
            shapes: what the state of each group looks like.

        Raises:
            Abandoned, PeerLost, Stalled: as `Patience.wait`.
            StateDamaged: a checksum differs.
        """
        pulls: list[tuple[Copy, Pull]] = []
        for number, copy in enumerate(self._copies):
            if copy.destination == self._node:
                sizes = (_num_words(shapes[copy.name]), 2)
                sharding = SingleDeviceSharding(self._device)
                specs = [jax.ShapeDtypeStruct((size,), np.uint32, sharding=sharding) for size in sizes]
                try:
                    pull = self._link.pull(self._addresses[copy.source], self._key(number, copy), specs)
                except PeerLost as lost:
                    raise PeerLost(str(lost), what=lost.what, node=copy.source) from lost
                pulls.append((copy, pull))
        states: dict[str, GroupState] = {}
        for copy, pull in pulls:
            words, checksum = [np.asarray(array) for array in patience.wait(pull.wait, (copy.source,))]
            if not np.array_equal(_checksum(words), checksum):
                raise StateDamaged(node=copy.source, group=copy.name)
            states[copy.name] = _unpack(words, shapes[copy.name])
        return states

    def _key(self, number: int, copy: Copy) -> LinkKey:
        return LinkKey(
            generation=self._generation,
            step=self._step,
            payload=Payload.STATE,
            consumer=self._ranks[copy.destination],
            item=number,
        )


def checksum_of(leaves: Sequence[np.ndarray]) -> int:
    """Return 64 bits: the sum of all 32-bit words, each leaf's weighed by its place so that swaps show."""
    total = 0
    for place, leaf in enumerate(leaves, start=1):
        words = _words(leaf)
        total += place * int(np.add.reduce(words, dtype=np.uint64))
    return total % 2**64


def _checksum(words: np.ndarray) -> np.ndarray:
    """Return the checksum as uint32[2], for the way."""
    checksum = checksum_of([words])
    return np.array([checksum % 2**32, checksum >> 32], np.uint32)


def _num_words(shapes: GroupState) -> int:
    """Return the length of a packed state."""
    return sum(_length(leaf) for leaf in jax.tree.leaves(shapes))


def _pack(state: GroupState) -> np.ndarray:
    """Return a state as uint32[n]: the bits of its leaves, one after the other."""
    return np.concatenate([_words(leaf) for leaf in jax.tree.leaves(state)])


def _unpack(words: np.ndarray, shapes: GroupState) -> GroupState:
    """Invert `_pack`; the leaves share the memory of the words."""
    leaves, structure = jax.tree.flatten(shapes)
    ends = np.cumsum([_length(leaf) for leaf in leaves])
    parts = [
        words[end - _length(leaf) : end].view(leaf.dtype)[: leaf.size].reshape(leaf.shape)
        for leaf, end in zip(leaves, ends, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


def _words(leaf: np.ndarray) -> np.ndarray:
    """Return the bits of an array as uint32[n], filled up with zeros; a view where there is nothing to fill up."""
    flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    missing = -flat.size % 4
    return (np.concatenate([flat, np.zeros(missing, np.uint8)]) if missing else flat).view(np.uint32)


def _length(shape: np.ndarray | jax.ShapeDtypeStruct) -> int:
    return -(-shape.size * shape.dtype.itemsize // 4)
