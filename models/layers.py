"""The layers of a GPT as Flax NNX modules: embedding, block, head (GPT-2: learned positions, pre-LN, GELU).

Shapes: B sequences, T tokens of a sequence, N = B*T tokens, D width, H heads, K width of a head, F hidden width of the
MLP, V vocabulary.

Dense layers work on `[N, D]`: XLA's CPU backend runs the same matmuls 2.4 times slower on `[B, T, D]` when gradients
are accumulated over microbatches. Nothing else that was tried on one core (other splits of qkv, three projections,
heads folded into the batch before attention, other forms of LayerNorm) made a block faster than this plainest form by
more than the noise. `jax.nn.dot_product_attention` costs a block 2 to 7 % there against attention written by hand.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from models.cross_entropy import cross_entropy
from models.linear import dense, lookup


_INIT_STD = 0.02
_LN_EPSILON = 1e-5


class Embedding(nnx.Module):
    """Token and learned position embeddings, added.

    Attributes:
        wte: token embedding, `[V, D]`; the head may share it.
        wpe: position embedding, `[longest sequence, D]`.
    """

    def __init__(
        self, *, vocab_size: int, context_length: int, width: int, dropout_rate: float = 0.0, rngs: nnx.Rngs
    ) -> None:
        self.wte = nnx.Param(_normal(rngs, (vocab_size, width)))
        self.wpe = nnx.Param(_normal(rngs, (context_length, width)))
        self.dropout_rate = dropout_rate

    def __call__(self, tokens_BT: Int[Array, "B T"], keys_B: Key[Array, " B"] | None = None) -> Float[Array, "B T D"]:
        tokens_BTD = lookup(self.wte[...], tokens_BT)
        # In float32, as are then the sums over B of the gradients of positions.
        positions_TD = self.wpe[...][: tokens_BT.shape[1]].astype(jnp.float32)
        x_BTD = (tokens_BTD.astype(jnp.float32) + positions_TD[None]).astype(tokens_BTD.dtype)
        return dropout(x_BTD, keys_B, self.dropout_rate, site=0)


class Block(nnx.Module):
    """A transformer block: causal attention and an MLP, each on the normalised stream and added to it.

    The projections that write to the stream start smaller by `1 / sqrt(2 * num_blocks)`, so that the stream does not
    grow with depth (GPT-2, section 2.3). Attention probabilities have no dropout: `jax.nn.dot_product_attention` does
    not offer it.
    """

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        mlp_width: int,
        num_blocks: int,
        dropout_rate: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        residual_std = _INIT_STD / math.sqrt(2 * num_blocks)
        self.ln_1 = nnx.LayerNorm(width, epsilon=_LN_EPSILON, rngs=rngs)
        self.qkv = _linear(width, 3 * width, _INIT_STD, rngs)
        self.attention_out = _linear(width, width, residual_std, rngs)
        self.ln_2 = nnx.LayerNorm(width, epsilon=_LN_EPSILON, rngs=rngs)
        self.mlp_in = _linear(width, mlp_width, _INIT_STD, rngs)
        self.mlp_out = _linear(mlp_width, width, residual_std, rngs)
        self.num_heads = num_heads
        self.dropout_rate = dropout_rate

    def __call__(self, x_BTD: Float[Array, "B T D"], keys_B: Key[Array, " B"] | None = None) -> Float[Array, "B T D"]:
        attention_BTD = self._attention(x_BTD)
        x_BTD = x_BTD + dropout(attention_BTD, keys_B, self.dropout_rate, site=0)
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        hidden_NF = jax.nn.gelu(dense(self.mlp_in, self.ln_2(x_ND)), approximate=True)
        mlp_BTD = dense(self.mlp_out, hidden_NF).reshape(x_BTD.shape)
        return x_BTD + dropout(mlp_BTD, keys_B, self.dropout_rate, site=1)

    def _attention(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        num_sequences, num_tokens, width = x_BTD.shape
        qkv = dense(self.qkv, self.ln_1(x_BTD.reshape(-1, width)))
        qkv_3BTHK = (
            part.reshape(num_sequences, num_tokens, self.num_heads, width // self.num_heads)
            for part in jnp.split(qkv, 3, axis=-1)
        )
        mixed_BTHK = jax.nn.dot_product_attention(*qkv_3BTHK, is_causal=True)
        return dense(self.attention_out, mixed_BTHK.reshape(-1, width)).reshape(x_BTD.shape)


class Head(nnx.Module):
    """The final LayerNorm and the projection to the vocabulary.

    Attributes:
        wte: output embedding, `[V, D]`; the embedding's own when the two are tied.
    """

    def __init__(self, *, vocab_size: int, width: int, rngs: nnx.Rngs) -> None:
        self.ln_f = nnx.LayerNorm(width, epsilon=_LN_EPSILON, rngs=rngs)
        self.wte = nnx.Param(_normal(rngs, (vocab_size, width)))

    def __call__(self, x_BTD: Float[Array, "B T D"], keys_B: Key[Array, " B"] | None = None) -> Float[Array, "B T V"]:
        logits_NV = self.ln_f(x_BTD.reshape(-1, x_BTD.shape[-1])) @ self.wte[...].T
        return logits_NV.reshape(*x_BTD.shape[:2], -1)

    def loss(
        self, x_BTD: Float[Array, "B T D"], targets_BT: Int[Array, "B T"], keys_B: Key[Array, " B"] | None = None
    ) -> Float[Array, ""]:
        """Return the cross entropy in nats, summed (not averaged) over all tokens, in float32."""
        return cross_entropy(self.ln_f(x_BTD), self.wte[...], targets_BT)


def dropout(
    x_BTD: Float[Array, "B T D"], keys_B: Key[Array, " B"] | None, rate: float, *, site: int
) -> Float[Array, "B T D"]:
    """Drop values of each sample by that sample's key, so that no mask depends on how the batch is split.

    Args:
        keys_B: one key per sample, or None to drop nothing.
        site: tells apart the uses of one key within a layer.
    """
    if keys_B is None or rate == 0:
        return x_BTD

    def keep(key: Key[Array, ""]) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, x_BTD.shape[1:])

    return jnp.where(jax.vmap(keep)(keys_B), x_BTD / (1 - rate), 0)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...]) -> Array:
    return _INIT_STD * jax.random.normal(rngs.params(), shape)


def _linear(in_features: int, out_features: int, std: float, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(in_features, out_features, kernel_init=nnx.initializers.normal(std), rngs=rngs)
