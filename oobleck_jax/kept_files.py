"""Files that are kept from run to run because it took time to make them: whoever finds none makes it again.

So nobody minds if one is gone, and processes that share a folder need not agree on what to remove. Whatever else is in
such a folder, which a user may have named, is left alone.
"""

import contextlib
import os
import re
import time
from pathlib import Path


KEPT_S = 90 * 86400.0  # after it was last used; a worker loads a program once, and may run for weeks


def mark_used(path: Path) -> None:
    """Note that a file is of use, where file systems do not do that by themselves."""
    with contextlib.suppress(OSError):  # it is somebody else's, or gone
        os.utime(path)


def remove_unused(folder: Path, names: re.Pattern[str]) -> None:
    """Remove files that were neither written nor read for KEPT_S; what cannot be removed stays.

    Args:
        folder: is left as it is if it cannot be read.
        names: of the files that may be removed, as a whole.
    """
    since_s = time.time() - KEPT_S
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if names.fullmatch(path.name) and _used_s(path) < since_s:
                    path.unlink()


def _used_s(path: Path) -> float:
    """Return when a file was used last; of reading, file systems take note a day late, or never (noatime)."""
    found = path.stat()
    return max(found.st_mtime, found.st_atime)
