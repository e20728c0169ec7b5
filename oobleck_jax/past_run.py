"""What the files of a run tell a coordinator that is to go on with it.

The journal decides: a step counts if its line in journal.jsonl is complete, for no node hears of a commit before.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from oobleck_jax import events
from oobleck_jax.elastic.resumption import Resumption
from oobleck_jax.errors import ConfigError
from oobleck_jax.journal import Journal, read_journal


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """A run that has begun.

    Attributes:
        records: what happened, in order, without what concerns only the coordinator that died.
        journal: which steps count.
        finished: how it ended; None: it did not, because its coordinator died.
        differences: what is another than it was, each as `name 1 (now 2)`; then no worker can have lived on.
    """

    records: tuple[events.Record, ...]
    journal: Journal
    finished: events.Finished | None = None
    differences: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether its workers may live, and can go on."""
        return self.finished is None and not self.differences

    @property
    def resumption(self) -> Resumption:
        """What the membership machine needs to go on."""
        plans = [record for record in self.records if isinstance(record, events.Planned)]
        evaluated = [record.step for record in self.records if isinstance(record, events.Evaluated)]
        journal, step = self.journal, self.journal.next_step
        last = journal.committed[-1][1] if journal.committed else None
        since = 0 if journal.restored is None else journal.restored.generation
        return Resumption(
            generation=plans[-1].generation if plans else 0,
            plan=plans[-1].plan if plans else None,
            step=step,
            committed=last if last is not None and last.generation >= since else None,
            num_skipped=journal.num_skipped,
            nodes=tuple(sorted(plans[-1].plan.nodes)) if plans and self.is_open else (),
            evaluated=not step or step - 1 in evaluated,
            restored_generation=since,
        )

    def why_not(self, run_dir: Path) -> str:
        """Say why it cannot go on without a checkpoint, if it is not open."""
        choose = f"choose another --run-dir than {run_dir}"
        if self.finished is not None:
            return f"its run is finished after {self.finished.steps} steps ({self.finished.reason}); {choose}"
        return f"its run has other settings: {', '.join(self.differences)}; use the same ones, or {choose}"


def read_past(run_dir: Path, *, config_json: str, versions: Mapping[str, str]) -> PastRun | None:
    """Read the run that a directory holds; None: it holds none.

    Args:
        run_dir: of the run; must belong to this process.
        config_json: what is to run now.
        versions: of the software that is to run it.

    Raises:
        ConfigError: its files are damaged.
    """
    told = _read(run_dir / "events.jsonl")
    if not told:
        return None
    try:
        journal = read_journal(run_dir / "journal.jsonl")
    except ConfigError as error:
        raise ConfigError(f"{error}; choose another --run-dir") from error
    records = [record for _, record in told]
    differences = _differences(_read_config(run_dir / "config.json"), json.loads(config_json))
    started = [record for record in records if isinstance(record, events.Started)]
    if started:
        differences += _differences(started[-1].versions, dict(versions))
    ends = [item for item in records if isinstance(item, events.Started | events.Resumed | events.Finished)]
    last = ends[-1] if ends else None
    in_order = sorted([*told, *journal.decided], key=lambda item: item[0])
    return PastRun(
        records=tuple(record for _, record in in_order),
        journal=journal,
        finished=last if isinstance(last, events.Finished) else None,
        differences=tuple(differences),
    )


def _read(path: Path) -> list[tuple[float, events.Record]]:
    try:
        return list(events.read_events(path))
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged ({error}); choose another --run-dir") from None


def _read_config(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error}); choose another --run-dir") from None


def _differences(then: Any, now: Any) -> list[str]:
    """Return what differs, each as `name 1 (now 2)`."""
    before, after = dict(_flat(then)), dict(_flat(now))
    return [
        f"{name} {before.get(name, '(unknown)')} (now {after.get(name, '(unknown)')})"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(name, value)]
    return [item for key, inner in value.items() for item in _flat(inner, f"{name}.{key}" if name else key)]
