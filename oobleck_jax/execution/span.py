"""Spans: consecutive layers of one kind in a stage, and the compiled programs that run them.

A stage is a few spans: embedding, a run of n blocks, head. Each span has its own programs, keyed by what they depend on
(kind, number of layers, devices, shapes), never by node or plan, so that the few programs of all templates together can
be compiled before the first failure.

- `forward(params, x, ...) -> y, residuals`; residuals never carry parameters (they are put back for `backward`).
- `backward(params, kept, dy, acc) -> acc, dx`; `acc` are the float32 sums of gradients, updated in place; `kept` are
  the residuals, with `x` only where the derivative needs it: scanned layers have it among their residuals.
- `loss_and_gradients(params, x, targets, scale, acc, ...) -> loss, acc, dx` of the last layer: one program.
- `infer` and `infer_loss` are the same without gradients and randomness.

Shapes: B microbatch, T sequence, N layers of the span, P parameters of a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from oobleck_jax.config import Precision, Remat
from oobleck_jax.execution.home import Home, StageDevices
from oobleck_jax.execution.jaxlib_private import needed_primals, restore_residuals, strip_residuals
from oobleck_jax.execution.layer_functions import (
    LayerFunctions,
    Params,
    Randomness,
    flatten_layers,
    keys_of,
    num_elements,
)
from oobleck_jax.execution.precision import as_computed


SpanParams: TypeAlias = tuple[Params, dict[str, Params]]
"""(own parameters stacked `[N, ...]`, tied parameters by attribute stacked `[1, ...]`)."""


class once:
    """A property that is computed once. Unlike `functools.cached_property` before Python 3.12 it holds no lock that all
    spans share: one thread compiles for later while another one recovers."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __get__(self, span: Any, owner: type) -> Any:
        if span is None:
            return self
        value = span.__dict__[self._make.__name__] = self._make(span)
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanKey:
    """What the programs of a span depend on."""

    kind: str
    num_layers: int
    is_last: bool  # holds the model's last layer
    x_shape: tuple[int, ...]
    x_dtype: str
    targets_shape: tuple[int, ...]
    devices: tuple[int, ...]
    precision: Precision
    remat: Remat
    is_stochastic: bool


