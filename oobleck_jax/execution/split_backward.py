"""A backward pass in two parts: the gradient of the input, which others wait for, and the gradients of the weights.

The equations of the traced backward pass are divided by what depends on them. What the gradient of the input needs
comes first; what it computes on the way, and the rest needs, too, is handed over, so nothing is computed twice. What
hides several equations in one (`jit`) is opened before; a loop or a recomputation is not, and stays in the first part.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import Array


_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})  # that only name some equations


class SplitBackward:
    """The two parts of a function `(params, kept, dy) -> dparams, dx`; `dx` is None where there is no such gradient.

    Attributes:
        weight_kept: which items of `kept` the second part needs.
    """

    def __init__(
        self, backward: Callable[[Any, list[Any], Any], tuple[Any, Any]], params: Any, kept: list[Any], dy: Any
    ):
        """Trace a backward pass.

        Args:
            params, kept, dy: shapes of the arguments; `dy` is a single array.
        """
        shapes = jax.tree.leaves((params, kept, dy))
        structure = jax.tree.structure((params, kept, dy))
        results: list[Any] = []

        def flat(*leaves: Array) -> list[Array]:
            dparams, dx = backward(*jax.tree.unflatten(structure, leaves))
            results[:] = [jax.tree.structure(dparams)]
            return [*jax.tree.leaves(dparams), *([] if dx is None else [dx])]

        traced = jax.make_jaxpr(flat)(*shapes)
        opened = jax.make_jaxpr(lambda *leaves: _evaluate(traced.jaxpr, traced.consts, leaves))(*shapes)
        self._jaxpr: Any = opened.jaxpr
        self._consts = opened.consts
        (self._dparams,) = results
        num_params = len(jax.tree.leaves(params))
        inputs = self._jaxpr.invars
        self._params_of, self._kept_of, self._dy = inputs[:num_params], inputs[num_params:-1], inputs[-1]
        weights = self._jaxpr.outvars[: self._dparams.num_leaves]
        self._outputs, self._weights = self._jaxpr.outvars[len(weights) :], weights
        self._first = _needed(self._jaxpr.eqns, self._outputs, frozenset())
        self._second = _needed(self._jaxpr.eqns, weights, self._first)
        made = {var for number in self._first for var in self._jaxpr.eqns[number].outvars} | {self._dy}
        used = [var for number in sorted(self._second) for var in self._jaxpr.eqns[number].invars] + list(weights)
        used = list(dict.fromkeys(var for var in used if not isinstance(var, jex.Literal)))
        self._saved = [var for var in used if var in made]
        self.weight_kept = tuple(index for index, var in enumerate(self._kept_of) if var in used)

    def input_gradient(self, params: Any, kept: Sequence[Array], dy: Array) -> tuple[Array | None, list[Array]]:
        """Return the gradient of the input, and what the second part needs of the way there."""
        values = self._values(params, zip(self._kept_of, kept, strict=True))
        values[self._dy] = dy
        self._run(self._first, values)
        dx = [_read(var, values) for var in self._outputs]
        return dx[0] if dx else None, [values[var] for var in self._saved]

    def weight_gradients(self, params: Any, kept: Sequence[Array], saved: Sequence[Array]) -> Any:
        """Return the gradients of the parameters.

        Args:
            params: as in the first part.
            kept: the items that `weight_kept` names.
            saved: by the first part.
        """
        values = self._values(params, zip([self._kept_of[index] for index in self.weight_kept], kept, strict=True))
        values |= dict(zip(self._saved, saved, strict=True))
        self._run(self._second, values)
        return jax.tree.unflatten(self._dparams, [_read(var, values) for var in self._weights])

    def _values(self, params: Any, others: Iterable[tuple[Any, Array]]) -> dict[Any, Array]:
        values = dict(zip(self._jaxpr.constvars, self._consts, strict=True))
        return values | dict(zip(self._params_of, jax.tree.leaves(params), strict=True)) | dict(others)

    def _run(self, numbers: frozenset[int], values: dict[Any, Array]) -> None:
        for number in sorted(numbers):
            _apply(self._jaxpr.eqns[number], values)


def _needed(equations: Sequence[Any], outputs: Iterable[Any], known: frozenset[int]) -> frozenset[int]:
    """Return the numbers of the equations, besides known ones, that some outputs depend on."""
    wanted = {var for var in outputs if not isinstance(var, jex.Literal)}
    numbers: set[int] = set()
    for number in reversed(range(len(equations))):
        if number not in known and not wanted.isdisjoint(equations[number].outvars):
            numbers.add(number)
            wanted |= {var for var in equations[number].invars if not isinstance(var, jex.Literal)}
    return frozenset(numbers)


def _evaluate(jaxpr: Any, consts: Sequence[Array], arguments: Sequence[Array]) -> list[Array]:
    """Evaluate equations one by one, and those inside calls, too."""
    values = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        _apply(equation, values)
    return [_read(var, values) for var in jaxpr.outvars]


def _apply(equation: Any, values: dict[Any, Array]) -> None:
    inputs = [_read(var, values) for var in equation.invars]
    if equation.primitive.name in _CALLS:
        called = equation.params["jaxpr"]
        results = _evaluate(called.jaxpr, called.consts, inputs)
    else:
        results = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
        results = results if equation.primitive.multiple_results else [results]
    values |= dict(zip(equation.outvars, results, strict=True))


def _read(var: Any, values: dict[Any, Array]) -> Any:
    return var.val if isinstance(var, jex.Literal) else values[var]
