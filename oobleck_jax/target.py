"""What one plans for, or replays: a model and its batch, and a kind of node that one need not have."""

import dataclasses
from pathlib import Path
from typing import Protocol

from models.presets import load_preset
from oobleck_jax.choose_remat import choose_remat
from oobleck_jax.config import Precision, Remat, RunConfig, check_config
from oobleck_jax.errors import PlanError
from oobleck_jax.launch import available_cores
from oobleck_jax.measured_profile import Profiler, cache_folder, place_of, read_profile
from oobleck_jax.planning.devices import Device, rates_of
from oobleck_jax.planning.estimate import DeviceRates, estimate_profile
from oobleck_jax.planning.profile import Profile
from oobleck_jax.propose import Proposer, estimated_profile, layer_sizes, memory_per_device
from oobleck_jax.session import software_versions


class Target(Protocol):
    """The flags that say so, as the scripts have them; None: the preset decides, or this machine."""

    @property
    def preset(self) -> str: ...
    @property
    def nodes(self) -> int | None: ...
    @property
    def fault_tolerance(self) -> int | None: ...
    @property
    def devices_per_node(self) -> int | None: ...
    @property
    def tensor_parallel(self) -> bool: ...
    @property
    def microbatch_size(self) -> int | None: ...
    @property
    def global_batch_size(self) -> int | None: ...
    @property
    def remat(self) -> str | None: ...
    @property
    def profile(self) -> str | None: ...
    @property
    def device(self) -> str | None: ...
    @property
    def precision(self) -> str | None: ...
    @property
    def device_memory_gib(self) -> float | None: ...
    @property
    def network_gbit(self) -> float: ...
    @property
    def network_latency_us(self) -> float: ...


def config_of(target: Target) -> RunConfig:
    """Return the preset with the flags that were given."""
    names = ("nodes", "fault_tolerance", "devices_per_node", "microbatch_size", "global_batch_size")
    given = {name: value for name in names if (value := getattr(target, name)) is not None}
    config = dataclasses.replace(load_preset(target.preset), **given)
    if target.tensor_parallel:
        config = dataclasses.replace(config, tensor_parallel=True)
    if target.remat is not None:
        config = dataclasses.replace(config, remat=Remat(target.remat))
    if target.precision is not None or target.device is not None:
        config = dataclasses.replace(config, precision=Precision(target.precision or Precision.MIXED))
    check_config(config)
    return config


def profile_of(target: Target, config: RunConfig, device: Device | None) -> Profile:
    """Return the costs: what --profile says, else those kept from runs on this machine, else estimates.

    They are of the policy that `Remat.AUTO` takes, which is said with the reason.
    """
    if config.remat is not Remat.AUTO:
        return _profile_with(target, config, device)
    proposer = Proposer(
        config=config, profile=estimated_profile(config), device_memory_bytes=memory_of(target, config, device)
    )
    proposer, reason = choose_remat(
        proposer, lambda remat: _profile_with(target, dataclasses.replace(config, remat=remat), device)
    )
    print(reason)  # noqa: T201
    return proposer.profile


def _profile_with(target: Target, config: RunConfig, device: Device | None) -> Profile:
    if target.profile not in (None, "estimate", "xla"):
        return read_profile(Path(target.profile), config)
    if device is None and target.profile == "xla":
        raise PlanError("--profile xla estimates costs on a --device; name one")
    if device is None:
        kept = kept_profile(target.preset, config) if target.profile is None else None
        return kept or estimated_profile(config)
    rates = rates_of(
        device,
        precision=config.precision,
        network_bytes_per_s=target.network_gbit * 1e9 / 8,
        network_latency_s=target.network_latency_us * 1e-6,
    )
    if target.profile == "xla":
        return _estimated_with_xla(config, rates)
    return estimate_profile(
        layer_sizes(config),
        microbatch_size=config.microbatch_size,
        precision=config.precision,
        remat=config.remat,
        rates=rates,
        devices_per_node=config.devices_per_node,
        tensor_parallel=config.tensor_parallel,
    )


def kept_profile(preset: str, config: RunConfig) -> Profile | None:
    """Return the profile that runs on this machine have measured, if there is one."""
    profiler = Profiler(
        compilation_cache=cache_folder(),
        place=place_of(num_nodes=config.nodes, cores=available_cores()),
        versions=software_versions(),
        limit_s=0.0,
        say=print,
    )
    return profiler.kept(preset, config)


def _estimated_with_xla(config: RunConfig, rates: DeviceRates) -> Profile:
    import jax  # imported here, because it takes its time

    jax.config.update("jax_platforms", "cpu")
    from oobleck_jax.execution.profiler import estimate_profile_with_xla

    return estimate_profile_with_xla(config, rates)


def memory_of(target: Target, config: RunConfig, device: Device | None) -> int:
    """Return the bytes that a stage may use of each device."""
    if target.device_memory_gib is not None:
        return int(target.device_memory_gib * 2**30)
    return memory_per_device(config.nodes * config.devices_per_node) if device is None else device.usable_memory_bytes
