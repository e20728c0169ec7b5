"""Plan a run without starting it, for machines that one need not have.

python scripts/plan.py --preset gpt3-6.7b --device a40 --nodes 30 --fault-tolerance 3
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import tyro
from rich.console import Console

from models.presets import load_preset
from oobleck_jax.config import Remat, RunConfig, check_config
from oobleck_jax.errors import ConfigError, PlanError
from oobleck_jax.plan_report import Report, Request, make_report
from oobleck_jax.plan_tables import print_report
from oobleck_jax.planning.devices import Device, device_named, rates_of
from oobleck_jax.planning.estimate import LAPTOP_RATES, estimate_profile
from oobleck_jax.planning.profile import Profile, profile_from_json
from oobleck_jax.planning.templates import make_templates
from oobleck_jax.propose import layer_sizes, memory_per_device


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to plan for. Flags that are left out come from the preset."""

    preset: str = "gpt-laptop"  # the model and its batch: a name, or FILE.py:FUNCTION
    nodes: int | None = None  # nodes
    fault_tolerance: int | None = None  # f: losses of nodes that must be survivable at once
    devices_per_node: int | None = None  # devices of each node
    microbatch_size: int | None = None  # sequences per microbatch
    global_batch_size: int | None = None  # sequences per step
    remat: Literal["none", "dots", "layer"] | None = None  # what the forward pass keeps for the backward pass

    device: str | None = None  # plan for this device (a40, h100, ...), with estimated costs; without: a core of a CPU
    profile: Path | None = None  # measured costs, from scripts/profile.py, instead of estimated ones
    precision: Literal["bfloat16", "float32"] = "bfloat16"  # of activations on --device
    device_memory_gib: float | None = None  # memory of a device (default: what --device has, less a reserve)
    network_gbit: float = 100.0  # peak rate of the network of a node, in each direction, for --device
    network_latency_us: float = 10.0  # latency of the network, for --device

    json: Path | None = None  # write everything into this file
    plot: Path | None = None  # draw the plan and its schedule into this file (.png, .pdf, .svg)


def main(arguments: Arguments) -> int:
    """Plan, print, write; return the exit code."""
    console = Console(soft_wrap=False)
    try:
        config = config_of(arguments)
        report = report_of(arguments, config)
    except ConfigError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print_report(report, console)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if arguments.plot is not None:
        from oobleck_jax.plan_plot import draw_plan  # imported here, because matplotlib takes its time

        draw_plan(report, arguments.plot)
        console.print(f"drawn: {arguments.plot}")
    return 0


def config_of(arguments: Arguments) -> RunConfig:
    """Return the preset with the flags that were given."""
    names = ("nodes", "fault_tolerance", "devices_per_node", "microbatch_size", "global_batch_size")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    config = dataclasses.replace(load_preset(arguments.preset), **given)
    if arguments.remat is not None:
        config = dataclasses.replace(config, remat=Remat(arguments.remat))
    check_config(config)
    return config


def report_of(arguments: Arguments, config: RunConfig) -> Report:
    """Plan for the configuration."""
    device = None if arguments.device is None else device_named(arguments.device)
    profile = profile_of(arguments, config, device)
    templates = make_templates(
        profile,
        max_nodes=min(config.nodes, profile.num_layers),
        devices_per_node=config.devices_per_node,
        num_microbatches=config.num_microbatches,
        device_memory_bytes=memory_of(arguments, config, device),
    )
    flops_per_sequence = 3 * sum(size.forward_flops for size in layer_sizes(config))
    return make_report(
        templates,
        Request(
            name=arguments.preset,
            nodes=config.nodes,
            fault_tolerance=config.fault_tolerance,
            microbatch_size=config.microbatch_size,
            tokens_per_step=config.tokens_per_step,
            flops_per_step=float(flops_per_sequence * config.global_batch_size),
            peak_flops_per_s=None if device is None else device.peak_flops_per_s(profile.precision),
        ),
    )


def profile_of(arguments: Arguments, config: RunConfig, device: Device | None) -> Profile:
    """Return the measured profile, or an estimated one."""
    if arguments.profile is not None:
        profile = profile_from_json(arguments.profile.read_bytes())
        if profile.microbatch_size != config.microbatch_size or profile.num_layers != config.model.num_layers:
            raise PlanError(
                f"--profile {arguments.profile} is of {profile.num_layers} layers and microbatches of "
                f"{profile.microbatch_size}, but the run has {config.model.num_layers} layers and microbatches of "
                f"{config.microbatch_size}; profile again"
            )
        return profile
    rates = LAPTOP_RATES
    if device is not None:
        rates = rates_of(
            device,
            precision=arguments.precision,
            network_bytes_per_s=arguments.network_gbit * 1e9 / 8,
            network_latency_s=arguments.network_latency_us * 1e-6,
        )
    return estimate_profile(
        layer_sizes(config),
        microbatch_size=config.microbatch_size,
        precision="float32" if device is None else arguments.precision,
        remat=config.remat,
        rates=rates,
        devices_per_node=config.devices_per_node,
    )


def memory_of(arguments: Arguments, config: RunConfig, device: Device | None) -> int:
    """Return the bytes that a stage may use of each device."""
    if arguments.device_memory_gib is not None:
        return int(arguments.device_memory_gib * 2**30)
    return memory_per_device(config.nodes * config.devices_per_node) if device is None else device.usable_memory_bytes


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
