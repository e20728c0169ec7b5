"""The link over TCP, and the one between threads, which must behave alike."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from oobleck_jax.errors import Abandoned, PeerLost, Stalled
from oobleck_jax.execution.in_process import InProcessHub
from oobleck_jax.execution.link import Link, LinkKey, Payload, TransferLink


pytestmark = pytest.mark.jax_version

LIMIT_S = 20.0


@pytest.fixture(params=["transfer", "in_process"], scope="module")
def links(request: pytest.FixtureRequest) -> Iterator[tuple[Link, Link]]:
    if request.param == "transfer":
        yield TransferLink(), TransferLink()
    else:
        hub = InProcessHub()
        yield hub.link(), hub.link()


@pytest.fixture
def never() -> threading.Event:
    return threading.Event()


def key(item: int, *, step: int = 0, part: int = 0) -> LinkKey:
    return LinkKey(generation=3, step=step, payload=Payload.ACTIVATION, consumer=1, item=item, part=part)


def spec(array: jax.Array, device: int = 0) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=SingleDeviceSharding(jax.devices()[device]))


def test_offers_and_pulls_meet_in_either_order(links: tuple[Link, Link], never: threading.Event) -> None:
    producer, consumer = links
    arrays = [jnp.arange(n, dtype=jnp.float32) for n in (10, 1000)]
    specs = [spec(array) for array in arrays]
    early = consumer.pull(producer.address, key(1), specs)
    time.sleep(0.05)
    assert not early.is_ready()
    producer.offer(key(2), arrays)
    producer.offer(key(1), arrays)
    late = consumer.pull(producer.address, key(2), specs)
    for pull in (late, early):
        for array, expected in zip(pull.wait(LIMIT_S, never), arrays, strict=True):
            np.testing.assert_array_equal(array, expected)
        assert pull.is_ready()
    producer.settle()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_arrays_arrive_bit_for_bit_and_on_the_device_that_was_asked_for(
    links: tuple[Link, Link], never: threading.Event, dtype: str
) -> None:
    producer, consumer = links
    array = jax.random.bits(jax.random.key(0), (3, 700, 300), jnp.uint32).astype(dtype)  # more than one chunk
    for device in (0, 3):
        producer.offer(key(device, step=9), [array])
        (got,) = consumer.pull(producer.address, key(device, step=9), [spec(array, device)]).wait(LIMIT_S, never)
        np.testing.assert_array_equal(got, array)
        assert got.devices() == {jax.devices()[device]}
    producer.settle()


def test_an_offer_of_shards_on_several_devices_is_pulled_onto_others(
    links: tuple[Link, Link], never: threading.Event
) -> None:
    producer, consumer = links
    shards = [jax.device_put(jnp.full((2, 3), float(n)), jax.devices()[n]) for n in range(4)]
    producer.offer(key(1, step=1), shards)
    pull = consumer.pull(producer.address, key(1, step=1), [spec(shard, 4 + n % 2) for n, shard in enumerate(shards)])
    for number, shard in enumerate(pull.wait(LIMIT_S, never)):
        np.testing.assert_array_equal(shard, np.full((2, 3), number))
        assert shard.devices() == {jax.devices()[4 + number % 2]}
    producer.settle()


def test_results_that_are_still_being_computed_can_be_offered(links: tuple[Link, Link], never: threading.Event) -> None:
    producer, consumer = links
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, x: jnp.tanh(x @ x), x))(jnp.eye(200))
    producer.offer(key(1, step=2), [slow])
    (got,) = consumer.pull(producer.address, key(1, step=2), [spec(slow)]).wait(LIMIT_S, never)
    np.testing.assert_array_equal(got, slow)
    producer.settle()


def test_a_pull_ends_at_its_limit_or_when_it_is_abandoned_and_can_be_waited_for_again(
    links: tuple[Link, Link], never: threading.Event
) -> None:
    producer, consumer = links
    array = jnp.ones(5)
    pull = consumer.pull(producer.address, key(1, step=3), [spec(array)])
    with pytest.raises(Stalled, match="step=3"):
        pull.wait(0.05, never)
    over = threading.Event()
    over.set()
    with pytest.raises(Abandoned):
        pull.wait(LIMIT_S, over)
    producer.offer(key(1, step=3), [array])
    np.testing.assert_array_equal(pull.wait(LIMIT_S, never)[0], array)
    producer.settle()


def test_after_draining_keys_are_free_and_offers_are_new(links: tuple[Link, Link], never: threading.Event) -> None:
    producer, consumer = links
    old, new = jnp.zeros(1000), jnp.ones(1000)
    producer.offer(key(1, step=4), [old])
    producer.offer(key(2, step=4), [old])
    np.testing.assert_array_equal(
        consumer.pull(producer.address, key(2, step=4), [spec(old)]).wait(LIMIT_S, never)[0], old
    )
    producer.drain()
    producer.drain()
    time.sleep(0.1)
    for item in (1, 2):
        producer.offer(key(item, step=4), [new])
        (got,) = consumer.pull(producer.address, key(item, step=4), [spec(new)]).wait(LIMIT_S, never)
        np.testing.assert_array_equal(got, new)
    producer.settle()


def test_one_key_names_one_offer(links: tuple[Link, Link]) -> None:
    producer, _ = links
    producer.offer(key(1, step=5), [jnp.ones(1)])
    with pytest.raises(AssertionError, match="on offer already"):
        producer.offer(key(1, step=5), [jnp.ones(1)])
    producer.drain()


def test_nobody_listens_at_a_dead_address() -> None:
    link = TransferLink()
    dead = InProcessHub()
    dead_link = dead.link()
    dead.kill(dead_link.address)
    for puller, address in ((link, "127.0.0.1:1"), (dead.link(), dead_link.address)):
        began_s = time.monotonic()
        with pytest.raises(PeerLost, match="nobody listens"):
            puller.pull(address, key(1), [spec(jnp.ones(1))])
        assert time.monotonic() - began_s < 5.0


def test_a_name_means_its_address_and_not_all_addresses_of_the_machine(never: threading.Event) -> None:
    link = TransferLink(host="localhost")
    assert not link.address.startswith("0.0.0.0")
    link.offer(key(1), [jnp.ones(3)])
    np.testing.assert_array_equal(link.pull(link.address, key(1), [spec(jnp.ones(3))]).wait(LIMIT_S, never)[0], 1.0)


def test_a_connection_that_broke_is_made_anew(never: threading.Event) -> None:
    producer, consumer = TransferLink(), TransferLink()
    pending = consumer.pull(producer.address, key(1), [spec(jnp.ones(3))])
    consumer._connections[producer.address]._poison_connection()
    with pytest.raises(PeerLost):
        pending.wait(LIMIT_S, never)
    producer.offer(key(2), [jnp.ones(3)])
    np.testing.assert_array_equal(
        consumer.pull(producer.address, key(2), [spec(jnp.ones(3))]).wait(LIMIT_S, never)[0], 1.0
    )


def test_the_death_of_a_thread_node_ends_pulls_from_it(never: threading.Event) -> None:
    hub = InProcessHub()
    producer, consumer = hub.link(), hub.link()
    pull = consumer.pull(producer.address, key(1), [spec(jnp.ones(1))])
    hub.kill(producer.address)
    with pytest.raises(PeerLost, match="producer is gone"):
        pull.wait(LIMIT_S, never)


keys = st.builds(
    LinkKey,
    generation=st.integers(1, 4095),
    step=st.integers(0, 4095),
    payload=st.sampled_from(Payload),
    consumer=st.integers(0, 4095),
    item=st.integers(0, 65535),
    part=st.integers(0, 1023),
)


@hypothesis.given(keys, keys)
def test_keys_are_packed_injectively_into_64_bits(one: LinkKey, other: LinkKey) -> None:
    assert 0 <= int(one) < 1 << 64
    assert (int(one) == int(other)) == (one == other)


@hypothesis.given(keys, st.sampled_from(["generation", "step", "payload", "consumer", "item", "part"]))
def test_every_field_of_a_key_counts(one: LinkKey, name: str) -> None:
    changed = Payload.STATE if one.payload != Payload.STATE else Payload.GRADIENT
    value = changed if name == "payload" else getattr(one, name) ^ 1
    assert int(replace(one, **{name: value})) != int(one)


def test_keys_of_steps_far_beyond_the_bits_still_differ_from_their_neighbours() -> None:
    packed = {int(key(0, step=step)) for step in range(1_000_000, 1_004_000)}
    assert len(packed) == 4000


@pytest.mark.parametrize(("name", "value"), [("consumer", 4096), ("item", 65536), ("part", 1024), ("item", -1)])
def test_fields_out_of_range_are_refused(name: str, value: int) -> None:
    fields = {"generation": 1, "step": 0, "consumer": 0, "item": 0, "part": 0} | {name: value}
    with pytest.raises(AssertionError, match=name):
        int(LinkKey(payload=Payload.STATE, **fields))