@dataclass(frozen=True, kw_only=True)
class Span:
    """Programs of a span, for the devices of a stage. A program is compiled when it is first asked for."""

    key: SpanKey
    functions: LayerFunctions
    home: Home
    devices: StageDevices
    y_spec: jax.ShapeDtypeStruct = field(init=False)
    is_scanned: bool = field(init=False)
    _residual_structure: list[Any] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        scanned = not self.functions.tied_shapes and not self.key.is_last
        y_shape, y_dtype = self.home.fact((replace(self.key, num_layers=1), "y"), self._find_y)
        scanned = scanned and (y_shape, y_dtype) == (self.x_spec.shape, str(self.x_spec.dtype))
        assert scanned or self.key.num_layers == 1, (
            f"{self.key.num_layers} layers of kind {self.key.kind} cannot be scanned"
        )
        object.__setattr__(self, "is_scanned", scanned)
        object.__setattr__(self, "y_spec", self.devices.batch_spec(y_shape, y_dtype))

    # -- shapes of arguments

    def _find_y(self) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype of the output; none of the last layer, which has a loss instead."""
        if self.key.is_last:
            return (), "float32"
        own, tied = self._shapes
        y = jax.eval_shape(lambda own, tied, x: self.functions.apply(own, tied, x, None), own, tied, self.x_spec)
        return y.shape, str(y.dtype)

    @property
    def _shapes(self) -> SpanParams:
        """Own and tied parameters of one layer, as it computes with them."""
        return as_computed((self.functions.own_shapes, self.functions.tied_shapes), self.key.precision)

    @property
    def x_spec(self) -> jax.ShapeDtypeStruct:
        return self.devices.batch_spec(self.key.x_shape, self.key.x_dtype)

    @property
    def takes_tokens(self) -> bool:
        """Whether the input is token ids, so that there is no gradient of it."""
        return not jnp.issubdtype(self.key.x_dtype, jnp.floating)

    @property
    def params_specs(self) -> SpanParams:
        stack = lambda tree, n: jax.tree.map(lambda s: jax.ShapeDtypeStruct((n, *s.shape), s.dtype), tree)  # noqa: E731
        own, tied = self._shapes
        own = stack(own, self.key.num_layers)
        tied = {attribute: stack(tree, 1) for attribute, tree in tied.items()}
        return self.devices.parameter_specs((own, tied), num_stacked_dims=1)

    @property
    def accumulator_specs(self) -> SpanParams:
        return jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=spec.sharding), self.params_specs
        )

    @property
    def kept_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """What stays of a microbatch from `forward` to `backward`."""
        return self.kept(self.x_spec, jax.eval_shape(self._forward, *self._forward_specs)[1])

    def kept(self, x: Any, residuals: list[Any]) -> list[Any]:
        """Return what `backward` needs of a forward pass."""
        return [x, *residuals] if self._needs_x else residuals

    @property
    def random_specs(self) -> Any:
        if not self.key.is_stochastic:
            return None
        return (
            self.devices.replicated_spec((2,), jnp.uint32),
            self.devices.batch_spec((self.key.x_shape[0],), jnp.uint32),
        )

    @property
    def layer_spec(self) -> jax.ShapeDtypeStruct:
        return self.devices.replicated_spec((), jnp.int32)

    @property
    def _forward_specs(self) -> tuple[Any, ...]:
        return self.params_specs, self.x_spec, self.random_specs, self.layer_spec

    @property
    def _kept_specs(self) -> list[jax.ShapeDtypeStruct]:
        shardings = self.kept(self.x_spec.sharding, list(self.forward.output_shardings[1]))
        return [
            jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
            for shape, sharding in zip(self.kept_shapes, shardings, strict=True)
        ]

    @property
    def _targets_spec(self) -> jax.ShapeDtypeStruct:
        return self.devices.batch_spec(self.key.targets_shape, jnp.int32)

    # -- programs

    @once
    def forward(self) -> jax.stages.Compiled:
        """`(params, x, randomness, first_layer) -> y, residuals`, residuals as a list of arrays."""
        shardings = self.devices.replicated if len(self.devices.devices) == 1 else (self.y_spec.sharding, None)
        return self.home.compiled(
            (self.key, "forward"), self._forward, lambda: self._forward_specs, out_shardings=shardings
        )

    @once
    def backward(self) -> jax.stages.Compiled:
        """`(params, kept, dy, acc) -> acc, dx`; `acc` is donated, `dx` is None for token inputs."""

        def backward(params: SpanParams, kept: list[Array], dy: Array, acc: SpanParams) -> Any:
            x, residuals = (kept[0], kept[1:]) if self._needs_x else (None, kept)
            stripped = jax.tree.unflatten(self._residual_structure[0], residuals)
            primals = (params,) if self.takes_tokens else (params, x)
            gradients = restore_residuals(stripped, primals)(dy)
            return accumulate(acc, gradients[0]), None if self.takes_tokens else gradients[1]

        return self.home.compiled(
            (self.key, "backward"),
            backward,
            lambda: (self.params_specs, self._kept_specs, self.y_spec, self.accumulator_specs),
            donate=(3,),
            out_shardings=self._gradient_shardings,
        )

    @once
    def loss_and_gradients(self) -> jax.stages.Compiled:
        """`(params, x, targets, scale, acc, randomness, layer) -> loss, acc, dx`; `acc` is donated.

        `loss` is the sum over the tokens of the microbatch; gradients are those of `scale * loss`.
        """

        def loss_and_gradients(
            params: SpanParams,
            x: Float[Array, "B ..."],
            targets_BT: Int[Array, "B T"],
            scale: Float[Array, ""],
            acc: SpanParams,
            randomness: Randomness | None,
            layer: Int[Array, ""],
        ) -> Any:
            keys = keys_of(randomness, layer)
            loss, vjp = jax.vjp(lambda params, x: self._module(params).loss(x, targets_BT, keys), params, x)
            dparams, dx = vjp(scale)
            return loss, accumulate(acc, dparams), dx

        scalar = self.devices.replicated_spec((), jnp.float32)
        return self.home.compiled(
            (self.key, "loss"),
            loss_and_gradients,
            lambda: (
                self.params_specs,
                self.x_spec,
                self._targets_spec,
                scalar,
                self.accumulator_specs,
                self.random_specs,
                self.layer_spec,
            ),
            donate=(4,),
            out_shardings=(scalar.sharding, *self._gradient_shardings),
        )

    @once
    def infer(self) -> jax.stages.Compiled:
        """`(params, x) -> y` without randomness."""
        zero = jnp.int32(0)
        return self.home.compiled(
            (self.key, "infer"),
            lambda params, x: self._apply(params, x, None, zero),
            lambda: (self.params_specs, self.x_spec),
            out_shardings=self.y_spec.sharding,
        )

    @once
    def infer_loss(self) -> jax.stages.Compiled:
        """`(params, x, targets) -> loss`, the sum over the tokens, without randomness."""
        return self.home.compiled(
            (self.key, "infer_loss"),
            lambda params, x, targets: self._module(params).loss(x, targets, None),
            lambda: (self.params_specs, self.x_spec, self._targets_spec),
            out_shardings=self.devices.replicated,
        )

    @once
    def zeros(self) -> jax.stages.Compiled:
        """`() -> acc`, empty gradient sums."""
        specs = self.accumulator_specs
        return self.home.compiled(
            (self.key, "zeros"),
            lambda: jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs),
            lambda: (),
            out_shardings=jax.tree.map(lambda spec: spec.sharding, specs),
        )

    @once
    def flatten(self) -> jax.stages.Compiled:
        """`(acc) -> (own[N, P], {attribute: [1, P]})`, gradient sums as rows of float32."""
        return self.home.compiled(
            (self.key, "flatten"),
            lambda acc: (
                flatten_layers(acc[0], self.key.num_layers),
                {attribute: flatten_layers(tree, 1) for attribute, tree in acc[1].items()},
            ),
            lambda: (self.accumulator_specs,),
            out_shardings=(
                self._row_sharding(self.functions.own_shapes),
                {attribute: self._row_sharding(tree) for attribute, tree in self.functions.tied_shapes.items()},
            ),
        )

    def _row_sharding(self, shapes: Params) -> jax.sharding.Sharding:
        return self.devices.of_rows(num_elements(shapes))

    # -- mathematics

    def _module(self, params: SpanParams) -> Any:
        own, tied = jax.tree.map(lambda leaf: leaf[0], params)
        return self.functions.module(own, tied)

    def _apply(self, params: SpanParams, x: Array, randomness: Randomness | None, first_layer: Array) -> Array:
        if not self.is_scanned:
            own, tied = jax.tree.map(lambda leaf: leaf[0], params)
            return self.functions.apply(own, tied, x, keys_of(randomness, first_layer))

        def body(h: Array, own_and_layer: tuple[Params, Array]) -> tuple[Array, None]:
            own, layer = own_and_layer
            return self.functions.apply(own, {}, h, keys_of(randomness, layer)), None

        layers = first_layer + jnp.arange(self.key.num_layers, dtype=jnp.int32)
        return jax.lax.scan(rematerialised(body, self.key.remat), x, (params[0], layers))[0]

    def _vjp(self, params: SpanParams, x: Array, randomness: Randomness | None, first_layer: Array) -> Any:
        if self.takes_tokens:
            return jax.vjp(lambda params: self._apply(params, x, randomness, first_layer), params)
        return jax.vjp(lambda params, x: self._apply(params, x, randomness, first_layer), params, x)

    @once
    def _forward(self) -> Callable[..., Any]:
        """The function of `forward`: the same object each time, so that JAX traces it once for all that ask."""

        def forward(params: SpanParams, x: Array, randomness: Randomness | None, first_layer: Array) -> Any:
            y, vjp = self._vjp(params, x, randomness, first_layer)
            # The structure holds the traced backward pass; it stays here, so that programs exchange plain arrays.
            residuals, self._residual_structure[:] = _flatten(strip_residuals(vjp))
            return y, residuals

        return forward

    @once
    def _needs_x(self) -> bool:
        """Whether `backward` needs the input as it is."""
        return self.home.fact((self.key, "needs x"), self._find_needs_x)

    def _find_needs_x(self) -> bool:
        if not self._residual_structure:
            jax.eval_shape(self._forward, *self._forward_specs)
        stripped = jax.tree.unflatten(self._residual_structure[0], self._residual_structure[0].num_leaves * [None])
        return not self.takes_tokens and needed_primals(stripped)[1]

    @property
    def _gradient_shardings(self) -> Any:
        acc = jax.tree.map(lambda spec: spec.sharding, self.accumulator_specs)
        return acc, None if self.takes_tokens else self.x_spec.sharding


def _flatten(tree: Any) -> tuple[list[Array], list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return leaves, [structure]


def accumulate(acc: SpanParams, gradients: SpanParams) -> SpanParams:
    return jax.tree.map(lambda a, g: a + g.astype(a.dtype), acc, gradients)


def rematerialised(body: Any, remat: Remat) -> Any:
    """Return the body of a scan over layers, of which the forward pass keeps what a policy says."""
    match remat:
        case Remat.NONE:
            return body
        case Remat.DOTS:
            return jax.checkpoint(body, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        case Remat.LAYER:
            return jax.checkpoint(body)
        case _:
            raise AssertionError(f"layers know nothing of remat {remat}")
