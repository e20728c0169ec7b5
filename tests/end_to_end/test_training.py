"""Whole runs with real processes: gradients (T1), losses of any plan and after a kill (T2), equal holders (T3)."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from models.presets import load_preset
from tests.execution.test_node import reference_gradients
from tests.execution.thread_cluster import plan_of


ROOT = Path(__file__).parents[2]
STEPS = 60
LIMIT_S = 150


def train(run_dir: Path, *flags: str) -> list[dict]:
    """Run scripts/train.py to its end and return the metrics of its steps."""
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--preset", "gpt-test", "--run-dir", str(run_dir)]
    command += ["--steps", str(STEPS), "--eval-every", "30", "--compilation-cache", str(run_dir.parent / "programs")]
    result = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, env=environment()
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def environment() -> dict[str, str]:
    """Return the environment of users: programs are optimized as theirs are, unlike those of other tests."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def fingerprints(run_dir: Path) -> dict[str, list[str]]:
    """Return the checksums that the workers logged of each group's state at the end."""
    found: dict[str, list[str]] = {}
    for log in (run_dir / "logs").glob("node-*.log"):
        for group, checksum in re.findall(r"state of (\S+): ([0-9a-f]{16})", log.read_text()):
            found.setdefault(group, []).append(checksum)
    return found


@pytest.fixture(scope="module")
def two_and_two(tmp_path_factory) -> tuple[Path, list[dict]]:
    """A run of two pipelines of two nodes."""
    run_dir = tmp_path_factory.mktemp("training") / "two-and-two"
    return run_dir, train(run_dir, "--nodes", "4", "--fault-tolerance", "1", "--plan", "0-3,3-6 | 0-3,3-6")


@pytest.mark.process
@pytest.mark.timeout(2 * LIMIT_S)
def test_holders_are_equal_and_the_loss_falls_T3(two_and_two):
    run_dir, metrics = two_and_two
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1.0
    found = fingerprints(run_dir)
    assert {group: len(checksums) for group, checksums in found.items()} == {
        **{f"layer-{layer:03d}": 2 for layer in range(6)},
        "wte": 4,
    }
    assert all(len(set(checksums)) == 1 for checksums in found.values()), found


@pytest.mark.process
@pytest.mark.timeout(2 * LIMIT_S)
def test_another_plan_has_the_same_losses_T2(two_and_two):
    run_dir, expected = two_and_two
    actual = train(run_dir.parent / "three-and-one", "--nodes", "4", "--plan", "0-2,2-4,4-6 | 0-6")
    for line, other in zip(actual, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert (line["sample_first"], line["sample_end"]) == (other["sample_first"], other["sample_end"])


@pytest.mark.process
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("plan", ["0-3,3-6 | 0-3,3-6", "0-2,2-6 | 0-5,5-6"], ids=["same-plan", "other-cuts"])
def test_the_same_split_of_the_batch_has_the_same_bits_T1(two_and_two, plan):
    run_dir, expected = two_and_two
    again = run_dir.parent / plan.replace(" | ", "-")
    actual = train(again, "--nodes", "4", "--fault-tolerance", "1", "--plan", plan)
    assert [(line["loss"], line["grad_norm"]) for line in actual] == [
        (line["loss"], line["grad_norm"]) for line in expected
    ]
    checksums = {group: set(found) for group, found in fingerprints(again).items()}
    assert checksums == {group: set(found) for group, found in fingerprints(run_dir).items()}


@pytest.mark.process
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_gradient_norm_is_that_of_a_single_device_T1(two_and_two):
    _, metrics = two_and_two
    plan = plan_of(([3, 3], 4), ([3, 3], 4))
    gradients = reference_gradients(load_preset("gpt-test"), plan, 0)
    norm = math.sqrt(math.fsum(float(np.sum(np.square(value, dtype=np.float64))) for value in gradients.values()))
    assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.process
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_killed_node_does_not_change_the_losses_T2(two_and_two):
    run_dir, expected = two_and_two
    survived = run_dir.parent / "survived"
    flags = ("--nodes", "4", "--fault-tolerance", "1", "--plan", "0-3,3-6 | 0-3,3-6", "--run-dir", str(survived))
    flags += ("--steps", str(STEPS), "--eval-every", "30", "--compilation-cache", str(run_dir.parent / "programs"))
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--preset", "gpt-test", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as run:
        try:
            await_steps(survived / "metrics.jsonl", 10)
            os.kill(worker_of(run.pid), signal.SIGKILL)
            out, _ = run.communicate(timeout=LIMIT_S)
        finally:
            run.kill()
    assert run.returncode == 0, out
    actual = [json.loads(line) for line in (survived / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in actual] == list(range(STEPS))
    assert actual[-1]["generation"] == 2, out
    for line, other in zip(actual, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert all(len(set(checksums)) == 1 for checksums in fingerprints(survived).values())


def await_steps(metrics: Path, count: int) -> None:
    """Wait until so many steps are committed."""
    deadline_s = time.monotonic() + LIMIT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert time.monotonic() < deadline_s, f"no {count} steps within {LIMIT_S} s"
        time.sleep(0.05)


def worker_of(coordinator: int) -> int:
    """Return the process id of one worker of a run."""
    workers = [
        process
        for process in psutil.Process(coordinator).children(recursive=True)
        if "oobleck_jax.worker" in process.cmdline()
    ]
    assert len(workers) == 4, workers
    return workers[1].pid


@pytest.mark.process
@pytest.mark.timeout(2 * LIMIT_S)
def test_two_devices_a_node_have_the_same_losses_T2(two_and_two):
    run_dir, expected = two_and_two
    flags = ("--nodes", "2", "--devices-per-node", "2", "--microbatch-size", "2", "--plan", "0-3/2,3-6/2")
    actual = train(run_dir.parent / "two-devices", *flags)
    for line, other in zip(actual, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)
