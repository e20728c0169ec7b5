"""Text from a model that is whole in one place: no pipeline, no gradients.

Every token is computed from the whole context anew, in one program of one shape: plain, and fast enough to look at what
was trained. Shapes: B sequences, T tokens of the context, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from oobleck_jax.execution.layer_functions import LayerFunctions, Params, functions_of
from oobleck_jax.execution.layout import LayerSpan, own_group, spans_of
from oobleck_jax.model import LayeredModel


class WholeModel:
    """All layers of a model, with their parameters."""

    def __init__(self, model: LayeredModel, params: Mapping[str, Any]) -> None:
        """Arrange parameters; layers of one kind are stacked and scanned, so that depth costs no compilation.

        Args:
            params: of all groups.
        """
        self._model = model
        self._functions = functions_of(model)
        self._spans = spans_of(model, range(len(model.layers)))
        self._params = [self._arrange(span, params) for span in self._spans]
        self._logits = jax.jit(self._compute)

    def logits(self, tokens_BT: Int[np.ndarray, "B T"]) -> Float[Array, "B T V"]:
        return self._logits(self._params, tokens_BT)

    def next_logits(self, tokens_T: Int[np.ndarray, " T"], num_tokens: int) -> Float[np.ndarray, " V"]:
        """Return the logits after the first `num_tokens`; what follows them does not matter."""
        return np.asarray(self.logits(tokens_T[None])[0, num_tokens - 1])

    def _arrange(self, span: LayerSpan, params: Mapping[str, Any]) -> tuple[Params, Params]:
        own = [params[own_group(layer)] for layer in span.layers]
        tied = {attribute: jnp.asarray(params[name]) for attribute, name in self._model.layers[span.first_layer].tied}
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *own), tied

    def _compute(self, params: Sequence[tuple[Params, Params]], tokens_BT: Array) -> Array:
        x: Any = tokens_BT
        for span, (own, tied) in zip(self._spans, params, strict=True):
            functions = self._functions[span.kind]
            if len(span.layers) == 1:
                x = functions.module(jax.tree.map(lambda leaf: leaf[0], own), tied)(x, None)
            else:
                x, _ = jax.lax.scan(partial(_apply, functions), x, own)
        return x


def _apply(functions: LayerFunctions, x: Array, own: Params) -> tuple[Array, None]:
    return functions.module(own, {})(x, None), None


def sample(
    model: WholeModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    context_length: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """Yield tokens that follow a prompt.

    Args:
        context_length: each token depends on so many before it; the same shape is computed every time.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only so many of the likeliest tokens; 0: all.
    """
    assert prompt
    random = np.random.default_rng(seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        window = tokens[-context_length:]
        padded = np.zeros(context_length, np.int32)
        padded[: len(window)] = window
        tokens.append(_choose(model.next_logits(padded, len(window)), temperature, top_k, random))
        yield tokens[-1]


def _choose(logits_V: np.ndarray, temperature: float, top_k: int, random: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    scaled_V = logits_V.astype(np.float64) / temperature
    if 0 < top_k < len(scaled_V):
        scaled_V[scaled_V < np.partition(scaled_V, -top_k)[-top_k]] = -np.inf
    # Gumbel's trick: the largest of the logits with this noise is a sample of their softmax.
    return int((scaled_V + random.gumbel(size=len(scaled_V))).argmax())
