"""Files that outlive a crash: forced to disk, summed, and checked.

`os.replace` alone makes a file appear whole or not at all for readers, but after a loss of power only what was forced
to disk is there, the entries of folders included. What an object store has taken is there to stay, and appears whole.
"""

import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from oobleck_jax.checkpoint.manifest import FileRecord
from oobleck_jax.checkpoint.object_store import ObjectPath
from oobleck_jax.checkpoint.scratch import scratch_folder


Location: TypeAlias = Path | ObjectPath
"""A file or a folder, of a file system or of an object store."""

_CHUNK_BYTES = 1 << 22


def location_of(text: str) -> Location:
    """Return what `str` has made of a location."""
    return ObjectPath(text) if "://" in text else Path(text)


def write_durably(path: Location, content: bytes) -> None:
    """Write a file that is complete or absent, whatever dies."""
    if isinstance(path, ObjectPath):
        return path.write_bytes(content)
    draft = path.with_name(f".{path.name}.new")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    return sync_folder(path.parent)


def sync_folder(path: Location) -> None:
    """Force the entries of a folder to disk."""
    if isinstance(path, ObjectPath):
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_folder(path: Location) -> None:
    """Remove a folder with all that is in it."""
    if isinstance(path, ObjectPath):
        path.remove()
    else:
        shutil.rmtree(path)


def seal(folder: Path, *, sync: bool = True) -> dict[str, FileRecord]:
    """Return what the files of a folder contain, by their paths in it.

    Args:
        sync: force everything in it to disk.
    """
    records: dict[str, FileRecord] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_dir():
            records[path.relative_to(folder).as_posix()] = _read(path, sync=sync)
        elif sync:
            sync_folder(path)
    if sync:
        sync_folder(folder)
    return records


def damage(folder: Location, records: Mapping[str, FileRecord], *, whole: bool) -> tuple[str, str] | None:
    """Return the first damaged file and what is wrong with it; None: there is none.

    Args:
        whole: read the files, which must be in a file system; if not, only their sizes are checked.

    Raises:
        ObjectStoreError: the store cannot be asked.
    """
    sizes = folder.sizes() if isinstance(folder, ObjectPath) else {}  # one question for all files
    for name, record in records.items():
        path = folder / name
        try:
            num_bytes = sizes[name] if isinstance(path, ObjectPath) else path.stat().st_size
            if num_bytes != record.num_bytes:
                return name, f"has {num_bytes} bytes, not the {record.num_bytes} that were saved"
            if not whole:
                continue
            assert isinstance(path, Path)
            if _read(path, sync=False) != record:
                return name, "has other content than was saved: its checksum differs"
        except (FileNotFoundError, KeyError):
            return name, "is missing"
        except OSError as error:
            return name, f"cannot be read: {error.strerror}"
    return None


@contextmanager
def local_files(folder: Location, records: Mapping[str, FileRecord]) -> Iterator[Path]:
    """Give a folder of a file system with these files: their own, or one that is gone afterwards.

    Raises:
        OSError: they cannot be copied.
    """
    if isinstance(folder, Path):
        yield folder
        return
    with scratch_folder() as scratch:
        folder.download(scratch, {name: record.num_bytes for name, record in records.items()})
        yield scratch


def _read(path: Path, *, sync: bool) -> FileRecord:
    crc32 = num_bytes = 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
            num_bytes += len(chunk)
    return FileRecord(num_bytes=num_bytes, crc32=crc32)
