"""`--remat auto`: the fastest policy that fits, whatever the memory, and why."""

from dataclasses import replace

import pytest

from models.presets import load_preset
from oobleck_jax.choose_remat import choose_remat
from oobleck_jax.config import Remat, RunConfig, ScheduleKind
from oobleck_jax.errors import PlanError
from oobleck_jax.plan_text import read_plan
from oobleck_jax.planning.profile import Profile
from oobleck_jax.propose import Proposer, estimated_profile


@pytest.fixture
def config() -> RunConfig:
    config = replace(load_preset("gpt2-xl"), nodes=8, global_batch_size=64, remat=Remat.AUTO)
    return replace(config, schedule=ScheduleKind.ONE_F_ONE_B)  # others take memory, too


def chosen(config: RunConfig, memory_gib: float, plan: str | None = None) -> tuple[Remat, str]:
    proposer = Proposer(
        config=config,
        profile=estimated_profile(config),
        device_memory_bytes=int(memory_gib * 2**30),
        given=None if plan is None else read_plan(plan, num_microbatches=config.num_microbatches),
    )

    def profile_of(remat: Remat) -> Profile:
        profile = estimated_profile(replace(config, remat=remat))
        if remat is Remat.NONE:  # recomputing what matmuls do not give costs something
            faster = [
                replace(layer, costs=tuple(replace(cost, backward_s=0.9 * cost.backward_s) for cost in layer.costs))
                for layer in profile.layers
            ]
            profile = replace(profile, layers=tuple(faster))
        return profile

    found, reason = choose_remat(proposer, profile_of)
    assert found.config == replace(config, remat=found.profile.remat)
    assert found.first().plan
    return found.profile.remat, reason


def test_the_less_memory_the_less_is_kept(config):
    policies = [chosen(config, gib)[0] for gib in (100, 20, 10, 5.3)]
    assert policies == [Remat.NONE, Remat.DOTS, Remat.LAYER, Remat.STAGE]
    with pytest.raises(PlanError, match=r"cannot hold|alone needs|no number of nodes"):
        chosen(config, 3)


def test_the_reason_names_all_policies(config):
    policy, reason = chosen(config, 10)
    assert reason.startswith(f"--remat auto takes {policy}, the fastest that fits: ")
    assert " of 10 GiB predicted (" in reason
    assert all(
        f"{other}: " in reason for other in (Remat.NONE, Remat.DOTS, Remat.LAYER, Remat.STAGE) if other is not policy
    )


def test_a_plan_that_is_given_decides_what_fits():
    config = replace(load_preset("gpt2-small"), nodes=2, global_batch_size=64, remat=Remat.AUTO)
    assert chosen(config, 40, plan="0-7,7-14")[0] is Remat.NONE
    assert chosen(config, 6, plan="0-7,7-14")[0] is not Remat.NONE
    with pytest.raises(
        PlanError, match=r"--plan does not fit with any --remat .none: needs .* GiB of a device; dots: "
    ):
        chosen(config, 1, plan="0-7,7-14")
