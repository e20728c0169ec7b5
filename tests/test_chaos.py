"""Random strikes: drawn from the seed alone, and a check that sees what is wrong."""

import json
from pathlib import Path

import pytest

from oobleck_jax import events
from oobleck_jax.chaos import Target, draw_strikes, violations_of
from oobleck_jax.plan_text import parse_plan
from tests.test_progress import committed


def test_the_same_seed_strikes_the_same_nodes():
    first, again = (draw_strikes(7, count=50, num_nodes=4, fault_tolerance=2) for _ in range(2))
    assert first == again
    assert first != draw_strikes(8, count=50, num_nodes=4, fault_tolerance=2)
    assert {strike.target for strike in first[: len(Target)]} == set(Target)
    assert all(strike.node != strike.other for strike in first)


def test_two_nodes_are_struck_at_once_only_if_that_must_be_survived():
    targets = {strike.target for strike in draw_strikes(7, count=50, num_nodes=4, fault_tolerance=1)}
    assert targets == set(Target) - {Target.TWO, Target.AGAIN}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The files of a run of three steps in two generations."""
    files = events.RunFiles(tmp_path)
    plan = parse_plan("0-4 | 0-4", num_microbatches=4)
    files.write(events.Planned(generation=1, step=0, reason="begin", plan=plan, plan_reason=""))
    files.write(events.Planned(generation=3, step=1, reason="node 1 died", plan=plan, plan_reason=""))
    for step in range(3):
        files.write(committed(step))
        files.write_metrics(
            events.StepMetrics(
                step=step,
                generation=1,
                loss=4.25,
                grad_norm=1.0,
                learning_rate=1e-3,
                tokens_per_s=1.0,
                step_time_s=1.0,
                sample_first=8 * step,
                sample_end=8 * step + 8,
            )
        )
    files.close()
    (tmp_path / "logs").mkdir()
    for node in (0, 1):
        text = "INFO state of layer-000 after step 2: 00000000deadbeef\n"
        (tmp_path / "logs" / f"node-{node}.log").write_text(text)
    return tmp_path


def test_a_run_as_it_should_be_has_no_violations(run_dir):
    assert violations_of(run_dir, [4.25] * 3, relative=1e-6) == []


def edit(path: Path, line: int, **changes: object) -> None:
    lines = path.read_text().splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **changes})
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("name", "line", "changes", "property_"),
    [
        ("metrics.jsonl", 1, {"loss": 4.2501}, "T2"),
        ("metrics.jsonl", 1, {"sample_first": 7}, "T4"),
        ("metrics.jsonl", 2, {"step": 1}, "M2"),
        ("journal.jsonl", 2, {"step": 1}, "M2"),
        ("events.jsonl", 1, {"generation": 1}, "M1"),
        ("events.jsonl", 1, {"reason": ""}, "M3"),
    ],
)
def test_each_violation_is_seen(run_dir, name, line, changes, property_):
    edit(run_dir / name, line, **changes)
    assert any(text.startswith(property_) for text in violations_of(run_dir, [4.25] * 3, relative=1e-6))


def test_holders_that_differ_are_seen_T3(run_dir):
    (run_dir / "logs" / "node-1.log").write_text("INFO state of layer-000 after step 2: 00000000deadbeee\n")
    assert violations_of(run_dir, [4.25] * 3, relative=1e-6) == ["T3: holders differ in layer-000 after step 2"]
