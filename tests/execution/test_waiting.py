"""Waits for other nodes end: with the value, with an error, or at their deadline."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from oobleck_jax.errors import Abandoned, PeerLost, Stalled
from oobleck_jax.execution.waiting import raise_transport_error, wait_event, wait_ready


class NeverReady:
    """Stands for an array whose producer is silent."""

    def is_ready(self) -> bool:
        return False


class Broken:
    """Stands for an array that came out as an error."""

    def __init__(self, message: str) -> None:
        self._message = message

    def is_ready(self) -> bool:
        return True

    def block_until_ready(self) -> None:
        raise jax.errors.JaxRuntimeError(self._message)


def test_ready_arrays_are_not_waited_for() -> None:
    wait_ready([jnp.ones(3).block_until_ready()], limit_s=0.0, abandoned=threading.Event(), what="an array")


def test_a_wait_ends_at_its_limit_and_says_how_long_it_was() -> None:
    with pytest.raises(Stalled, match="an activation") as caught:
        wait_ready([NeverReady()], limit_s=0.05, abandoned=threading.Event(), what="an activation")  # type: ignore[list-item]
    assert caught.value.what == "an activation"
    assert 0.05 <= caught.value.waited_s < 0.5


def test_a_wait_ends_when_it_is_abandoned() -> None:
    abandoned = threading.Event()
    threading.Timer(0.05, abandoned.set).start()
    began_s = time.monotonic()
    with pytest.raises(Abandoned, match="an activation"):
        wait_ready([NeverReady()], limit_s=30.0, abandoned=abandoned, what="an activation")  # type: ignore[list-item]
    assert time.monotonic() - began_s < 5.0


def test_a_wait_for_another_thread_ends_in_the_same_ways() -> None:
    done, abandoned = threading.Event(), threading.Event()
    with pytest.raises(Stalled):
        wait_event(done, limit_s=0.02, abandoned=abandoned, what="a sum")
    abandoned.set()
    with pytest.raises(Abandoned):
        wait_event(done, limit_s=30.0, abandoned=abandoned, what="a sum")
    done.set()
    wait_event(done, limit_s=0.0, abandoned=abandoned, what="a sum")


def test_waiting_sleeps_instead_of_spinning() -> None:
    began_s = time.thread_time()
    with pytest.raises(Stalled):
        wait_ready([NeverReady()], limit_s=0.5, abandoned=threading.Event(), what="an activation")  # type: ignore[list-item]
    assert time.thread_time() - began_s < 0.1


@pytest.mark.parametrize(
    "message",
    [
        "INTERNAL: SocketServer: Connection closed recv() == 0.",
        "INTERNAL: RecvThreadState::HandleRecvItem -> recv_count == 0",
        "UNKNOWN: Gloo all-reduce failed: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:59036",
    ],
)
def test_what_transports_say_of_a_dead_peer_becomes_PeerLost(message: str) -> None:
    with pytest.raises(PeerLost, match="a pull") as caught:
        wait_ready([Broken(message)], limit_s=1.0, abandoned=threading.Event(), what="a pull")  # type: ignore[list-item]
    assert caught.value.what == "a pull"
    assert message in str(caught.value)


def test_what_numpy_makes_of_an_error_becomes_PeerLost_too() -> None:
    message = "UNKNOWN: Gloo all-reduce failed: [gloo/transport/tcp/pair.cc:538] Read error: Connection reset by peer"
    with pytest.raises(PeerLost, match="a sum"):
        raise_transport_error(ValueError(message), what="a sum")
    with pytest.raises(ValueError, match="could not broadcast"):
        raise_transport_error(ValueError("could not broadcast input array"), what="a sum")


def test_errors_of_our_own_are_not_blamed_on_a_peer() -> None:
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 3 bytes.")
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        raise_transport_error(error, what="a pull")
