"""What a cluster did with its time: a row of segments without gaps, from which every number and figure is derived.

Time is conserved by construction: a segment begins where the one before it ends, and losing work changes what a
segment counts as, never how long it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class Spending(StrEnum):
    """What time is spent on."""

    USEFUL = "useful"  # steps that count
    REDONE = "redone"  # steps, or parts of steps, that were lost and done again
    RECOVERY = "recovery"  # detection, plans, copies, restarts, restoring checkpoints
    CHECKPOINT = "checkpoint"  # training stands still, or is slower, while one is saved
    REDUNDANT = "redundant"  # computing twice, so that losses cost less
    IDLE = "idle"  # too few nodes to train


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A time without changes."""

    begin_s: float
    end_s: float
    spending: Spending
    samples: float = 0.0  # trained on, which count
    extra: Spending | None = None  # what a part of the time is spent on besides, evenly spread
    extra_fraction: float = 0.0
    num_live: int = 0  # nodes

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def shares(self) -> Iterator[tuple[Spending, float]]:
        """Yield what the time is spent on, and the seconds; they add up to the segment."""
        extra_s = self.seconds * self.extra_fraction if self.extra is not None else 0.0
        yield self.spending, self.seconds - extra_s
        if self.extra is not None:
            yield self.extra, extra_s


class Timeline:
    """Segments, one after the other from 0 on."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    @property
    def end_s(self) -> float:
        return self._segments[-1].end_s if self._segments else 0.0

    def append(self, segment: Segment) -> None:
        """Add a segment, which must begin at the end of the last one; one without time is left out."""
        assert segment.begin_s == self.end_s, f"{segment} does not begin at {self.end_s}"
        assert segment.end_s >= segment.begin_s, f"{segment} ends before it begins"
        if segment.seconds > 0:
            self._segments.append(segment)

    def lose(self, since_s: float) -> None:
        """Let the useful segments from a moment on, at which one begins, count as work that must be done again."""
        for number in range(len(self._segments) - 1, -1, -1):
            segment = self._segments[number]
            if segment.end_s <= since_s:
                return
            assert segment.begin_s >= since_s, f"{segment} was begun before {since_s}"
            if segment.spending is Spending.USEFUL:
                self._segments[number] = replace(segment, spending=Spending.REDONE, samples=0.0)
