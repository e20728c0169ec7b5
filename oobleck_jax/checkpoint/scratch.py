"""Folders of this machine for files on their way to an object store, or from it.

A process that is killed leaves its folder behind, and that may have gigabytes. The next one of the host removes it: who
owns a folder holds a lock on it, which ends with the process. A lock says nothing of folders of other hosts.
"""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


_NAME = f"oobleck-scratch-*@{socket.gethostname()}"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Give an empty folder in the place for temporary files (TMPDIR), which is gone afterwards."""
    root = Path(tempfile.gettempdir())
    _remove_abandoned(root)
    # Under another name until it is locked: nobody must take it for abandoned.
    path = Path(tempfile.mkdtemp(prefix=".oobleck-", dir=root))
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = path.rename(root / _NAME.replace("*", path.name.removeprefix(".oobleck-")))
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(root: Path) -> None:
    for path in root.glob(_NAME):
        with suppress(OSError):  # it is another user's, it is in use, or it has just gone
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)
