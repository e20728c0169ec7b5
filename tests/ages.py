"""Files that were used long ago, for tests of what is removed then."""

import os
import time
from pathlib import Path


def age(path: Path, *, days: float) -> None:
    """Let a file have been written, and read, so long ago."""
    then_s = time.time() - days * 86400
    os.utime(path, (then_s, then_s))
