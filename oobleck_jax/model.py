"""What the trainer needs to know of a model: a sequence of layers, and nothing else.

A layered model is a tuple of `Layer`s. Each layer is made by a function that returns a Flax NNX module:

- the first layer's module maps `tokens int32[B, T]` to hidden activations (any one array, batch first);
- every other layer but the last maps hidden activations to hidden activations;
- the last layer's module has `loss(x, targets_BT, keys) -> Float[""]`, the *sum* of the token losses in float32,
  and `__call__(x, keys) -> logits`.

Every module is called as `module(x, keys)`; `keys` is one PRNG key per sample, `Key[Array, "B"]`, already a function
of (seed, step, sample, layer), or None when nothing is random (evaluation, or a model that is not stochastic).
Only `nnx.Param` variables are state. Layers of one `kind` must have the same structure: they are stacked and scanned.

A tied parameter is one that several layers own together: each of them names the attribute that holds it and the name
of the shared group, as in `tied=(("wte", "wte"),)`. Its first owner decides its initial value.
"""

from collections.abc import Callable
from dataclasses import dataclass

from flax import nnx


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer: its kind, how to make it, and which of its attributes are tied.

    Attributes:
        kind: layers of equal kind have equal structure, and differ only in the values of their parameters.
        create: makes the module; all its randomness comes from `rngs`.
        tied: pairs (attribute of the module, name of the tied group). Groups are named once for the whole model.
        tensor_dims: pairs (own parameter, as "mlp_in.kernel"; dim that the devices of a stage share out among them
            under `--tensor-parallel`). XLA finds the sums that this takes. What is not named is gathered instead.
    """

    kind: str
    create: Callable[[nnx.Rngs], nnx.Module]
    tied: tuple[tuple[str, str], ...] = ()
    tensor_dims: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayeredModel:
    """A model as a sequence of layers.

    Attributes:
        layers: the layers in order; the first takes tokens, the last computes the loss.
        vocab_size: number of token ids it accepts.
        max_sequence_length: longest sequence it accepts, in tokens.
        is_stochastic: whether training draws random numbers (dropout); if not, `keys` is always None.
    """

    layers: tuple[Layer, ...]
    vocab_size: int
    max_sequence_length: int
    is_stochastic: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers, in order."""
        return tuple(dict.fromkeys(layer.kind for layer in self.layers))

    @property
    def tensor_dims(self) -> dict[str, int]:
        """The `tensor_dims` of all kinds of layers together."""
        named = {name: dim for layer in self.layers for name, dim in layer.tensor_dims}
        for layer in self.layers:
            for name, dim in layer.tensor_dims:
                assert named[name] == dim, f"{name} has dim {dim} in {layer.kind}, and {named[name]} in another kind"
        return named
