"""A run of this machine as its operator sees it: started, waited for, ended, and read while it goes on."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from oobleck_jax.errors import OobleckError
from oobleck_jax.events import Committed, Record, Restored
from oobleck_jax.run_processes import agents_of, workers_of


R = TypeVar("R", bound=Record)
T = TypeVar("T")

_POLL_S = 0.02


class LiveRunError(OobleckError):
    """A run ended, or does not do what is waited for."""


class LiveRun:
    """The process of the coordinator, if it was started here, and what the run has written so far.

    Attributes:
        run_dir: of the run.
        output: where the coordinator prints.
        process: the coordinator; None: not started yet.
    """

    def __init__(
        self, run_dir: Path, command: Sequence[str] = (), *, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            run_dir: of the run.
            command: that starts its coordinator, and starts it again; none: it is only read.
            environment: of that command; None: the one of this process.
        """
        self.run_dir = run_dir
        self.output = run_dir.with_name(f"{run_dir.name}.out")
        self.process: subprocess.Popen[bytes] | None = None
        self._command, self._environment = list(command), environment
        self._events = _RecordFile(run_dir / "events.jsonl")
        self._journal = _RecordFile(run_dir / "journal.jsonl")

    def start(self) -> None:
        """Start the coordinator, for the first time or again."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )

    @property
    def events(self) -> list[tuple[float, Record]]:
        """(seconds since 1970, record) of all that happened but for commits."""
        return self._events.read()

    def records(self, kind: type[R], since_s: float = 0.0) -> list[tuple[float, R]]:
        """Return (seconds since 1970, record) of all records of a kind, in order."""
        return [
            (when, record)
            for when, record in self._file_of(kind).read()
            if isinstance(record, kind) and when >= since_s
        ]

    def _file_of(self, kind: type[Record]) -> "_RecordFile":
        return self._journal if issubclass(kind, Committed | Restored) else self._events

    @property
    def num_steps(self) -> int:
        """Steps that count."""
        match self._journal.read()[-1:]:
            case [(_, Committed() as last)]:
                return last.step + 1
            case [(_, Restored() as last)]:
                return last.step
            case _:
                return 0

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each committed step; of one that was done again, the last."""
        path = self.run_dir / "metrics.jsonl"
        lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        return list({line["step"]: line for line in lines}.values())

    @property
    def workers(self) -> dict[int, int]:
        """Process ids of the workers that live, by node."""
        return workers_of(self.run_dir)

    @property
    def agents(self) -> dict[int, int]:
        """Process ids of the agents that live, by node."""
        return agents_of(self.run_dir)

    def wait(self, what: str, condition: Callable[[], T | None], *, limit_s: float) -> T:
        """Wait until `condition()` is true; return what it gave.

        Raises:
            LiveRunError: not within `limit_s`, or the coordinator ended before.
        """
        deadline_s = time.monotonic() + limit_s
        while not (found := condition()):
            if self.process is not None and self.process.poll() is not None:
                ended = f"the run ended with exit code {self.process.returncode}"
                raise LiveRunError(f"{ended} before there was {what}; {self._last_words}")
            if time.monotonic() > deadline_s:
                raise LiveRunError(f"no {what} within {limit_s:.0f} s; {self._last_words}")
            time.sleep(_POLL_S)
        return found

    @property
    def _last_words(self) -> str:
        """What the run printed last: the folder of a benchmark is gone when its message is read."""
        lines = self.output.read_text(encoding="utf-8", errors="replace").split("\n") if self.output.exists() else []
        said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        return f"it said last: {said} ({self.output})"

    def undisturbed_steps_s(self, *, limit_s: float, end_s: float) -> list[float]:
        """Start the run and let it come to its end; return the times of its steps, without the first quarter.

        Args:
            limit_s: for the run.
            end_s: for its end, if it is told to end before.

        Raises:
            LiveRunError: it did not end.
        """
        self.start()
        try:
            self.finish(limit_s=limit_s)
        finally:
            self.interrupt(limit_s=end_s)
        steps_s = [record.step_time_s for _, record in self.records(Committed)]
        return steps_s[len(steps_s) // 4 :]

    def interrupt(self, *, limit_s: float) -> None:
        """End the run as Ctrl-C does.

        Raises:
            LiveRunError: it did not end within `limit_s`, and was killed.
        """
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        try:
            self.finish(limit_s=limit_s)
        finally:
            self.kill()

    def finish(self, *, limit_s: float) -> int:
        """Wait for the end; return the exit code.

        Raises:
            LiveRunError: it did not end within `limit_s`.
        """
        assert self.process is not None
        try:
            return self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise LiveRunError(f"the run did not end within {limit_s:.0f} s; {self._last_words}") from None

    def kill_all(self) -> None:
        """Leave nothing behind of a run that has gone wrong."""
        self.kill()
        for agent in self.agents.values():  # their workers end with them
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the coordinator alone, if it lives."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class _RecordFile:
    """The records of a file that grows, each line of which is read once: a long run is asked often."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_bytes = 0
        self._records: list[tuple[float, Record]] = []
        self._decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)

    def read(self) -> list[tuple[float, Record]]:
        """Return all records so far; a line that is not complete yet, or was cut off, comes later or never."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._num_bytes)
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return self._records
        for line in lines:
            if line.endswith(b"\n"):
                self._records.append((msgspec.json.decode(line)["time"], self._decoder.decode(line)))
                self._num_bytes += len(line)
        return self._records
