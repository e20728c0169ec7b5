"""The programs of a span whose backward is split (`ScheduleKind.ZB_H1`): see split_backward.py.

- `forward(params, x, ...) -> y, residuals`, of each layer its own, so that each can be split.
- `backward_input(params, residuals, dy) -> dx, saved`; there is none where the input is token ids.
- `backward_weights(params, residuals, saved, acc) -> acc`, with those residuals only that it needs.

They compute what the programs of span.py do, in the same order, with everything kept (`Remat.NONE`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from oobleck_jax.config import Remat
from oobleck_jax.execution.jaxlib_private import needed_primals, restore_residuals, strip_residuals
from oobleck_jax.execution.layer_functions import Randomness, keys_of
from oobleck_jax.execution.span import Span, SpanParams, accumulate, once
from oobleck_jax.execution.split_backward import SplitBackward


Residuals: TypeAlias = list[Any]


@dataclass(frozen=True, kw_only=True)
class SplitSpan:
    """Programs of a span, for the devices of a stage. A program is compiled when it is first asked for."""

    span: Span
    _residual_structure: list[Any] = field(init=False, default_factory=list)  # of one layer

    def __post_init__(self) -> None:
        assert self.span.key.remat is Remat.NONE, f"remat {self.span.key.remat} keeps too little to split a backward"
        assert not self.span.key.is_last, "the last layer has one program for loss and gradients"

    @once
    def forward(self) -> jax.stages.Compiled:
        """`(params, x, randomness, first_layer) -> y, residuals`."""
        return self._compiled("forward", self._forward, lambda: self._forward_specs)

    @once
    def backward_input(self) -> jax.stages.Compiled:
        """`(params, residuals, dy) -> dx, saved`."""
        # Not traced before it must be.
        backward_input = lambda *arguments: self._backward_input(*arguments)  # noqa: E731
        return self._compiled("backward input", backward_input, lambda: self._backward_specs)

    @once
    def backward_weights(self) -> jax.stages.Compiled:
        """`(params, residuals, saved, acc) -> acc`; `acc` is donated."""
        shardings = jax.tree.map(lambda spec: spec.sharding, self.span.accumulator_specs)
        return self.span.home.compiled(
            (self.span.key, "split", "backward weights"),
            self._backward_weights,
            self._weights_specs,
            donate=(3,),
            out_shardings=shardings,
        )

    def weight_residuals(self, residuals: Residuals) -> Residuals:
        """Return the residuals that `backward_weights` needs."""
        return [residuals[index] for index in self._weight_kept]

    # -- helpers

    @once
    def _weight_kept(self) -> tuple[int, ...]:
        """Which of the residuals `backward_weights` needs."""
        key = (self.span.key, "split", "kept for weights")
        return self.span.home.fact(key, lambda: tuple(self._parts.weight_kept))

    def _compiled(self, name: str, function: Callable[..., Any], specs: Callable[[], Any]) -> jax.stages.Compiled:
        devices = self.span.devices
        shardings: Any = None
        if len(devices.devices) == 1:
            shardings = devices.replicated
        else:
            shardings = (self.span.x_spec.sharding if name == "backward input" else self.span.y_spec.sharding, None)
        return self.span.home.compiled((self.span.key, "split", name), function, specs, out_shardings=shardings)

    @property
    def _forward_specs(self) -> tuple[Any, ...]:
        return self.span.params_specs, self.span.x_spec, self.span.random_specs, self.span.layer_spec

    @property
    def _backward_specs(self) -> tuple[SpanParams, Residuals, Any]:
        _ = self._parts  # traced on its own, not while a program is traced that needs it
        shapes = jax.eval_shape(self._forward, *self._forward_specs)[1]
        residuals = _with_shardings(shapes, list(self.forward.output_shardings[1]))
        return self.span.params_specs, residuals, self.span.y_spec

    def _weights_specs(self) -> tuple[Any, ...]:
        params, residuals, dy = self._backward_specs
        if self.span.takes_tokens:
            saved = [dy]
        else:
            shapes = jax.eval_shape(self._backward_input, params, residuals, dy)[1]
            saved = _with_shardings(shapes, list(self.backward_input.output_shardings[1]))
        return params, self.weight_residuals(residuals), saved, self.span.accumulator_specs

    # -- mathematics

    @once
    def _forward(self) -> Callable[..., tuple[Array, Residuals]]:
        """The function of `forward`: the same object each time, so that JAX traces it once for all that ask."""

        def forward(
            params: SpanParams, x: Array, randomness: Randomness | None, first_layer: Array
        ) -> tuple[Array, Residuals]:
            if not self.span.is_scanned:
                return self._layer_forward(_only(params), x, keys_of(randomness, first_layer))
            layers = first_layer + jnp.arange(self.span.key.num_layers, dtype=jnp.int32)
            layer_forward = lambda h, item: self._layer_forward((item[0], {}), h, keys_of(randomness, item[1]))  # noqa: E731
            return jax.lax.scan(layer_forward, x, (params[0], layers))

        return forward

    @once
    def _backward_input(self) -> Callable[..., tuple[Any, list[Array]]]:
        """The function of `backward_input`, as above."""
        parts = self._parts

        def backward_input(params: SpanParams, residuals: Residuals, dy: Array) -> tuple[Any, list[Array]]:
            if not self.span.is_scanned:
                return parts.input_gradient(_only(params), residuals, dy)
            layer_backward = lambda dy, item: parts.input_gradient((item[0], {}), item[1], dy)  # noqa: E731
            return jax.lax.scan(layer_backward, dy, (params[0], residuals), reverse=True)

        return backward_input

    def _backward_weights(
        self, params: SpanParams, residuals: Residuals, saved: list[Array], acc: SpanParams
    ) -> SpanParams:
        if not self.span.is_scanned:
            gradients = self._parts.weight_gradients(_only(params), residuals, saved)
            return accumulate(acc, jax.tree.map(lambda leaf: leaf[None], gradients))
        _, gradients = jax.lax.scan(
            lambda _, item: (None, self._parts.weight_gradients((item[0], {}), item[1], item[2])),
            None,
            (params[0], residuals, saved),
            reverse=True,
        )
        return accumulate(acc, gradients)

    def _layer_forward(self, params: SpanParams, x: Array, keys: Array | None) -> tuple[Array, Residuals]:
        apply = self.span.functions.apply
        if self.span.takes_tokens:
            y, vjp = jax.vjp(lambda params: apply(params[0], params[1], x, keys), params)
        else:
            y, vjp = jax.vjp(lambda params, x: apply(params[0], params[1], x, keys), params, x)
        stripped = strip_residuals(vjp)
        residuals, structure = jax.tree.flatten(stripped)
        self._residual_structure[:] = [structure]
        return y, [x, *residuals] if self._needs_x(stripped) else residuals

    def _layer_backward(self, params: SpanParams, residuals: Residuals, dy: Array) -> tuple[SpanParams, Any]:
        (structure,) = self._residual_structure
        num_leaves = structure.num_leaves
        stripped = jax.tree.unflatten(structure, residuals[len(residuals) - num_leaves :])
        if self.span.takes_tokens:
            return restore_residuals(stripped, (params,))(dy)[0], None
        x = residuals[0] if self._needs_x(stripped) else None
        return restore_residuals(stripped, (params, x))(dy)

    def _needs_x(self, stripped: Any) -> bool:
        return not self.span.takes_tokens and needed_primals(stripped)[1]

    @once
    def _parts(self) -> SplitBackward:
        """The split backward of one layer."""
        stacked, x, randomness, layer = self._forward_specs
        params: Any = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape[1:], spec.dtype), stacked)
        forward = lambda params, x, randomness, layer: self._layer_forward(params, x, keys_of(randomness, layer))  # noqa: E731
        residuals = jax.eval_shape(forward, params, x, randomness, layer)[1]
        return SplitBackward(self._layer_backward, params, residuals, self.span.y_spec)


def _only(params: SpanParams) -> SpanParams:
    """Return the parameters of the only layer."""
    return jax.tree.map(lambda leaf: leaf[0], params)


def _with_shardings(shapes: list[Any], shardings: list[Any]) -> list[Any]:
    return [
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
        for shape, sharding in zip(shapes, shardings, strict=True)
    ]
