"""What the programs of a span take: timed at the pace of a stage, on the devices present."""

import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oobleck_jax.execution.pace import Pace
from oobleck_jax.execution.span import Span
from oobleck_jax.planning.profile import LayerCost


_LIMIT_S = 3.0  # after this, two timed runs of a program are enough
_MOST_BYTES = 1 << 28  # of parameters, gradients and what is kept: far more than any cache has


def measure_span(span: Span, num_spans: int, repetitions: int, num_temporary_bytes: int) -> LayerCost:
    """Time a span's programs; return the cost of one of its layers.

    Time is that of a microbatch through several such spans, each with numbers of its own, as in a stage: a single one
    would find its parameters in the caches of the processor, where they never are in a run. The programs are started
    at the pace of a stage, which takes some time of a core, too.

    Args:
        num_spans: that the model has.
    """
    num_layers, pace = span.key.num_layers, Pace()
    pace.begin(threading.Event())
    if span.key.is_last:
        params, x, acc, randomness, layer = _random_arguments(span)
        targets = _filled(span.devices.batch_spec(span.key.targets_shape, jnp.int32))
        scale = _filled(span.devices.replicated_spec((), jnp.float32))

        def loss() -> Any:
            nonlocal acc
            arguments = (params, x, targets, scale, acc, randomness, layer)
            value, acc, dx = pace.run("loss", span.loss_and_gradients, *arguments)
            pace.finish()
            return value, acc, dx

        forward_s, backward_s = 0.0, median_s(loss, repetitions)
        residual_bytes = 0
    else:
        shardings = span.kept(span.x_spec.sharding, list(span.forward.output_shardings[1]))
        residual_bytes = sum(map(_device_bytes, span.kept_shapes, shardings))
        own_bytes = 2 * tree_bytes(span.params_specs) + residual_bytes * len(span.devices.devices)
        num_spans = min(num_spans, max(_MOST_BYTES // own_bytes, 1))
        arguments = [_random_arguments(span) for _ in range(num_spans)]
        accs = [acc for _, _, acc, _, _ in arguments]
        kept: list[list[Any]] = []
        y = arguments[0][1]

        def forward() -> Any:
            nonlocal y
            kept.clear()
            for params, x, _, randomness, layer in arguments:
                y, residuals = pace.run("forward", span.forward, params, x, randomness, layer)
                kept.append(span.kept(x, residuals))
            pace.finish()
            return y, kept

        def backward() -> Any:
            for number in reversed(range(num_spans)):
                parts = (arguments[number][0], kept[number], y, accs[number])
                accs[number] = pace.run("backward", span.backward, *parts)[0]
            pace.finish()
            return accs

        forward_s = median_s(forward, repetitions) / num_spans
        backward_s = median_s(backward, repetitions) / num_spans
    count = len(span.devices.devices)
    return LayerCost(
        num_devices=count,
        forward_s=forward_s / num_layers,
        backward_s=backward_s / num_layers,
        residual_bytes=-(-residual_bytes // num_layers),
        temporary_bytes=num_temporary_bytes,
    )


def median_s(call: Callable[[], Any], repetitions: int) -> float:
    """Return how long a call usually takes: a step is long, and the least time is that of a lucky moment of the clock.

    Where one core computes, that is its time in this process, which does not count what others take of the core.
    """
    is_one_core = (
        jax.default_backend() == "cpu" and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1
    )
    now_s = time.process_time if is_one_core else time.perf_counter
    jax.block_until_ready(call())  # the first run touches memory for the first time
    times_s: list[float] = []
    while len(times_s) < repetitions and (len(times_s) < 2 or sum(times_s) < _LIMIT_S):
        began_s = now_s()
        jax.block_until_ready(call())
        times_s.append(now_s() - began_s)
    return statistics.median(times_s)


def _random_arguments(span: Span) -> tuple[Any, jax.Array, Any, Any, jax.Array]:
    randomness = None if span.random_specs is None else jax.tree.map(_filled, span.random_specs)
    layer = _filled(span.devices.replicated_spec((), jnp.int32))
    return jax.tree.map(_filled, span.params_specs), _filled(span.x_spec), span.zeros(), randomness, layer


def _filled(spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array of small numbers; what they are makes no difference to time, but denormal ones would."""
    values = np.random.default_rng(0).standard_normal(spec.shape) * 0.02
    return jax.device_put(np.asarray(values, spec.dtype), spec.sharding)


def _device_bytes(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> int:
    """Return what each device has of an array."""
    return math.prod(sharding.shard_shape(shape.shape)) * shape.dtype.itemsize


def tree_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
