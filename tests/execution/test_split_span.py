"""A split backward against the joint one: the same gradients, and no work done twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.presets import load_preset
from oobleck_jax.config import Precision, Remat
from oobleck_jax.execution.home import Home, StageDevices
from oobleck_jax.execution.layer_functions import LayerFunctions
from oobleck_jax.execution.span import Span, SpanKey
from oobleck_jax.execution.split_backward import SplitBackward
from oobleck_jax.execution.split_span import SplitSpan
from tests.execution.thread_cluster import CODE_AS_FOR_USERS


B, T = 4, 16


@pytest.fixture(scope="module")
def home():
    return Home(jax.devices("cpu")[:2], compiler_options=CODE_AS_FOR_USERS)


def span_of(home, layer: int, *, num_layers=1, precision=Precision.FLOAT32, dropout_rate=0.0, num_devices=1) -> Span:
    config = load_preset("gpt-test").model
    model = (config if not dropout_rate else type(config)(**{**_fields(config), "dropout_rate": dropout_rate})).build()
    width = config.width
    devices = StageDevices(home.devices[:num_devices])
    dtype = "int32" if layer == 0 else str(jnp.bfloat16.dtype if precision is not Precision.FLOAT32 else "float32")
    key = SpanKey(
        kind=model.layers[layer].kind,
        num_layers=num_layers,
        is_last=False,
        x_shape=(B, T) if layer == 0 else (B, T, width),
        x_dtype=dtype,
        targets_shape=(B, T),
        devices=devices.key,
        precision=precision,
        remat=Remat.NONE,
        is_stochastic=dropout_rate > 0,
    )
    return Span(key=key, functions=LayerFunctions(model.layers[layer], precision), home=home, devices=devices)


def _fields(config) -> dict:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def draw(spec, key):
    if jnp.issubdtype(spec.dtype, jnp.floating):
        return jax.device_put(0.3 * jax.random.normal(key, spec.shape, spec.dtype), spec.sharding)
    return jax.device_put(jax.random.randint(key, spec.shape, 0, 7, spec.dtype), spec.sharding)


def drawn(specs, seed: int):
    leaves, structure = jax.tree.flatten(specs)
    keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))
    return jax.tree.unflatten(structure, [draw(leaf, key) for leaf, key in zip(leaves, keys, strict=False)])


def relative_error(found, expected) -> float:
    found, expected = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (found, expected))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


CASES = {
    "embedding": {"layer": 0},
    "one block": {"layer": 1},
    "two blocks": {"layer": 1, "num_layers": 2},
    "dropout": {"layer": 1, "num_layers": 2, "dropout_rate": 0.2},
    "mixed": {"layer": 1, "num_layers": 2, "precision": Precision.MIXED},
    "two devices": {"layer": 1, "num_layers": 2, "num_devices": 2},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_gradients_equal_those_of_the_joint_backward(home, case):
    span = span_of(home, **case)
    split = SplitSpan(span=span)
    params, x, dy = drawn(span.params_specs, 1), drawn(span.x_spec, 2), drawn(span.y_spec, 3)
    randomness, layer = drawn(span.random_specs, 4), jax.device_put(np.int32(1), span.devices.replicated)
    y, residuals = span.forward(params, x, randomness, layer)
    expected, expected_dx = span.backward(params, span.kept(x, residuals), dy, span.zeros())
    y_again, residuals = split.forward(params, x, randomness, layer)
    saved = [dy]
    if not span.takes_tokens:
        dx, saved = split.backward_input(params, residuals, dy)
        np.testing.assert_array_equal(dx, expected_dx)
    found = split.backward_weights(params, split.weight_residuals(residuals), saved, span.zeros())
    np.testing.assert_array_equal(y_again, y)
    # Not to the bit: what both parts need is rounded, and in other registers, where one part hands it to the other.
    limit = 1e-6 if span.key.precision is Precision.FLOAT32 else 2**-8
    assert relative_error(found, expected) < limit


def test_nothing_is_computed_twice_and_the_weights_wait():
    def layer(params, x):
        first, second = params
        return jnp.tanh(x @ first) @ second

    params = [jnp.ones((8, 8)), jnp.ones((8, 8))]
    x = jnp.ones((4, 8))
    _, vjp = jax.vjp(layer, params, x)
    leaves, structure = jax.tree.flatten(vjp)
    parts = SplitBackward(lambda params, kept, dy: jax.tree.unflatten(structure, kept)(dy), params, leaves, x)
    first = str(jax.make_jaxpr(parts.input_gradient)(params, leaves, x))
    _, saved = parts.input_gradient(params, leaves, x)
    kept = [leaves[index] for index in parts.weight_kept]
    second = str(jax.make_jaxpr(parts.weight_gradients)(params, kept, saved))
    assert first.count("dot_general") == 2
    assert second.count("dot_general") == 2
    assert len(kept) < len(leaves)
