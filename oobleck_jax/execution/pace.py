"""The pace of a step: how much work is started ahead of what has been computed.

A program that is started cannot be taken back: whatever is queued when a step is abandoned still runs, in front of the
first programs of the next generation. So no more is queued than keeps the devices busy, by the measured time of each
program, and whoever waits for that notices that the step is over.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax

from oobleck_jax.errors import Abandoned
from oobleck_jax.execution.jaxlib_private import is_ready


_QUEUED_S = 0.02  # work that may wait for a device; far more than it takes to start the next program
_SHORTEST_SLEEP_S = 200e-6
_LONGEST_SLEEP_S = 2e-3

OnEnded = Callable[[Hashable, int, float, float], None]
"""Told what ran, on which item, from when to when (`time.monotonic`)."""


class _Running(NamedTuple):
    program: Hashable
    item: int
    result: jax.Array
    started_s: float
    expected_s: float

    @property
    def has_ended(self) -> bool:
        # A result that is donated: the program that has taken it is waited for in its stead.
        return self.result.is_deleted() or is_ready(self.result)


class Pace:
    """Starts the programs of a node one after the other, none before those started earlier are about to end.

    Attributes:
        item: what the next programs work on, for whoever is told when they end.
    """

    def __init__(self, on_ended: OnEnded | None = None) -> None:
        """Begin with nothing.

        Args:
            on_ended: told of each program when it has been seen to end.
        """
        self.item = -1
        self._on_ended = on_ended
        self._took_s: dict[Hashable, float] = {}  # the last time of each program
        self._running: deque[_Running] = deque()
        self._ended_s = 0.0  # when the last one that was waited for ended
        self._abandoned = threading.Event()

    def begin(self, abandoned: threading.Event) -> None:
        """Forget what was started before, and end all waits once `abandoned` is set."""
        self._running.clear()
        self._abandoned = abandoned

    def run(self, program: Hashable, call: Callable[..., Any], *arguments: Any) -> Any:
        """Start a program, as soon as not much is queued; return its results, which are not computed yet.

        Args:
            program: what it is; equal ones take about the same time.
            call: starts it with `arguments`; its first result must be an array.

        Raises:
            Abandoned: the step is over.
        """
        while self._running and (self._is_enough or self._running[0].has_ended):
            self._await_first()
        results = call(*arguments)
        expected_s = self._took_s.get(program, _QUEUED_S)
        self._running.append(_Running(program, self.item, jax.tree.leaves(results)[0], time.monotonic(), expected_s))
        return results

    def watch(self, until: Callable[[], bool]) -> None:
        """See programs end while something else is waited for, so that `on_ended` learns when; returns after both.

        Raises:
            Abandoned: the step is over.
        """
        while self._running and not until():
            if self._running[0].has_ended:
                self._await_first()
            elif self._abandoned.is_set():
                raise Abandoned("the step is no longer needed")
            else:
                time.sleep(_SHORTEST_SLEEP_S)

    def finish(self) -> None:
        """Wait until all has been computed.

        Raises:
            Abandoned: the step is over.
        """
        while self._running:
            self._await_first()

    @property
    def _is_enough(self) -> bool:
        return sum(running.expected_s for running in self._running) >= _QUEUED_S

    def _await_first(self) -> None:
        first, began_s = self._running[0], time.monotonic()
        while not first.has_ended:
            if self._abandoned.is_set():
                raise Abandoned("the step is no longer needed")
            time.sleep(min(max(0.1 * (time.monotonic() - began_s), _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))
        self._running.popleft()
        now_s = time.monotonic()
        began_s, self._ended_s = max(first.started_s, self._ended_s), now_s
        self._took_s[first.program] = now_s - began_s
        if self._on_ended is not None:
            self._on_ended(first.program, first.item, began_s, now_s)
