"""What every node of a run did when, from the files that `--trace` has left: for Perfetto, and as a picture.

Each node has three lanes. "programs" has what its devices computed: a program begins when it was started or when the
one before it ended, whichever came later. "waits" has what the thread that starts them was busy with: waiting for other
stages, sums, votes, updates, and the preparation of generations. While it waits for a stage, its own programs run on.
"sums" has the sums of gradients over nodes, which begin while programs still run.

Nodes of one machine share one clock, to the nanosecond. Those of several are as far apart as their wall clocks: the
protocol does not estimate offsets, so keep them equal by NTP, and do not believe differences below a millisecond.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from oobleck_jax import events
from oobleck_jax.errors import ConfigError
from oobleck_jax.execution.recorder import Activity, Header, Record
from oobleck_jax.planning.plan import NodeId


PROGRAMS = frozenset({Activity.FORWARD, Activity.LOSS, Activity.BACKWARD})
_COLOURS: Mapping[Activity, str] = {
    Activity.FORWARD: "#4c8fd6",
    Activity.LOSS: "#2c5fa0",
    Activity.BACKWARD: "#3ba272",
    Activity.RECEIVE: "#d9dde2",
    Activity.SUM: "#e6a23c",
    Activity.REDUCE: "#c8963c",
    Activity.VOTE: "#b9a3dd",
    Activity.UPDATE: "#7c4bc0",
    Activity.EVALUATE: "#8fb8c9",
    Activity.COMPILE: "#c8323c",
    Activity.COPY: "#e5646c",
    Activity.FABRIC: "#f0a3a8",
}
_EVALUATIONS_LANE, _SUMS_LANE = 2, 3  # lanes within a node


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What one worker did; times in nanoseconds since 1970."""

    node: NodeId
    incarnation: int
    records: tuple[Record, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What all of them did, and what happened to the run meanwhile: (began, ended, incident)."""

    traces: tuple[Trace, ...]
    incidents: tuple[tuple[int, int, events.Incident], ...]

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(sorted({trace.node for trace in self.traces}))

    @property
    def began_ns(self) -> int:
        return min(record.began_ns for trace in self.traces for record in trace.records)

    @property
    def ended_ns(self) -> int:
        return max(record.ended_ns for trace in self.traces for record in trace.records)


def read_timeline(run_dir: Path, *, steps: range | None = None) -> Timeline:
    """Read the traces of a run, which may still go on.

    Args:
        run_dir: of the run.
        steps: those to keep; None: all.

    Raises:
        ConfigError: there are none, or one is damaged.
    """
    paths = sorted((run_dir / "trace").glob("node-*.jsonl"))
    if not paths:
        raise ConfigError(f"{run_dir} has no trace; start the run with --trace")
    traces = tuple(_read_trace(path, steps) for path in paths)
    if not any(trace.records for trace in traces):
        which = "any step" if steps is None else f"steps {steps.start} to {steps.stop - 1}"
        raise ConfigError(f"the trace of {run_dir} has nothing of {which}; it may not have come that far")
    timeline = Timeline(traces=tuple(trace for trace in traces if trace.records), incidents=())
    incidents = (
        (int(1e9 * (time_s - record.seconds.get("total", 0.0))), int(1e9 * time_s), record)
        for time_s, record in events.read_events(run_dir / "events.jsonl")
        if isinstance(record, events.Incident)
    )
    began_ns, ended_ns = timeline.began_ns, timeline.ended_ns
    meanwhile = tuple(item for item in incidents if item[0] <= ended_ns and item[1] >= began_ns)
    return replace(timeline, incidents=meanwhile)


def _read_trace(path: Path, steps: range | None) -> Trace:
    lines = events.complete_lines(path)
    try:
        header = msgspec.json.decode(lines[0], type=Header) if lines else None
        told = [record for line in lines[1:] for record in msgspec.json.decode(line, type=list[Record])]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    if header is None:
        raise ConfigError(f"{path} is empty")
    return Trace(
        node=header.node,
        incarnation=header.incarnation,
        records=tuple(
            record._replace(began_ns=record.began_ns + header.clock_ns, ended_ns=record.ended_ns + header.clock_ns)
            for record in told
            if steps is None or record.step in steps
        ),
    )


# -------------------------------------------------------------------------------------------------------- Perfetto


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Write the trace event format of Chrome, which Perfetto reads, too."""
    path.write_text(json.dumps({"traceEvents": list(_chrome_events(timeline)), "displayTimeUnit": "ms"}))


def _chrome_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield complete events ("X", in microseconds since the first); a node is a process, a lane a thread."""
    origin_ns = timeline.began_ns
    yield _name("process_name", "incidents", 0, 0)
    for node in timeline.nodes:
        yield _name("process_name", f"node {node}", node + 1, 0)
        yield {"name": "process_sort_index", "ph": "M", "pid": node + 1, "tid": 0, "args": {"sort_index": node + 1}}
        yield _name("thread_name", "programs", node + 1, 0)
        yield _name("thread_name", "waits", node + 1, 1)
        yield _name("thread_name", "evaluation", node + 1, _EVALUATIONS_LANE)
        yield _name("thread_name", "sums", node + 1, _SUMS_LANE)
    for began_ns, ended_ns, incident in timeline.incidents:
        details = {"cause": incident.cause, "nodes": list(incident.nodes), "step": incident.step, **incident.seconds}
        yield _complete(incident.kind, "incident", began_ns - origin_ns, ended_ns - origin_ns, 0, 0, details)
    for trace in timeline.traces:
        for record in trace.records:
            details = {"step": record.step, "worker": trace.incarnation}
            if record.microbatch >= 0:
                details["microbatch"] = record.microbatch
            yield _complete(
                record.activity,
                "program" if record.activity in PROGRAMS else "wait",
                record.began_ns - origin_ns,
                record.ended_ns - origin_ns,
                trace.node + 1,
                _lane(record.activity),
                details,
            )


def _lane(activity: Activity) -> int:
    """Return the lane: evaluation encloses waits, and would hide them."""
    if activity in PROGRAMS:
        return 0
    return {Activity.EVALUATE: _EVALUATIONS_LANE, Activity.REDUCE: _SUMS_LANE}.get(activity, 1)


def _name(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _complete(
    name: str, category: str, began_ns: int, ended_ns: int, process: int, thread: int, details: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": str(name),
        "cat": category,
        "ph": "X",
        "ts": began_ns / 1000,
        "dur": (ended_ns - began_ns) / 1000,
        "pid": process,
        "tid": thread,
        "args": details,
    }


# --------------------------------------------------------------------------------------------------------- picture


def plot_timeline(timeline: Timeline, path: Path, *, title: str) -> None:
    """Draw the timeline into a file; the ending of its name says which format."""
    nodes = timeline.nodes
    seconds = (timeline.ended_ns - timeline.began_ns) / 1e9
    figure = Figure(figsize=(16, 1.8 + 0.62 * len(nodes)), layout="constrained")
    axes = figure.subplots()
    seen: set[Activity] = set()
    for row, node in enumerate(nodes):
        records = [record for trace in timeline.traces if trace.node == node for record in trace.records]
        seen.update(record.activity for record in records)
        for activity, spans in _by_activity(records, timeline.began_ns).items():
            axes.broken_barh(spans, _place(row, activity), facecolors=_COLOURS[activity], linewidth=0)
    for began_ns, ended_ns, incident in timeline.incidents:
        began_s, ended_s = max((began_ns - timeline.began_ns) / 1e9, 0.0), (ended_ns - timeline.began_ns) / 1e9
        axes.axvspan(began_s, ended_s, color="tab:red", alpha=0.08, linewidth=0)
        axes.axvline(began_s, color="tab:red", linewidth=1)
        who = " ".join(f"node {number}" for number in incident.nodes)
        label = axes.text(began_s, -0.08, f" {incident.kind} {who}", color="tab:red", fontsize=8, va="bottom")
        label.set_in_layout(False)
    axes.set_yticks([row + 0.4 for row in range(len(nodes))], [f"node {node}" for node in nodes])
    axes.set_ylim(len(nodes), -0.35)
    axes.set_xlim(0, seconds)
    axes.set_xlabel("seconds; lanes of a node: its programs; what it waits for or does in between; sums over nodes")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(color=_COLOURS[activity], label=str(activity)) for activity in Activity if activity in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 12), fontsize=8, frameon=False)
    axes.set_title(title, loc="left", fontsize=10)
    figure.savefig(path, dpi=120)


def _place(row: int, activity: Activity) -> tuple[float, float]:
    """Return (lower end, height) of the lane of an activity."""
    if activity in PROGRAMS:
        return row + 0.02, 0.42
    return (row + 0.73, 0.12) if activity is Activity.REDUCE else (row + 0.45, 0.27)


def _by_activity(records: Iterable[Record], origin_ns: int) -> dict[Activity, list[tuple[float, float]]]:
    """Return (start, length) in seconds, by activity, in the order in which they must be drawn."""
    found: dict[Activity, list[tuple[float, float]]] = {Activity.EVALUATE: []}
    for record in records:
        span = ((record.began_ns - origin_ns) / 1e9, (record.ended_ns - record.began_ns) / 1e9)
        found.setdefault(record.activity, []).append(span)
    return found
