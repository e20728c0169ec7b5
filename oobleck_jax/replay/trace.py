"""Failure traces: which nodes come and go, and when.

Files have one change in each line; empty lines and lines that begin with # are skipped.

    0,add,node1               milliseconds, add or remove, any name: the format of the traces of Bamboo and Oobleck
    3600000,remove,node1
    0,8                       seconds, number of nodes: the format of counters of spot instances. Who leaves is drawn
    7200,5                    from the seed, because the file does not say

A trace begins with its first node, whatever the clock of the file says, and ends with its last line. Nodes of the first
moment are there from the beginning; those that come later have to start first (`Trace.starting`). Files say when nodes
leave, not when they are told so; `notice_s` assumes it: spot markets give 30 s (GCP, Azure) to 2 minutes (AWS).
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from oobleck_jax.errors import ConfigError
from oobleck_jax.planning.plan import NodeId


EVENT_UNIT_S = 1e-3  # of time,add|remove,node
COUNT_UNIT_S = 1.0  # of time,count


class TraceError(ConfigError):
    """A trace that cannot be used; the message names the line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Nodes that come and go at one moment."""

    time_s: float
    joined: tuple[NodeId, ...] = ()
    left: tuple[NodeId, ...] = ()
    leaving: tuple[NodeId, ...] = ()  # that will leave, and have been told so just now


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """A node is there, from one moment to another."""

    node: NodeId
    begin_s: float
    end_s: float  # at the end of the trace or later: it stays


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The lives of all nodes, in order of their beginnings; the first begins at 0."""

    name: str
    duration_s: float
    lives: tuple[Life, ...]
    notice_s: float = 0.0  # nodes are told so long before they leave

    @property
    def changes(self) -> tuple[Change, ...]:
        """All changes before the end, in order; the first is at 0."""
        joined: defaultdict[float, list[NodeId]] = defaultdict(list)
        left: defaultdict[float, list[NodeId]] = defaultdict(list)
        leaving: defaultdict[float, list[NodeId]] = defaultdict(list)
        for life in self.lives:
            joined[life.begin_s].append(life.node)
            left[life.end_s].append(life.node)
            if self.notice_s and life.end_s - self.notice_s > life.begin_s:
                leaving[life.end_s - self.notice_s].append(life.node)
        times_s = sorted({0.0, *(time_s for time_s in (*joined, *left, *leaving) if time_s < self.duration_s)})
        return tuple(
            Change(
                time_s=time_s,
                joined=tuple(sorted(joined.get(time_s, ()))),
                left=tuple(sorted(left.get(time_s, ()))),
                leaving=tuple(sorted(leaving.get(time_s, ()))),
            )
            for time_s in times_s
        )

    @property
    def num_losses(self) -> int:
        """Nodes that leave before the end."""
        return sum(life.end_s < self.duration_s for life in self.lives)

    @property
    def most_nodes(self) -> int:
        """The most nodes that there are at once."""
        count, most = 0, 0
        for change in self.changes:
            count += len(change.joined) - len(change.left)
            most = max(most, count)
        return most

    @property
    def mean_nodes(self) -> float:
        """The mean number of nodes over time."""
        spans = (min(life.end_s, self.duration_s) - life.begin_s for life in self.lives)
        return sum(span for span in spans if span > 0) / self.duration_s

    def starting(self, start_s: float) -> "Trace":
        """Return the trace of nodes that are live: who comes after the beginning needs so long to start.

        Who leaves before was never live.
        """
        begun = [(life, life.begin_s + (start_s if life.begin_s else 0.0)) for life in self.lives]
        lives = [
            Life(node=life.node, begin_s=begin_s, end_s=life.end_s) for life, begin_s in begun if begin_s < life.end_s
        ]
        return replace(make_trace(self.name, self.duration_s, lives), notice_s=self.notice_s)

    def within(self, duration_s: float) -> "Trace":
        """Return the trace for another duration: cut short, or with the last nodes staying on."""
        lives = [
            Life(
                node=life.node,
                begin_s=life.begin_s,
                end_s=life.end_s if life.end_s < self.duration_s else max(life.end_s, duration_s),
            )
            for life in self.lives
            if life.begin_s < duration_s
        ]
        return replace(make_trace(self.name, duration_s, lives), notice_s=self.notice_s)


def make_trace(name: str, duration_s: float, lives: Iterable[Life]) -> Trace:
    """Return a trace, with lives in order.

    Raises:
        TraceError: it has no time, or nobody lives.
    """
    ordered = tuple(sorted(lives, key=lambda life: (life.begin_s, life.node)))
    if duration_s <= 0 or not ordered:
        needed = "it needs a node, and a later line or --hours"
        raise TraceError(f"trace {name} has {len(ordered)} nodes and lasts {duration_s:g} s; {needed}")
    return Trace(name=name, duration_s=duration_s, lives=ordered)


