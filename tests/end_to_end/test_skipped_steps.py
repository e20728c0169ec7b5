"""A whole run with steps whose gradient is not finite: all nodes go without them alike, also when one of them dies."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oobleck_jax.data import TokenDataset
from tests.end_to_end.training_runs import (
    LIMIT_S,
    STEPS,
    assert_equal_holders,
    incidents_of,
    story_of,
    train,
)
from tests.models.spiky_model import SPIKE, spiky


pytestmark = [pytest.mark.process, pytest.mark.timeout(2 * LIMIT_S)]
SPIKY = f"{Path(__file__).parents[1] / 'models' / 'spiky_model.py'}:spiky"


def spiky_steps() -> list[int]:
    """Return the steps with a sample whose loss is not finite."""
    config = replace(spiky(), steps=STEPS)
    dataset = TokenDataset.open(config)
    targets = [dataset.tokens(dataset.sample_indices(step))[:, 1:] for step in range(STEPS)]
    return [step for step in range(STEPS) if np.any(targets[step] == SPIKE)]


def test_steps_that_are_not_finite_are_skipped_by_all_nodes_alike_T3(tmp_path):
    """A node dies in such a step, which is done again, and skipped again."""
    skipped = spiky_steps()
    assert len(skipped) > 1
    summary = tmp_path / "summary.json"
    flags = (
        "--preset",
        SPIKY,
        "--nodes",
        "3",
        "--fault-tolerance",
        "1",
        "--plan",
        "0-2,2-5 | 0-5",
        "--eval-every",
        "0",
    )
    run = train(
        tmp_path / "run",
        *(*flags, "--skip-steps", "3", "--summary-json", str(summary), "--inject", f"kill:1@{skipped[1]}:sum"),
    )
    metrics = run.metrics
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert [line["step"] for line in metrics if line["grad_norm"] is None] == skipped, story_of(run)
    assert [line["step"] for line in metrics if line["loss"] is None] == skipped
    assert json.loads(summary.read_text())["skipped_steps"] == len(skipped)
    (loss,) = [incident for incident in incidents_of(run) if incident.kind == "loss"]
    assert (loss.nodes, loss.step) == ((1,), skipped[1])
    assert_equal_holders(run)
    finite = [line["loss"] for line in metrics if line["loss"] is not None]
    assert np.mean(finite[-10:]) < np.mean(finite[:10]) - 0.5
