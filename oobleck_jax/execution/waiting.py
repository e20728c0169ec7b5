"""Waiting for other nodes: by polling, with a deadline, and with an ear for the news that the wait is over.

Nothing that depends on another node may be waited for in any other way. `block_until_ready` cannot be interrupted, and
a survivor that is not a neighbour of the dead node in Gloo's ring hears nothing of the death.
"""

import threading
import time
from collections.abc import Iterable
from typing import NoReturn

import jax

from oobleck_jax.errors import Abandoned, PeerLost, Stalled
from oobleck_jax.execution.jaxlib_private import is_ready


# Between two looks sleep a tenth of the time waited so far, within these bounds. Shorter sleeps help nobody: each wakes
# up just to take the core from the threads that bring the data.
_SHORTEST_SLEEP_S = 200e-6
_LONGEST_SLEEP_S = 1e-3
_EVENT_SLICE_S = 10e-3  # a wait for an event looks for abandonment this often

# How statuses begin that the death of a peer ends in; others (RESOURCE_EXHAUSTED, INVALID_ARGUMENT) are our own fault.
_PEER_STATUSES = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED")


def wait_ready(arrays: Iterable[jax.Array], *, limit_s: float, abandoned: threading.Event, what: str) -> None:
    """Wait until arrays that depend on other nodes are ready.

    Args:
        arrays: results of pulls, or of programs that use such results.
        limit_s: longest wait for all of them, in seconds.
        abandoned: set when nobody needs the arrays any more.
        what: what is waited for, for the messages of errors.

    Raises:
        Abandoned: `abandoned` was set.
        PeerLost: an array came out as an error of its transport.
        Stalled: the limit passed.
    """
    start_s = time.monotonic()
    for array in arrays:
        _poll(array, start_s=start_s, limit_s=limit_s, abandoned=abandoned, what=what)
        try:
            array.block_until_ready()  # returns at once; raises if the array is an error
        except jax.errors.JaxRuntimeError as error:
            raise_transport_error(error, what=what)


def wait_event(done: threading.Event, *, limit_s: float, abandoned: threading.Event, what: str) -> None:
    """Wait until another thread of this process sets `done`.

    Raises:
        Abandoned: `abandoned` was set.
        Stalled: the limit passed.
    """
    start_s = time.monotonic()
    while not done.wait(_EVENT_SLICE_S):
        _check(start_s=start_s, limit_s=limit_s, abandoned=abandoned, what=what)


def raise_transport_error(error: BaseException, *, what: str) -> NoReturn:
    """Raise `PeerLost` for an error of a transport, or the error itself where no peer is to blame."""
    message = str(error)
    # numpy makes a ValueError, with the same words, of an array that turns out to be an error while it is copied.
    if isinstance(error, jax.errors.JaxRuntimeError | ValueError) and message.startswith(_PEER_STATUSES):
        raise PeerLost(f"{what}: a node that takes part is gone ({message.splitlines()[0]})", what=what) from error
    raise error


def _poll(array: jax.Array, *, start_s: float, limit_s: float, abandoned: threading.Event, what: str) -> None:
    began_s = time.monotonic()
    while not is_ready(array):
        _check(start_s=start_s, limit_s=limit_s, abandoned=abandoned, what=what)
        tenth_s = 0.1 * (time.monotonic() - began_s)
        time.sleep(min(max(tenth_s, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))


def _check(*, start_s: float, limit_s: float, abandoned: threading.Event, what: str) -> None:
    if abandoned.is_set():
        raise Abandoned(f"{what}: no longer needed")
    waited_s = time.monotonic() - start_s
    if waited_s > limit_s:
        raise Stalled(
            f"{what}: nothing came for {waited_s:.1f} s, the limit is {limit_s:g} s", what=what, waited_s=waited_s
        )
