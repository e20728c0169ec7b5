"""Hops: the way from a stage to the one before or after it, whether in this node or in another.

Stages may have unequal device counts. Between nodes an activation is offered shard by shard (parts of the batch) and
put together again on the devices of the consumer; within a node it is moved from devices to devices.
"""

from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from oobleck_jax.errors import PeerLost
from oobleck_jax.execution.home import StageDevices
from oobleck_jax.execution.layout import Neighbour
from oobleck_jax.execution.link import Link, LinkKey, Payload, Pull
from oobleck_jax.execution.patience import Patience
from oobleck_jax.execution.stage_runtime import StageRuntime
from oobleck_jax.planning.plan import NodeId


class Hop(Protocol):
    """One neighbour of a stage. Items are microbatches, numbered over all pipelines."""

    def send(self, payload: Payload, step: int, item: int, array: jax.Array) -> None:
        """Let the neighbour have an array; returns at once."""
        ...

    def ask(self, payload: Payload, step: int, item: int) -> None:
        """Begin to fetch what the neighbour sends, if that has not begun yet."""
        ...

    def is_here(self, payload: Payload, step: int, item: int) -> bool:
        """Whether `receive` would not wait."""
        ...

    def receive(self, payload: Payload, step: int, item: int, patience: Patience) -> jax.Array:
        """Return what the neighbour sent, after `ask`.

        Raises:
            Abandoned, PeerLost, Stalled: as `Patience.wait`.
        """
        ...


class LinkHop:
    """A neighbour on another node."""

    def __init__(
        self,
        *,
        link: Link,
        generation: int,
        stage: StageRuntime,
        neighbour: Neighbour,
        neighbour_stage: int,
        address: str,
        received: Mapping[Payload, jax.ShapeDtypeStruct],
    ) -> None:
        self._link, self._generation, self._address = link, generation, address
        self._stage_index, self._devices = stage.local.index, stage.devices
        self._neighbour, self._neighbour_stage, self._received = neighbour, neighbour_stage, received
        self._pulls: dict[tuple[Payload, int, int], Pull] = {}

    def send(self, payload: Payload, step: int, item: int, array: jax.Array) -> None:
        key = LinkKey(
            generation=self._generation, step=step, payload=payload, consumer=self._neighbour_stage, item=item
        )
        self._link.offer(key, shards_of(array))

    def ask(self, payload: Payload, step: int, item: int) -> None:
        if (payload, step, item) in self._pulls:
            return
        key = LinkKey(generation=self._generation, step=step, payload=payload, consumer=self._stage_index, item=item)
        specs = _shard_specs(self._received[payload], self._neighbour.num_devices, self._devices)
        try:
            self._pulls[payload, step, item] = self._link.pull(self._address, key, specs)
        except PeerLost as lost:
            raise PeerLost(str(lost), what=lost.what, node=self._neighbour.node) from lost

    def is_here(self, payload: Payload, step: int, item: int) -> bool:
        return self._pulls[payload, step, item].is_ready()

    def receive(self, payload: Payload, step: int, item: int, patience: Patience) -> jax.Array:
        pull = self._pulls[payload, step, item]
        shards = patience.wait(pull.wait, (self._neighbour.node,))
        del self._pulls[payload, step, item]
        return _assemble(shards, self._received[payload], self._devices)


class LocalHop:
    """A neighbour on other devices of this node. Both stages share one `mailbox`."""

    def __init__(self, mailbox: dict[tuple[Payload, int, int], jax.Array], devices: StageDevices) -> None:
        self._mailbox, self._devices = mailbox, devices

    def send(self, payload: Payload, step: int, item: int, array: jax.Array) -> None:
        self._mailbox[payload, step, item] = array

    def ask(self, payload: Payload, step: int, item: int) -> None:
        pass

    def is_here(self, payload: Payload, step: int, item: int) -> bool:
        return True

    def receive(self, payload: Payload, step: int, item: int, patience: Patience) -> jax.Array:
        array = self._mailbox.pop((payload, step, item))
        return _laid_out(array, self._devices.of_batch(array.shape))


def hops_of(
    stages: Mapping[int, StageRuntime], generation: int, node: NodeId, addresses: Mapping[NodeId, str], link: Link
) -> tuple[dict[int, Hop], dict[int, Hop]]:
    """Return the hops to the stage before and to the stage after, by stage index; ends of the pipeline have none."""
    before: dict[int, Hop] = {}
    after: dict[int, Hop] = {}
    for index, stage in stages.items():
        if stage.local.next is not None and stage.local.next.node == node:
            mailbox: dict[tuple[Payload, int, int], jax.Array] = {}
            after[index] = LocalHop(mailbox, stage.devices)
            before[index + 1] = LocalHop(mailbox, stages[index + 1].devices)
        elif stage.local.next is not None:
            after[index] = LinkHop(
                link=link,
                generation=generation,
                stage=stage,
                neighbour=stage.local.next,
                neighbour_stage=index + 1,
                address=addresses[stage.local.next.node],
                received={Payload.GRADIENT: stage.y_spec},
            )
        if stage.local.previous is not None and stage.local.previous.node != node:
            before[index] = LinkHop(
                link=link,
                generation=generation,
                stage=stage,
                neighbour=stage.local.previous,
                neighbour_stage=index - 1,
                address=addresses[stage.local.previous.node],
                received={Payload.ACTIVATION: stage.x_spec, Payload.EVALUATION: stage.x_spec},
            )
    return before, after


def shards_of(array: jax.Array) -> list[jax.Array]:
    """Return the distinct shards of an array in the order of the batch, each on its device."""
    distinct = {(shard.index[0].start or 0 if shard.index else 0): shard.data for shard in array.addressable_shards}
    return [distinct[start] for start in sorted(distinct)]


def _shard_specs(whole: jax.ShapeDtypeStruct, num_devices: int, devices: StageDevices) -> list[jax.ShapeDtypeStruct]:
    """Return specs of the shards that a producer with `num_devices` devices offers, spread over the own devices."""
    num_shards = devices.num_batch_shards(whole.shape[0], num_devices)
    shape = (whole.shape[0] // num_shards, *whole.shape[1:])
    return [
        jax.ShapeDtypeStruct(
            shape, whole.dtype, sharding=SingleDeviceSharding(devices.devices[index % len(devices.devices)])
        )
        for index in range(num_shards)
    ]


def _assemble(shards: list[jax.Array], whole: jax.ShapeDtypeStruct, devices: StageDevices) -> jax.Array:
    """Return the array that the shards make up, as the own devices need it."""
    sharding = devices.of_batch(whole.shape)
    if len(shards) == 1:
        return shards[0] if len(devices.devices) == 1 else _laid_out(shards[0], sharding)
    if len(shards) == len(devices.devices):
        return jax.make_array_from_single_device_arrays(whole.shape, sharding, shards)
    return jax.device_put(np.concatenate([np.asarray(shard) for shard in shards]), sharding)


def _laid_out(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Return an array as other devices need it.

    JAX would cut it in parts by a program, which it compiles in the middle of a step; so that goes through numpy.
    """
    is_cut = not sharding.is_fully_replicated and len(array.sharding.device_set) != len(sharding.device_set)
    return jax.device_put(np.asarray(array) if is_cut else array, sharding)
