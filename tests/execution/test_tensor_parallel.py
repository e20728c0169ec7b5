"""Tensor parallelism in a stage: what the devices share is as the model says, and they share the work, too.

That gradients and losses are those of other layouts is in test_node.py.
"""

from dataclasses import replace
from pathlib import Path

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from models.presets import load_preset
from oobleck_jax.config import Precision, Remat, check_config
from oobleck_jax.errors import ConfigError
from oobleck_jax.execution.home import StageDevices
from oobleck_jax.execution.layer_functions import LayerFunctions
from oobleck_jax.execution.profiler import estimate_profile_with_xla, measure_profile
from oobleck_jax.execution.span import Span, SpanKey
from oobleck_jax.model import Layer
from oobleck_jax.planning.estimate import LAPTOP_RATES
from oobleck_jax.planning.profile import Rate
from tests.execution.thread_cluster import shared_home


CONFIG = replace(load_preset("gpt-test"), devices_per_node=2, microbatch_size=1, remat=Remat.NONE, tensor_parallel=True)
RATE = Rate(bytes_per_s=1e9, latency_s=1e-4)


def block_on(num_devices: int) -> Span:
    model = CONFIG.model.build()
    home = shared_home(CONFIG.model, 2, tensor_parallel=True)
    devices = home.stage_devices(range(num_devices))
    key = SpanKey(
        kind="block",
        num_layers=1,
        is_last=False,
        x_shape=(1, CONFIG.sequence_length, CONFIG.model.width),
        x_dtype="float32",
        targets_shape=(1, CONFIG.sequence_length),
        devices=devices.key,
        precision=Precision.FLOAT32,
        remat=Remat.NONE,
        is_stochastic=False,
    )
    return Span(key=key, functions=LayerFunctions(model.layers[1]), home=home, devices=devices)


def test_parameters_lie_as_the_model_says():
    own = block_on(2).params_specs[0]
    assert own["mlp_in"]["kernel"].sharding.spec == P(None, None, "shard")
    assert own["mlp_out"]["kernel"].sharding.spec == P(None, "shard")
    assert own["qkv"]["bias"].sharding.spec == P(None, "shard")
    assert own["mlp_out"]["bias"].sharding.spec == P(None, "shard")  # not named, so gathered


def test_every_device_has_the_activations_and_does_its_share_of_the_work():
    one, two = block_on(1), block_on(2)
    assert two.x_spec.sharding.is_fully_replicated
    assert two.y_spec.sharding.is_fully_replicated
    for name in ("forward", "backward"):
        alone, shared = (getattr(span, name).cost_analysis()["flops"] for span in (one, two))
        assert shared < 0.6 * alone, name
    gathered = [line for line in two.forward.as_text().splitlines() if " all-gather(" in line]
    width, mlp_width = CONFIG.model.width, CONFIG.model.width * CONFIG.model.mlp_ratio
    assert not any(f"{width},{mlp_width}]" in line or f"{mlp_width},{width}]" in line for line in gathered)


def test_profiles_count_what_each_device_keeps():
    home = shared_home(CONFIG.model, 2, tensor_parallel=True)
    measured = measure_profile(CONFIG, home=home, link=RATE, sum_rate=RATE, repetitions=1)
    estimated = estimate_profile_with_xla(CONFIG, LAPTOP_RATES, home=home)
    for profile in (measured, estimated):
        assert profile.tensor_parallel
    alone, shared = measured.layers[1].costs
    # What is kept of the stream is whole on both, what is kept within attention and MLP is shared.
    assert 0.5 * alone.residual_bytes < shared.residual_bytes < 0.8 * alone.residual_bytes
    assert estimated.layers[1].costs[1].residual_bytes >= shared.residual_bytes


def test_a_model_that_cannot_be_shared_out_says_so():
    toy = load_preset(f"{Path(__file__).parents[1] / 'models' / 'toy_model.py'}:toy")
    with pytest.raises(ConfigError, match=r"--tensor-parallel needs a model .* \(embedding, convolution, classifier\)"):
        check_config(replace(toy, tensor_parallel=True))
    block = CONFIG.model.build().layers[1]
    with pytest.raises(
        ConfigError,
        match=r"tensor_dims of a layer of kind block has dim 1 of mlp.kernel, but its own parameters are .*mlp_in",
    ):
        LayerFunctions(replace(block, tensor_dims=(("mlp.kernel", 1),)))


def test_layers_may_have_lists_of_modules():
    class Stacked(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.inner = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs))

    functions = LayerFunctions(Layer(kind="stacked", create=lambda rngs: Stacked(rngs)))
    specs = StageDevices(jax.devices("cpu")[:2]).parameter_specs(functions.own_shapes, num_stacked_dims=0)
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(specs)} == {P("shard"), P(None, "shard")}
