"""The configuration of a GPT. Nothing here imports jax: the coordinator reads it."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from oobleck_jax.errors import ConfigError


if TYPE_CHECKING:
    from oobleck_jax.model import LayeredModel


LOGITS_AT_ONCE = 1 << 24  # float32 numbers, 64 MiB; more are computed chunk by chunk (cross_entropy.py)

# Of a block: columns of what reads the stream and rows of what writes to it (Megatron-LM, section 3).
TENSOR_DIMS = (
    ("qkv.kernel", 1),
    ("qkv.bias", 0),
    ("attention_out.kernel", 0),
    ("mlp_in.kernel", 1),
    ("mlp_in.bias", 0),
    ("mlp_out.kernel", 0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GptConfig:
    """A GPT-2: embedding, `num_blocks` equal blocks, head. The comments are the help of the flags."""

    num_blocks: int = 8  # transformer blocks
    width: int = 256  # width of the residual stream
    num_heads: int = 4  # attention heads; they share the width
    mlp_ratio: int = 4  # hidden width of the MLP, as a multiple of the width
    vocab_size: int = 256  # number of token ids
    context_length: int = 128  # longest sequence, in tokens: there are this many learned positions
    dropout_rate: float = 0.0  # share of values dropped after the embedding, attention and MLP in training
    tie_embeddings: bool = True  # use the token embedding as output embedding, too

    def __post_init__(self) -> None:
        for name in ("num_blocks", "width", "num_heads", "mlp_ratio", "vocab_size", "context_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"the model's {name} is {getattr(self, name)}; it must be at least 1")
        if self.width % self.num_heads:
            raise ConfigError(
                f"the model's width {self.width} is not a multiple of its {self.num_heads} heads; change one of them"
            )
        if not 0 <= self.dropout_rate < 1:
            raise ConfigError(f"the model's dropout_rate is {self.dropout_rate}; it must be in [0, 1)")

    @property
    def num_layers(self) -> int:
        return self.num_blocks + 2

    @property
    def max_sequence_length(self) -> int:
        return self.context_length

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        width, mlp_width = self.width, self.mlp_ratio * self.width
        layer_norm = 2 * width
        attention = 3 * width * (width + 1) + width * (width + 1)
        mlp = mlp_width * (width + 1) + width * (mlp_width + 1)
        block = 2 * layer_norm + attention + mlp
        embeddings = (self.vocab_size * (1 if self.tie_embeddings else 2) + self.context_length) * width
        return embeddings + self.num_blocks * block + layer_norm

    def build(self) -> "LayeredModel":
        # Imported here, because Flax imports jax.
        from models.layers import Block, Embedding, Head
        from oobleck_jax.model import Layer, LayeredModel

        embedding = partial(
            Embedding,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            width=self.width,
            dropout_rate=self.dropout_rate,
        )
        block = partial(
            Block,
            width=self.width,
            num_heads=self.num_heads,
            mlp_width=self.mlp_ratio * self.width,
            num_blocks=self.num_blocks,
            dropout_rate=self.dropout_rate,
        )
        head = partial(Head, vocab_size=self.vocab_size, width=self.width)
        tied = (("wte", "wte"),) if self.tie_embeddings else ()
        return LayeredModel(
            layers=(
                Layer(kind="embedding", create=lambda rngs: embedding(rngs=rngs), tied=tied),
                *(
                    Layer(kind="block", create=lambda rngs: block(rngs=rngs), tensor_dims=TENSOR_DIMS)
                    for _ in range(self.num_blocks)
                ),
                Layer(kind="head", create=lambda rngs: head(rngs=rngs), tied=tied),
            ),
            vocab_size=self.vocab_size,
            max_sequence_length=self.max_sequence_length,
            is_stochastic=self.dropout_rate > 0,
        )
