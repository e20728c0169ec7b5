"""Files that outlive a crash: forced to disk, summed, and checked.

`os.replace` alone makes a file appear whole or not at all for readers, but after a loss of power only what was forced
to disk is there, the entries of folders included. What an object store has taken is there to stay, and appears whole.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
    return ObjectPath(address=text) if "://" in text else Path(text)


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


def folders_in(folder: Location) -> list[str]:
    """Return the names of the folders in a folder; a folder that is not there has none."""
    if isinstance(folder, ObjectPath):
        return folder.folders()
    try:
        return [path.name for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def sizes_in(folder: Location) -> dict[str, int]:
    """Return the sizes of all files in a folder and its folders, by their paths in it, in bytes."""
    if isinstance(folder, ObjectPath):
        return folder.sizes()
    sizes: dict[str, int] = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            with suppress(OSError):  # it has just gone, or is as good as gone
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    return sizes


def remove_folder(folder: Location, *, first: str) -> None:
    """Remove a folder with all that is in it.

    Args:
        first: the file to begin with.
    """
    if isinstance(folder, ObjectPath):
        return folder.remove(first=first)
    (folder / first).unlink(missing_ok=True)
    return shutil.rmtree(folder)


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


def wrong_size(sizes: Mapping[str, int], records: Mapping[str, FileRecord]) -> tuple[str, str] | None:
    """Return the first file that is missing or has another size than was saved, and what is wrong; None: there is none.

    Args:
        sizes: what there is, as `sizes_in` tells.
        records: what there should be.
    """
    for name, record in records.items():
        if name not in sizes:
            return name, "is missing"
        if sizes[name] != record.num_bytes:
            return name, f"has {sizes[name]} bytes, not the {record.num_bytes} that were saved"
    return None


def wrong_content(folder: Path, records: Mapping[str, FileRecord]) -> tuple[str, str] | None:
    """Return the first file that has other bits than were saved, and what is wrong with it; None: there is none."""
    for name, record in records.items():
        try:
            if _read(folder / name, sync=False) != record:
                return name, "has other content than was saved: its checksum differs"
        except OSError as error:
            return name, f"cannot be read: {error.strerror}"
    return None


@contextmanager
def local_files(folder: Location, records: Mapping[str, FileRecord], tell: Callable[[], None]) -> Iterator[Path]:
    """Give a folder of a file system with these files: their own, or one that is gone afterwards.

    Args:
        tell: called every few seconds while they are fetched; may raise to end it.

    Raises:
        OSError: they cannot be fetched.
    """
    if isinstance(folder, Path):
        yield folder
        return
    with scratch_folder() as scratch:
        folder.download(scratch, {name: record.num_bytes for name, record in records.items()}, tell)
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
