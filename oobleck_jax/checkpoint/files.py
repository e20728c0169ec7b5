"""Files that outlive a crash: forced to disk, summed, and checked.

`os.replace` alone makes a file appear whole or not at all for readers, but after a loss of power only what was forced
to disk is there, the entries of folders included.
"""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from oobleck_jax.checkpoint.manifest import FileRecord


_CHUNK_BYTES = 1 << 22


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent, whatever dies."""
    draft = path.with_name(f".{path.name}.new")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Force the entries of a folder to disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def seal(folder: Path) -> dict[str, FileRecord]:
    """Force everything in a folder to disk; return what its files contain, by their paths in it."""
    records: dict[str, FileRecord] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        else:
            records[path.relative_to(folder).as_posix()] = _read(path, sync=True)
    sync_folder(folder)
    return records


def damage(folder: Path, records: Mapping[str, FileRecord], *, whole: bool) -> tuple[Path, str] | None:
    """Return the first damaged file and what is wrong with it; None: there is none.

    Args:
        whole: read the files; if not, only their sizes are checked.
    """
    for name, record in records.items():
        path = folder / name
        try:
            num_bytes = path.stat().st_size
            if num_bytes != record.num_bytes:
                return path, f"has {num_bytes} bytes, not the {record.num_bytes} that were saved"
            if whole and _read(path, sync=False) != record:
                return path, "has other content than was saved: its checksum differs"
        except FileNotFoundError:
            return path, "is missing"
        except OSError as error:
            return path, f"cannot be read: {error.strerror}"
    return None


def _read(path: Path, *, sync: bool) -> FileRecord:
    crc32 = num_bytes = 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
            num_bytes += len(chunk)
    return FileRecord(num_bytes=num_bytes, crc32=crc32)
