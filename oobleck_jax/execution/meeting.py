"""The making of a generation's fabric, in a thread of its own: nodes meet while their states are on the way."""

import threading
from collections.abc import Callable

from oobleck_jax.execution.fabric import Fabric
from oobleck_jax.execution.waiting import wait_event


_END_LIMIT_S = 1.0  # whoever makes a fabric looks for the end of its generation far more often


class Meeting:
    """A fabric that is being made, and then is there."""

    def __init__(self, make: Callable[[threading.Event], Fabric]) -> None:
        """Begin.

        Args:
            make: makes the fabric, ready for sums; it raises `Abandoned` soon after the event is set.
        """
        self._given_up = threading.Event()
        self._done = threading.Event()
        self._fabric: Fabric | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(make,), name="fabric-meeting", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float, abandoned: threading.Event) -> Fabric:
        """Return the fabric once it is ready.

        Raises:
            Abandoned, PeerLost, Stalled: there is none; see `Fabric.warm`.
        """
        wait_event(self._done, limit_s=limit_s, abandoned=abandoned, what="meeting in the fabric")
        if self._fabric is None:
            assert self._error is not None
            raise self._error
        return self._fabric

    def drop(self) -> None:
        """Drop the fabric, or give up making it."""
        self._given_up.set()
        self._thread.join(_END_LIMIT_S)
        if self._fabric is not None:
            self._fabric.drop()
        self._fabric = None

    def _run(self, make: Callable[[threading.Event], Fabric]) -> None:
        try:
            self._fabric = make(self._given_up)
        except BaseException as error:  # goes to whoever waits
            self._error = error.with_traceback(None)  # whose frames would keep the fabric alive
        self._done.set()
