"""The state of a group as arrays with names, which no version of a library can reorder.

A name is the path of the array in the state ("params/qkv/kernel", "optimizer_state/0/mu/qkv/kernel"). On disk the state
is the nested dict that these paths make, so that anybody can read it with Orbax alone.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from oobleck_jax.checkpoint.manifest import ArrayRecord


NamedArrays: TypeAlias = dict[str, np.ndarray]
"""Arrays by their names, in the order of the tree that they come from."""


def named_arrays(tree: Any) -> NamedArrays:
    """Return the leaves of a tree by their names."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def records_of(arrays: Mapping[str, Any]) -> dict[str, ArrayRecord]:
    """Return what arrays, or their shapes, look like."""
    return {name: ArrayRecord(shape=tuple(array.shape), dtype=str(array.dtype)) for name, array in arrays.items()}


def nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the nested dict that the names make."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *folders, last = name.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = array
    return tree
