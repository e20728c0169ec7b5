"""Rounding: from the numbers that the model makes to those that are kept, and on to those that it computes with.

With float32, both are what the model makes, and nothing is rounded. `mixed` keeps those and computes with bfloat16,
`bfloat16` keeps and computes with that. Norms, softmax and loss are up to the layers, which compute them in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp

from oobleck_jax.config import Precision


def as_kept(tree: Any, precision: Precision) -> Any:
    """Return parameters, or their shapes, as they are kept from step to step."""
    return _rounded(tree) if precision is Precision.BFLOAT16 else tree


def as_computed(tree: Any, precision: Precision) -> Any:
    """Return parameters, activations, or their shapes, as layers compute with them."""
    return tree if precision is Precision.FLOAT32 else _rounded(tree)


def widened(tree: Any) -> Any:
    """Return a tree of arrays with its bfloat16 numbers as float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, tree)


def like(tree: Any, shapes: Any) -> Any:
    """Return a tree of arrays with the types of another."""
    return jax.tree.map(lambda leaf, shape: leaf.astype(shape.dtype), tree, shapes)


def _rounded(tree: Any) -> Any:
    def rounded(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding)
        return leaf.astype(jnp.bfloat16)

    return jax.tree.map(rounded, tree)
