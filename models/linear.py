"""What layers need beside Flax: lookups and dense layers whose gradients add up in float32 whatever they compute in.

With bfloat16, JAX's own gradients of a bias or of an embedding add up bfloat16 numbers one by one, and from some 256
of a size on nothing is added any more.

Shapes: N tokens, I and O features in and out, V vocabulary, D width.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


def dense(layer: nnx.Linear, x_NI: Float[Array, "N I"]) -> Float[Array, "N O"]:
    """Return what a linear layer makes of `x`."""
    assert layer.bias is not None
    bias_NO: Array = _rows(x_NI.shape[0], layer.bias[...])  # pyright: ignore[reportAssignmentType]
    return x_NI @ layer.kernel[...] + bias_NO


def lookup(table_VD: Float[Array, "V D"], tokens: Int[Array, "*any"]) -> Float[Array, "*any D"]:
    """Return the rows of the table; not a number where there is none."""
    return _lookup(table_VD.shape[0], table_VD, tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(num_rows: int, bias_O: Array) -> Array:
    return jnp.broadcast_to(bias_O, (num_rows, bias_O.shape[0]))


def _rows_forward(num_rows: int, bias_O: Array) -> tuple[Array, None]:
    return _rows(num_rows, bias_O), None


def _rows_backward(num_rows: int, _: None, dy_NO: Array) -> tuple[Array]:
    return (dy_NO.astype(jnp.float32).sum(0).astype(dy_NO.dtype),)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(num_rows: int, table_VD: Array, tokens: Array) -> Array:
    return jnp.take(table_VD, tokens, axis=0, mode="fill")


def _lookup_forward(num_rows: int, table_VD: Array, tokens: Array) -> tuple[Array, Array]:
    return _lookup(num_rows, table_VD, tokens), tokens


def _lookup_backward(num_rows: int, tokens: Array, dy: Array) -> tuple[Array, None]:
    sums_VD = jnp.zeros((num_rows, dy.shape[-1]), jnp.float32).at[tokens].add(dy.astype(jnp.float32), mode="drop")
    return sums_VD.astype(dy.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)
_lookup.defvjp(_lookup_forward, _lookup_backward)
