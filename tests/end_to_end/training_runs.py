"""Runs of scripts/train.py with real processes, as the tests of whole runs need them."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from oobleck_jax.events import Record, read_events
from oobleck_jax.run_processes import agents_of, workers_of


ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / ".pytest_cache" / "programs"  # of all whole runs: most of what they compile is the same
STEPS = 60
LIMIT_S = 150
T = TypeVar("T", bound=Record)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that goes on, or is over."""

    run_dir: Path
    process: "subprocess.Popen[str]"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each committed step."""
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def records(self, kind: type[T]) -> list[T]:
        """Return the events of one kind, in order."""
        return [record for _, record in read_events(self.run_dir / "events.jsonl") if isinstance(record, kind)]

    @property
    def fingerprints(self) -> dict[str, list[str]]:
        """The checksums that the workers logged of each group's state at the end."""
        found: dict[str, list[str]] = {}
        for log in (self.run_dir / "logs").glob("node-*.log"):
            pattern = rf"state of (\S+) after step {STEPS - 1}: ([0-9a-f]{{16}})"
            for group, checksum in re.findall(pattern, log.read_text()):
                found.setdefault(group, []).append(checksum)
        return found

    @property
    def workers(self) -> dict[int, int]:
        """Process ids of the workers that live, by node."""
        return workers_of(self.run_dir)

    @property
    def agents(self) -> dict[int, int]:
        """Process ids of the agents that live, by node."""
        return agents_of(self.run_dir)

    def await_steps(self, count: int) -> None:
        """Wait until so many steps are committed."""
        self.wait_for(lambda: len(self.metrics) >= count, f"{count} steps")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, f"the run ended before there were {what}"
            assert time.monotonic() < deadline_s, f"no {what} within {LIMIT_S} s"
            time.sleep(0.02)

    def finish(self, exit_code: int = 0) -> str:
        """Wait for the end; return what was printed."""
        out, _ = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == exit_code, out + self._tails()
        return out

    def _tails(self) -> str:
        logs = sorted((self.run_dir / "logs").glob("node-*.log"))
        return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


def environment() -> dict[str, str]:
    """Return the environment of users: programs are optimized as theirs are, unlike those of other tests."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def command_of(run_dir: Path, *flags: str) -> list[str]:
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--preset", "gpt-test"]
    command += ["--profile", "estimate", "--run-dir", str(run_dir)]
    command += ["--compilation-cache", str(PROGRAMS)]
    return [*command, "--steps", str(STEPS), "--eval-every", "30", *flags]


@contextmanager
def started(run_dir: Path, *flags: str) -> Iterator[Run]:
    """Start a run, and end it at the latest when the block ends."""
    with subprocess.Popen(
        command_of(run_dir, *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment(),
    ) as process:
        try:
            yield Run(run_dir=run_dir, process=process)
        finally:
            process.kill()


def train(run_dir: Path, *flags: str) -> Run:
    """Run to the end."""
    with started(run_dir, *flags) as run:
        run.finish()
    return run


def assert_equal_losses(run: Run, expected: Run) -> None:
    """Compare each step's loss and samples with those of another run (properties T2 and T4)."""
    actual, wanted = run.metrics, expected.metrics
    assert [line["step"] for line in actual] == list(range(len(wanted)))
    for line, other in zip(actual, wanted, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6), f"step {line['step']}"
        assert (line["sample_first"], line["sample_end"]) == (other["sample_first"], other["sample_end"])


def assert_equal_holders(run: Run) -> None:
    """Compare the states that the holders of each group have at the end (property T3)."""
    found = run.fingerprints
    assert found, "no worker logged its state"
    assert all(len(set(checksums)) == 1 for checksums in found.values()), found
