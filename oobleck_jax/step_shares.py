"""Where the time of a step goes on each node, from the timeline of a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from oobleck_jax.execution.recorder import Activity, Record
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.timeline import PROGRAMS, Timeline, Trace


# At each moment a node is said to do the first of these that it does; else it starts programs, takes samples, or waits
# for the plan that follows an abandoned step. A program whose core is taken by another node still computes.
_PARTS: Mapping[str, frozenset[Activity]] = {
    "compute": PROGRAMS,
    "receive": frozenset({Activity.RECEIVE}),
    "sum": frozenset({Activity.SUM, Activity.REDUCE}),
    "vote": frozenset({Activity.VOTE}),
    "update": frozenset({Activity.UPDATE}),
    "evaluate": frozenset({Activity.EVALUATE}),
    "regroup": frozenset({Activity.COMPILE, Activity.COPY, Activity.FABRIC}),
}
PARTS = (*_PARTS, "other")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShares:
    """Where the time of a worker went.

    Attributes:
        incarnation: which worker of its node it was.
        step_s: the whole time, divided by the number of steps.
        shares: of that time, by part; they add up to 1.
        hidden_sum: of that time, what sums took beside programs; within compute.
    """

    node: NodeId
    incarnation: int
    step_s: float
    shares: Mapping[str, float]
    hidden_sum: float


def step_shares(timeline: Timeline) -> tuple[StepShares, ...]:
    """Return where the time of each worker went in the steps of a timeline, of those that computed; by node."""
    computed = [trace for trace in timeline.traces if _steps_of(trace)]
    return tuple(map(_shares_of, sorted(computed, key=lambda trace: (trace.node, trace.incarnation))))


def _steps_of(trace: Trace) -> set[int]:
    return {record.step for record in trace.records if record.activity in PROGRAMS}


def _shares_of(trace: Trace) -> StepShares:
    records = trace.records
    times_ns = np.unique([time_ns for record in records for time_ns in (record.began_ns, record.ended_ns)])
    lengths_ns = np.diff(times_ns)
    part = np.full(len(lengths_ns), len(_PARTS))
    for number, activities in reversed(list(enumerate(_PARTS.values()))):
        part[_when(records, activities, times_ns)] = number
    is_hidden = _when(records, PROGRAMS, times_ns) & _when(records, frozenset({Activity.REDUCE}), times_ns)
    total_ns = lengths_ns.sum()
    return StepShares(
        node=trace.node,
        incarnation=trace.incarnation,
        step_s=total_ns / len(_steps_of(trace)) / 1e9,
        shares={name: float(lengths_ns[part == number].sum() / total_ns) for number, name in enumerate(PARTS)},
        hidden_sum=float(lengths_ns[is_hidden].sum() / total_ns),
    )


def _when(records: Iterable[Record], activities: frozenset[Activity], times_ns: np.ndarray) -> np.ndarray:
    """Tell for each time between two neighbours of `times_ns` whether the node does any of these."""
    does = np.zeros(len(times_ns) - 1, dtype=bool)
    for record in records:
        if record.activity in activities:
            does[slice(*np.searchsorted(times_ns, (record.began_ns, record.ended_ns)))] = True
    return does


def shares_table(rows: tuple[StepShares, ...]) -> Table:
    """Return the shares as a table in per cent; parts that no node has are left out."""
    parts = [name for name in PARTS if any(row.shares[name] > 0 for row in rows)]
    table = Table(title="per cent of a step", box=None)
    for heading in ("node", "seconds", *parts, "sum beside compute"):
        table.add_column(heading, justify="right")
    for row in rows:
        shares = [*(row.shares[name] for name in parts), row.hidden_sum]
        who = f"{row.node}, worker {row.incarnation}" if row.incarnation else str(row.node)
        table.add_row(who, f"{row.step_s:.3f}", *(f"{100 * share:.1f}" for share in shares))
    return table
