"""The measured profile of a run: found where it was kept, or measured once by a process of its own.

A profile holds for what changes the cost of a layer: model, microbatch, precision, remat policy, devices; the processor
and its share of cores; the versions of what compiles it. A digest of all these names the file, in a folder beside the
compilation cache; whoever adds one removes those that nobody used for months. Nothing here imports jax.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from models.presets import config_to_json, source_digest
from oobleck_jax.config import RunConfig
from oobleck_jax.elastic.child import child_command
from oobleck_jax.elastic.worker_process import MALLOC, worker_environment
from oobleck_jax.errors import PlanError
from oobleck_jax.kept_files import mark_used, remove_unused
from oobleck_jax.launch import about_cores, place_at_start
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.profile import Profile, profile_from_json
from oobleck_jax.propose import estimated_profile


ESTIMATE = "estimate"
COMMAND = (sys.executable, "-m", "oobleck_jax.profile_process")
LIMIT_S = 120.0  # most of it for compiling, on a machine that is busy
_NAMES = re.compile(r".+-[0-9a-f]{16}\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where nodes of a run compute on this machine.

    Attributes:
        cores: of the first node; empty: not pinned.
        num_threads: compute threads of a node; 0: as many as it likes.
        peer_core: of another node; None: not pinned.
    """

    cores: tuple[int, ...]
    num_threads: int
    peer_core: int | None


def place_of(*, num_nodes: int, cores: Sequence[int]) -> Place:
    """Return the place of the first of so many nodes, and of one beside it."""
    own, num_threads = place_at_start(NodeId(0), num_nodes=num_nodes, cores=cores)
    beside, _ = place_at_start(NodeId(min(1, num_nodes - 1)), num_nodes=num_nodes, cores=cores)
    return Place(cores=own, num_threads=num_threads, peer_core=beside[0] if beside else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiler:
    """How profiles are measured on this machine, and where they are kept.

    Attributes:
        compilation_cache: of the workers; profiles are kept in a folder beside it.
        place: of the nodes.
        versions: of what compiles and measures.
        limit_s: a measurement that takes longer is given up.
        say: takes what a user should read, line by line.
        command: the program that measures.
    """

    compilation_cache: Path
    place: Place
    versions: Mapping[str, str]
    limit_s: float
    say: Callable[[str], None]
    command: tuple[str, ...] = COMMAND

    def profile(self, preset: str, config: RunConfig) -> Profile:
        """Return the profile that is kept, else measure and keep it; where that fails, say so and estimate."""
        path = self.path(preset, config)
        if (kept := _read(path)) is not None:
            return kept
        self.say(f"measuring the layers of {preset} (once; kept in {path.parent})")
        try:
            return self.measure(preset, config)
        except PlanError as error:
            self.say(
                f"WARNING: {error}; the plan is made from rough estimates. --profile {ESTIMATE} does that at once, "
                "--profile FILE takes a profile of scripts/profile.py, --patience allows more time"
            )
            return estimated_profile(config)

    def measure(self, preset: str, config: RunConfig) -> Profile:
        """Measure a profile and keep it.

        Raises:
            PlanError: that failed, or took too long.
        """
        try:
            return self._measure(preset, config, self.path(preset, config))
        except (OSError, subprocess.SubprocessError, PlanError) as error:
            raise PlanError(f"the layers of {preset} could not be measured ({_reason(error, self.limit_s)})") from error

    def kept(self, preset: str, config: RunConfig) -> Profile | None:
        """Return the profile that is kept, if there is one."""
        return _read(self.path(preset, config))

    def path(self, preset: str, config: RunConfig) -> Path:
        """Return where the profile of a configuration is kept."""
        described = {
            "model": [type(config.model).__qualname__, msgspec.to_builtins(config.model), source_digest(preset)],
            "microbatch": [config.microbatch_size, config.sequence_length, config.precision, config.remat],
            "devices": [config.devices_per_node, config.tensor_parallel, device_kind(), self.place.num_threads],
            "environment": [os.environ.get(name, "") for name in ("JAX_PLATFORMS", "XLA_FLAGS")],
            "malloc": {name: os.environ.get(name, value) for name, value in MALLOC.items()},
            "versions": dict(self.versions),
            "times": "medians, at the pace of a stage; rows of gradients shared out over devices",
        }
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
        name = Path(preset.rpartition(":")[0]).stem if ":" in preset else preset
        folder = self.compilation_cache.with_name(f"{self.compilation_cache.name}-profiles")
        return folder / f"{name}-{digest}.json"

    def _measure(self, preset: str, config: RunConfig, path: Path) -> Profile:
        """Measure in another process, pinned as a worker is; the file appears as a whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unused(path.parent, _NAMES)
        place = self.place
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            output = Path(folder) / path.name
            command = [*self.command, "--output", str(output), "--compilation-cache", str(self.compilation_cache)]
            if place.peer_core is not None:
                command += ["--peer-core", str(place.peer_core)]
            subprocess.run(
                child_command(command, cores=place.cores),
                input=config_to_json(preset, config),
                env=worker_environment(os.environ, num_threads=place.num_threads, num_devices=config.devices_per_node),
                timeout=self.limit_s,
                check=True,
                capture_output=True,
                text=True,
            )
            profile = profile_from_json(output.read_bytes())
            output.replace(path)
        self.say(f"measured in {time.monotonic() - began_s:.1f} s: {_summary(profile)}")
        return profile


def cache_folder() -> Path:
    """Return where programs compiled on this machine are kept, unless --compilation-cache says otherwise."""
    return Path.home() / ".cache" / "oobleck_jax" / socket.gethostname()


def read_profile(path: Path, config: RunConfig) -> Profile:
    """Return the profile in a file, which must be of the configuration's model, microbatches and devices.

    Raises:
        PlanError: it cannot be read, is no profile, or one of something else.
    """
    try:
        profile = profile_from_json(path.read_bytes())
    except OSError as error:
        raise PlanError(f"--profile {path}: {error.strerror}") from None
    except PlanError as error:
        raise PlanError(f"--profile {path} is {error}") from None
    found, wanted = (
        f"{of.num_layers} layers, microbatches of {costs.microbatch_size}, precision {costs.precision} and remat "
        f"{costs.remat}{', tensor parallel' if costs.tensor_parallel else ''}"
        for of, costs in ((profile, profile), (config.model, config))
    )
    if found != wanted:
        raise PlanError(f"--profile {path} is of {found}, but the run has {wanted}; profile again")
    return profile


def device_kind() -> str:
    """Return what computes on this machine: the processor, and NVIDIA's devices if there are any."""
    names = [platform.machine(), f"{os.cpu_count()} cores", *filter(None, [about_cores("model name")])]
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            names.append(path.read_text(encoding="utf-8", errors="replace").partition("\n")[0])
    return ", ".join(names)


def _read(path: Path) -> Profile | None:
    """Return a kept profile; one that cannot be read is as good as none."""
    try:
        profile = profile_from_json(path.read_bytes())
    except (OSError, PlanError):
        return None
    mark_used(path)
    return profile


def _summary(profile: Profile) -> str:
    kinds = {layer.kind: layer.costs[0] for layer in profile.layers}
    costs = (f"{kind} {1e3 * (cost.forward_s + cost.backward_s):.3g} ms" for kind, cost in kinds.items())
    return f"{', '.join(costs)} per microbatch"


def _reason(error: Exception, limit_s: float) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took more than {limit_s:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = str(error.stderr or "").strip().splitlines()
        return f"exit code {error.returncode}: {lines[-1] if lines else 'no output'}"
    return str(error)
