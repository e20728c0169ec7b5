"""Everything that is private to jax and jaxlib, and nothing else: the rest of the package uses their public API only.

What is private here, and why it is needed:

- The coordination service and its client (`jaxlib._jax.get_distributed_runtime_*`): `jax.distributed` starts the
  service inside a worker and ties it to the only runtime of the process; a fabric is made anew for each generation.
- Gloo and `make_cpu_client`: a second CPU client, beside the home runtime of the process.
- `jax.experimental.transfer`: public by name, experimental by nature.
- `jax.Array.is_ready`: the only way to wait with a deadline.
- The object that `jax.vjp` returns: residuals that do not carry the primals.
- `jax.experimental.serialize_executable`: compiled programs that are kept on disk; and the settings of JAX's own cache
  for one thread, because what comes out of it cannot be serialized again.

The functions import what they need when they are called, because the coordinator only hosts coordination services and
should not pay for all of jax (105 MB instead of 170).

Log lines of the C++ side are silenced by whoever starts the process, with `TF_CPP_MIN_LOG_LEVEL=3` in its environment.
"""

import contextlib
import importlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from oobleck_jax.errors import UnsupportedJax


OLDEST_JAX = (0, 10)  # the first with everything below, and the last for Python 3.11

# The C++ client of the coordination service aborts the whole process when a wait of its own runs out or a heartbeat is
# missed, so nothing in it may ever run out: our deadlines are kept outside. In seconds.
_NEVER_S = 10 * 365 * 24 * 3600


def check_versions() -> None:
    """Refuse a jaxlib that is too old.

    Raises:
        UnsupportedJax: with the version and what to install.
    """
    version: str = importlib.import_module("jaxlib.version").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_JAX:
        raise UnsupportedJax(f"jaxlib {version} is too old; install jax>={OLDEST_JAX[0]}.{OLDEST_JAX[1]}")


# ------------------------------------------------------------------------------------ coordination service


class CoordinationService:
    """JAX's coordination service of one generation, through which the members of a fabric meet.

    Attributes:
        address: host:port where it listens.
    """

    def __init__(self, service: Any, address: str) -> None:
        self._service = service
        self.address = address

    def close(self) -> None:
        """Stop the service. Blocks for up to 5 s while a client still waits in it.

        Clients that are attached at this moment abort their process: close a generation's service only when every
        member has detached from it or is dead, that is, when a later generation is running.
        """
        service, self._service = self._service, None
        if service is not None:
            service.shutdown()


def start_coordination_service(bind_address: str, num_nodes: int) -> CoordinationService:
    """Start the coordination service of a generation in this process, without importing jax.

    Args:
        bind_address: host:port to listen on; port 0 takes a free one.
        num_nodes: members of the generation; all of them must connect before any gets through.

    Raises:
        OSError: the port is taken, or the host is not of this machine.
    """
    check_versions()
    start = _require(_jaxlib(), "get_distributed_runtime_service")
    with _reserved(bind_address) as address:
        service = start(
            address,
            num_nodes,
            heartbeat_timeout=_NEVER_S,
            cluster_register_timeout=_NEVER_S,
            shutdown_timeout=1,
            recoverable=True,  # no barrier at shutdown; the death of a member does not spread to the others
        )
    return CoordinationService(service, address)


class CoordinationClient:
    """A member's connection to the coordination service.

    As long as it is connected, the end of the service aborts this process (the callback that could prevent it cannot be
    given from Python: its argument has no Python type, and the call ends in `std::bad_cast`).
    """

    def __init__(self, address: str, rank: int) -> None:
        make = _require(_jaxlib(), "get_distributed_runtime_client")
        self.client = make(
            address,
            rank,
            init_timeout=_NEVER_S,
            heartbeat_timeout=_NEVER_S,
            shutdown_timeout=1,
            use_compression=True,
            shutdown_on_destruction=True,
        )

    def connect(self) -> None:
        """Block until all members of the generation have connected, for ever if one does not."""
        self.client.connect()

    def shutdown(self) -> None:
        """Leave. Another thread that is making a CPU client at this moment gets an error; one in `connect` stays."""
        self.client.shutdown()


def make_fabric_client(
    coordination: CoordinationClient, *, rank: int, num_nodes: int, hostname: str, channels: int
) -> Any:
    """Make a CPU client whose devices span the members of a generation. Blocks until all members make theirs.

    Args:
        hostname: name or address of this host under which the other members reach it.
        channels: devices that each member brings.
    """
    collectives = _require(_jaxlib(), "make_gloo_tcp_collectives")
    make_client = _require(importlib.import_module("jaxlib.xla_client"), "make_cpu_client")
    return make_client(
        asynchronous=True,
        distributed_client=coordination.client,
        node_id=rank,
        num_nodes=num_nodes,
        collectives=collectives(distributed_client=coordination.client, hostname=hostname),
        num_devices=channels,
    )


