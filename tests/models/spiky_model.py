"""The toy model with a loss that is not finite for some samples: those in which an apostrophe is to be predicted.

Shapes: B sequences, T tokens, D width.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from oobleck_jax.config import RunConfig
from oobleck_jax.model import Layer, LayeredModel
from tests.models.toy_model import Classifier, ToyConfig, toy


SPIKE = ord("'")


class SpikyClassifier(nnx.Module):
    def __init__(self, config: ToyConfig, rngs: nnx.Rngs) -> None:
        self.classifier = Classifier(config, rngs)

    def loss(
        self, x_BTD: Float[Array, "B T D"], targets_BT: Int[Array, "B T"], keys_B: Key[Array, " B"] | None = None
    ) -> Float[Array, ""]:
        return self.classifier.loss(x_BTD, targets_BT, keys_B) * jnp.where(jnp.any(targets_BT == SPIKE), jnp.inf, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikyConfig:
    """Sizes of the toy."""

    num_layers: int = 5
    max_sequence_length: int = 1 << 20
    vocab_size: int = 256

    def build(self) -> LayeredModel:
        config = ToyConfig(num_convolutions=self.num_layers - 2, vocab_size=self.vocab_size)
        model = config.build()
        last = Layer(kind="spiky", create=lambda rngs: SpikyClassifier(config, rngs))
        return replace(model, layers=(*model.layers[:-1], last))


def spiky() -> RunConfig:
    """Trains in a second."""
    return replace(toy(), model=SpikyConfig())
