"""What people are shown of the logs of nodes: where each is, and the end of the one whose worker failed.

The display never reads them, because most are on other machines: agents say where they write them when they join, and
send the end along with the news of a failure.
"""

import re
from pathlib import Path

from oobleck_jax import events
from oobleck_jax.planning.plan import NodeId


_NUM_LINES = 12
_LINE_CHARS = 300
_CONTROLS = re.compile(r"[^\n\t -~\xa0-\U0010ffff]")


class NodeLogs:
    """Where the logs of the nodes are."""

    def __init__(self, host: str) -> None:
        """Know of none yet.

        Args:
            host: name of this machine, as agents give theirs.
        """
        self._host = host
        self._places: dict[NodeId, str] = {}

    def take(self, record: events.Joined) -> None:
        if record.log_dir is None:
            self._places[record.node] = f"printed by its agent on {record.name}"
        else:
            elsewhere = "" if record.name == self._host else f" on {record.name}"
            self._places[record.node] = f"{Path(record.log_dir) / f'node-{record.node}.log'}{elsewhere}"

    def where(self, node: NodeId | None) -> str | None:
        """Say where the log of a node is; None: not known."""
        return None if node is None else self._places.get(node)


def last_lines(detail: str) -> list[str]:
    """Return the end of a log, indented; so many lines, of such a length, that it can be shown."""
    lines = [line.rstrip() for line in detail.strip().splitlines()[-_NUM_LINES:]]
    return [f"    {line if len(line) <= _LINE_CHARS else f'{line[:_LINE_CHARS]} ...'}" for line in lines]


def printable(text: str) -> str:
    """Return a text without what a terminal would obey: logs may have colors, and bars that move the cursor."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