# ----------------------------------------------------------------------------------- arrays and their transfer


def is_ready(array: Any) -> bool:
    """Whether a `jax.Array` has its value, or is an error, by now. Never blocks."""
    return _require(array, "is_ready")()


def start_transfer_server(client: Any, *, address: str, transport_addresses: Sequence[str], chunk_bytes: int) -> Any:
    """Start a transfer server on a client (of `device.client`).

    Args:
        address: host:port to listen on; port 0 takes a free one.
        transport_addresses: host:port of the data sockets; one thread sends and one receives for each.
        chunk_bytes: arrays travel in chunks of at most so much; up to 24 staging buffers of this size are used.
    """
    start = _require(importlib.import_module("jax.experimental.transfer"), "start_transfer_server")
    return start(client, address, list(transport_addresses), transfer_size=chunk_bytes)


# ------------------------------------------------------------------------------------------------ residuals


def strip_residuals(vjp: Any) -> Any:
    """Return the function that `jax.vjp` gave without its primals, to be returned from a jitted forward pass.

    A jitted function that returns `vjp` as it is copies all parameters into its outputs. The primals are given back by
    `restore_residuals`; what says that one is not needed stays.
    """
    primals: list[Any] = _require(vjp, "args_res")
    return replace(vjp, args_res=[primal if _is_not_needed(primal) else None for primal in primals])


def needed_primals(stripped: Any) -> tuple[bool, ...]:
    """Return which primals a stripped `vjp` needs back."""
    return tuple(not _is_not_needed(primal) for primal in _require(stripped, "args_res"))


def restore_residuals(vjp: Any, primals: Sequence[Any]) -> Any:
    """Return a stripped `vjp` with live primals, ready to be called.

    Args:
        vjp: from `strip_residuals`, possibly through a jitted function.
        primals: what the forward pass was differentiated at, in the same order; anything where it is not needed.
    """
    stripped: list[Any] = _require(vjp, "args_res")
    assert len(stripped) == len(primals), f"the forward pass had {len(stripped)} primals, {len(primals)} are given"
    both = zip(stripped, primals, strict=True)
    return replace(vjp, args_res=[old if _is_not_needed(old) else primal for old, primal in both])


# -------------------------------------------------------------------------------------------------- private


@contextlib.contextmanager
def _reserved(bind_address: str) -> Iterator[str]:
    """Keep others from a port while a gRPC server is started on it, which crashes the process if the port is taken."""
    host, _, port = bind_address.rpartition(":")
    family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does, so that it can share the port
        holder.bind(place)
        yield f"{host}:{holder.getsockname()[1]}"


def _is_not_needed(primal: Any) -> bool:
    return type(primal).__name__ == "NotNeeded"


def _jaxlib() -> ModuleType:
    return importlib.import_module("jaxlib._jax")


def _require(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        version = importlib.import_module("jaxlib.version").__version__
        where = getattr(owner, "__name__", type(owner).__name__)
        raise UnsupportedJax(
            f"jaxlib {version} has no `{where}.{name}`, which this package needs; install a jax from "
            f"{OLDEST_JAX[0]}.{OLDEST_JAX[1]} on that has it, such as jax==0.12.0"
        )
    return found


# ------------------------------------------------------------------------------------ programs on disk


def serialized(program: Any) -> Any:
    """Return a compiled program as something to pickle."""
    shardings = importlib.import_module("jax").tree.leaves((program.input_shardings, program.output_shardings))
    numbers = {device.id for sharding in shardings for device in sharding.device_set}
    return numbers, importlib.import_module("jax.experimental.serialize_executable").serialize(program)


def deserialized(found: Any) -> Any:
    """Return a program (`jax.stages.Compiled`) for local devices with the numbers of those it was compiled for."""
    numbers, content = found
    devices = [device for device in importlib.import_module("jax").local_devices() if device.id in numbers]
    load = importlib.import_module("jax.experimental.serialize_executable").deserialize_and_load
    return load(*content, backend=devices[0].client, execution_devices=devices)


@contextlib.contextmanager
def kept_out_of_cache() -> Iterator[None]:
    """Compile, in this thread, without leaving anything in JAX's persistent cache.

    A program that comes out of that cache and is serialized again is no longer whole (XLA for CPUs: "Function ... not
    found" when it runs), so programs that are to be serialized must not get into it.
    """
    setting = _require(importlib.import_module("jax._src.config"), "persistent_cache_min_compile_time_secs")
    with setting(float("inf")):
        yield
