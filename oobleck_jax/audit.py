"""Proof from the files of a run that its committed steps are contiguous and its samples used once (M1, M2, T4).

The journal says which steps count, in the order in which they were decided; steps after a checkpoint that the run went
back to count no more. Steps name positions in the endless sequence of passes, and the keyed permutation turns these
into samples (data.py): the samples of each pass are computed and counted here, not assumed.
"""

import logging
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from models.presets import config_from_json
from oobleck_jax import events
from oobleck_jax.checkpoint.store import CheckpointStore, checkpoints_of
from oobleck_jax.config import RunConfig
from oobleck_jax.data import BUILTIN, TokenDataset, shuffled
from oobleck_jax.errors import ConfigError, DataError


_CHUNK_SAMPLES = 1 << 20

logger = logging.getLogger(__name__)


class Violation(Exception):
    """What must hold does not; says where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What the files of a run prove.

    Attributes:
        first_step: where its files begin; 0, unless it began with another run's checkpoint.
        end_step: exclusive.
        num_undone_steps: committed, but given up when the run went back to a checkpoint.
        num_samples_per_pass: training samples there are.
        violation: the first that was found; None: all that must hold does.
    """

    first_step: int
    end_step: int
    num_generations: int
    num_restores: int
    num_undone_steps: int
    num_samples: int
    num_samples_per_pass: int
    violation: str | None

    @property
    def num_passes(self) -> float:
        return self.num_samples / max(self.num_samples_per_pass, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ledger:
    """The steps that count: contiguous, or there is a violation."""

    first_step: int = 0
    generations: tuple[int, ...] = ()  # of each step that counts
    first_steps: dict[int, int]  # the first step that each generation committed
    num_restores: int = 0
    num_undone_steps: int = 0
    last_time: float = 0.0
    violation: str | None = None

    @property
    def end_step(self) -> int:
        return self.first_step + len(self.generations)


def audit(run_dir: Path) -> Audit:
    """Check a run, which may still go on.

    Raises:
        ConfigError: its files cannot be read.
        DataError: nobody knows how many samples its data have.
    """
    config = _read_config(run_dir)
    ledger = _read_journal(run_dir / "journal.jsonl")
    num_samples_per_pass, violation = 0, ledger.violation
    if violation is None:
        try:
            _check_events(run_dir, ledger)
            _check_metrics(run_dir / "metrics.jsonl", ledger, config)
            num_samples_per_pass = _num_train_samples(run_dir, config)
            _check_samples(ledger, config, num_samples_per_pass)
        except Violation as found:
            violation = str(found)
    return Audit(
        first_step=ledger.first_step,
        end_step=ledger.end_step,
        num_generations=len(ledger.first_steps),
        num_restores=ledger.num_restores,
        num_undone_steps=ledger.num_undone_steps,
        num_samples=len(ledger.generations) * config.global_batch_size,
        num_samples_per_pass=num_samples_per_pass,
        violation=violation,
    )


def _read_journal(path: Path) -> _Ledger:
    """Go through the decisions in their order, up to the first that must not be there."""
    generations: list[int] = []
    first_steps: dict[int, int] = {}
    first_step = newest = num_restores = num_undone = 0
    last_time, violation = 0.0, None
    for number, (time_s, record) in enumerate(_records(path), start=1):
        last_time = time_s
        where, expected = f"{path.name}, line {number}", first_step + len(generations)
        match record:
            case events.Restored() if not newest:  # nothing was done before
                first_step = record.step
            case events.Restored() if record.step <= expected:
                num_undone += expected - max(record.step, first_step)
                del generations[max(record.step - first_step, 0) :]
                first_step = min(record.step, first_step)
            case events.Restored():
                violation = f"{where}: goes on with step {record.step}, but the run has {first_step} to {expected - 1}"
            case events.Committed() if record.step < expected:
                violation = f"{where}: step {record.step} is committed again; step {expected} was next"
            case events.Committed() if record.step > expected:
                violation = f"{where}: step {record.step} is committed, but step {expected} was not"
            case events.Committed() if record.generation < newest:
                violation = f"{where}: generation {record.generation} committed after generation {newest}"
            case events.Committed():
                newest = record.generation
                first_steps.setdefault(newest, record.step)
                generations.append(newest)
            case _:
                violation = f"{where}: {type(record).__name__} is no decision"
        num_restores += isinstance(record, events.Restored)
        if violation is not None:
            break
    return _Ledger(
        first_step=first_step,
        generations=tuple(generations),
        first_steps=first_steps,
        num_restores=num_restores,
        num_undone_steps=num_undone,
        last_time=last_time,
        violation=violation,
    )


def _check_events(run_dir: Path, ledger: _Ledger) -> None:
    """Compare the generations that were begun with those that committed."""
    begun: dict[int, int] = {}
    finished: tuple[float, events.Finished] | None = None
    for number, (time_s, record) in enumerate(_records(run_dir / "events.jsonl"), start=1):
        where = f"events.jsonl, line {number}"
        if isinstance(record, events.Planned):
            if begun and record.generation <= max(begun):
                raise Violation(f"{where}: generation {record.generation} begins after generation {max(begun)}")
            begun[record.generation] = record.step
        elif isinstance(record, events.Finished):
            finished = time_s, record
    for generation, step in ledger.first_steps.items():
        if generation not in begun:
            raise Violation(f"generation {generation} committed step {step}, but events.jsonl does not say it began")
        if begun[generation] != step:
            raise Violation(
                f"generation {generation} began with step {begun[generation]}, but its first commit is step {step}"
            )
    if finished is not None and finished[0] >= ledger.last_time and finished[1].steps != ledger.end_step:
        raise Violation(f"the run says it has {finished[1].steps} steps, but its journal has {ledger.end_step}")


def _check_metrics(path: Path, ledger: _Ledger, config: RunConfig) -> None:
    """Compare the samples that were recorded with those that the steps name."""
    recorded: dict[int, tuple[int, int]] = {}
    decoder = msgspec.json.Decoder(events.StepMetrics)
    for number, line in enumerate(events.complete_lines(path), start=1):
        try:
            metrics = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise Violation(f"{path.name}, line {number} is damaged: {error}") from error
        recorded[metrics.step] = metrics.sample_first, metrics.sample_end
    # The coordinator may have died between the journal and the metrics of its last step.
    for step in range(ledger.first_step, ledger.end_step):
        expected = step * config.global_batch_size, (step + 1) * config.global_batch_size
        if step not in recorded and step < ledger.end_step - 1:
            raise Violation(f"{path.name} does not say which samples step {step} used")
        if recorded.get(step, expected) != expected:
            first, end = recorded[step]
            raise Violation(
                f"{path.name}: step {step} used the samples {first} to {end - 1} of the sequence, it should have used "
                f"{expected[0]} to {expected[1] - 1}"
            )


def _check_samples(ledger: _Ledger, config: RunConfig, num_per_pass: int) -> None:
    """Compute the samples of every pass, and see that none comes twice."""
    batch = config.global_batch_size
    position, end = ledger.first_step * batch, ledger.end_step * batch
    while position < end:
        number = position // num_per_pass
        end_of_pass = min(end, (number + 1) * num_per_pass)
        used = np.zeros(num_per_pass, dtype=bool)
        for first in range(position, end_of_pass, _CHUNK_SAMPLES):
            positions = np.arange(first, min(first + _CHUNK_SAMPLES, end_of_pass), dtype=np.int64)
            passes, within = np.divmod(positions, num_per_pass)
            samples = shuffled(within, num_per_pass, seed=config.seed, passes=passes)
            order = np.argsort(samples, kind="stable")
            again = used[samples]
            again[order[1:]] |= samples[order[1:]] == samples[order[:-1]]
            if again.any():
                index = int(again.argmax())
                step = int(positions[index]) // batch
                raise Violation(f"step {step} used sample {samples[index]} again within pass {number}")
            used[samples] = True
        position = end_of_pass


def _num_train_samples(run_dir: Path, config: RunConfig) -> int:
    """Return how many samples a pass has: what checkpoints say, or else the data."""
    saved: set[int] = set()
    try:
        found = CheckpointStore(checkpoints_of(run_dir)).find()
        saved = {item.manifest.num_train_samples for item in found.checkpoints}
    except (ConfigError, OSError) as error:  # such as an object store, from here
        logger.warning("the checkpoints cannot be read, so the data tells how many samples a pass has: %s", error)
    if len(saved) > 1:
        raise Violation(f"checkpoints disagree on the number of training samples: {sorted(saved)}")
    if saved:
        return saved.pop()
    versions = {
        record.versions.get("python")
        for _, record in _records(run_dir / "events.jsonl")
        if isinstance(record, events.Started)
    }
    here = ".".join(platform.python_version_tuple()[:2])
    if config.data == BUILTIN and versions - {here, None}:
        raise DataError(
            f"the run took its data from Python {', '.join(map(str, versions))}, this is Python {here}, whose texts "
            "differ; audit it with that version"
        )
    num_samples = TokenDataset.open(config).num_train_samples
    if num_samples == 0:
        raise DataError(
            f"{config.data} has no training sample of {config.sequence_length} tokens; is it the file of this run?"
        )
    return num_samples


def _read_config(run_dir: Path) -> RunConfig:
    try:
        return config_from_json((run_dir / "config.json").read_text(encoding="utf-8"))[1]
    except OSError as error:
        raise ConfigError(f"{run_dir} is no folder of a run: {error}") from error


def _records(path: Path) -> Iterator[tuple[float, events.Record]]:
    try:
        yield from events.read_events(path)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
