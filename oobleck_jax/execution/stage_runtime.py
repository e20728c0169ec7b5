"""One stage at work: forward and backward of a microbatch through its spans, and its gradient sums.

Shapes: B microbatch, T sequence, N layers of a span, P parameters of a layer.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from oobleck_jax.config import Precision, Remat
from oobleck_jax.execution.gradient_sum import Emit
from oobleck_jax.execution.home import Home
from oobleck_jax.execution.layout import LayerSpan, LocalStage, own_group
from oobleck_jax.execution.pace import Pace
from oobleck_jax.execution.span import Span, SpanKey, SpanParams
from oobleck_jax.execution.span_library import SpanLibrary
from oobleck_jax.execution.split_span import SplitSpan
from oobleck_jax.execution.state import GroupState, ParameterRun, StateBuilder
from oobleck_jax.model import LayeredModel
from oobleck_jax.planning.schedule import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchShape:
    """Shapes of what a microbatch brings: `tokens int32[B, T]` and as many targets."""

    num_samples: int
    num_tokens: int  # per sample

    @property
    def shape(self) -> tuple[int, int]:
        return (self.num_samples, self.num_tokens)


class StageRuntime:
    """Programs, parameters and gradient sums of one stage.

    Attributes:
        local: what the stage is.
        devices: the devices it runs on.
        x_spec: its input; tokens on the first stage, else activations.
        y_spec: its output; of no meaning on the last stage.
        is_last: whether it computes the loss.
    """

    def __init__(
        self,
        local: LocalStage,
        *,
        model: LayeredModel,
        home: Home,
        library: SpanLibrary,
        builder: StateBuilder,
        microbatch: MicrobatchShape,
        x_spec: jax.ShapeDtypeStruct,
        precision: Precision,
        remat: Remat,
    ) -> None:
        self.local = local
        self.devices = home.stage_devices(local.stage.devices)
        self.is_last = local.next is None
        self._model, self._builder = model, builder
        self._spans: list[tuple[LayerSpan, Span]] = []
        self._split: list[SplitSpan] = []  # of each span but the last layer's, if the backward is split
        spec = self.devices.batch_spec(x_spec.shape, x_spec.dtype)
        self.x_spec = spec
        for layer_span in local.spans:
            key = SpanKey(
                kind=layer_span.kind,
                num_layers=len(layer_span.layers),
                is_last=layer_span.end_layer == len(model.layers),
                x_shape=spec.shape,
                x_dtype=str(spec.dtype),
                targets_shape=microbatch.shape,
                devices=self.devices.key,
                precision=precision,
                remat=remat.of_layers,
                is_stochastic=model.is_stochastic,
            )
            span = library.span(key, self.devices)
            self._spans.append((layer_span, span))
            if local.is_split and not key.is_last:
                self._split.append(library.split_span(key, self.devices))
            spec = span.y_spec
        self.y_spec = spec
        self._runs: dict[tuple[str, ...], ParameterRun] = {}
        self._accumulators: list[SpanParams] = []
        self._is_recomputed = remat is Remat.STAGE
        self._saved: dict[int, Callable[[Pace], list[Any]]] = {}  # by microbatch, what gives what its spans kept
        self._waiting: dict[int, list[tuple[int, list[Any], list[Any]]]] = {}  # by microbatch, what weights need
        numbers = [np.int32(layer_span.first_layer) for layer_span, _ in self._spans]
        self._layer_numbers: list[jax.Array] = jax.device_put(numbers, self.devices.replicated)

    # -- preparation

    @property
    def run_names(self) -> tuple[tuple[str, ...], ...]:
        """The runs of parameter groups of this stage: own groups of each span, if they have any, then tied groups."""
        own = [
            _own_groups(layer_span) for layer_span, span in self._spans if jax.tree.leaves(span.functions.own_shapes)
        ]
        tied = [(name,) for layer_span, _ in self._spans for name in self._tied_names(layer_span).values()]
        return tuple(dict.fromkeys(own + tied))

    @property
    def completing_phase(self) -> Phase:
        """The phase that adds to the gradients last; the last stage does its backward with its forward."""
        if self.local.is_split:
            return Phase.WEIGHT
        return Phase.FORWARD if self.is_last else Phase.BACKWARD

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(name for names in self.run_names for name in names)

    @property
    def emitted(self) -> tuple[str, ...]:
        """The groups whose gradients a step gives, once for each contribution."""
        return tuple(
            name
            for layer_span, _ in self._spans
            for name in (*map(own_group, layer_span.layers), *self._tied_names(layer_span).values())
        )

    def compilations(self, *, with_evaluation: bool) -> dict[Hashable, Callable[[], Any]]:
        """Return a call for each program of the stage, by what it is; it compiles the program, or finds it compiled."""
        calls: dict[Hashable, Callable[[], Any]] = {}
        for split in self._split:
            names = ["forward", "backward_weights"] + ([] if split.span.takes_tokens else ["backward_input"])
            calls |= {(split.span.key, "split", name): partial(getattr, split, name) for name in names}
        for _, span in self._spans:
            names = ["loss_and_gradients"] if span.key.is_last else ["forward", "backward"] * (not self._split)
            names += ["zeros", "flatten"]
            if with_evaluation:
                names.append("infer_loss" if span.key.is_last else "infer")
            calls |= {(span.key, name): partial(getattr, span, name) for name in names}
        for names in self.run_names:
            key = self._builder.update_key(names, self.devices)
            calls[key] = partial(self._builder.compile_update, names, self.devices)
            if self._builder.rounds:
                key = self._builder.rounding_key(names, self.devices)
                calls[key] = partial(self._builder.compile_rounding, names, self.devices)
        return calls

    def adopt(self, held: "StageRuntime") -> None:
        """Take over what a held stage has in the very form that this one needs. Both have it until one is dropped."""
        if held.devices.key == self.devices.key:
            self._runs |= {names: held._runs[names] for names in self.run_names if names in held._runs}

    @property
    def missing(self) -> tuple[str, ...]:
        """The groups whose state the stage does not have yet."""
        return tuple(name for names in self.run_names if names not in self._runs for name in names)

    def load(self, states: Mapping[str, GroupState]) -> None:
        """Take the parameters and optimizer state of the groups that are missing."""
        for names in self.run_names:
            if names not in self._runs:
                self._runs[names] = self._builder.stack(names, states, self.devices)

    def states(self, wanted: Collection[str]) -> dict[str, GroupState]:
        """Return the states of those of the stage's groups that are wanted, as numpy arrays.

        They may share memory with the stage, so the next update invalidates them.
        """
        states: dict[str, GroupState] = {}
        for names, run in self._runs.items():
            if not set(names).isdisjoint(wanted):
                states |= {name: state for name, state in self._builder.unstack(run).items() if name in wanted}
        return states

    # -- a step

    def begin_step(self) -> None:
        """Empty the gradient sums."""
        self.forget_step()
        self._accumulators = [span.zeros() for _, span in self._spans]

    def forget_step(self) -> None:
        """Drop what an unfinished step has left."""
        self._saved.clear()
        self._waiting.clear()
        self._accumulators = []

    def forward(self, microbatch: int, x: jax.Array, randomness: Any, pace: Pace) -> jax.Array:
        """Run a microbatch forward; not for the last stage, whose forward is part of `loss_and_backward`."""
        y, kept = self._forward_spans(len(self._spans), x, randomness, pace)
        if self._is_recomputed:
            del kept
            self._saved[microbatch] = lambda pace: self._forward_spans(len(self._spans), x, randomness, pace)[1]
        else:
            self._saved[microbatch] = lambda pace: kept
        return y

    def backward(self, microbatch: int, dy: jax.Array, pace: Pace, emit: Emit | None = None) -> jax.Array | None:
        """Run a microbatch backward; returns the gradient of its input, None on the first stage.

        If the backward is split, `backward_weights` is to follow.

        Args:
            emit: takes the gradient sums as they become complete; given with the last microbatch only.
        """
        return self._backward_spans(microbatch, self._saved.pop(microbatch)(pace), dy, pace, emit)

    def backward_weights(self, microbatch: int, pace: Pace, emit: Emit | None = None) -> None:
        """Add the gradients of the weights that a split backward has left.

        Args:
            emit: as of `backward`.
        """
        if emit is not None and self.is_last:
            self._emit(len(self._spans) - 1, emit)
        waiting = self._waiting.pop(microbatch)
        waiting.reverse()  # what is used is dropped
        while waiting:
            number, residuals, saved = waiting.pop()
            arguments = (self._params(number), residuals, saved, self._accumulators[number])
            program = self._split[number].backward_weights
            self._accumulators[number] = pace.run((self._spans[number][1].key, "weights"), program, *arguments)
            if emit is not None:
                self._emit(number, emit)

    def loss_and_backward(
        self,
        microbatch: int,
        x: jax.Array,
        targets: np.ndarray,
        scale: float,
        randomness: Any,
        pace: Pace,
        emit: Emit | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Run a microbatch forward and backward on the last stage.

        If the backward is split, `backward_weights` is to follow, for all layers but the last one.

        Args:
            emit: as of `backward`.

        Returns:
            The loss summed over the microbatch's tokens, and the gradient of the input (None on the first stage).
        """
        x, kept = self._forward_spans(len(self._spans) - 1, x, randomness, pace)
        span = self._spans[-1][1]
        loss, self._accumulators[-1], dx = pace.run(
            (span.key, "loss"),
            span.loss_and_gradients,
            self._params(-1),
            x,
            self.put_batch(targets),
            self._put(np.float32(scale)),
            self._accumulators[-1],
            randomness,
            self._layer_numbers[-1],
        )
        if emit is not None:
            self._emit(len(self._spans) - 1, emit)
        return loss, self._backward_spans(microbatch, kept, dx, pace, emit)

    def infer(self, x: jax.Array, pace: Pace) -> jax.Array:
        """Run a microbatch forward without gradients; of the last stage all but the last layer."""
        for number, (_, span) in enumerate(self._spans[:-1] if self.is_last else self._spans):
            x = pace.run((span.key, "infer"), span.infer, self._params(number), x)
        return x

    def infer_loss(self, x: jax.Array, targets: np.ndarray, pace: Pace) -> jax.Array:
        """Return the loss summed over a microbatch's tokens, without gradients; for the last stage."""
        span = self._spans[-1][1]
        x = self.infer(x, pace)
        return pace.run((span.key, "infer_loss"), span.infer_loss, self._params(-1), x, self.put_batch(targets))

    def update(self, gradients: Mapping[str, np.ndarray], clip_factor: float, learning_rate: float) -> None:
        """Apply one optimizer step to all groups of the stage."""
        factors = jax.device_put([np.float32(clip_factor), np.float32(learning_rate)], self.devices.replicated)
        for names, run in self._runs.items():
            rows = [gradients[name] for name in names]
            gradient_NP = np.stack(rows) if len(rows) > 1 else rows[0][None]  # no copy of an embedding's
            self._runs[names] = self._builder.update(run, gradient_NP, factors, self.devices)

    def put_batch(self, array: np.ndarray) -> jax.Array:
        """Put an array whose first dim is the microbatch onto the stage's devices."""
        return jax.device_put(array, self.devices.of_batch(array.shape))

    def randomness(self, seed: int, step: int, samples_B: np.ndarray) -> Any:
        """Return what the stage's random numbers of a microbatch depend on, or None if nothing is random."""
        if not self._model.is_stochastic:
            return None
        return self._put(np.array([seed % 2**32, step], np.uint32)), self.put_batch(samples_B.astype(np.uint32))

    # -- helpers

    def _forward_spans(
        self, num_spans: int, x: jax.Array, randomness: Any, pace: Pace
    ) -> tuple[jax.Array, list[list[jax.Array]]]:
        """Run the first spans forward; return the last one's output, and what each keeps."""
        kept: list[list[jax.Array]] = []
        for number, (_, span) in enumerate(self._spans[:num_spans]):
            arguments = (self._params(number), x, randomness, self._layer_numbers[number])
            if self._split:
                x, residuals = pace.run((span.key, "forward"), self._split[number].forward, *arguments)
                kept.append(residuals)
                continue
            y, residuals = pace.run((span.key, "forward"), span.forward, *arguments)
            kept.append(span.kept(x, residuals))
            x = y
        return x, kept

    def _backward_spans(
        self, microbatch: int, kept: list[list[jax.Array]], dy: jax.Array | None, pace: Pace, emit: Emit | None
    ) -> jax.Array | None:
        """Run the first spans backward; what they kept is dropped as it is used."""
        if self.local.is_split:
            return self._backward_inputs(microbatch, kept, dy, pace)
        while kept:
            number = len(kept) - 1
            span = self._spans[number][1]
            arguments = (self._params(number), kept.pop(), dy, self._accumulators[number])
            self._accumulators[number], dy = pace.run((span.key, "backward"), span.backward, *arguments)
            if emit is not None:
                self._emit(number, emit)
        return dy

    def _backward_inputs(
        self, microbatch: int, kept: list[list[jax.Array]], dy: jax.Array | None, pace: Pace
    ) -> jax.Array | None:
        """Do the same for the gradients of the inputs only, and keep what those of the weights need."""
        waiting = self._waiting[microbatch] = []
        while kept:
            number, residuals = len(kept) - 1, kept.pop()
            split, saved = self._split[number], [dy]
            if split.span.takes_tokens:
                dy = None
            else:
                arguments = (self._params(number), residuals, dy)
                dy, saved = pace.run((split.span.key, "backward"), split.backward_input, *arguments)
            waiting.append((number, split.weight_residuals(residuals), saved))
        return dy

    def _emit(self, number: int, emit: Emit) -> None:
        """Give a span's gradient sums away; a tied parameter's may have other contributions."""
        layer_span, span = self._spans[number]
        own_NP, tied = span.flatten(self._accumulators[number])
        self._accumulators[number] = ({}, {})  # at once: all of them would be there twice
        for index, layer in enumerate(layer_span.layers):
            emit(own_group(layer), partial(_row, own_NP, index))
        for attribute, name in self._tied_names(layer_span).items():
            emit(name, partial(_row, tied[attribute], 0))

    def _params(self, number: int) -> SpanParams:
        layer_span, _ = self._spans[number]
        run = self._runs.get(_own_groups(layer_span))
        return run.computed if run else {}, {
            attribute: self._runs[(name,)].computed for attribute, name in self._tied_names(layer_span).items()
        }

    def _tied_names(self, layer_span: LayerSpan) -> dict[str, str]:
        return dict(self._model.layers[layer_span.first_layer].tied)

    def _put(self, value: np.ndarray | np.generic) -> jax.Array:
        return jax.device_put(value, self.devices.replicated)


def _row(rows_NP: jax.Array, index: int) -> np.ndarray:
    return np.asarray(rows_NP)[index]


def _own_groups(layer_span: LayerSpan) -> tuple[str, ...]:
    return tuple(own_group(layer) for layer in layer_span.layers)
