"""What the files of a run tell a coordinator that is to go on with it, because the one before it has died.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """A run that has begun and is not finished.

    Attributes:
        records: what happened, in order, without what concerns only the coordinator that died.
        committed: the steps that count, from 0 on.
    """

    records: tuple[events.Record, ...]
    committed: tuple[events.Committed, ...]

    @property
    def resumption(self) -> Resumption:
        """What the membership machine needs to go on."""
        plans = [record for record in self.records if isinstance(record, events.Planned)]
        evaluated = [record.step for record in self.records if isinstance(record, events.Evaluated)]
        last = self.committed[-1] if self.committed else None
        return Resumption(
            generation=plans[-1].generation if plans else 0,
            plan=plans[-1].plan if plans else None,
            committed=last,
            nodes=tuple(sorted(plans[-1].plan.nodes)) if plans else (),
            evaluated=last is None or last.step in evaluated,
        )


def read_past(run_dir: Path, *, config_json: str, versions: Mapping[str, str]) -> PastRun | None:
    """Read the run that a directory holds; None: it holds none.

    Args:
        run_dir: of the run; must belong to this process.
        config_json: what is to run now.
        versions: of the software that is to run it.

    Raises:
        ConfigError: the run is finished, was another one, or its files are damaged.
    """
    told, decided = _read(run_dir / "events.jsonl"), _read(run_dir / "journal.jsonl")
    if not told:
        return None
    records = [record for _, record in told]
    choose = f"choose another --run-dir than {run_dir}"
    for record in records:
        if isinstance(record, events.Finished):
            raise ConfigError(f"its run is finished after {record.steps} steps ({record.reason}); {choose}")
    differences = _differences(_read_config(run_dir / "config.json"), json.loads(config_json))
    for record in records:
        if isinstance(record, events.Started):
            differences += _differences(record.versions, dict(versions))
    if differences:
        raise ConfigError(f"its run has other settings: {', '.join(differences)}; use the same ones, or {choose}")
    committed = tuple(record for _, record in decided if isinstance(record, events.Committed))
    for step, record in enumerate(committed):
        if record.step != step:
            raise ConfigError(f"{run_dir}/journal.jsonl is damaged: line {step + 1} is step {record.step}")
    in_order = sorted([*told, *decided], key=lambda item: item[0])
    return PastRun(records=tuple(record for _, record in in_order), committed=committed)


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
