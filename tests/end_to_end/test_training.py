"""Whole runs with real processes: losses do not depend on the plan (T2), holders stay equal (T3)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
STEPS = 60
LIMIT_S = 150


def train(run_dir: Path, *flags: str) -> list[dict]:
    """Run scripts/train.py to its end and return the metrics of its steps."""
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--preset", "gpt-test", "--run-dir", str(run_dir)]
    command += ["--steps", str(STEPS), "--eval-every", "30", "--compilation-cache", str(run_dir.parent / "programs")]
    result = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


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
def test_the_same_plan_has_the_same_bits(two_and_two):
    run_dir, expected = two_and_two
    again = run_dir.parent / "again"
    actual = train(again, "--nodes", "4", "--fault-tolerance", "1", "--plan", "0-3,3-6 | 0-3,3-6")
    assert [(line["loss"], line["grad_norm"]) for line in actual] == [
        (line["loss"], line["grad_norm"]) for line in expected
    ]
    assert fingerprints(again) == fingerprints(run_dir)


@pytest.mark.process
@pytest.mark.timeout(2 * LIMIT_S)
def test_two_devices_a_node_have_the_same_losses_T2(two_and_two):
    run_dir, expected = two_and_two
    flags = ("--nodes", "2", "--devices-per-node", "2", "--microbatch-size", "2", "--plan", "0-3/2,3-6/2")
    actual = train(run_dir.parent / "two-devices", *flags)
    for line, other in zip(actual, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)
