"""What happened in a run, as typed records: the lines of events.jsonl, metrics.jsonl and journal.jsonl.

A record says what happened and why; `RunFiles` adds when. Whoever wants to know what a run did reads these files, never
the log.

    events.jsonl    membership, plans, evaluations, failures: a few lines, in order
    metrics.jsonl   one object for each committed step; of steps that were done again (Restored), the last one counts
    journal.jsonl   the commit decisions, each written before any node hears of it
"""

import os
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import TypeAlias

import msgspec

from oobleck_jax.planning.plan import NodeId, Plan


class _Base(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    """Base of all records; the JSON field `event` names the class."""


class Started(_Base, frozen=True, kw_only=True):
    """A coordinator began a run."""

    preset: str
    num_nodes: int
    fault_tolerance: int
    steps: int
    config_digest: str
    versions: dict[str, str]


class Joined(_Base, frozen=True, kw_only=True):
    """A node takes part from now on; its worker starts."""

    node: NodeId
    name: str
    incarnation: int
    log_dir: str | None = None  # on its host, where node-K.log is; None: its agent prints what the worker does


class Rejected(_Base, frozen=True, kw_only=True):
    """A node may not take part."""

    name: str
    reason: str


class Ready(_Base, frozen=True, kw_only=True):
    """A node's worker has its devices and waits for a plan."""

    node: NodeId
    incarnation: int
    device_kind: str
    num_devices: int
    seconds: float  # since it joined; if it compiled ahead first, since it was done


class Advanced(_Base, frozen=True, kw_only=True):
    """A node's preparation went on by a little. Shown, not written."""

    node: NodeId
    generation: int
    phase: str
    done: int
    total: int


class Gathering(_Base, frozen=True, kw_only=True):
    """There is no plan for the nodes there are: the run waits for more."""

    reason: str


class Planned(_Base, frozen=True, kw_only=True):
    """A generation begins: who runs what, from which step, and why."""

    generation: int
    step: int
    reason: str  # why there is a new generation
    plan: Plan
    plan_reason: str  # why it has this plan


class Prepared(_Base, frozen=True, kw_only=True):
    """All nodes of a generation are ready to run its first step."""

    generation: int
    step: int
    seconds: float  # since the generation began
    num_compilations: dict[int, int]  # of each node, since its worker began
    phases: dict[int, dict[str, float]]  # seconds of each node in each phase


class Committed(_Base, frozen=True, kw_only=True):
    """A step counts. Written to the journal before any node hears of it."""

    generation: int
    step: int
    loss: float | None  # mean over the tokens of the global batch; None: not finite
    grad_norm: float | None  # global, before clipping; None: not finite, the update was skipped
    step_time_s: float  # since the step before it was committed, or since the generation ran
    seconds: dict[str, float] = {}  # mean over the nodes: compute, receive (waiting for stages), sum (of gradients)


class Restored(_Base, frozen=True, kw_only=True):
    """The run goes on from a checkpoint: later steps count no more. In the journal, before any node hears of it."""

    generation: int  # that goes on
    step: int  # the next one
    checkpoint: str  # folder
    reason: str


class Checkpointed(_Base, frozen=True, kw_only=True):
    """A checkpoint is complete: from here on it counts."""

    generation: int
    step: int  # the last one that it contains
    folder: str
    num_bytes: int  # of all states
    seconds: dict[str, float]  # copy: steps waited for it; write (both of the slowest node); total
    removed: tuple[str, ...] = ()  # folders of older ones


class NotCheckpointed(_Base, frozen=True, kw_only=True):
    """A checkpoint that was due does not come about; training goes on."""

    generation: int
    step: int
    reason: str


class Damaged(_Base, frozen=True, kw_only=True):
    """A checkpoint cannot be used; the next older one is tried."""

    what: str


class Evaluated(_Base, frozen=True, kw_only=True):
    """The mean loss over the evaluation batches after a committed step; None: not finite."""

    generation: int
    step: int
    loss: float | None
    num_tokens: int


class Failed(_Base, frozen=True, kw_only=True):
    """A node failed, or something that concerns all of them."""

    generation: int
    step: int  # the step in progress
    node: NodeId | None
    cause: str
    detail: str  # log tail or traceback
    is_collateral: bool  # a consequence of an earlier failure
    is_error: bool = False  # the worker's own, so that its log tells more than the cause


class Abandoned(_Base, frozen=True, kw_only=True):
    """A generation ended before its time; the step in progress is done again by the next one."""

    generation: int
    step: int
    reason: str


class Leaving(_Base, frozen=True, kw_only=True):
    """A node was asked to leave, and does so after the step in progress."""

    node: NodeId
    reason: str


class Respawned(_Base, frozen=True, kw_only=True):
    """The worker of a node is replaced by a new incarnation."""

    node: NodeId
    incarnation: int
    delay_s: float  # waited first: grows with each failure
    reason: str


class Resumed(_Base, frozen=True, kw_only=True):
    """A coordinator took over the run of one that had died."""

    generation: int  # the last one
    step: int  # the next one
    nodes: tuple[NodeId, ...]  # whose workers are expected to have lived on


class CompiledAhead(_Base, frozen=True, kw_only=True):
    """A node went on with the programs that later plans may need. Shown, not written, until it is done."""

    node: NodeId
    done: int
    total: int


class Incident(_Base, frozen=True, kw_only=True):
    """What a change of membership cost, from the first notice to the first commit after it. One for each incident."""

    kind: str  # loss, join, leave, coordinator
    cause: str  # the first cause, a sentence
    nodes: tuple[NodeId, ...]  # that were lost, came, or left
    collateral: tuple[NodeId, ...]  # that were lost as a consequence
    generation: int  # that ended the incident
    num_generations: int  # that it took: more than one if nodes were lost while it recovered
    step: int  # done again, or the first one after the change
    seconds: dict[str, float]  # plan, compile, copy, restore, fabric (of the slowest node), first_step, total
    received_bytes: int  # layer states, over all nodes
    num_redone_microbatches: int  # at most: those of the abandoned step that were in progress
    num_compilations: int  # programs that were not ready, over all nodes
    num_redone_steps: int = 0  # committed before, and done again from a checkpoint on


class Left(_Base, frozen=True, kw_only=True):
    """The worker of a node ended."""

    node: NodeId
    exit_code: int  # negative: the signal that killed it
    peak_memory_bytes: int
    agent_peak_memory_bytes: int


class Finished(_Base, frozen=True, kw_only=True):
    """The run is over."""

    steps: int  # committed
    reason: str
    exit_code: int
    node: NodeId | None = None  # to blame for a failure


Record: TypeAlias = (
    Started
    | Joined
    | Rejected
    | Ready
    | Advanced
    | Gathering
    | Planned
    | Prepared
    | Committed
    | Restored
    | Checkpointed
    | NotCheckpointed
    | Damaged
    | Evaluated
    | Failed
    | Abandoned
    | Leaving
    | Respawned
    | Resumed
    | CompiledAhead
    | Incident
    | Left
    | Finished
)


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics.jsonl."""

    step: int
    generation: int
    loss: float | None  # None, here and below: not finite
    grad_norm: float | None
    learning_rate: float
    tokens_per_s: float
    step_time_s: float
    sample_first: int  # first sample of the step, counted from the start of the run
    sample_end: int  # exclusive


class RunFiles:
    """Writes what happens into the run directory, line by line, each complete as soon as the call returns.

    Attributes:
        num_metrics: decisions whose metrics there were when the files were opened; the journal may be ahead by one.
    """

    def __init__(
        self, run_dir: Path, *, goes_on_after: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the files.

        Args:
            run_dir: where they are.
            goes_on_after: append to what is there, which has so many decisions; None: begin anew.
            clock: seconds since 1970.
        """
        self.num_metrics = 0
        self._clock = clock
        paths = [run_dir / name for name in ("events.jsonl", "metrics.jsonl", "journal.jsonl")]
        if goes_on_after is None:
            kept = [0, 0, 0]
        else:
            metrics = complete_lines(paths[1])[:goes_on_after]
            self.num_metrics = len(metrics)
            kept = [len(b"".join(lines)) for lines in (complete_lines(paths[0]), metrics, complete_lines(paths[2]))]
        self._events, self._metrics, self._journal = (_open_after(*file) for file in zip(paths, kept, strict=True))

    def write(self, record: Record) -> None:
        """Write a record to the file it belongs to."""
        match record:
            case Advanced():
                return
            case CompiledAhead() if record.done < record.total:
                return
            case Committed() | Restored():
                file = self._journal
            case _:
                file = self._events
        # One write of the whole line: a reader, or a coordinator that dies, never leaves half of one behind.
        file.write(_with_time(record, self._clock()))

    def sync(self) -> None:
        """Force decisions and metrics to disk: a checkpoint must not know more than they do after a loss of power."""
        for file in (self._journal, self._metrics):
            os.fsync(file.fileno())

    def write_metrics(self, metrics: StepMetrics) -> None:
        self._metrics.write(msgspec.json.encode(metrics) + b"\n")

    def close(self) -> None:
        for file in (self._events, self._metrics, self._journal):
            file.close()


def _open_after(path: Path, num_bytes: int) -> FileIO:
    """Open a file to append to its first bytes; what comes after them is dropped."""
    file = path.open("ab", buffering=0)
    file.truncate(num_bytes)
    return file


def complete_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, except for a last one that was not written to its end; none if there is no file."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def _with_time(record: Record, now: float) -> bytes:
    return msgspec.json.encode({"time": round(now, 3), **msgspec.to_builtins(record)}) + b"\n"


def read_run(run_dir: Path) -> list[tuple[float, Record]]:
    """Return (seconds since 1970, record) of everything that a run directory tells, in order of time.

    Raises:
        msgspec.ValidationError: a line is not a record.
    """
    told = [*read_events(run_dir / "events.jsonl"), *read_events(run_dir / "journal.jsonl")]
    return sorted(told, key=lambda item: item[0])


def read_events(path: Path) -> Iterator[tuple[float, Record]]:
    """Yield (seconds since 1970, record) for each line of an events or journal file that is complete.

    Raises:
        msgspec.ValidationError: a line is not a record.
    """
    decoder = msgspec.json.Decoder(Record)
    for line in complete_lines(path):
        yield msgspec.json.decode(line)["time"], decoder.decode(line)