def read_trace(path: Path, *, seed: int = 0, unit_s: float | None = None) -> Trace:
    """Return the trace in a file; see the top of this module.

    Args:
        path: of the file.
        seed: decides who leaves, where the file has numbers of nodes only.
        unit_s: of its times, in seconds (default: 0.001 for events, 1 for counts).

    Raises:
        TraceError: it cannot be read, or a line is wrong; the message has its number.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(
            f"--trace {path}: {error.strerror}; give a file, or a recipe such as poisson:mtbf=1800"
        ) from None
    except UnicodeDecodeError as error:
        raise TraceError(f"--trace {path} is no text: {error}") from None
    return parse_trace(text, name=path.stem, seed=seed, unit_s=unit_s)


def parse_trace(text: str, *, name: str, seed: int = 0, unit_s: float | None = None) -> Trace:
    """Return the trace that a text describes; see `read_trace`."""
    rows = list(_rows(text, name))
    if not rows:
        raise TraceError(f"trace {name} has no line with a change, such as 0,add,node1 or 0,8")
    if len(rows[0][1]) == 3:
        lives, end_s = _lives_of_events(rows, name, unit_s or EVENT_UNIT_S)
    else:
        lives, end_s = _lives_of_counts(rows, name, unit_s or COUNT_UNIT_S, random.Random(seed))
    first_s = min((life.begin_s for life in lives), default=0.0)
    moved = [Life(node=life.node, begin_s=life.begin_s - first_s, end_s=life.end_s - first_s) for life in lives]
    return make_trace(name, end_s - first_s, moved)


def _rows(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the fields of each line that has some."""
    num_fields = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        fields = [item.strip() for item in line.split(",")]
        num_fields = num_fields or len(fields)
        if len(fields) not in (2, 3) or len(fields) != num_fields:
            raise TraceError(f"trace {name}, line {number}: {line!r} is neither time,add|remove,node nor time,count")
        yield number, fields


def _lives_of_events(rows: list[tuple[int, list[str]]], name: str, unit_s: float) -> tuple[list[Life], float]:
    ids: dict[str, NodeId] = {}
    begun: dict[str, float] = {}
    lives: list[Life] = []
    last_s = 0.0
    for number, (time, what, node) in rows:
        last_s = _time_s(time, last_s, unit_s, f"trace {name}, line {number}")
        if what == "add" and node not in begun:
            ids.setdefault(node, NodeId(len(ids)))
            begun[node] = last_s
        elif what == "remove" and node in begun:
            lives.append(Life(node=ids[node], begin_s=begun.pop(node), end_s=last_s))
        elif what in ("add", "remove"):
            state = "there already" if what == "add" else "not there"
            raise TraceError(f"trace {name}, line {number}: {what} {node}, but it is {state}")
        else:
            raise TraceError(f"trace {name}, line {number}: {what!r} is neither add nor remove")
    lives += [Life(node=ids[node], begin_s=begin_s, end_s=float("inf")) for node, begin_s in begun.items()]
    return lives, last_s


def _lives_of_counts(
    rows: list[tuple[int, list[str]]], name: str, unit_s: float, draw: random.Random
) -> tuple[list[Life], float]:
    begun: dict[NodeId, float] = {}
    lives: list[Life] = []
    last_s, num_ids = 0.0, 0
    for number, (time, count) in rows:
        last_s = _time_s(time, last_s, unit_s, f"trace {name}, line {number}")
        if not count.isdecimal():
            raise TraceError(f"trace {name}, line {number}: {count!r} is no number of nodes")
        while len(begun) > int(count):
            node = draw.choice(sorted(begun))
            lives.append(Life(node=node, begin_s=begun.pop(node), end_s=last_s))
        while len(begun) < int(count):
            begun[NodeId(num_ids)] = last_s
            num_ids += 1
    lives = [life for life in lives if life.end_s > life.begin_s]
    lives += [Life(node=node, begin_s=begin_s, end_s=float("inf")) for node, begin_s in begun.items()]
    return lives, last_s


def _time_s(text: str, last_s: float, unit_s: float, where: str) -> float:
    try:
        time_s = float(text) * unit_s
    except ValueError:
        raise TraceError(f"{where}: {text!r} is no time") from None
    if not last_s <= time_s < float("inf"):
        raise TraceError(f"{where}: time {text} is before the line above, or no time at all; lines go forward")
    return time_s
