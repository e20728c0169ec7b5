"""Profile a model's layers: measured on this machine, or estimated for a device that is not here.

    python scripts/profile.py --preset gpt-laptop --output laptop.json
    python scripts/profile.py --preset gpt3-175b --device h100 --devices-per-node 8 --output h100.json

Measured times are those of a node with one core and one compute thread, as nodes that share a machine have. Runs with
the same flags whose nodes have that use it; others measure for themselves, once.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from models.presets import load_preset
from oobleck_jax.config import Precision, Remat, RunConfig
from oobleck_jax.launch import available_cores
from oobleck_jax.measured_profile import Profiler, cache_folder, place_of
from oobleck_jax.planning.devices import device_named, rates_of
from oobleck_jax.planning.profile import Profile, profile_to_json
from oobleck_jax.script import make_room, run_script
from oobleck_jax.session import software_versions


_LIMIT_S = 600.0  # for measuring a large model


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this script."""

    preset: str = "gpt-laptop"  # the model, as for scripts/train.py
    device: str | None = None  # estimate for this device (a40, a100-80gb, h100, ...) instead of measuring here
    microbatch_size: int | None = None  # sequences per microbatch (default: the preset's)
    devices_per_node: int | None = None  # also profile 2, 4, ... devices of a node up to this (default: the preset's)
    tensor_parallel: bool = False  # devices of a stage share out its products, not the samples
    precision: Literal["float32", "bfloat16", "mixed"] | None = None  # as for scripts/train.py (default: the preset's)
    remat: Literal["none", "dots", "layer", "stage"] | None = None  # as for scripts/train.py (default: the preset's)
    network_gbit: float = 100.0  # peak rate of the network of a node, in each direction, for --device
    network_latency_us: float = 10.0  # latency of the network, for --device
    output: Path | None = None  # where to write the profile (JSON)


def main(arguments: Arguments) -> int:
    """Profile, print a table, and write the JSON."""
    make_room(arguments.output, flag="--output")
    config = _config(arguments)
    profile = _measured(config, arguments.preset) if arguments.device is None else _estimated(config, arguments)
    _show(profile)
    if arguments.output is not None:
        arguments.output.write_bytes(profile_to_json(profile) + b"\n")
        print(f"written to {arguments.output}")
    return 0


def _config(arguments: Arguments) -> RunConfig:
    config = load_preset(arguments.preset)
    given = {
        "microbatch_size": arguments.microbatch_size,
        "devices_per_node": arguments.devices_per_node,
        "tensor_parallel": arguments.tensor_parallel or None,
        "precision": None if arguments.precision is None else Precision(arguments.precision),
        "remat": None if arguments.remat is None else Remat(arguments.remat),
    }
    return replace(config, **{name: value for name, value in given.items() if value is not None})


def _measured(config: RunConfig, preset: str) -> Profile:
    cores = available_cores()
    profiler = Profiler(
        compilation_cache=cache_folder(),
        place=place_of(num_nodes=max(len(cores), 2), cores=cores),
        versions=software_versions(),
        limit_s=_LIMIT_S,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    return profiler.measure(preset, config)


def _estimated(config: RunConfig, arguments: Arguments) -> Profile:
    assert arguments.device is not None
    rates = rates_of(
        device_named(arguments.device),
        precision=config.precision,
        network_bytes_per_s=arguments.network_gbit * 1e9 / 8,
        network_latency_s=arguments.network_latency_us * 1e-6,
    )
    import jax

    jax.config.update("jax_platforms", "cpu")
    from oobleck_jax.execution.profiler import estimate_profile_with_xla

    return estimate_profile_with_xla(config, rates)


def _show(profile: Profile) -> None:
    table = Table(title=f"{profile.device}, {profile.source}; microbatches of {profile.microbatch_size}")
    for column in (
        "kind",
        "layers",
        "devices",
        "forward ms",
        "backward ms",
        "kept MB",
        "temporary MB",
        "parameters MB",
    ):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind in dict.fromkeys(layer.kind for layer in profile.layers):
        members = [layer for layer in profile.layers if layer.kind == kind]
        for cost in members[0].costs:
            table.add_row(
                kind,
                str(len(members)),
                str(cost.num_devices),
                f"{1e3 * cost.forward_s:.3f}",
                f"{1e3 * cost.backward_s:.3f}",
                f"{cost.residual_bytes / 1e6:.2f}",
                f"{cost.temporary_bytes / 1e6:.1f}",
                f"{members[0].state.parameter_bytes / 1e6:.2f}",
            )
    Console().print(table)
    for name, rate in (("link", profile.link), ("sum", profile.sum)):
        print(f"{name}: {rate.bytes_per_s / 1e6:,.0f} MB/s, {1e3 * rate.latency_s:.2f} ms latency")
    print(f"update, once per step: {1e9 * profile.update_s_per_byte:.2f} ms per MB of gradients")


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=__doc__)))
