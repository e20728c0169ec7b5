"""How a worker writes the groups that it was elected for: a copy in memory at once, the disk in the background.

The caller's thread only copies arrays. They are views of device memory that the next update gives away, so without a
copy the writer would save a mixture of two steps. Orbax is imported by the first save: it costs 0.3 s and 25 MB.

The thread has the priority of the others, like all that work in the background (background.py).

Compression is off: for one block of gpt-laptop it cost 0.12 s of CPU time instead of 0.07 s, for 7 % fewer bytes.
"""

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from oobleck_jax.checkpoint.files import Location, seal, sync_folder
from oobleck_jax.checkpoint.manifest import FileRecord, GroupRecord
from oobleck_jax.checkpoint.named_arrays import NamedArrays, named_arrays, nested, records_of
from oobleck_jax.checkpoint.object_store import ObjectPath
from oobleck_jax.checkpoint.scratch import scratch_folder
from oobleck_jax.errors import CheckpointUnwritable, ObjectStoreError, cause_of
from oobleck_jax.execution.state_transfer import checksum_of


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Groups that are on disk, to stay there whatever dies."""

    folder: Location
    groups: dict[str, GroupRecord]
    seconds: dict[str, float]  # copy: the caller waited for it; write


Outcome: TypeAlias = Written | CheckpointUnwritable


class CheckpointWriter:
    """Writes one part of a checkpoint at a time, in a thread of its own; one more may wait for its turn.

    That one is wanted when the run was about to save its last state and a loss made it begin anew: the part that came
    to nothing is still being written then.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []  # the one that writes, and the one that waits for it

    @property
    def is_busy(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def begin(self, folder: Location, states: Mapping[str, Any], on_end: Callable[[Outcome], None]) -> bool:
        """Copy states, and begin to write the copies.

        Args:
            folder: of the checkpoint; see `CheckpointStore.folder`.
            states: by group, each a tree of arrays (`GroupState`).
            on_end: called once, in the writer's thread.

        Returns:
            False if another one waits for its turn already; then nothing is done.
        """
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) > 1:
            return False
        began_s = time.monotonic()
        copies = {group: _copied(state) for group, state in states.items()}
        # Daemonic: a disk that hangs must not keep the process from ending. Who needs the result waits for it.
        thread = threading.Thread(
            target=_write,
            args=(self._threads[:1], folder, copies, time.monotonic() - began_s, on_end),
            name="checkpoint-writer",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the saves in progress, if there are any; tell whether they have ended."""
        for thread in self._threads[-1:]:  # it ends last
            thread.join(timeout_s)
        return not self.is_busy


def write_group(folder: Location, group: str, arrays: NamedArrays) -> GroupRecord:
    """Write one group into a checkpoint's folder, to stay there.

    Raises:
        CheckpointUnwritable: the disk is full, read-only, or otherwise unfit; or the object store does not take it.
    """
    try:
        if isinstance(folder, ObjectPath):
            files = _upload(folder, group, arrays)
        else:
            files = _write_files(folder, group, arrays)
    # Orbax has no error of its own for a disk that refuses: it depends on where that happens.
    except Exception as error:
        logger.debug("%s cannot be written", folder / group, exc_info=True)
        raise CheckpointUnwritable(folder / group, cause_of(error)) from error
    leaves = list(arrays.values())
    return GroupRecord(
        checksum=checksum_of(leaves),
        num_bytes=sum(leaf.nbytes for leaf in leaves),
        arrays=records_of(arrays),
        files=files,
    )


def _write_files(folder: Path, group: str, arrays: NamedArrays) -> dict[str, FileRecord]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _save(folder / group, arrays)
        files = seal(folder / group)
        sync_folder(folder)
        sync_folder(folder.parent)
    except Exception:
        # Space that nobody else can use is worth more than a part of a group.
        for part in folder.glob(f"{group}*"):
            shutil.rmtree(part, ignore_errors=True)
        raise
    return files


def _upload(folder: ObjectPath, group: str, arrays: NamedArrays) -> dict[str, FileRecord]:
    try:
        with scratch_folder() as scratch:
            _save(scratch / group, arrays)
            files = seal(scratch / group, sync=False)
            (folder / group).upload(scratch / group, {name: record.num_bytes for name, record in files.items()})
    except ObjectStoreError:
        raise
    except Exception as error:
        raise OSError(None, f"{cause_of(error)} (in {tempfile.gettempdir()}, where it is made)") from error
    return files


def _save(path: Path, arrays: NamedArrays) -> None:
    import orbax.checkpoint as ocp  # late, see above

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(nested(arrays)), force=True)


def _write(
    before: Sequence[threading.Thread],
    folder: Location,
    copies: dict[str, NamedArrays],
    copy_s: float,
    on_end: Callable[[Outcome], None],
) -> None:
    for thread in before:
        thread.join()
    began_s = time.monotonic()
    groups: dict[str, GroupRecord] = {}
    try:
        for group in list(copies):
            groups[group] = write_group(folder, group, copies.pop(group))  # memory is free as soon as it can be
    except CheckpointUnwritable as error:
        on_end(error)
    else:
        seconds = {"copy": copy_s, "write": time.monotonic() - began_s}
        on_end(Written(folder=folder, groups=groups, seconds=seconds))


def _copied(state: Any) -> NamedArrays:
    return {name: np.array(leaf, copy=True, order="C") for name, leaf in named_arrays(state).items()}
