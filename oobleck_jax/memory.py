"""How much memory a process has used."""

import contextlib
import resource
import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """Return the largest resident size of this process so far."""
    # Not getrusage on Linux: its maximum includes the size of the process that started this one.
    with contextlib.suppress(OSError), Path("/proc/self/status").open(encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
