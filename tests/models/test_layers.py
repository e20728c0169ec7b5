"""Layers of the GPT, and of the toy that a user would bring: what a pipeline relies on."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.gpt import GptConfig
from models.layers import Block, Embedding, dropout
from models.presets import load_preset
from oobleck_jax.model import LayeredModel
from oobleck_jax.model_config import ModelConfig


TOY = f"{Path(__file__).parent / 'toy_model.py'}:toy"
SMALL = GptConfig(num_blocks=1, width=16, num_heads=2, vocab_size=32, context_length=8)
MODELS = pytest.mark.parametrize("config", [SMALL, load_preset(TOY).model], ids=["gpt", "toy"])


def create_layers(model: LayeredModel) -> list:
    """Return the layers with arbitrary parameters: those of a real start take long to compile."""
    rng = np.random.default_rng(0)
    layers = []
    for layer in model.layers:
        graph, shapes = nnx.split(nnx.eval_shape(lambda layer=layer: layer.create(nnx.Rngs(0))))
        params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), leaf.dtype), shapes)
        layers.append(nnx.merge(graph, params))
    return layers


TOKENS_BT = jnp.asarray(np.random.default_rng(1).integers(0, 32, (4, 8)))


def run(layers: list, x: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
    for layer in layers:
        x = layer(x, keys_B)
    return x


def compiled(layers: list) -> Callable[..., jax.Array]:
    return jax.jit(lambda x, keys_B=None: run(layers, x, keys_B))


@MODELS
def test_logits_depend_on_no_later_token(config: ModelConfig) -> None:
    model = config.build()
    logits = compiled(create_layers(model))
    before_BTV = logits(TOKENS_BT)
    for changed in range(TOKENS_BT.shape[1]):
        after_BTV = logits(TOKENS_BT.at[:, changed].set((TOKENS_BT[:, changed] + 1) % 32))
        np.testing.assert_array_equal(after_BTV[:, :changed], before_BTV[:, :changed])
        assert (after_BTV[:, changed] != before_BTV[:, changed]).any()


def test_logits_depend_on_all_earlier_tokens() -> None:
    model = SMALL.build()
    logits = compiled(create_layers(model))
    before_BTV = logits(TOKENS_BT)
    for changed in range(TOKENS_BT.shape[1]):
        after_BTV = logits(TOKENS_BT.at[:, changed].set((TOKENS_BT[:, changed] + 1) % 32))
        assert (after_BTV[:, -1] != before_BTV[:, -1]).any(axis=-1).all()


@MODELS
def test_loss_is_the_sum_of_the_cross_entropies_of_all_tokens(config: ModelConfig) -> None:
    model = config.build()
    *body, head = create_layers(model)
    targets_BT = jnp.roll(TOKENS_BT, -1, axis=1)

    def logits_and_loss(tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_BTD = run(body, tokens_BT)
        return head(x_BTD, None), head.loss(x_BTD, targets_BT, None)

    logits_BTV, loss = jax.jit(logits_and_loss)(TOKENS_BT)
    logits_BTV, targets_BT1 = np.asarray(logits_BTV, dtype=np.float64), np.asarray(targets_BT)[..., None]
    expected_BT1 = np.log(np.exp(logits_BTV).sum(axis=-1, keepdims=True)) - np.take_along_axis(
        logits_BTV, targets_BT1, axis=-1
    )
    assert loss.shape == ()
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected_BT1.sum(), rtol=1e-6)


def test_loss_is_float32_for_activations_of_less_precision() -> None:
    *_, head = create_layers(SMALL.build())
    loss = jax.eval_shape(head.loss, jnp.ones((1, 4, 16), jnp.bfloat16), jnp.zeros((1, 4), jnp.int32))
    assert loss.dtype == jnp.float32


@MODELS
def test_layers_of_a_kind_stack_and_scan(config: ModelConfig) -> None:
    """What the trainer does: a graph from nnx.eval_shape, parameters stacked, merged inside the scan."""
    if isinstance(config, GptConfig):
        config = replace(config, num_blocks=3)
    model = config.build()
    layers = create_layers(model)
    assert len({layer.kind for layer in model.layers[1:-1]}) == 1
    x_BTD = jnp.asarray(np.random.default_rng(2).normal(size=(4, 8, 16)), jnp.float32)
    stacked = jax.tree.map(
        lambda *leaves: np.stack(leaves), *[nnx.to_pure_dict(nnx.state(layer)) for layer in layers[1:-1]]
    )
    graph, abstract = nnx.split(nnx.eval_shape(lambda: model.layers[1].create(nnx.Rngs(0))))

    def body(x_BTD: jax.Array, params: dict) -> tuple[jax.Array, None]:
        state = jax.tree.map(lambda leaf: leaf, abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(x_BTD, None), None

    scanned_BTD, _ = jax.jit(lambda x, params: jax.lax.scan(body, x, params))(x_BTD, stacked)
    np.testing.assert_allclose(scanned_BTD, compiled(layers[1:-1])(x_BTD), rtol=1e-5, atol=1e-6)


@MODELS
def test_only_parameters_are_state(config: ModelConfig) -> None:
    for layer in create_layers(config.build()):
        variables = jax.tree.leaves(nnx.state(layer), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        assert variables
        assert all(type(variable) is nnx.Param for variable in variables)


def test_gradients_flow_to_every_parameter() -> None:
    model = replace(SMALL, dropout_rate=0.5).build()
    split = [nnx.split(layer) for layer in create_layers(model)]
    keys_B = jax.random.split(jax.random.key(2), 4)

    def loss(states: list) -> jax.Array:
        *body, head = [nnx.merge(graph, state) for (graph, _), state in zip(split, states, strict=True)]
        return head.loss(run(body, TOKENS_BT, keys_B), TOKENS_BT, keys_B)

    gradients = jax.jit(jax.grad(loss))([state for _, state in split])
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert jnp.isfinite(leaf).all(), jax.tree_util.keystr(path)
        assert (leaf != 0).any(), jax.tree_util.keystr(path)


def test_initial_values_are_those_of_gpt2() -> None:
    block = Block(width=128, num_heads=4, mlp_width=512, num_blocks=8, rngs=nnx.Rngs(0))
    std = {
        name: float(getattr(block, name).kernel[...].std()) for name in ("qkv", "mlp_in", "attention_out", "mlp_out")
    }
    assert std["qkv"] == pytest.approx(0.02, rel=0.03)
    assert std["mlp_in"] == pytest.approx(0.02, rel=0.03)
    assert std["attention_out"] == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert std["mlp_out"] == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert not block.qkv.bias[...].any()
    embedding = Embedding(vocab_size=256, context_length=64, width=128, rngs=nnx.Rngs(0))
    assert float(embedding.wte[...].std()) == pytest.approx(0.02, rel=0.03)
    assert float(embedding.wpe[...].std()) == pytest.approx(0.02, rel=0.03)


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    *body, head = [layer.create(nnx.Rngs(0)) for layer in SMALL.build().layers]
    loss = head.loss(compiled(body)(TOKENS_BT), TOKENS_BT)
    assert float(loss) / TOKENS_BT.size == pytest.approx(math.log(32), rel=0.05)


def test_positions_depend_on_the_sequence_length_only() -> None:
    embedding = Embedding(vocab_size=32, context_length=8, width=16, rngs=nnx.Rngs(0))
    tokens_BT = jnp.arange(16).reshape(2, 8)
    np.testing.assert_array_equal(embedding(tokens_BT)[:, :5], embedding(tokens_BT[:, :5]))


def test_a_token_outside_the_vocabulary_is_noticed() -> None:
    embedding = Embedding(vocab_size=32, context_length=8, width=16, rngs=nnx.Rngs(0))
    assert jnp.isnan(embedding(jnp.full((1, 2), 32))).all()


def test_dropout_masks_do_not_depend_on_the_split_into_microbatches() -> None:
    x_BTD, keys_B = jnp.ones((8, 5, 16)), jax.random.split(jax.random.key(3), 8)
    drop = jax.jit(lambda x_BTD, keys_B: dropout(x_BTD, keys_B, 0.4, site=1))
    whole = drop(x_BTD, keys_B)
    for size in (1, 4):
        parts = [drop(x_BTD[i : i + size], keys_B[i : i + size]) for i in range(0, 8, size)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_dropout_of_a_whole_model_does_not_depend_on_the_split_into_microbatches() -> None:
    model = replace(SMALL, dropout_rate=0.3).build()
    logits = compiled(create_layers(model))
    keys_B = jax.random.split(jax.random.key(3), 4)
    whole = logits(TOKENS_BT, keys_B)
    parts = [logits(TOKENS_BT[i : i + 1], keys_B[i : i + 1]) for i in range(4)]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-4, atol=1e-6)
    assert not np.allclose(whole, logits(TOKENS_BT), atol=1e-3)


def test_dropout_keeps_the_mean_and_differs_between_samples_and_sites() -> None:
    x_BTD, keys_B = jnp.ones((4, 64, 64)), jax.random.split(jax.random.key(3), 4)
    dropped, elsewhere = (np.asarray(dropout(x_BTD, keys_B, 0.25, site=site)) for site in (0, 1))
    assert dropped.mean() == pytest.approx(1, abs=0.02)
    assert (dropped == 0).mean() == pytest.approx(0.25, abs=0.02)
    assert not (dropped[0] == dropped[1]).all()
    assert not (dropped == elsewhere).all()


def test_nothing_is_dropped_without_keys_or_rate() -> None:
    x_BTD, keys_B = jnp.ones((2, 3, 4)), jax.random.split(jax.random.key(3), 2)
    assert dropout(x_BTD, None, 0.5, site=0) is x_BTD
    assert dropout(x_BTD, keys_B, 0.0, site=0) is x_BTD
