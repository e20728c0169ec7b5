"""A model that is not a GPT, in one file, as a user would bring it: gated causal convolutions, untied.

    python scripts/train.py --preset tests/models/toy_model.py:toy --nodes 3

Shapes: B sequences, T tokens, D width, V vocabulary, W taps of the convolution.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from oobleck_jax.config import OptimizerConfig, RunConfig
from oobleck_jax.model import Layer, LayeredModel


class TokenEmbedding(nnx.Module):
    def __init__(self, config: "ToyConfig", rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(0.1 * jax.random.normal(rngs.params(), (config.vocab_size, config.width)))

    def __call__(self, tokens_BT: Int[Array, "B T"], keys_B: Key[Array, " B"] | None = None) -> Float[Array, "B T D"]:
        return self.table[...][tokens_BT]


class GatedConvolution(nnx.Module):
    """x + out(values * sigmoid(gates)), both from a causal depthwise convolution of the normalised input."""

    def __init__(self, config: "ToyConfig", rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.taps = nnx.Param(0.5 * jax.random.normal(rngs.params(), (config.num_taps, config.width)))
        self.into = nnx.Linear(config.width, 2 * config.width, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, rngs=rngs)

    def __call__(self, x_BTD: Float[Array, "B T D"], keys_B: Key[Array, " B"] | None = None) -> Float[Array, "B T D"]:
        taps_WD, num_tokens = self.taps[...], x_BTD.shape[1]
        padded_BTD = jnp.pad(self.norm(x_BTD), ((0, 0), (taps_WD.shape[0] - 1, 0), (0, 0)))
        windows = [padded_BTD[:, first : first + num_tokens] for first in range(taps_WD.shape[0])]
        mixed_BTD = jnp.einsum("WBTD,WD->BTD", jnp.stack(windows), taps_WD)
        values_BTD, gates_BTD = jnp.split(self.into(mixed_BTD), 2, axis=-1)
        return x_BTD + self.out(values_BTD * jax.nn.sigmoid(gates_BTD))


class Classifier(nnx.Module):
    def __init__(self, config: "ToyConfig", rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.out = nnx.Linear(config.width, config.vocab_size, rngs=rngs)

    def __call__(self, x_BTD: Float[Array, "B T D"], keys_B: Key[Array, " B"] | None = None) -> Float[Array, "B T V"]:
        return self.out(self.norm(x_BTD))

    def loss(
        self, x_BTD: Float[Array, "B T D"], targets_BT: Int[Array, "B T"], keys_B: Key[Array, " B"] | None = None
    ) -> Float[Array, ""]:
        log_probs_BTV = jax.nn.log_softmax(self(x_BTD, keys_B).astype(jnp.float32))
        return -jnp.take_along_axis(log_probs_BTV, targets_BT[..., None], axis=-1).sum()


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig:
    """Sizes of the toy."""

    num_convolutions: int = 3  # gated convolutions between embedding and classifier
    width: int = 16  # width of the residual stream
    num_taps: int = 3  # tokens that a convolution looks at
    vocab_size: int = 256  # number of token ids

    @property
    def num_layers(self) -> int:
        return self.num_convolutions + 2

    @property
    def max_sequence_length(self) -> int:
        return 1 << 20  # there are no positions to run out of

    def build(self) -> LayeredModel:
        return LayeredModel(
            layers=(
                Layer(kind="embedding", create=lambda rngs: TokenEmbedding(self, rngs)),
                *[Layer(kind="convolution", create=lambda rngs: GatedConvolution(self, rngs))] * self.num_convolutions,
                Layer(kind="classifier", create=lambda rngs: Classifier(self, rngs)),
            ),
            vocab_size=self.vocab_size,
            max_sequence_length=self.max_sequence_length,
        )


def toy() -> RunConfig:
    """Trains in a second."""
    return RunConfig(
        model=ToyConfig(),
        optimizer=OptimizerConfig(peak_learning_rate=3e-3),
        steps=20,
        global_batch_size=8,
        microbatch_size=1,
        sequence_length=16,
    )
