import dataclasses

import pytest

from oobleck_jax.config import Remat
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.estimate import estimate_profile, gpt_sizes
from oobleck_jax.planning.profile import Profile, Rate, check_profile, profile_from_json, profile_to_json


def small_profile() -> Profile:
    sizes = gpt_sizes(num_blocks=2, width=64, num_heads=2, vocab_size=256, sequence_length=32, remat=Remat.DOTS)
    return estimate_profile(sizes, microbatch_size=4, devices_per_node=2)


def test_json_brings_a_profile_back() -> None:
    profile = small_profile()
    assert profile_from_json(profile_to_json(profile)) == profile
    assert profile_to_json(profile_from_json(profile_to_json(profile))) == profile_to_json(profile)


@pytest.mark.parametrize("data", ["", "{}", "[]", '{"device": 3}'])
def test_other_json_is_refused(data: str) -> None:
    with pytest.raises(PlanError, match="not a profile"):
        profile_from_json(data)


def test_broken_profile_is_refused() -> None:
    profile = small_profile()
    layer = profile.layers[1]
    free = dataclasses.replace(layer.costs[0], forward_s=-1.0)
    broken = {
        "the profile has no layer": dataclasses.replace(profile, layers=()),
        "layer 0 .* has costs for .* devices; they must ascend from 1 on": dataclasses.replace(
            profile, layers=(dataclasses.replace(layer, costs=()),)
        ),
        "layer 0 .* has a negative time or size": dataclasses.replace(
            profile, layers=(dataclasses.replace(layer, costs=(free,)),)
        ),
        "updates take -1.0 seconds per byte; they cannot take less than none": dataclasses.replace(
            profile, update_s_per_byte=-1.0
        ),
        "tied group tied lists layers": dataclasses.replace(profile, layers=(layer,)),
        "link and sum need rates above 0": dataclasses.replace(
            profile, tied_groups=(), link=Rate(bytes_per_s=0.0, latency_s=0.0)
        ),
    }
    for message, value in broken.items():
        with pytest.raises(PlanError, match=message):
            check_profile(value)
        with pytest.raises(PlanError, match=f"damaged: .*{message}.*; make another with scripts/profile.py"):
            profile_from_json(profile_to_json(value))


def test_sum_over_one_holder_is_free_and_over_many_nears_twice_the_bytes() -> None:
    profile = dataclasses.replace(small_profile(), sum=Rate(bytes_per_s=100.0, latency_s=0.0))
    assert profile.sum_s(1000, 1) == 0.0
    assert profile.sum_s(1000, 2) == pytest.approx(10.0)
    assert profile.sum_s(1000, 100) == pytest.approx(19.8)
