"""What a worker did when, for `--trace`: one file for each worker, written beside the training.

A record is a tuple in a list; at the end of a step the list goes to a thread that writes it. So a record costs a few
microseconds, and what a worker did in the step in which it is killed is lost.

    {"node": 2, "incarnation": 0, "clock_ns": ...}                      added to a time it gives nanoseconds since 1970
    [["forward", began_ns, ended_ns, step, microbatch], ...]            a line for each step

Times are of the machine's monotonic clock, which all processes of a machine share. Between machines, only the wall
clocks that `clock_ns` leads to can be compared, as well as the machines keep them equal (NTP: about a millisecond).
"""

import logging
import queue
import threading
import time
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from oobleck_jax.planning.plan import NodeId


logger = logging.getLogger(__name__)


class Activity(StrEnum):
    """What a worker does."""

    FORWARD = "forward"
    LOSS = "loss"  # the last span: forward and backward in one program
    BACKWARD = "backward"
    RECEIVE = "receive"  # waits for another stage
    SUM = "sum"  # waits for the sums of gradients, and looks at norms and checksums
    REDUCE = "reduce"  # a sum of gradients over nodes runs, beside the programs; with the wait for the other holders
    VOTE = "vote"  # waits for the decision
    UPDATE = "update"
    EVALUATE = "evaluate"
    COMPILE = "compile"  # for a new generation
    COPY = "copy"  # of layer states
    FABRIC = "fabric"  # waits for the other members


class Record(NamedTuple):
    """One thing that a worker did; times in nanoseconds of the monotonic clock."""

    activity: Activity
    began_ns: int
    ended_ns: int
    step: int
    microbatch: int = -1  # -1: all of them


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file."""

    node: NodeId
    incarnation: int
    clock_ns: int  # seconds since 1970 minus monotonic clock, in nanoseconds


class Recorder(Protocol):
    """Takes note of what a worker does. Times are those of `time.monotonic`."""

    @property
    def is_on(self) -> bool: ...

    def add(self, activity: Activity, began_s: float, ended_s: float, step: int, microbatch: int = -1) -> None:
        """Take note of something that has ended."""
        ...

    def flush(self) -> None:
        """A step, or a preparation, is over."""
        ...


class NoRecorder:
    """Without `--trace`."""

    is_on = False

    def add(self, activity: Activity, began_s: float, ended_s: float, step: int, microbatch: int = -1) -> None:
        pass

    def flush(self) -> None:
        pass


class FileRecorder:
    """Writes a file. A disk that refuses ends the trace, not the training."""

    is_on = True

    def __init__(self, folder: Path, *, node: NodeId, incarnation: int) -> None:
        """Begin the file of a worker.

        Raises:
            OSError: it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"node-{node}-{incarnation}.jsonl").open("wb", buffering=0)
        header = Header(node=node, incarnation=incarnation, clock_ns=time.time_ns() - time.monotonic_ns())
        self._file.write(msgspec.json.encode(header) + b"\n")
        self._records: list[Record] = []
        self._full: queue.SimpleQueue[list[Record]] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="trace", daemon=True)
        self._writer.start()

    def add(self, activity: Activity, began_s: float, ended_s: float, step: int, microbatch: int = -1) -> None:
        self._records.append(Record(activity, int(1e9 * began_s), int(1e9 * ended_s), step, microbatch))

    def flush(self) -> None:
        if self._records and self._writer.is_alive():
            self._full.put(self._records)
        self._records = []

    def _write(self) -> None:
        encoder = msgspec.json.Encoder()
        try:
            while True:
                records = self._full.get()
                self._file.write(encoder.encode(records) + b"\n")
        except OSError as error:
            logger.warning("the trace %s ends here: %s", self._file.name, error)


def make_recorder(folder: Path | None, node: NodeId, incarnation: int) -> Recorder:
    """Return what records into a folder; None: nothing does."""
    return NoRecorder() if folder is None else FileRecorder(folder, node=node, incarnation=incarnation)


class Stopwatch:
    """Times the parts of a node's work that follow one another: each `lap` ends the part that the one before began."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._since_s = time.monotonic()

    def start(self) -> None:
        self._since_s = time.monotonic()

    def lap(self, activity: Activity, step: int) -> None:
        """The part that has just ended was this."""
        now_s = time.monotonic()
        self._recorder.add(activity, self._since_s, now_s, step)
        self._since_s = now_s
