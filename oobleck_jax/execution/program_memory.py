"""What programs need while they run, beside what they are given, by XLA's own analysis."""

from collections.abc import Sequence
from typing import Any

import jax

from oobleck_jax.execution.span import Span
from oobleck_jax.execution.state import StateBuilder


# What there is besides the arrays of layers, a few bytes each: the pointers to a program's results, the losses of
# microbatches, AdamW's step counts, the numbers of layers.
SMALL_BYTES = 16 * 1024


def temporary_bytes(span: Span, builder: StateBuilder, runs: Sequence[Sequence[str]]) -> int:
    """Return the bytes of each device that the most demanding program of a span, or of its update, needs for itself.

    Results of the span's programs do not count: those that stay and those that are on their way are counted by the
    memory model. Rows of gradients and rounded parameters do: the old and the new ones are there at the same time. So
    does what is too small to be counted one by one, since no stage may need more than is predicted.

    Args:
        runs: groups of the span's own parameters, and of each tied parameter.
    """
    programs = [span.loss_and_gradients] if span.key.is_last else [span.forward, span.backward]
    needs = [own_bytes(program) for program in programs]
    needs.append(own_bytes(span.flatten) + result_bytes(span.flatten))
    for names in runs:
        update = builder.compile_update(names, span.devices)
        needs.append(own_bytes(update) + result_bytes(update))
        if builder.rounds:
            rounding = builder.compile_rounding(names, span.devices)
            needs.append(own_bytes(rounding) + result_bytes(rounding))
    return max(needs) + SMALL_BYTES


def own_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes that a program needs for itself while it runs."""
    analysis: Any = program.memory_analysis()
    return int(analysis.temp_size_in_bytes)


def result_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes of a program's results that do not lie where donated arguments were, and of pointers to all."""
    analysis: Any = program.memory_analysis()
    return int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
