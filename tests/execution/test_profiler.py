"""Profiles: sizes are exact, times are there for every kind and device count, both sources agree on what is kept."""

from dataclasses import replace

import pytest

from models.presets import load_preset
from oobleck_jax.execution.profiler import estimate_profile_with_xla, measure_profile
from oobleck_jax.execution.rates import measure_rates
from oobleck_jax.planning.estimate import LAPTOP_RATES
from oobleck_jax.planning.profile import Rate, check_profile, profile_from_json, profile_to_json
from tests.execution.thread_cluster import shared_home


RATE = Rate(bytes_per_s=1e9, latency_s=1e-4)


@pytest.fixture(scope="module")
def config():
    return replace(load_preset("gpt-test"), devices_per_node=2, microbatch_size=2)


@pytest.fixture(scope="module")
def measured(config):
    told: list[tuple[str, int, int]] = []
    home = shared_home(config.model, 2)
    profile = measure_profile(
        config, home=home, link=RATE, sum_rate=RATE, repetitions=1, progress=lambda *news: told.append(news)
    )
    assert told[-1] == ("update", 6, 6)
    return profile


def test_a_measured_profile_is_complete(config, measured):
    check_profile(measured)
    assert profile_from_json(profile_to_json(measured)) == measured
    assert [layer.kind for layer in measured.layers] == ["embedding", *["block"] * 4, "head"]
    for layer in measured.layers:
        assert [cost.num_devices for cost in layer.costs] == [1, 2]
        assert all(cost.backward_s > 0 for cost in layer.costs)
    assert measured.update_s_per_byte > 0
    parameters = sum(layer.state.parameter_bytes for layer in measured.layers)
    parameters += sum(group.state.parameter_bytes for group in measured.tied_groups)
    assert parameters == 4 * config.model.num_parameters
    assert [(group.name, group.layers) for group in measured.tied_groups] == [("wte", (0, 5))]


def test_kept_bytes_are_those_of_the_input_of_each_layer(config, measured):
    block = measured.layers[1]
    activation = 4 * config.microbatch_size * config.sequence_length * config.model.width
    assert block.output_bytes == activation
    assert block.costs[0].residual_bytes == activation
    assert block.costs[1].residual_bytes == pytest.approx(block.costs[0].residual_bytes / 2, rel=0.1)


def test_an_estimate_counts_the_work_of_the_model(config, measured):
    estimated = estimate_profile_with_xla(config, LAPTOP_RATES, home=shared_home(config.model, 2))
    check_profile(estimated)
    assert [layer.state for layer in estimated.layers] == [layer.state for layer in measured.layers]
    assert estimated.tied_groups == measured.tied_groups
    block = estimated.layers[1].costs[0]
    assert block.forward_s > 0
    # With recomputation, backward is three times forward; XLA folds some of it.
    assert 2 * block.forward_s < block.backward_s < 4 * block.forward_s


@pytest.mark.process
def test_rates_between_two_processes_are_measured():
    for rate in measure_rates(program_s=0.001):
        assert 1e6 < rate.bytes_per_s < 1e12
        assert 0 <= rate.latency_s < 1
