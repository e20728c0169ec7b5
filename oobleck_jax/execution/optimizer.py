"""The optimizer: AdamW applied to each parameter group by itself.

Clipping uses the norm over all groups of all stages, which only the coordinator knows; it arrives as a factor. Nothing
is remembered but the optimizer state: the learning rate is a function of the step and arrives as an argument.

Shapes: N groups stacked in a run, P parameters of each.
"""

from typing import Any

import jax
import optax
from jaxtyping import Array, Float

from oobleck_jax.config import OptimizerConfig
from oobleck_jax.execution.layer_functions import Params, unflatten_layers
from oobleck_jax.execution.precision import like, widened


def adamw(config: OptimizerConfig, learning_rate: Float[Array, ""] | float) -> optax.GradientTransformation:
    """Return AdamW for one parameter group; matrices and embeddings are decayed, vectors are not."""
    return optax.adamw(
        learning_rate,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
    )


def init_optimizer(config: OptimizerConfig, params: Params) -> Any:
    """Return the optimizer state of stacked groups `[N, ...]`, stacked the same way."""
    return jax.vmap(adamw(config, 0.0).init)(params)


def update_groups(
    config: OptimizerConfig,
    params: Params,
    optimizer_state: Any,
    gradient_NP: Float[Array, "N P"],
    clip_factor: Float[Array, ""],
    learning_rate: Float[Array, ""],
) -> tuple[Params, Any]:
    """Return new parameters and optimizer state of N stacked groups, computed in float32 and kept as they were."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
    gradients = unflatten_layers(gradient_NP * clip_factor, shapes)

    def update_one(params: Params, state: Any, gradient: Params) -> tuple[Params, Any]:
        wide = widened(params)
        updates, next_state = adamw(config, learning_rate).update(gradient, widened(state), wide)
        return like(optax.apply_updates(wide, updates), params), like(next_state, state)

    return jax.vmap(update_one)(params, optimizer_state, gradients)


def clip_factor(config: OptimizerConfig, global_norm: float) -> float:
    """Return what gradients are multiplied with so that their global norm is at most `clip_norm`."""
    if config.clip_norm <= 0 or global_norm <= config.clip_norm:
        return 1.0
    return config.clip_norm / global_norm
