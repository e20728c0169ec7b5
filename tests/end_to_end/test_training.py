"""Whole runs with real processes: gradients (T1), losses of any plan (T2), equal holders (T3)."""

import math

import numpy as np
import pytest

from models.presets import load_preset
from tests.end_to_end.training_runs import (
    LIMIT_S,
    STEPS,
    assert_equal_bits,
    assert_equal_holders,
    assert_equal_losses,
    fingerprints_of,
    train,
)
from tests.execution.test_node import reference_gradients
from tests.execution.thread_cluster import plan_of


pytestmark = [pytest.mark.process, pytest.mark.jax_version, pytest.mark.timeout(2 * LIMIT_S)]


def test_holders_are_equal_and_the_loss_falls_T3(undisturbed):
    metrics = undisturbed.metrics
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1.0
    found = fingerprints_of(undisturbed)
    assert {group: len(checksums) for group, checksums in found.items()} == {
        **{f"layer-{layer:03d}": 2 for layer in range(6)},
        "wte": 4,
    }
    assert_equal_holders(undisturbed)


def test_the_gradient_norm_is_that_of_a_single_device_T1(undisturbed):
    plan = plan_of(([3, 3], 4), ([3, 3], 4))
    gradients = reference_gradients(load_preset("gpt-test"), plan, 0)
    norm = math.sqrt(math.fsum(float(np.sum(np.square(value, dtype=np.float64))) for value in gradients.values()))
    assert undisturbed.metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_another_plan_has_the_same_losses_T2(undisturbed, tmp_path):
    assert_equal_losses(train(tmp_path / "run", "--nodes", "4", "--plan", "0-2,2-4,4-6 | 0-6"), undisturbed)


def test_other_cuts_have_the_same_bits_where_the_batch_is_split_the_same_way_T1(undisturbed, tmp_path):
    """The same plan again, too: see test_coordinator_restart.py."""
    run = train(tmp_path / "run", "--nodes", "4", "--plan", "0-2,2-6 | 0-5,5-6")
    assert_equal_bits(run, undisturbed)
    checksums, expected = (
        {group: set(found) for group, found in fingerprints_of(each).items()} for each in (run, undisturbed)
    )
    assert checksums == expected


def test_two_devices_a_node_have_the_same_losses_T2(undisturbed, tmp_path):
    flags = ("--nodes", "2", "--devices-per-node", "2", "--microbatch-size", "2", "--plan", "0-3/2,3-6/2")
    assert_equal_losses(train(tmp_path / "run", *flags), undisturbed)
