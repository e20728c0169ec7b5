"""What a worker wrote last of why it ended."""

import os
import re
from pathlib import Path

from oobleck_jax.planning.plan import NodeId


_NUM_BYTES = 2**16  # a worker that aborts writes where each of its threads is
_NUM_LINES = 20
_NUM_FATAL_LINES = 6  # before the message of a fatal error, and from it on
_HEADLINE = "---- worker "
_FATAL = "Fatal Python error: "  # by faulthandler, for signals such as SIGSEGV and SIGABRT
_FRAME_OF_C = re.compile(r"\s+@\s+0x")  # abseil's; what it stopped at stands above them


def headline(incarnation: int, node: NodeId) -> str:
    """Return the line of a log after which a worker that replaced another one writes."""
    return f"{_HEADLINE}{incarnation} of node {node}"


def read_tail(path: Path) -> str:
    """Return the last lines of a log that say why its last worker ended."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _NUM_BYTES))
        return tail_of(file.read().decode(errors="replace"))


def tail_of(text: str) -> str:
    """Return the last lines that say why the last worker ended, from the end of its log."""
    lines = text.splitlines()
    first = max((number for number, line in enumerate(lines, 1) if line.startswith(_HEADLINE)), default=0)
    lines = lines[first:]
    for number, line in enumerate(lines):
        if line.startswith(_FATAL):
            return "\n".join(_of_fatal_error(lines[:number], lines[number:]))
    return "\n".join(lines[-_NUM_LINES:])


def _of_fatal_error(before: list[str], after: list[str]) -> list[str]:
    """Return why it was fatal, and where; other threads only wait for something."""
    reason = [line for line in before if line.strip() and not _FRAME_OF_C.match(line)]
    thread = next((number for number, line in enumerate(after) if line.startswith("Current thread ")), len(after))
    end = next((number for number, line in enumerate(after) if number > thread and not line.strip()), len(after))
    return [*reason[-_NUM_FATAL_LINES:], after[0], *after[thread:end][: _NUM_FATAL_LINES - 1]]
