"""Plan a run without starting it, for machines that one need not have.

    python scripts/plan.py --preset gpt3-6.7b --device a40 --nodes 30 --fault-tolerance 3
    python scripts/plan.py --preset gpt-laptop --nodes 4 --fault-tolerance 1

Costs come from `--profile FILE`. Without it, costs on a `--device` are estimated in closed form at once (`--profile
estimate`), or from XLA's analysis of the programs in some ten seconds (`--profile xla`; within a tenth of the closed
form for GPTs, so worth it for other models). Without `--device`, they are what runs on this machine
have measured, or rough estimates where there was none.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import tyro
from rich.console import Console

from oobleck_jax.config import RunConfig, ScheduleKind
from oobleck_jax.errors import ConfigError
from oobleck_jax.launch import available_cores
from oobleck_jax.plan_report import Report, Request, make_report
from oobleck_jax.plan_tables import print_report
from oobleck_jax.planning.devices import device_named
from oobleck_jax.planning.templates import make_templates
from oobleck_jax.propose import layer_sizes, schedule_of
from oobleck_jax.script import make_room, make_room_for_picture, run_script
from oobleck_jax.target import config_of, memory_of, profile_of


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to plan for. Flags that are left out come from the preset."""

    preset: str = "gpt-laptop"  # the model and its batch: a name, or FILE.py:FUNCTION
    nodes: int | None = None  # nodes
    fault_tolerance: int | None = None  # f: losses of nodes that must be survivable at once
    devices_per_node: int | None = None  # devices of each node
    tensor_parallel: bool = False  # devices of a stage share out its products, not the samples
    microbatch_size: int | None = None  # sequences per microbatch
    global_batch_size: int | None = None  # sequences per step
    remat: Literal["none", "dots", "layer", "stage", "auto"] | None = None  # what forward keeps for backward

    schedule: Literal["auto", "1f1b", "interleaved", "zb-h1"] | None = None  # order of a pipeline's work

    device: str | None = None  # plan for this device (a40, h100, ...), with estimated costs; without: for this machine
    profile: str | None = None  # costs: a file of scripts/profile.py, "estimate", or "xla" (default: see below)
    precision: Literal["float32", "bfloat16", "mixed"] | None = None  # default: mixed on a --device, else the preset's
    device_memory_gib: float | None = None  # memory of a device (default: what --device has, less a reserve)
    network_gbit: float = 100.0  # peak rate of the network of a node, in each direction, for --device
    network_latency_us: float = 10.0  # latency of the network, for --device

    json: Path | None = None  # write everything into this file
    plot: Path | None = None  # draw the plan and its schedule into this file (.png, .pdf, .svg)


def main(arguments: Arguments) -> int:
    """Plan, print, write; return the exit code."""
    make_room(arguments.json, flag="--json")
    make_room_for_picture(arguments.plot, flag="--plot")
    console = Console(soft_wrap=False)
    try:
        config = config_of(arguments)
        if arguments.schedule is not None:
            config = replace(config, schedule=ScheduleKind(arguments.schedule))
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
        schedule=schedule_of(config, shares_cores=device is None and len(available_cores()) < config.nodes),
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


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=__doc__)))
