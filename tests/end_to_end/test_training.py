"""Whole runs with real processes: gradients (T1), losses of any plan (T2), equal holders (T3)."""

import math

import numpy as np
import pytest

from models.presets import load_preset
from tests.end_to_end.training_runs import LIMIT_S, STEPS, Run, assert_equal_holders, assert_equal_losses, train
from tests.execution.test_node import reference_gradients
from tests.execution.thread_cluster import plan_of


@pytest.fixture(scope="module")
def two_and_two(tmp_path_factory) -> Run:
    """A run of two pipelines of two nodes."""
    run_dir = tmp_path_factory.mktemp("training") / "two-and-two"
    return train(run_dir, "--nodes", "4", "--fault-tolerance", "1", "--plan", "0-3,3-6 | 0-3,3-6")


@pytest.mark.process
@pytest.mark.timeout(2 * LIMIT_S)
def test_holders_are_equal_and_the_loss_falls_T3(two_and_two):
    metrics = two_and_two.metrics
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1.0
    found = two_and_two.fingerprints
    assert {group: len(checksums) for group, checksums in found.items()} == {
        **{f"layer-{layer:03d}": 2 for layer in range(6)},
        "wte": 4,
    }
    assert_equal_holders(two_and_two)


@pytest.mark.process
@pytest.mark.timeout(2 * LIMIT_S)
def test_another_plan_has_the_same_losses_T2(two_and_two):
    run_dir = two_and_two.run_dir.parent / "three-and-one"
    assert_equal_losses(train(run_dir, "--nodes", "4", "--plan", "0-2,2-4,4-6 | 0-6"), two_and_two)


@pytest.mark.process
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("plan", ["0-3,3-6 | 0-3,3-6", "0-2,2-6 | 0-5,5-6"], ids=["same-plan", "other-cuts"])
def test_the_same_split_of_the_batch_has_the_same_bits_T1(two_and_two, plan):
    run_dir = two_and_two.run_dir.parent / plan.replace(" | ", "-")
    again = train(run_dir, "--nodes", "4", "--fault-tolerance", "1", "--plan", plan)
    assert [(line["loss"], line["grad_norm"]) for line in again.metrics] == [
        (line["loss"], line["grad_norm"]) for line in two_and_two.metrics
    ]
    checksums = {group: set(found) for group, found in again.fingerprints.items()}
    assert checksums == {group: set(found) for group, found in two_and_two.fingerprints.items()}


@pytest.mark.process
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_gradient_norm_is_that_of_a_single_device_T1(two_and_two):
    plan = plan_of(([3, 3], 4), ([3, 3], 4))
    gradients = reference_gradients(load_preset("gpt-test"), plan, 0)
    norm = math.sqrt(math.fsum(float(np.sum(np.square(value, dtype=np.float64))) for value in gradients.values()))
    assert two_and_two.metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.process
@pytest.mark.timeout(2 * LIMIT_S)
def test_two_devices_a_node_have_the_same_losses_T2(two_and_two):
    flags = ("--nodes", "2", "--devices-per-node", "2", "--microbatch-size", "2", "--plan", "0-3/2,3-6/2")
    assert_equal_losses(train(two_and_two.run_dir.parent / "two-devices", *flags), two_and_two)
