"""The loss of large vocabularies, a few tokens at a time, so that the logits of a microbatch never exist as a whole.

Loss and gradients of a chunk are computed together, while its logits are there: nothing is kept for the backward pass
but the gradients themselves, and nothing is computed twice. (Gradients of a sum of losses are the same for every loss
but for a factor, so they can be computed before that is known.)

Shapes: B sequences, T tokens of a sequence, C tokens of it in a chunk, N = B*C tokens, D width, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.gpt import LOGITS_AT_ONCE


def cross_entropy(
    x_BTD: Float[Array, "B T D"],
    wte_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    *,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Float[Array, ""]:
    """Return the cross entropy of the logits `x @ wte.T` in nats, summed over all tokens; logits are float32.

    Args:
        logits_at_once: how many may exist; the sequences are cut into equal chunks, of one token at least.
    """
    num_sequences, num_tokens = targets_BT.shape
    sizes = (size for size in range(num_tokens, 0, -1) if num_tokens % size == 0)
    fitting = (size for size in sizes if num_sequences * size * wte_VD.shape[0] <= logits_at_once)
    return _cross_entropy(num_tokens // next(fitting, 1), x_BTD, wte_VD, targets_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(num_chunks: int, x_BTD: Array, wte_VD: Array, targets_BT: Array) -> Array:
    def add(loss: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
        return loss + _losses(_logits(chunk[0], wte_VD), chunk[1])[0], None

    if num_chunks == 1:
        return add(jnp.float32(0), (_merged(x_BTD), targets_BT.reshape(-1)))[0]
    return jax.lax.scan(add, jnp.float32(0), _chunks(num_chunks, x_BTD, targets_BT))[0]


def _forward(num_chunks: int, x_BTD: Array, wte_VD: Array, targets_BT: Array) -> tuple[Array, tuple[Array, Array]]:
    if num_chunks == 1:
        loss, dx_ND, dwte_VD = _loss_and_gradients(_merged(x_BTD), wte_VD, targets_BT.reshape(-1))
        return loss, (dx_ND.reshape(x_BTD.shape), dwte_VD)

    def add(sums: tuple[Array, Array], chunk: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        loss, dx_ND, dwte_VD = _loss_and_gradients(chunk[0], wte_VD, chunk[1])
        return (sums[0] + loss, sums[1] + dwte_VD), dx_ND

    zeros = (jnp.float32(0), jnp.zeros(wte_VD.shape, jnp.float32))
    (loss, dwte_VD), dx_chunks = jax.lax.scan(add, zeros, _chunks(num_chunks, x_BTD, targets_BT))
    num_sequences, _, width = x_BTD.shape
    dx_BTD = dx_chunks.reshape(num_chunks, num_sequences, -1, width).swapaxes(0, 1).reshape(x_BTD.shape)
    return loss, (dx_BTD, dwte_VD)


def _backward(num_chunks: int, gradients: tuple[Array, Array], scale: Array) -> tuple[Array, Array, None]:
    dx_BTD, dwte_VD = gradients
    return (dx_BTD * scale).astype(dx_BTD.dtype), (dwte_VD * scale).astype(dx_BTD.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _loss_and_gradients(x_ND: Array, wte_VD: Array, targets_N: Array) -> tuple[Array, Array, Array]:
    """Return the loss, and its gradients: that of `x` as `x` is, that of `wte` in float32."""
    logits_NV = _logits(x_ND, wte_VD)
    loss, normaliser_N = _losses(logits_NV, targets_N)
    is_target_NV = jnp.arange(wte_VD.shape[0]) == targets_N[:, None]
    dlogits_NV = (jnp.exp(logits_NV - normaliser_N[:, None]) - is_target_NV).astype(x_ND.dtype)
    return loss, dlogits_NV @ wte_VD, jnp.matmul(dlogits_NV.T, x_ND, preferred_element_type=jnp.float32)


def _losses(logits_NV: Array, targets_N: Array) -> tuple[Array, Array]:
    """Return the summed loss, and the logarithm of the sum of the exponentials of each token."""
    normaliser_N = jax.nn.logsumexp(logits_NV, axis=-1)
    target_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=-1)[:, 0]
    return (normaliser_N - target_N).sum(), normaliser_N


def _logits(x_ND: Array, wte_VD: Array) -> Array:
    return jnp.matmul(x_ND, wte_VD.T, preferred_element_type=jnp.float32)


def _merged(x_BTD: Array) -> Array:
    return x_BTD.reshape(-1, x_BTD.shape[-1])


def _chunks(num_chunks: int, x_BTD: Array, targets_BT: Array) -> tuple[Array, Array]:
    """Return `x` and targets chunk by chunk; each has a part of every sequence, so that devices share its work."""
    num_sequences, _, width = x_BTD.shape
    x_chunks = x_BTD.reshape(num_sequences, num_chunks, -1, width).swapaxes(0, 1).reshape(num_chunks, -1, width)
    return x_chunks, targets_BT.reshape(num_sequences, num_chunks, -1).swapaxes(0, 1).reshape(num_chunks, -1)
