"""The commit decisions of a run, as its journal tells them: which steps count.

A run that goes back to a checkpoint does steps again, so a step may be decided several times; the last time counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import msgspec

from oobleck_jax import events
from oobleck_jax.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """What has been decided.

    Attributes:
        decided: every decision in its order, with its time; also those that were given up later.
        committed: those that count: of the steps `first_step`, `first_step` + 1, ...
        first_step: 0, unless the run began with the checkpoint of another one.
        restored: the last time that the run went back; None: it never did.
    """

    decided: tuple[tuple[float, events.Committed], ...]
    committed: tuple[tuple[float, events.Committed], ...]
    first_step: int
    restored: events.Restored | None

    @property
    def next_step(self) -> int:
        return self.first_step + len(self.committed)

    @property
    def num_skipped(self) -> int:
        """How many of the last steps were not finite."""
        return sum(1 for _ in takewhile(lambda item: item[1].grad_norm is None, reversed(self.committed)))


def read_journal(path: Path) -> Journal:
    """Read journal.jsonl.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        return journal_of(events.read_events(path))
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def journal_of(records: Iterable[tuple[float, events.Record]]) -> Journal:
    """Return what the records of a journal amount to.

    Raises:
        ValueError: a step is missing, or is there without having been given up before.
    """
    decided: list[tuple[float, events.Committed]] = []
    committed: list[tuple[float, events.Committed]] = []
    first_step, restored = 0, None
    for number, (time_s, record) in enumerate(records, start=1):
        expected = first_step + len(committed)
        match record:
            case events.Committed() if record.step == expected:
                committed.append((time_s, record))
                decided.append((time_s, record))
            case events.Committed():
                raise ValueError(f"line {number} is step {record.step}, not step {expected}")
            case events.Restored():
                del committed[max(record.step - first_step, 0) :]
                # Another run's checkpoint comes before all that this one did.
                first_step = min(record.step, first_step) if decided else record.step
                restored = record
            case _:
                raise ValueError(f"line {number} is no decision")
    return Journal(decided=tuple(decided), committed=tuple(committed), first_step=first_step, restored=restored)
