"""The checkpoints of a run as its coordinator sees them: when they are due, where they lie, what manifests say."""

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from oobleck_jax.checkpoint.compatibility import check_compatible
from oobleck_jax.checkpoint.files import Location, write_durably
from oobleck_jax.checkpoint.manifest import GroupRecord, Manifest
from oobleck_jax.checkpoint.object_store import ObjectPath, object_path
from oobleck_jax.checkpoint.store import FOLDER, Checkpoint, CheckpointStore, checkpoints_of
from oobleck_jax.config import RunConfig
from oobleck_jax.data import TokenDataset
from oobleck_jax.elastic.effects import CheckpointCommitted, CheckpointFailed, CheckpointFound
from oobleck_jax.elastic.messages import RestorePoint
from oobleck_jax.elastic.terms import Checkpoints
from oobleck_jax.errors import CheckpointDamaged, CheckpointUnwritable, ConfigError


_AGAIN_S = 1.0  # before a store that could not be read is asked again

logger = logging.getLogger(__name__)


class RunCheckpoints:
    """Commits, finds and removes the checkpoints of a run; may block."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        config: RunConfig,
        config_json: str,
        versions: Mapping[str, str],
        keep: int,
        find_s: float,
    ) -> None:
        """Look at nothing yet.

        Args:
            store: where they are.
            config: of the run.
            config_json: the same, as config.json has it.
            versions: of the software.
            keep: so many are left when another one is complete.
            find_s: so long is waited for what is looked for.
        """
        self.store = store
        self._config, self._versions, self._keep, self._find_s = config, dict(versions), keep, find_s
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
        removed = self._clean_up(saving=None)
        return CheckpointCommitted(generation=generation, step=step, num_bytes=manifest.num_bytes, removed=removed)

    def clean(self, step: int, generation: int) -> None:
        """Remove what was left half written, but for one checkpoint."""
        self._clean_up(saving=self.store.folder(step=step, generation=generation))

    def _clean_up(self, saving: Location | None) -> tuple[str, ...]:
        try:
            return self.store.clean_up(keep=self._keep, saving=saving)
        except OSError as error:
            logger.warning("%s cannot be cleaned up: %s", self.store.root, error.strerror)
            return ()

    def find(self, excluded: Collection[str], end_step: int | None) -> CheckpointFound:
        """Return the newest intact checkpoint; see `FindCheckpoint`.

        The run depends on it, so a store that cannot be read is asked again, as long as an answer can be in time.
        """
        until_s = time.monotonic() + self._find_s / 2
        while True:
            try:
                checkpoint, damaged = self.store.newest(end_step=end_step, excluded=excluded)
            except OSError as error:
                if time.monotonic() + _AGAIN_S > until_s:
                    unread = f"{self.store.root} cannot be read: {error.strerror}"
                    return CheckpointFound(point=None, unread=unread)
                time.sleep(_AGAIN_S)
                continue
            point = None
            if checkpoint is not None:
                point = RestorePoint(folder=str(checkpoint.folder), step=checkpoint.step)
            return CheckpointFound(point=point, damaged=tuple(map(str, damaged)))

    def start(self) -> tuple[Checkpoint | None, int]:
        """Return the newest checkpoint that seems intact, if this run can go on with it, and the last generation.

        Raises:
            ConfigError: it cannot; names every difference. Or nobody can tell, or there is no such bucket.
        """
        try:
            checkpoint, _ = self.store.newest()
            last_generation = self.store.last_generation()
        except OSError as error:  # a run that began anew would get in the way of the checkpoints that may be there
            raise ConfigError(
                f"{self.store.root} cannot be read: {error.strerror}; so nobody knows whether there is a checkpoint to "
                "go on from"
            ) from error
        if checkpoint is not None:
            check_compatible(
                checkpoint.manifest,
                self._config_fields,
                num_train_samples=self._dataset.num_train_samples,
                data_fingerprint=self._dataset.fingerprint,
            )
        elif self.store.is_bucket_missing():
            raise ConfigError(f"{self.store.root}: there is no such bucket; make it, or give another --checkpoint-dir")
        return checkpoint, last_generation


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


def checkpoint_folder(given: str | None, run_dir: Path) -> Location:
    """Return the folder of a run's checkpoints, if it is in a file system its absolute path.

    Args:
        given: by the user.
        run_dir: has them otherwise, or says where they are.

    Raises:
        ConfigError: it is an address that cannot be used.
    """
    if given is None:
        return _absolute(checkpoints_of(run_dir))
    try:
        address = object_path(given)
    except ConfigError as error:
        raise ConfigError(f"--checkpoint-dir {error}") from error
    return _absolute(Path(given)) if address is None else address


def link_checkpoints(run_dir: Path, store: CheckpointStore) -> None:
    """Make checkpoints that lie elsewhere reachable from the run directory, where all programs look for them.

    In a file system that is a link. The address of an object store is written into a file of the same name.

    Raises:
        ConfigError: the run has them in another folder.
    """
    link, linked = run_dir / FOLDER, _absolute(checkpoints_of(run_dir))
    root = _absolute(store.root)
    if linked == root:
        return
    if os.path.lexists(link):
        raise ConfigError(
            f"--checkpoint-dir {store.root}: {run_dir} has its checkpoints in {linked}; leave it out, or choose "
            "another --run-dir"
        )
    if isinstance(root, ObjectPath):
        write_durably(link, f"{root}\n".encode())
    else:
        link.symlink_to(root)


def _absolute(place: Location) -> Location:
    return place.resolve() if isinstance(place, Path) else place
