"""The processes of a run on this machine: agents and workers, found by the log files that they write to."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil


_WORKER = "oobleck_jax.worker"


def workers_of(run_dir: Path) -> dict[int, int]:
    """Return the process ids of the workers that live, by node (Linux)."""
    return {node: pid for node, pid, command in _writers(run_dir) if _WORKER in command}


def agents_of(run_dir: Path) -> dict[int, int]:
    """Return the process ids of the agents that live, by node (Linux)."""
    return {node: pid for node, pid, command in _writers(run_dir) if _WORKER not in command}


def _writers(run_dir: Path) -> Iterator[tuple[int, int, list[str]]]:
    """Yield (node, process id, command line) of all processes that print into a log of the run.

    Wherever they hang in the tree of processes: the coordinator that started them may have died.
    """
    logs = (run_dir / "logs").resolve()
    for process in psutil.process_iter():
        try:
            log = Path(os.readlink(f"/proc/{process.pid}/fd/2"))
            node = log.stem.removeprefix("node-")
            if log.parent == logs and node.isdigit():
                yield int(node), process.pid, process.cmdline()
        except (psutil.Error, OSError):  # it has just ended, or is somebody else's
            continue
