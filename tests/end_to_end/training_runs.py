"""Runs of scripts/train.py with real processes, as the tests of whole runs need them."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oobleck_jax.events import Incident
from oobleck_jax.live_run import LiveRun


ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / ".pytest_cache" / "programs"  # of all whole runs: most of what they compile is the same
STEPS = 60
LIMIT_S = 240  # for any one thing that is waited for
# In mixed precision a difference in the last bit of a sum may round a parameter the other way, by 1/256 of it.
IN_MIXED_PRECISION = 2e-4


def environment() -> dict[str, str]:
    """Return the environment of users: programs are optimized as theirs are, unlike those of other tests."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def command_of(run_dir: Path, *flags: str) -> list[str]:
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--preset", "gpt-test"]
    command += ["--profile", "estimate", "--run-dir", str(run_dir)]
    command += ["--compilation-cache", str(PROGRAMS)]
    command += ["--steps", str(STEPS), "--eval-every", "30"]
    return [*command, *(() if "--checkpoint-every" in flags else ("--checkpoint-every", "0")), *flags]


@contextmanager
def started(run_dir: Path, *flags: str) -> Iterator[LiveRun]:
    """Start a run; when the block ends, nothing is left of it."""
    run = LiveRun(run_dir, command_of(run_dir, *flags), environment=environment())
    run.start()
    try:
        yield run
    finally:
        run.kill_all()


def await_steps(run: LiveRun, count: int) -> None:
    """Wait until so many steps are committed."""
    run.wait(f"step {count - 1}", lambda: run.num_steps >= count, limit_s=LIMIT_S)


def finish(run: LiveRun, exit_code: int = 0) -> None:
    """Wait for the end, which must be of this kind."""
    ended_with = run.finish(limit_s=LIMIT_S)
    assert ended_with == exit_code, story_of(run)


def train(run_dir: Path, *flags: str) -> LiveRun:
    """Run to the end."""
    with started(run_dir, *flags) as run:
        finish(run)
    return run


def story_of(run: LiveRun) -> str:
    """Return what the run printed, and the ends of the logs of its nodes: for whom a test fails."""
    logs = sorted((run.run_dir / "logs").glob("node-*.log"))
    tails = "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)
    return run.output.read_text(errors="replace") + tails


def fingerprints_of(run: LiveRun) -> dict[str, list[str]]:
    """Return the checksums that the workers logged of each group's state at the end."""
    found: dict[str, list[str]] = {}
    for log in (run.run_dir / "logs").glob("node-*.log"):
        pattern = rf"state of (\S+) after step {STEPS - 1}: ([0-9a-f]{{16}})"
        for group, checksum in re.findall(pattern, log.read_text()):
            found.setdefault(group, []).append(checksum)
    return found


def incidents_of(run: LiveRun) -> list[Incident]:
    return [incident for _, incident in run.records(Incident)]


def assert_equal_losses(run: LiveRun, expected: LiveRun, *, bound: float = 1e-6) -> None:
    """Compare each step's loss, within a relative bound, and samples with those of another run (T2 and T4)."""
    actual, wanted = run.metrics, expected.metrics
    assert [line["step"] for line in actual] == list(range(len(wanted)))
    happened = [(incident.step, incident.kind, incident.nodes) for incident in incidents_of(run)]
    for line, other in zip(actual, wanted, strict=True):
        step = line["step"]
        before = [incident for incident in happened if incident[0] <= step]
        assert line["loss"] == pytest.approx(other["loss"], rel=bound), f"step {step}, after {before[-1:]}"
        assert (line["sample_first"], line["sample_end"]) == (other["sample_first"], other["sample_end"]), before[-1:]


def assert_equal_holders(run: LiveRun) -> None:
    """Compare the states that the holders of each group have at the end (property T3)."""
    found = fingerprints_of(run)
    assert found, "no worker logged its state"
    assert all(len(set(checksums)) == 1 for checksums in found.values()), found


def assert_equal_bits(run: LiveRun, expected: LiveRun, *, steps: int = STEPS) -> None:
    """Compare losses and gradient norms with those of another run, to the last bit (property T1)."""
    actual, wanted = ([(line["loss"], line["grad_norm"]) for line in each.metrics[:steps]] for each in (run, expected))
    assert actual == wanted
