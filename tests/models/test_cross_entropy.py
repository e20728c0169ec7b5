"""The loss of large vocabularies: the same loss and gradients as in one piece, in far less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cross_entropy import cross_entropy
from models.gpt import GptConfig
from oobleck_jax.execution.layer_functions import LayerFunctions


B, T, D, V = 2, 12, 8, 50


@pytest.fixture
def arguments():
    rng = np.random.default_rng(0)
    x_BTD, wte_VD = rng.normal(size=(B, T, D)), rng.normal(size=(V, D))
    return jnp.float32(x_BTD), jnp.float32(wte_VD), jnp.int32(rng.integers(0, V, (B, T)))


def plain(x_BTD, wte_VD, targets_BT):
    log_probs_BTV = jax.nn.log_softmax((x_BTD @ wte_VD.T).astype(jnp.float32))
    return -jnp.take_along_axis(log_probs_BTV, targets_BT[..., None], axis=-1).sum()


@pytest.mark.parametrize("size", [T, 4, 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_loss_and_gradients_are_those_of_the_plain_loss(arguments, size, dtype):
    x_BTD, wte_VD, targets_BT = arguments
    x_BTD, wte_VD = x_BTD.astype(dtype), wte_VD.astype(dtype)

    def chunked(x_BTD, wte_VD, targets_BT):
        return 0.5 * cross_entropy(x_BTD, wte_VD, targets_BT, logits_at_once=B * size * V)

    expected = jax.value_and_grad(lambda *given: 0.5 * plain(*given), (0, 1))(
        *jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (x_BTD, wte_VD)), targets_BT
    )
    loss, gradients = jax.jit(jax.value_and_grad(chunked, (0, 1)))(x_BTD, wte_VD, targets_BT)
    assert loss.dtype == jnp.float32
    bound = 1e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(chunked(x_BTD, wte_VD, targets_BT), expected[0], rtol=1e-6)
    for actual, wanted in zip(gradients, expected[1], strict=True):
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual.astype(jnp.float32), wanted, atol=bound * float(jnp.abs(wanted).max()))


def test_chunks_divide_the_sequence_and_are_as_long_as_fits(arguments):
    lengths = {}
    for limit in (B * T * V, B * 5 * V, B * 3 * V, 1):
        program = jax.make_jaxpr(lambda *given, limit=limit: cross_entropy(*given, logits_at_once=limit))(*arguments)
        lengths[limit] = {int(size) for size in _scan_lengths(program.jaxpr)}
    assert lengths == {B * T * V: set(), B * 5 * V: {3}, B * 3 * V: {4}, 1: {12}}


def _scan_lengths(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation.params["length"]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _scan_lengths(inner)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_of_a_microbatch_never_exist_whole(is_tied, dtype):
    config = GptConfig(num_blocks=1, width=16, vocab_size=32768, context_length=1024, tie_embeddings=is_tied)
    functions = LayerFunctions(config.build().layers[-1])
    specs = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), (functions.own_shapes, functions.tied_shapes)
    )
    x_BTD = jax.ShapeDtypeStruct((4, 1024, 16), dtype)

    def loss(params, x_BTD, targets_BT):
        return functions.module(*params).loss(x_BTD, targets_BT, None)

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    analysis = step.lower(specs, x_BTD, jax.ShapeDtypeStruct((4, 1024), jnp.int32)).compile().memory_analysis()
    whole_bytes = 4 * 4 * 1024 * config.vocab_size
    assert analysis.temp_size_in_bytes < whole_bytes // 2
