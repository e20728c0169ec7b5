"""The checkpoints of a run as its coordinator sees them: when they are due, where they lie, what manifests say."""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from oobleck_jax.checkpoint.compatibility import check_compatible
from oobleck_jax.checkpoint.manifest import GroupRecord, Manifest
from oobleck_jax.checkpoint.store import FOLDER, Checkpoint, CheckpointStore
from oobleck_jax.config import RunConfig
from oobleck_jax.data import TokenDataset
from oobleck_jax.elastic.effects import CheckpointCommitted, CheckpointFailed, CheckpointFound
from oobleck_jax.elastic.messages import RestorePoint
from oobleck_jax.elastic.terms import Checkpoints
from oobleck_jax.errors import CheckpointDamaged, CheckpointUnwritable, ConfigError


class RunCheckpoints:
    """Commits, finds and removes the checkpoints of a run; may block."""

    def __init__(
        self, store: CheckpointStore, *, config: RunConfig, config_json: str, versions: Mapping[str, str], keep: int
    ) -> None:
        """Look at nothing yet.

        Args:
            store: where they are.
            config: of the run.
            config_json: the same, as config.json has it.
            versions: of the software.
            keep: so many are left when another one is complete.
        """
        self.store = store
        self._config, self._versions, self._keep = config, dict(versions), keep
        self._config_fields: dict[str, Any] = msgspec.json.decode(config_json)
        self._dataset = TokenDataset.open(config)

    def commit(
        self, step: int, generation: int, groups: dict[str, GroupRecord], *, before: Callable[[], None]
    ) -> CheckpointCommitted | CheckpointFailed:
        """Let a checkpoint count, all groups of which are written.

        Args:
            before: forces to disk what must not be behind a checkpoint.
        """
        manifest = Manifest(
            step=step,
            generation=generation,
            seed=self._config.seed,
            samples_used=(step + 1) * self._config.global_batch_size,
            num_train_samples=self._dataset.num_train_samples,
            data_fingerprint=self._dataset.fingerprint,
            config=self._config_fields,
            versions=self._versions,
            groups=groups,
        )
        try:
            before()
            self.store.commit(manifest)
        except (CheckpointDamaged, CheckpointUnwritable, OSError) as error:
            return CheckpointFailed(generation=generation, step=step, reason=str(error))
        removed = self.store.clean_up(keep=self._keep)
        return CheckpointCommitted(generation=generation, step=step, num_bytes=manifest.num_bytes, removed=removed)

    def clean(self, step: int, generation: int) -> None:
        """Remove what was left half written, but for one checkpoint."""
        self.store.clean_up(keep=self._keep, saving=self.store.folder(step=step, generation=generation))

    def find(self, excluded: Collection[str], end_step: int | None) -> CheckpointFound:
        """Return the newest intact checkpoint; see `FindCheckpoint`."""
        try:
            checkpoint, damaged = self.store.newest(end_step=end_step, excluded=excluded)
        except OSError as error:
            return CheckpointFound(point=None, damaged=(f"{self.store.root} cannot be read: {error.strerror}",))
        point = None
        if checkpoint is not None:
            point = RestorePoint(folder=str(checkpoint.folder), step=checkpoint.step)
        return CheckpointFound(point=point, damaged=tuple(map(str, damaged)))

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that seems intact, if this run can go on with it.

        Raises:
            ConfigError: it cannot; names every difference.
        """
        checkpoint, _ = self.store.newest()
        if checkpoint is not None:
            check_compatible(
                checkpoint.manifest,
                self._config_fields,
                num_train_samples=self._dataset.num_train_samples,
                data_fingerprint=self._dataset.fingerprint,
            )
        return checkpoint


def checkpoint_terms(every: str | None, store: CheckpointStore) -> Checkpoints:
    """Return when checkpoints are due.

    Args:
        every: steps ("20") or minutes ("5m"); "0": never; None: only at the end.
        store: where they are.

    Raises:
        ConfigError: it is none of these.
    """

    def folder(step: int, generation: int) -> str:
        return str(store.folder(step=step, generation=generation))

    if every is None:
        return Checkpoints(folder=folder)
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)m", every)
    if match is None or (match[2] and not float(match[2])):
        raise ConfigError(f"--checkpoint-every {every}: give steps, such as 20, or minutes, such as 5m; 0 is never")
    if match[2]:
        return Checkpoints(folder=folder, every_s=60.0 * float(match[2]))
    steps = int(match[1])
    return Checkpoints(folder=folder, every_steps=steps or None, at_end=bool(steps))


def checkpoint_folder(given: Path | None, run_dir: Path) -> Path:
    """Return the absolute folder of a run's checkpoints.

    Args:
        given: by the user.
        run_dir: has them otherwise.

    Raises:
        ConfigError: it is the address of an object store.
    """
    if given is not None and re.match(r"[a-z][a-z0-9+.-]+:/", str(given)):
        raise ConfigError(
            f"--checkpoint-dir {given} is in an object store; checkpoints are forced to disk, so they need a file "
            "system: mount the store where all nodes see it (gcsfuse, mountpoint-s3), and give that folder"
        )
    return (given or run_dir / FOLDER).resolve()


def link_checkpoints(run_dir: Path, store: CheckpointStore) -> None:
    """Make checkpoints that lie elsewhere reachable from the run directory, where all programs look for them.

    Raises:
        ConfigError: the run has them in another folder.
    """
    link = run_dir / FOLDER
    if link.resolve() == store.root.resolve():
        return
    try:
        link.symlink_to(store.root.resolve())
    except FileExistsError:
        raise ConfigError(
            f"--checkpoint-dir {store.root}: {run_dir} has its checkpoints in {link.resolve()}; leave it out, or "
            "choose another --run-dir"
        ) from None
