"""The home: the ordinary single-process JAX runtime of a worker, which survives every failure of somebody else.

Parameters, optimizer state and compiled programs live here. Programs are held as ahead-of-time compiled objects: no
cache clearing touches them, and they cannot compile by surprise in the middle of a step.
"""

import re
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from oobleck_jax.config import RunConfig
from oobleck_jax.execution.program_store import ProgramStore
from oobleck_jax.kept_files import remove_unused
from oobleck_jax.model import LayeredModel
from oobleck_jax.planning.profile import num_batch_shares


TensorDims: TypeAlias = Mapping[str, int]
"""The dim of each parameter that devices share out among them, as `Layer.tensor_dims`."""

_PROGRAMS_OF_JAX = re.compile(r".+-[0-9a-f]{64}-cache")


class Home:
    """The devices of one node, and every program compiled for them.

    Attributes:
        devices: local devices, in the order that plans number them.
        num_compilations: programs compiled (or read from the store) so far.
        spans: those made so far (span.py), by key.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],
        *,
        store: ProgramStore | None = None,
        compiler_options: Mapping[str, str | bool] | None = None,
        tensor_dims: TensorDims | None = None,
    ) -> None:
        """Take the devices.

        Args:
            store: of programs that workers of this host share.
            compiler_options: for XLA, besides those of XLA_FLAGS.
            tensor_dims: of the model, if the devices of a stage are to be tensor parallel.
        """
        self.devices = tuple(devices)
        self._store = store
        self._compiler_options = dict(compiler_options or {})
        self._tensor_dims = tensor_dims
        self.num_compilations = 0
        self.spans: dict[Any, Any] = {}
        self._programs: dict[Hashable, jax.stages.Compiled] = {}
        self._lock = threading.Lock()  # of the dicts and counts; never held while anything is compiled
        self._compiling: dict[Hashable, threading.Lock] = {}

    def stage_devices(self, numbers: Iterable[int]) -> "StageDevices":
        """Return the devices with these numbers, as those of one stage."""
        return StageDevices([self.devices[number] for number in numbers], tensor_dims=self._tensor_dims)

    def compiled(
        self,
        key: tuple[Hashable, ...],
        function: Callable[..., Any],
        arguments: Callable[[], Sequence[Any]],
        *,
        donate: tuple[int, ...] = (),
        out_shardings: Any = None,
    ) -> jax.stages.Compiled:
        """Return the program stored under `key`; compile it first if it is new.

        Args:
            key: everything the program depends on, besides the origin of the store; the devices, too.
            function: what to compile; traced only if the key is new here and in the store.
            arguments: makes pytrees of `jax.ShapeDtypeStruct` with shardings; called when the function is traced.
            donate: positions of arguments whose memory the program may reuse.
            out_shardings: shardings of the results, as in `jax.jit`; None lets XLA choose.
        """
        program = self._programs.get(key)
        if program is not None:
            return program
        with self._lock:
            compiling = self._compiling.setdefault(key, threading.Lock())
        # Two threads that need the same program must not both compile it, but who needs another one does not wait: a
        # recovery must not stand behind what is compiled for later.
        with compiling:
            if key not in self._programs:
                self._programs[key] = self._compile(key, function, arguments, donate, out_shardings)
        return self._programs[key]

    def fact(self, key: Hashable, find: Callable[[], Any]) -> Any:
        """Return what is known under a key, a plain value that takes tracing to find out; not None."""
        found = None if self._store is None else self._store.fact(key)
        if found is None:
            found = find()
            if self._store is not None:
                self._store.keep_fact(key, found)
        return found

    def _compile(
        self,
        key: tuple[Hashable, ...],
        function: Callable[..., Any],
        arguments: Callable[[], Sequence[Any]],
        donate: tuple[int, ...],
        out_shardings: Any,
    ) -> jax.stages.Compiled:
        options = {} if out_shardings is None else {"out_shardings": out_shardings}
        jitted = jax.jit(function, donate_argnums=donate, keep_unused=True, **options)
        if self._store is None:
            program = jitted.lower(*arguments()).compile(self._compiler_options)
        else:
            program = self._store.program(key, lambda: jitted.lower(*arguments()), self._compiler_options)
        with self._lock:
            self.num_compilations += 1
        return program


def home_of(config: RunConfig, model: LayeredModel, store: ProgramStore | None) -> Home:
    """Return the home of a process that does the work of a node."""
    return Home(
        jax.local_devices()[: config.devices_per_node],
        store=store,
        tensor_dims=model.tensor_dims if config.tensor_parallel else None,
    )


def use_compilation_cache(folder: Path) -> None:
    """Let JAX keep the small programs that it compiles unasked in a part of a folder, and look there first.

    What nobody used for a long time is removed here: with `jax_compilation_cache_max_size` JAX 0.10 takes a lock of the
    folder for each program, and keeps none if one is there from the time before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_unused(folder / "jax", _PROGRAMS_OF_JAX)
    jax.config.update("jax_compilation_cache_dir", str(folder / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class StageDevices:
    """The devices of one stage, and how arrays lie on them.

    Parameters are sharded over their largest dim that the device count divides, activations and tokens over the batch
    (fully sharded data parallel). Tensor parallel, every device has the whole batch, and parameters are sharded over
    the dims that the model names; what it does not name is sharded as above. One device has everything whole.
    """

    def __init__(self, devices: Sequence[jax.Device], *, tensor_dims: TensorDims | None = None) -> None:
        self.devices = tuple(devices)
        self._mesh = Mesh(np.array(self.devices), ("shard",)) if len(self.devices) > 1 else None
        self._tensor_dims = tensor_dims

    @property
    def key(self) -> tuple[int, ...]:
        """What programs for these devices are keyed by."""
        return tuple(device.id for device in self.devices)

    @property
    def replicated(self) -> jax.sharding.Sharding:
        return self._sharding(P())

    def num_batch_shards(self, batch_size: int, num_devices: int) -> int:
        """Return into how many parts `num_devices` devices of a stage of this run share a batch."""
        return num_batch_shares(batch_size, num_devices, tensor_parallel=self._tensor_dims is not None)

    def of_batch(self, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        """Return the sharding of an array whose first dim is the batch."""
        is_shared = bool(shape) and self.num_batch_shards(shape[0], len(self.devices)) > 1
        return self._sharding(P("shard") if is_shared else P())

    def of_rows(self, num_elements: int) -> jax.sharding.Sharding:
        """Return the sharding of gradients as rows `[N, num_elements]`; whole where the devices do not divide them."""
        is_shared = len(self.devices) > 1 and num_elements % len(self.devices) == 0
        return self._sharding(P(None, "shard") if is_shared else P())

    def shardings_of_parameters(self, tree: Any, *, num_stacked_dims: int) -> Any:
        """Return the shardings of parameters or of what goes with them; the first dims are layers and stay whole."""
        return jax.tree.map_with_path(lambda path, leaf: self._of_parameter(path, leaf.shape, num_stacked_dims), tree)

    def _of_parameter(self, path: Any, shape: tuple[int, ...], num_stacked_dims: int) -> jax.sharding.Sharding:
        candidates = [dim for dim in range(num_stacked_dims, len(shape)) if shape[dim] % len(self.devices) == 0]
        if not candidates:
            return self._sharding(P())
        largest = max(candidates, key=lambda dim: (shape[dim], -dim))
        name = ".".join(str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey))
        dim = num_stacked_dims + (self._tensor_dims or {}).get(name, largest - num_stacked_dims)
        return self._sharding(P(*[None] * (dim if dim in candidates else largest), "shard"))

    def batch_spec(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.of_batch(shape))

    def replicated_spec(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    def parameter_specs(self, tree: Any, *, num_stacked_dims: int) -> Any:
        """Add shardings to a pytree of shapes."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            tree,
            self.shardings_of_parameters(tree, num_stacked_dims=num_stacked_dims),
        )

    def _sharding(self, spec: P) -> jax.sharding.Sharding:
        return SingleDeviceSharding(self.devices[0]) if self._mesh is None else NamedSharding(self._mesh, spec)
