"""What a stage really uses: its programs and its schedule at work, with neighbours that are as demanding as can be.

The memory model (planning/costs.py) is compared with this.
"""

import gc
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oobleck_jax.config import RunConfig, ScheduleKind
from oobleck_jax.data import TokenDataset
from oobleck_jax.execution.executor import Executor
from oobleck_jax.execution.gradient_sum import Row
from oobleck_jax.execution.home import Home, StageDevices
from oobleck_jax.execution.layer_functions import functions_of, input_specs
from oobleck_jax.execution.layout import groups_of, layout_of
from oobleck_jax.execution.link import Payload
from oobleck_jax.execution.patience import Patience
from oobleck_jax.execution.program_memory import own_bytes, result_bytes
from oobleck_jax.execution.recorder import NoRecorder
from oobleck_jax.execution.span_library import SpanLibrary
from oobleck_jax.execution.stage_runtime import MicrobatchShape, StageRuntime
from oobleck_jax.execution.state import StateBuilder
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan, Template


_LIMIT_S = 60.0


def stage_peak_bytes(
    config: RunConfig,
    template: Template,
    node: NodeId,
    home: Home,
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
) -> int:
    """Run a step of the stages of a node in a pipeline that does the whole batch; return its peak on one device.

    Args:
        config: of the run.
        template: one stage on each node, or several on the same device.
        node: by its number in the template.
        home: of the node.
        schedule: of the pipeline.
    """
    gc.collect()
    model, metered = config.model.build(), MeteredHome(home)
    functions = functions_of(model, config.precision)
    builder = StateBuilder(model, functions, groups_of(model), config.optimizer, metered)  # pyright: ignore[reportArgumentType]
    nodes = tuple(NodeId(number) for number in range(template.num_nodes))
    pipeline = Pipeline(template=template, nodes=nodes, num_microbatches=config.num_microbatches, schedule=schedule)
    layout = layout_of(model, Plan(pipelines=(pipeline,)), node)
    microbatch = MicrobatchShape(num_samples=config.microbatch_size, num_tokens=config.sequence_length)
    specs = input_specs(model.layers, functions, jax.ShapeDtypeStruct(microbatch.shape, jnp.int32))
    library = SpanLibrary(metered, functions)  # pyright: ignore[reportArgumentType]
    stages = {
        local.index: StageRuntime(
            local,
            model=model,
            home=metered,  # pyright: ignore[reportArgumentType]
            library=library,
            builder=builder,
            microbatch=microbatch,
            x_spec=specs[local.stage.first_layer],
            precision=config.precision,
            remat=config.remat,
        )
        for local in layout.stages
    }
    for stage in stages.values():
        stage.load({name: builder.initial(name, config.seed) for name in stage.missing})
    executor = Executor(
        config=config,
        dataset=TokenDataset.open(config),
        layout=layout,
        stages=stages,
        hops_before={
            index: _Neighbour(stage.devices, stage.x_spec) for index, stage in stages.items() if stage.local.previous
        },
        hops_after={
            index: _Neighbour(stage.devices, stage.y_spec) for index, stage in stages.items() if stage.local.next
        },
        at_moment=lambda moment, step: None,
        recorder=NoRecorder(),
    )
    patience = Patience(abandoned=threading.Event(), limit_s=_LIMIT_S, on_waiting=lambda node: None)
    rows: dict[str, list[Row]] = {}
    executor.train(0, patience, lambda group, row: rows.setdefault(group, []).append(row))
    gradients = {group: np.add.reduce([row() for row in rows.pop(group)]) for group in tuple(rows)}
    for stage in stages.values():
        stage.update(gradients, 1.0, 1e-3)
    return metered.peak_bytes


class _Neighbour:
    """A hop whose other end sends as soon as it is asked, and fetches nothing before the next is there."""

    def __init__(self, devices: StageDevices, spec: jax.ShapeDtypeStruct) -> None:
        self._devices, self._spec = devices, spec
        self._received: dict[tuple[Payload, int], jax.Array] = {}
        self._sent: jax.Array | None = None

    def send(self, payload: Payload, step: int, item: int, array: jax.Array) -> None:
        self._sent = array

    def ask(self, payload: Payload, step: int, item: int) -> None:
        if (payload, item) not in self._received:
            zeros = np.zeros(self._spec.shape, self._spec.dtype)
            self._received[payload, item] = jax.device_put(zeros, self._devices.of_batch(zeros.shape))

    def is_here(self, payload: Payload, step: int, item: int) -> bool:
        return True

    def receive(self, payload: Payload, step: int, item: int, patience: Patience) -> jax.Array:
        return self._received.pop((payload, item))


class MeteredHome:
    """A `Home` that measures what its programs find in memory and what they add to it.

    What is there counts when a program is started, as if each ended before the next one is.

    Attributes:
        devices, stage_devices, fact: of the home.
        spans: of its own, with programs that measure.
        peak_bytes: most bytes of the first device so far, without those that were there before.
    """

    def __init__(self, home: Home) -> None:
        self.devices = home.devices
        self.spans: dict[Any, Any] = {}
        self.peak_bytes = 0
        self._home = home
        self.stage_devices, self.fact = home.stage_devices, home.fact
        self._before = _live_bytes(home.devices[0])

    def compiled(
        self,
        key: tuple[Hashable, ...],
        function: Callable[..., Any],
        arguments: Callable[[], Sequence[Any]],
        *,
        donate: tuple[int, ...] = (),
        out_shardings: Any = None,
    ) -> Any:
        """As `Home.compiled`."""
        program = self._home.compiled(key, function, arguments, donate=donate, out_shardings=out_shardings)
        return _Metered(program, self)

    def take(self, program: jax.stages.Compiled) -> None:
        """Measure what a program uses that is started now."""
        used = _live_bytes(self.devices[0]) - self._before + own_bytes(program) + result_bytes(program)
        self.peak_bytes = max(self.peak_bytes, used)


class _Metered:
    def __init__(self, program: jax.stages.Compiled, home: MeteredHome) -> None:
        self._program, self._home = program, home

    def __call__(self, *arguments: Any) -> Any:
        self._home.take(self._program)
        return self._program(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def _live_bytes(device: jax.Device) -> int:
    """Return the bytes of all arrays on a device that somebody holds."""
    buffers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in jax.live_arrays(device.platform)
        if not array.is_deleted()
        for shard in array.addressable_shards
        if shard.device == device
    }
    return sum(buffers.values())
