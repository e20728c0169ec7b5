"""Layers as pure functions of parameter trees: how Flax modules become something to scan and differentiate.

The module of a kind is traced once by `nnx.eval_shape`; its graph definition is kept, and every call merges it with the
parameters given. Parameters are plain nested dicts. Those of one layer are split into its *own* (a subtree without the
tied attributes) and the *tied* ones (one subtree for each tied attribute), because tied parameters have other holders.

Shapes: B microbatch, T sequence, N layers of a span.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt

from oobleck_jax.config import Precision
from oobleck_jax.errors import ConfigError
from oobleck_jax.execution.precision import as_computed, as_kept
from oobleck_jax.model import Layer, LayeredModel


Params: TypeAlias = dict[str, Any]
"""A nested dict of arrays: parameters, or gradients of the same structure."""

Randomness: TypeAlias = tuple[UInt[Array, "2"], UInt[Array, " B"]]
"""(seed and step, sample index of each row): with the layer, all that random numbers of a step depend on."""


class LayerFunctions:
    """What to do with the layers of one kind.

    Attributes:
        precision: of the run.
        own_shapes: own parameters of one layer as they are kept, as `jax.ShapeDtypeStruct`s.
        tied_shapes: parameters of each tied attribute, by the attribute's name.
    """

    def __init__(self, layer: Layer, precision: Precision = Precision.FLOAT32) -> None:
        self._layer, self.precision = layer, precision
        self._graphdef, self._state = nnx.split(nnx.eval_shape(lambda: layer.create(nnx.Rngs(0))))
        shapes = nnx.to_pure_dict(self._state)
        self.own_shapes, self.tied_shapes = self.split(as_kept(jax.tree.map(_shape_only, shapes), precision))
        _check_tensor_dims(layer, self.own_shapes)

    def split(self, params: Params) -> tuple[Params, Params]:
        """Return (own, tied) of a layer's whole parameter tree."""
        tied_attributes = [attribute for attribute, _ in self._layer.tied]
        own = {name: value for name, value in params.items() if name not in tied_attributes}
        return own, {attribute: params[attribute] for attribute in tied_attributes}

    def init(self, seed: UInt[Array, ""], layer: UInt[Array, ""]) -> tuple[Params, Params]:
        """Return own and tied parameters of a layer: a function of seed and layer, not of any partition."""
        key = jax.random.fold_in(jax.random.key(seed), layer)
        _, state = nnx.split(self._layer.create(nnx.Rngs(params=key)))
        return self.split(as_kept(nnx.to_pure_dict(state), self.precision))

    def module(self, own: Params, tied: Params) -> Any:
        """Return the Flax module with these parameters."""
        state = jax.tree.map(lambda leaf: leaf, self._state)  # replace_by_pure_dict works in place
        nnx.replace_by_pure_dict(state, own | tied)
        return nnx.merge(self._graphdef, state)

    def apply(self, own: Params, tied: Params, x: Array, keys: Array | None) -> Array:
        """Return the activations that a layer makes of its input; not for the last layer, which makes logits."""
        return as_computed(self.module(own, tied)(x, keys), self.precision)


def functions_of(model: LayeredModel, precision: Precision = Precision.FLOAT32) -> dict[str, LayerFunctions]:
    """Return the functions of each kind of layer; making them takes 0.1 s each, so not of each layer."""
    by_kind = {layer.kind: layer for layer in model.layers}
    return {kind: LayerFunctions(layer, precision) for kind, layer in by_kind.items()}


def input_specs(
    layers: Sequence[Layer], functions: Mapping[str, LayerFunctions], tokens_BT: jax.ShapeDtypeStruct
) -> list[jax.ShapeDtypeStruct]:
    """Return the shape of each layer's input, for one microbatch.

    Args:
        layers: all of a model, in order.
        functions: of each kind of layer.
        tokens_BT: the shape of the first layer's input.
    """
    specs = [tokens_BT]
    known: dict[tuple[str, tuple[int, ...], str], jax.ShapeDtypeStruct] = {}
    for layer in layers[:-1]:
        x, called = specs[-1], functions[layer.kind]
        key = (layer.kind, x.shape, str(x.dtype))
        if key not in known:
            known[key] = jax.eval_shape(
                lambda own, tied, x, called=called: called.apply(own, tied, x, None),
                as_computed(called.own_shapes, called.precision),
                as_computed(called.tied_shapes, called.precision),
                x,
            )
        specs.append(known[key])
    return specs


def keys_of(randomness: Randomness | None, layer: Int[Array, ""]) -> Array | None:
    """Return one PRNG key per sample for a layer, a function of (seed, step, sample, layer) only."""
    if randomness is None:
        return None
    (seed, step), samples_B = randomness
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda sample: jax.random.fold_in(jax.random.fold_in(step_key, sample), layer))(samples_B)


def flatten_layers(tree: Params, num_layers: int) -> Float[Array, "N P"]:
    """Return stacked parameters as one float32 row per layer, leaves in the order of the tree."""
    leaves = [leaf.reshape(num_layers, -1).astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate(leaves, axis=1) if leaves else jnp.zeros((num_layers, 0), jnp.float32)


def unflatten_layers(rows_NP: Float[Array, "N P"], shapes: Params) -> Params:
    """Invert `flatten_layers`; `shapes` are those of one layer."""
    leaves, structure = jax.tree.flatten(shapes)
    restored, offset = [], 0
    for leaf in leaves:
        restored.append(rows_NP[:, offset : offset + leaf.size].reshape(rows_NP.shape[0], *leaf.shape))
        offset += leaf.size
    return jax.tree.unflatten(structure, restored)


def num_elements(shapes: Params) -> int:
    """Return the number of parameters in a tree of shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def _check_tensor_dims(layer: Layer, own_shapes: Params) -> None:
    """Refuse names of parameters that a layer does not own: they would be gathered instead, and nobody would notice."""
    leaves = jax.tree_util.tree_flatten_with_path(own_shapes)[0]
    shapes = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
    for name, dim in layer.tensor_dims:
        if name not in shapes or not 0 <= dim < len(shapes[name]):
            raise ConfigError(
                f"tensor_dims of a layer of kind {layer.kind} has dim {dim} of {name}, "
                f"but its own parameters are {shapes}"
            )


def _shape_only(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
