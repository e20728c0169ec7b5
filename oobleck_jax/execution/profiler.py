"""Profiles of a model's layers: measured on the devices present, or estimated from XLA's analysis without them.

Each kind of layer is looked at once, since layers of equal kind cost the same. Measuring runs the very programs of a
stage; estimating lowers the same mathematics with shapes only, so that a model of any size can be profiled on a laptop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from oobleck_jax.config import Remat, RunConfig
from oobleck_jax.execution.gradient_sum import report
from oobleck_jax.execution.home import Home, StageDevices
from oobleck_jax.execution.layer_functions import LayerFunctions, functions_of, input_specs, num_elements
from oobleck_jax.execution.layout import groups_of, own_group
from oobleck_jax.execution.program_memory import SMALL_BYTES, temporary_bytes
from oobleck_jax.execution.span import Span, SpanKey
from oobleck_jax.execution.span_times import measure_span, median_s, tree_bytes
from oobleck_jax.execution.state import GroupState, StateBuilder
from oobleck_jax.model import LayeredModel
from oobleck_jax.planning.estimate import DeviceRates, adamw_state, shared_cost, update_s_per_byte
from oobleck_jax.planning.plan import MAX_SPAN_LAYERS
from oobleck_jax.planning.profile import LayerCost, LayerProfile, Profile, Rate, TiedGroup


Functions: TypeAlias = dict[str, LayerFunctions]
"""Of each kind of layer."""

_REPETITIONS = 9  # timed runs of a program


def measure_profile(
    config: RunConfig,
    *,
    home: Home,
    link: Rate,
    sum_rate: Rate,
    repetitions: int = _REPETITIONS,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Profile:
    """Return a profile measured on the home's devices.

    Args:
        link: of an activation between nodes; see `scripts/profile.py` for how it is measured.
        sum_rate: of a gradient sum between nodes.
        repetitions: timed runs of each program; their median counts. Fewer where a run takes seconds.
        progress: told (kind of layer, done, total).
    """
    model = config.model.build()
    functions = functions_of(model, config.precision)
    device_counts = [1 << power for power in range(config.devices_per_node.bit_length())]
    kinds = list(dict.fromkeys(layer.kind for layer in model.layers))
    costs: dict[str, list[LayerCost]] = {kind: [] for kind in kinds}
    outputs: dict[str, int] = {}
    x_specs = _inputs(config, model, functions)
    # The programs are those of the longest spans that stages have, so that workers find them compiled.
    for done, kind in enumerate(kinds):
        for place, count in enumerate(device_counts):
            progress(kind, done * len(device_counts) + place, len(kinds) * len(device_counts))
            devices = home.stage_devices(range(count))
            span = _span(config, model, functions, kind, x_specs[kind], home, devices)
            num_spans = -(-sum(layer.kind == kind for layer in model.layers) // span.key.num_layers)
            num_bytes = _temporary_bytes(config, model, functions, span)
            costs[kind].append(measure_span(span, num_spans, repetitions, num_bytes))
            outputs[kind] = 0 if span.key.is_last else span.y_spec.size * span.y_spec.dtype.itemsize
    progress("update", len(kinds) * len(device_counts), len(kinds) * len(device_counts))
    update_s_per_byte = _measure_update(config, model, functions, x_specs, home, repetitions)
    return _profile(
        config,
        model,
        functions,
        device=home.devices[0].device_kind,
        source="measured",
        costs={kind: tuple(found) for kind, found in costs.items()},
        outputs=outputs,
        link=link,
        sum_rate=sum_rate,
        update_s_per_byte=update_s_per_byte,
    )


def estimate_profile_with_xla(config: RunConfig, rates: DeviceRates, *, home: Home | None = None) -> Profile:
    """Return a profile from XLA's own counts of operations and bytes; nothing is allocated or run.

    A program takes as long as its operations or its memory traffic, whichever is longer (roofline). Several devices
    share the work, and exchange numbers as `shared_cost` says; tensor parallel, each keeps everything (an upper bound).

    Args:
        home: where programs that it has need not be compiled again; they are compiled for its first device.
    """
    home = home or Home(jax.local_devices(backend="cpu")[:1])
    devices = home.stage_devices(range(1))
    model = config.model.build()
    functions = functions_of(model, config.precision)
    x_specs = _inputs(config, model, functions)
    device_counts = [1 << power for power in range(config.devices_per_node.bit_length())]
    costs: dict[str, tuple[LayerCost, ...]] = {}
    outputs: dict[str, int] = {}
    for kind, x_spec in x_specs.items():
        span = _span(config, model, functions, kind, x_spec, home, devices, num_layers=1)
        forward, backward = _analysed(span)
        # Of as many layers as are scanned together; times are of one, because XLA counts what is repeated once.
        together = _span(config, model, functions, kind, x_spec, home, devices)
        temporary = _temporary_bytes(config, model, functions, together)
        parameter_bytes = tree_bytes(span.params_specs)
        kept = 0 if span.key.is_last else tree_bytes(span.kept_shapes)
        outputs[kind] = 0 if span.key.is_last else span.y_spec.size * span.y_spec.dtype.itemsize

        alone = LayerCost(
            num_devices=1,
            forward_s=forward.seconds(rates),
            backward_s=backward.seconds(rates),
            residual_bytes=kept,
            temporary_bytes=temporary,
        )
        costs[kind] = tuple(
            shared_cost(
                alone,
                count,
                microbatch_size=config.microbatch_size,
                parameter_bytes=parameter_bytes,
                row_bytes=tree_bytes(together.accumulator_specs) + SMALL_BYTES,  # which devices do not share
                summed_bytes=outputs[kind] if config.tensor_parallel else None,
                is_recomputed=config.remat.of_layers is Remat.LAYER,
                rates=rates,
            )
            for count in device_counts
        )
    return _profile(
        config,
        model,
        functions,
        device=rates.name,
        source="estimated from XLA's cost and memory analysis",
        costs=costs,
        outputs=outputs,
        link=rates.link,
        sum_rate=rates.sum,
        update_s_per_byte=update_s_per_byte(rates),
    )


# -- measuring


def _measure_update(
    config: RunConfig,
    model: LayeredModel,
    functions: Functions,
    x_specs: dict[str, jax.ShapeDtypeStruct],
    home: Home,
    repetitions: int,
) -> float:
    """Return the seconds per byte of gradients that a node needs to gather, check and apply them.

    The kind of layer with the most parameters stands for all.
    """
    sizes = [num_elements(functions[layer.kind].own_shapes) for layer in model.layers]
    kind = model.layers[sizes.index(max(sizes))].kind
    devices = home.stage_devices(range(1))
    span = _span(config, model, functions, kind, x_specs[kind], home, devices)
    numbers = [number for number, layer in enumerate(model.layers) if layer.kind == kind][: span.key.num_layers]
    names = [own_group(number) for number in numbers]
    builder = StateBuilder(model, functions, groups_of(model), config.optimizer, home)
    shapes = builder.state_shapes(names[0])
    zeros = lambda tree: jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), tree)  # noqa: E731
    empty = GroupState(params=zeros(shapes.params), optimizer_state=zeros(shapes.optimizer_state))
    run = builder.stack(names, dict.fromkeys(names, empty), devices)

    def update() -> Any:
        nonlocal run
        gradient_NP = np.asarray(span.flatten(span.zeros())[0])
        for name, row in zip(names, gradient_NP, strict=True):
            report(name, row)
        factors = jax.device_put([np.float32(1.0), np.float32(0.0)], devices.replicated)
        run = builder.update(run, np.stack(list(gradient_NP)), factors, devices)
        return run.params

    return median_s(update, repetitions) / (4 * len(names) * max(sizes)) if max(sizes) else 0.0


# -- estimating


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    flops: float
    memory_bytes: float

    def seconds(self, rates: DeviceRates) -> float:
        return max(self.flops / rates.flops_per_s, self.memory_bytes / rates.memory_bytes_per_s)


def _analysed(span: Span) -> tuple[_Work, _Work]:
    """Return the work of forward and backward of a span of one layer; the last layer has it all in backward."""
    if span.key.is_last:
        return _Work(flops=0, memory_bytes=0), _work(span.loss_and_gradients)
    return _work(span.forward), _work(span.backward)


def _work(program: jax.stages.Compiled) -> _Work:
    analysis: Any = program.cost_analysis()
    return _Work(flops=float(analysis.get("flops", 0.0)), memory_bytes=float(analysis.get("bytes accessed", 0.0)))


# -- both


def _inputs(config: RunConfig, model: LayeredModel, functions: Functions) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape of the input of each kind of layer, one microbatch."""
    tokens_BT = jax.ShapeDtypeStruct((config.microbatch_size, config.sequence_length), jnp.int32)
    specs = input_specs(model.layers, functions, tokens_BT)
    return {layer.kind: spec for layer, spec in reversed(list(zip(model.layers, specs, strict=True)))}


