"""The pace of a step: how much work is started ahead of what has been computed.

A program that is started cannot be taken back: whatever is queued when a step is abandoned still runs, in front of the
first programs of the next generation. So no more is queued than keeps the devices busy, by the measured time of each
program, and whoever waits for that notices that the step is over.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax

from oobleck_jax.errors import Abandoned
from oobleck_jax.execution.jaxlib_private import is_ready


_AHEAD_S = 0.01  # work that a device should have left when the next program is started; far more than that takes
_SLOWER = 1.1  # how much longer a program is taken to have become at once: its end may just have been seen late
_LATE = 1 / 16  # of the time of a program, how late its end is seen if it takes longer than expected
_SHORTEST_SLEEP_S = 200e-6
# Looking costs some 50 us; what has been faster than expected is noticed so late, and whoever abandons wakes at once.
_LONGEST_SLEEP_S = 10e-3

OnEnded = Callable[[Hashable, int, float, float], None]
"""Told what ran, on which item, from when to when (`time.monotonic`)."""


class _Running(NamedTuple):
    program: Hashable
    item: int
    result: jax.Array
    started_s: float
    expected_s: float


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
        self._took_s: dict[Hashable, float] = {}  # what each program takes; for ever, as long as none has ended
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
        while self._running:
            if self._note_ends():
                continue
            if (too_early_s := self._left_s - _AHEAD_S) > 0:
                self._pause(too_early_s)
            else:
                break
        results = call(*arguments)
        expected_s = self._took_s.get(program, math.inf)
        self._running.append(_Running(program, self.item, jax.tree.leaves(results)[0], time.monotonic(), expected_s))
        return results

    def watch(self, until: Callable[[], bool]) -> None:
        """See programs end while something else is waited for, so that `on_ended` learns when; returns after both.

        Raises:
            Abandoned: the step is over.
        """
        while self._running and not until():
            if not self._note_ends():
                self._pause(0.0)

    def finish(self) -> None:
        """Wait until all has been computed.

        Raises:
            Abandoned: the step is over.
        """
        while self._running:
            if not self._note_ends():
                self._pause(max(0.5 * self._left_s, _LATE * self._running[0].expected_s))

    @property
    def _left_s(self) -> float:
        """How long the devices will be at work with what has been started."""
        first, *others = self._running
        first_left_s = first.expected_s - (time.monotonic() - max(first.started_s, self._ended_s))
        return max(first_left_s, 0.0) + sum(running.expected_s for running in others)

    def _pause(self, longest_s: float) -> None:
        if self._abandoned.wait(min(max(longest_s, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S)):
            raise Abandoned("the step is no longer needed")

    def _note_ends(self) -> bool:
        """Take note of all programs that have ended since the last look, if any.

        They run in order. Only the end of the last one is known well: the others ended unseen, while this thread did
        something else or had no core, or their results were given to programs that were started since. So they share
        the time as they were expected to.
        """
        num_ended = self._num_ended()
        if not num_ended:
            return False
        ended = [self._running.popleft() for _ in range(num_ended)]
        began_s, now_s = max(ended[0].started_s, self._ended_s), time.monotonic()
        elapsed_s = now_s - began_s
        expected_s = sum(running.expected_s for running in ended)
        for running in ended:
            share = running.expected_s / expected_s if 0 < expected_s < math.inf else 1 / num_ended
            took_s = share * elapsed_s
            self._took_s[running.program] = min(took_s, _SLOWER * self._took_s.get(running.program, took_s))
            if self._on_ended is not None:
                # Rounding must not let it end after the next one has begun, which may be at `now_s`.
                self._on_ended(running.program, running.item, began_s, min(began_s + took_s, now_s))
            began_s += took_s
        self._ended_s = now_s
        return True

    def _num_ended(self) -> int:
        """Count the programs that are known to have ended.

        A result that another program was given tells nothing: it is gone as soon as that program is started. So its
        own program has ended when a later one has; if there is none, whatever was given it is not paced.
        """
        num_ended = 0
        for number, running in enumerate(self._running, start=1):
            if running.result.is_deleted():
                continue
            if not is_ready(running.result):
                return num_ended
            num_ended = number
        return len(self._running)
