import itertools

import pytest

from oobleck_jax.config import Precision, Remat
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.devices import DEVICES, device_named, rates_of
from oobleck_jax.planning.estimate import estimate_profile, gpt_sizes


def test_unknown_device_names_the_known_ones() -> None:
    with pytest.raises(
        PlanError, match=r"--device a41 is not known; there are .*a40, a100-40gb.*\. Or give a measured --profile"
    ):
        device_named("a41")


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_sane_rates(name: str) -> None:
    device = device_named(name)
    assert device.name == name
    assert 0.3 <= device.matmul_fraction <= 0.6
    assert device.bfloat16_flops_per_s > device.float32_flops_per_s
    assert device.usable_memory_bytes < device.memory_bytes


def test_gpt3_175b_has_its_parameters_and_about_six_operations_for_each_and_token() -> None:
    sizes = gpt_sizes(
        num_blocks=96, width=12288, num_heads=96, vocab_size=50257, sequence_length=2048, remat=Remat.LAYER
    )
    num_parameters = sum(size.num_parameters for size in sizes) + sizes[0].num_tied_parameters
    assert num_parameters == pytest.approx(174.6e9, rel=1e-3)
    operations = 3 * sum(size.forward_flops for size in sizes) / 2048
    assert operations == pytest.approx(6 * num_parameters, rel=0.03)


def test_more_devices_are_faster_and_keep_less_each() -> None:
    sizes = gpt_sizes(num_blocks=1, width=4096, num_heads=32, vocab_size=50257, sequence_length=2048, remat=Remat.DOTS)
    rates = rates_of(device_named("h100"), precision=Precision.MIXED, network_bytes_per_s=1e10, network_latency_s=0.0)
    profile = estimate_profile(sizes, microbatch_size=8, precision=Precision.MIXED, rates=rates, devices_per_node=8)
    costs = profile.layers[1].costs
    assert [cost.num_devices for cost in costs] == [1, 2, 4, 8]
    for one, two in itertools.pairwise(costs):
        assert two.forward_s < one.forward_s < 2 * two.forward_s
        assert two.residual_bytes == one.residual_bytes / 2