def _span(
    config: RunConfig,
    model: LayeredModel,
    functions: Functions,
    kind: str,
    x_spec: jax.ShapeDtypeStruct,
    home: Home,
    devices: StageDevices,
    num_layers: int | None = None,
) -> Span:
    members = [layer for layer in model.layers if layer.kind == kind]
    is_last = members[0] is model.layers[-1]
    is_scanned = not members[0].tied and not is_last and members[0] is not model.layers[0]
    key = SpanKey(
        kind=kind,
        num_layers=min(len(members), num_layers or MAX_SPAN_LAYERS) if is_scanned else 1,
        is_last=is_last,
        x_shape=x_spec.shape,
        x_dtype=str(x_spec.dtype),
        targets_shape=(config.microbatch_size, config.sequence_length),
        devices=devices.key,
        precision=config.precision,
        remat=config.remat.of_layers,
        is_stochastic=model.is_stochastic,
    )
    return Span(key=key, functions=functions[kind], home=home, devices=devices)


def _temporary_bytes(config: RunConfig, model: LayeredModel, functions: Functions, span: Span) -> int:
    builder = StateBuilder(model, functions, groups_of(model), config.optimizer, span.home)
    layers = [number for number, layer in enumerate(model.layers) if layer.kind == span.key.kind]
    own = [own_group(number) for number in layers[: span.key.num_layers]]
    tied = [[name] for _, name in model.layers[layers[0]].tied]
    runs = [own, *tied] if builder.sizes[own[0]] else tied
    return temporary_bytes(span, builder, runs)


def _profile(
    config: RunConfig,
    model: LayeredModel,
    functions: Functions,
    *,
    device: str,
    source: str,
    costs: dict[str, tuple[LayerCost, ...]],
    outputs: dict[str, int],
    link: Rate,
    sum_rate: Rate,
    update_s_per_byte: float,
) -> Profile:
    tied = [group for group in groups_of(model) if group.attribute is not None]
    return Profile(
        device=device,
        source=source,
        microbatch_size=config.microbatch_size,
        precision=config.precision,
        remat=config.remat,
        layers=tuple(
            LayerProfile(
                kind=layer.kind,
                costs=costs[layer.kind],
                state=adamw_state(num_elements(functions[layer.kind].own_shapes), config.precision),
                output_bytes=outputs[layer.kind],
            )
            for layer in model.layers
        ),
        tied_groups=tuple(
            TiedGroup(
                name=group.name,
                layers=group.layers,
                state=adamw_state(
                    num_elements(functions[model.layers[group.layers[0]].kind].tied_shapes[group.attribute or ""]),
                    config.precision,
                ),
            )
            for group in tied
        ),
        link=link,
        sum=sum_rate,
        update_s_per_byte=update_s_per_byte,
        tensor_parallel=config.tensor_parallel,
    )
