"""The home: the ordinary single-process JAX runtime of a worker, which survives every failure of somebody else.

Parameters, optimizer state and compiled programs live here. Programs are held as ahead-of-time compiled objects: no
cache clearing touches them, and they cannot compile by surprise in the middle of a step.
"""

import fcntl
import hashlib
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from oobleck_jax.config import RunConfig
from oobleck_jax.model import LayeredModel
from oobleck_jax.planning.profile import num_batch_shares


TensorDims: TypeAlias = Mapping[str, int]
"""The dim of each parameter that devices share out among them, as `Layer.tensor_dims`."""

_TURN_LIMIT_S = 120.0


class Home:
    """The devices of one node, and every program compiled for them.

    Attributes:
        devices: local devices, in the order that plans number them.
        num_compilations: programs compiled (or read from the persistent cache) so far.
        compile_s: seconds spent on them.
        spans: those made so far (span.py), by key.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],
        *,
        shared_cache: Path | None = None,
        compiler_options: Mapping[str, str | bool] | None = None,
        tensor_dims: TensorDims | None = None,
    ) -> None:
        """Take the devices.

        Args:
            shared_cache: folder of JAX's persistent compilation cache, if workers of this host share one. Of several
                that need the same program at the same time, one compiles it and the others read it.
            compiler_options: for XLA, besides those of XLA_FLAGS.
            tensor_dims: of the model, if the devices of a stage are to be tensor parallel.
        """
        self.devices = tuple(devices)
        self._shared_cache = shared_cache
        self._compiler_options = dict(compiler_options or {})
        self._tensor_dims = tensor_dims
        self.num_compilations = 0
        self.compile_s = 0.0
        self.spans: dict[Any, Any] = {}
        self._programs: dict[Hashable, jax.stages.Compiled] = {}
        self._lock = threading.Lock()  # of the dicts and counts; never held while anything is compiled
        self._compiling: dict[Hashable, threading.Lock] = {}

    def stage_devices(self, numbers: Iterable[int]) -> "StageDevices":
        """Return the devices with these numbers, as those of one stage."""
        return StageDevices([self.devices[number] for number in numbers], tensor_dims=self._tensor_dims)

    def compiled(
        self,
        key: Hashable,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        donate: tuple[int, ...] = (),
        out_shardings: Any = None,
    ) -> jax.stages.Compiled:
        """Return the program stored under `key`; compile it first if it is new.

        Args:
            key: everything the program depends on.
            function: what to compile; traced only if the key is new.
            arguments: pytrees of `jax.ShapeDtypeStruct` with shardings.
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
                self._programs[key] = self._compile(function, arguments, donate, out_shardings)
        return self._programs[key]

    def _compile(
        self, function: Callable[..., Any], arguments: Sequence[Any], donate: tuple[int, ...], out_shardings: Any
    ) -> jax.stages.Compiled:
        began_s = time.monotonic()
        options = {} if out_shardings is None else {"out_shardings": out_shardings}
        lowered = jax.jit(function, donate_argnums=donate, keep_unused=True, **options).lower(*arguments)
        with self._turn(lowered):
            program = lowered.compile(self._compiler_options)
        with self._lock:
            self.num_compilations += 1
            self.compile_s += time.monotonic() - began_s
        return program

    @contextmanager
    def _turn(self, lowered: jax.stages.Lowered) -> Iterator[None]:
        """Wait until no other process compiles this program; for a while, in case that process is stuck."""
        if self._shared_cache is None:
            yield
            return
        name = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:32]
        with (self._shared_cache / f"{name}.turn").open("a") as file:
            deadline_s = time.monotonic() + _TURN_LIMIT_S
            while not _try_lock(file.fileno()) and time.monotonic() < deadline_s:
                time.sleep(0.02)
            yield


def home_of(config: RunConfig, model: LayeredModel, *, shared_cache: Path | None) -> Home:
    """Return the home of a process that does the work of a node."""
    return Home(
        jax.local_devices()[: config.devices_per_node],
        shared_cache=shared_cache,
        tensor_dims=model.tensor_dims if config.tensor_parallel else None,
    )


def use_compilation_cache(folder: Path) -> None:
    """Let JAX keep every program that it compiles in a folder, and look there first."""
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
