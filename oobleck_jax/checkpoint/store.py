"""The folder of a run's checkpoints, as the coordinator sees it; imports neither jax nor Orbax.

    checkpoints/step-000123-generation-4/layer-000/...     one Orbax item for each group, written by the workers
                                         wte/...
                                         manifest.json     written last, by the coordinator alone

A folder without a manifest is no checkpoint, so there is nothing to undo when somebody dies while saving. The
generation is part of the name, so that a writer that everybody has given up on can never touch what others save of the
same step later. A manifest needs no atomic rename of folders, which not every file system has, and no object store.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from oobleck_jax.checkpoint.files import (
    Location,
    folders_in,
    local_files,
    remove_folder,
    sizes_in,
    sync_folder,
    write_durably,
    wrong_content,
    wrong_size,
)
from oobleck_jax.checkpoint.manifest import Manifest, decode_manifest, encode_manifest
from oobleck_jax.checkpoint.object_store import ObjectPath, object_path
from oobleck_jax.errors import CheckpointDamaged, CheckpointUnwritable, ObjectStoreError


FOLDER = "checkpoints"  # in a run directory
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{6,})-generation-(\d+)")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that counts."""

    folder: Location
    manifest: Manifest

    @property
    def step(self) -> int:
        """The last one that it contains."""
        return self.manifest.step

    @contextmanager
    def intact_files(self, group: str, *, tell: Callable[[], None]) -> Iterator[Path]:
        """Give a folder of this machine with the files of a group, as they were saved.

        Args:
            tell: called every few seconds while they are fetched; may raise to end it.

        Raises:
            CheckpointDamaged: they are not as they were saved; names the first.
            OSError: they cannot be fetched, and may be intact.
        """
        record, folder = self.manifest.groups.get(group), self.folder / group
        if record is None:
            raise CheckpointDamaged("has no record in its manifest", step=self.step, group=group, file=None)

        def check(found: tuple[str, str] | None) -> None:
            if found is not None:
                raise CheckpointDamaged(found[1], step=self.step, group=group, file=folder / found[0])

        check(wrong_size(sizes_in(folder), record.files))
        with local_files(folder, record.files, tell) as files:
            check(wrong_content(files, record.files))
            yield files

    def first_damage(self, sizes: Mapping[str, int]) -> CheckpointDamaged | None:
        """Return what is wrong with the first file that is missing or has another size than was saved.

        Args:
            sizes: of the files in its folder.
        """
        groups = self.manifest.groups
        owners = {f"{group}/{name}": group for group, record in groups.items() for name in record.files}
        records = {f"{group}/{name}": file for group, record in groups.items() for name, file in record.files.items()}
        found = wrong_size(sizes, records)
        if found is None:
            return None
        return CheckpointDamaged(found[1], step=self.step, group=owners[found[0]], file=self.folder / found[0])


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

    def __init__(self, root: Location) -> None:
        self.root = root

    def folder(self, *, step: int, generation: int) -> Location:
        """Return where the groups of a checkpoint belong, each in a folder of its name."""
        return self.root / f"step-{step:06d}-generation-{generation}"

    def last_generation(self) -> int:
        """Return the last generation that wrote here, were it only a part; 0: there is none."""
        return max((generation for generation, _, _ in self._folders()), default=0)

    def is_bucket_missing(self) -> bool:
        """Tell whether it would be in a bucket that is known not to be there."""
        return isinstance(self.root, ObjectPath) and self.root.bucket.is_missing()

    def commit(self, manifest: Manifest) -> Checkpoint:
        """Let a checkpoint count, now that all its groups are written.

        Raises:
            CheckpointDamaged: the files are not here, or not as their writers reported them.
            CheckpointUnwritable: the disk is full, or read-only.
            ObjectStoreError: the store cannot be asked what is there.
        """
        folder = self.folder(step=manifest.step, generation=manifest.generation)
        checkpoint = Checkpoint(folder=folder, manifest=manifest)
        sizes = sizes_in(folder)
        if (damaged := checkpoint.first_damage(sizes)) is not None:
            if not sizes:
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
        found = [found for _, _, found in self._looked_at()]
        return Found(
            checkpoints=tuple(item for item in found if isinstance(item, Checkpoint)),
            damaged=tuple(item for item in found if isinstance(item, CheckpointDamaged)),
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
        for folder, sizes, found in self._looked_at():
            if isinstance(found, CheckpointDamaged):
                damaged.append(found)
            if not isinstance(found, Checkpoint) or str(folder) in excluded:
                continue
            if end_step is not None and found.step >= end_step:
                continue
            if (error := found.first_damage(sizes)) is None:
                return found, tuple(damaged)
            damaged.append(error)
        return None, tuple(damaged)

    def clean_up(self, *, keep: int, saving: Location | None = None) -> tuple[str, ...]:
        """Remove what is older than the newest `keep` checkpoints, and what was left half written.

        Checkpoints with damaged files do not count, lest the last intact one goes; those with a damaged manifest are
        left for people to look at.

        Args:
            saving: folder of the checkpoint that is being written.

        Returns:
            names of the folders that were removed.
        """
        assert keep >= 1
        old: list[Location] = []
        half_written: list[Location] = []
        num_intact = 0
        for folder, sizes, found in self._looked_at():
            if found is None:
                half_written += [folder] if folder != saving else []
            elif isinstance(found, Checkpoint) and num_intact == keep:
                old.append(folder)
            elif isinstance(found, Checkpoint):
                num_intact += found.first_damage(sizes) is None
        removed: list[str] = []
        for folder in (*old, *reversed(half_written)):
            try:
                # What makes it count goes first: a removal that is cut short leaves no damaged checkpoint.
                remove_folder(folder, first=MANIFEST)
                removed.append(folder.name)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", folder, error.strerror)
                if isinstance(error, ObjectStoreError):  # others would take as long to fail
                    break
        return tuple(removed)

    def _looked_at(self) -> Iterator[tuple[Location, Mapping[str, int], Checkpoint | CheckpointDamaged | None]]:
        """Yield what there is, newest first: its folder, the sizes of its files, and what its manifest says, if any.

        The last generation comes before the last step: after a run has gone back to an old checkpoint, the steps that
        it gave up count no more.
        """
        for _, _, name in sorted(self._folders(), reverse=True):
            folder = self.root / name
            sizes = sizes_in(folder)
            found = None
            if MANIFEST in sizes:
                try:
                    found = read_checkpoint(folder)
                except CheckpointDamaged as error:
                    found = error
            yield folder, sizes, found

    def _folders(self) -> list[tuple[int, int, str]]:
        """Return (generation, step, name) of all folders that look like checkpoints, complete or not."""
        matches = [_NAME.fullmatch(name) for name in folders_in(self.root)]
        return [(int(match[2]), int(match[1]), match[0]) for match in matches if match]


def checkpoints_of(run_dir: Path) -> Location:
    """Return the folder of a run's checkpoints: in its directory, unless that only says in which object store it is.

    Raises:
        ConfigError: the address that it has cannot be used.
    """
    path = run_dir / FOLDER
    address = object_path(path.read_text(encoding="utf-8", errors="replace").strip()) if path.is_file() else None
    return path if address is None else address


def read_checkpoint(folder: Location) -> Checkpoint:
    """Return the checkpoint in a folder; nothing but its manifest is read.

    Raises:
        CheckpointDamaged: the manifest is missing, or damaged.
        ObjectStoreError: the store cannot be asked; the checkpoint may be intact.
    """
    path = folder / MANIFEST
    try:
        return Checkpoint(folder=folder, manifest=decode_manifest(path.read_bytes()))
    except ObjectStoreError:
        raise
    except (OSError, ValueError) as error:
        match = _NAME.fullmatch(folder.name)
        what = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise CheckpointDamaged(what, step=int(match[1]) if match else None, group=None, file=path) from error
