"""The folder of a run's checkpoints, as the coordinator sees it; imports neither jax nor Orbax.

    checkpoints/step-000123-generation-4/layer-000/...     one Orbax item for each group, written by the workers
                                         wte/...
                                         manifest.json     written last, by the coordinator alone

A folder without a manifest is no checkpoint, so there is nothing to undo when somebody dies while saving. The
generation is part of the name, so that a writer that everybody has given up on can never touch what others save of the
same step later. A manifest needs no atomic rename of folders, which not every file system has.
"""

import logging
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from oobleck_jax.checkpoint.files import damage, sync_folder, write_durably
from oobleck_jax.checkpoint.manifest import Manifest, decode_manifest, encode_manifest
from oobleck_jax.errors import CheckpointDamaged, CheckpointUnwritable


FOLDER = "checkpoints"  # in a run directory
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{6,})-generation-(\d+)")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that counts."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The last one that it contains."""
        return self.manifest.step

    def damage(self, group: str, *, whole: bool = True) -> CheckpointDamaged | None:
        """Return what is wrong with the files of a group; None: nothing.

        Args:
            whole: read the files; if not, only their sizes are checked.
        """
        step, record = self.step, self.manifest.groups.get(group)
        if record is None:
            return CheckpointDamaged("has no record in its manifest", step=step, group=group, file=None)
        found = damage(self.folder / group, record.files, whole=whole)
        return None if found is None else CheckpointDamaged(found[1], step=step, group=group, file=found[0])

    def first_damage(self, *, whole: bool = False) -> CheckpointDamaged | None:
        """Return what is wrong with the first damaged group."""
        return next(filter(None, (self.damage(group, whole=whole) for group in self.manifest.groups)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What there is.

    Attributes:
        checkpoints: newest first.
        damaged: those whose manifest cannot be read.
    """

    checkpoints: tuple[Checkpoint, ...]
    damaged: tuple[CheckpointDamaged, ...]


class CheckpointStore:
    """The checkpoints in one folder, which need not exist before the first is saved."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, *, step: int, generation: int) -> Path:
        """Return where the groups of a checkpoint belong, each in a folder of its name."""
        return self.root / f"step-{step:06d}-generation-{generation}"

    def last_generation(self) -> int:
        """Return the last generation that wrote here, were it only a part; 0: there is none."""
        return max((generation for generation, _, _ in self._folders()), default=0)

    def commit(self, manifest: Manifest) -> Checkpoint:
        """Let a checkpoint count, now that all its groups are written.

        Raises:
            CheckpointDamaged: the files are not here, or not as their writers reported them.
            CheckpointUnwritable: the disk is full, or read-only.
        """
        folder = self.folder(step=manifest.step, generation=manifest.generation)
        checkpoint = Checkpoint(folder=folder, manifest=manifest)
        damaged = checkpoint.first_damage()
        if damaged is not None:
            if not folder.is_dir():
                what = "is not here: all nodes must write to the same folder, on a file system that they share"
                raise CheckpointDamaged(what, step=manifest.step, group=None, file=folder)
            raise damaged
        try:
            write_durably(folder / MANIFEST, encode_manifest(manifest))
            sync_folder(self.root)
        except OSError as error:
            raise CheckpointUnwritable(folder / MANIFEST, str(error.strerror)) from error
        return checkpoint

    def find(self) -> Found:
        """Return what is committed; nothing but the manifests is read."""
        entries = list(self._entries())
        return Found(
            checkpoints=tuple(entry for entry in entries if isinstance(entry, Checkpoint)),
            damaged=tuple(entry for entry in entries if isinstance(entry, CheckpointDamaged)),
        )

    def newest(
        self, *, end_step: int | None = None, excluded: Collection[str] = ()
    ) -> tuple[Checkpoint | None, tuple[CheckpointDamaged, ...]]:
        """Return the newest checkpoint whose files are all there, and what is wrong with newer ones.

        Only the sizes of files are checked; whoever reads a group finds out about the rest.

        Args:
            end_step: only checkpoints without this step and later ones.
            excluded: folders that are not taken.
        """
        damaged: list[CheckpointDamaged] = []
        for entry in self._entries():
            if isinstance(entry, Checkpoint) and (
                str(entry.folder) in excluded or (end_step is not None and entry.step >= end_step)
            ):
                continue
            if isinstance(entry, CheckpointDamaged):
                damaged.append(entry)
                continue
            error = entry.first_damage()
            if error is None:
                return entry, tuple(damaged)
            damaged.append(error)
        return None, tuple(damaged)

    def clean_up(self, *, keep: int, saving: Path | None = None) -> tuple[str, ...]:
        """Remove what is older than the newest `keep` checkpoints, and what was left half written.

        Checkpoints with damaged files do not count, lest the last intact one goes; those with a damaged manifest are
        left for people to look at.

        Args:
            saving: folder of the checkpoint that is being written.

        Returns:
            names of the folders that were removed.
        """
        assert keep >= 1
        removed: list[Path] = []
        num_intact = 0
        for entry in self._entries():
            if isinstance(entry, Checkpoint):
                if num_intact == keep:
                    removed.append(entry.folder)
                else:
                    num_intact += entry.first_damage() is None
        removed += [
            folder for _, _, folder in sorted(self._folders()) if folder != saving and not (folder / MANIFEST).exists()
        ]
        return tuple(folder.name for folder in removed if _remove(folder))

    def _entries(self) -> Iterator[Checkpoint | CheckpointDamaged]:
        """Yield what has a manifest, newest first.

        The last generation comes before the last step: after a run has gone back to an old checkpoint, the steps that
        it gave up count no more.
        """
        for _, _, folder in sorted(self._folders(), reverse=True):
            if (folder / MANIFEST).exists():
                try:
                    yield read_checkpoint(folder)
                except CheckpointDamaged as error:
                    yield error

    def _folders(self) -> list[tuple[int, int, Path]]:
        """Return (generation, step, folder) of all that look like checkpoints, complete or not."""
        try:
            entries = list(self.root.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        matches = [(_NAME.fullmatch(path.name), path) for path in entries]
        return [(int(match[2]), int(match[1]), path) for match, path in matches if match and path.is_dir()]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder; nothing but its manifest is read.

    Raises:
        CheckpointDamaged: the manifest is missing, or damaged.
    """
    path = folder / MANIFEST
    try:
        return Checkpoint(folder=folder, manifest=decode_manifest(path.read_bytes()))
    except (OSError, ValueError) as error:
        match = _NAME.fullmatch(folder.name)
        what = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise CheckpointDamaged(what, step=int(match[1]) if match else None, group=None, file=path) from error


def _remove(folder: Path) -> bool:
    try:
        # What makes it count goes first: a removal that is cut short leaves no damaged checkpoint.
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", folder, error.strerror)
        return False
    return True
