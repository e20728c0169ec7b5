"""Time the planner on problems far larger than this machine.

    python scripts/bench_planner.py --json bench.json

The model has 96 layers: embedding, 94 blocks of width 2048, head. Every number is the median of several runs; nothing
is cached between them.

    templates_96x64_s     templates for 2..64 nodes of one 80 GB device
    templates_96x32x8_s   templates for 1..32 nodes of eight
    plan_1000_s           best plan for 1000 nodes of one device, f = 3, 2048 microbatches, given templates
    reconfigure_1000_s    its next plan and all copies after three losses
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from oobleck_jax.config import Precision, Remat
from oobleck_jax.planning.devices import device_named, rates_of
from oobleck_jax.planning.estimate import estimate_profile, gpt_sizes
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.planner import plan_from
from oobleck_jax.planning.profile import Profile
from oobleck_jax.planning.reconfigure import get_ready, reconfigure
from oobleck_jax.planning.templates import Templates, make_templates
from oobleck_jax.script import make_room, run_script


TARGETS_S = {"templates_96x64_s": 1.0, "templates_96x32x8_s": 5.0, "plan_1000_s": 0.1, "reconfigure_1000_s": 1.0}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this benchmark."""

    rounds: int = 5  # runs of each
    json: Path | None = None  # where to write the result


def main(arguments: Arguments) -> None:
    """Run, print and write all timings."""
    make_room(arguments.json, flag="--json")
    one_device, eight_devices = large_profile(1), large_profile(8)
    nodes = tuple(NodeId(node) for node in range(1000))
    planning = plan_from(large_templates(one_device), nodes=nodes, fault_tolerance=3)
    holdings = {
        pipeline.nodes[stage.node_index]: tuple(stage.layers)
        for pipeline in planning.plan.pipelines
        for stage in pipeline.template.stages
    }
    alive = tuple(node for node in nodes if node not in (3, 400, 999))
    get_ready()  # as the coordinator does while the nodes come up
    runs: dict[str, Callable[[Templates], object]] = {
        "templates_96x64_s": lambda _: templates_of(one_device, max_nodes=64, devices_per_node=1, num_microbatches=512),
        "templates_96x32x8_s": lambda _: templates_of(
            eight_devices, max_nodes=32, devices_per_node=8, num_microbatches=512
        ),
        "plan_1000_s": lambda templates: plan_from(templates, nodes=nodes, fault_tolerance=3),
        "reconfigure_1000_s": lambda templates: reconfigure(
            templates, nodes=alive, holdings=holdings, fault_tolerance=3, old=planning.plan
        ),
    }
    seconds = {
        # Templates of its own for each run, because what has been planned with them is kept.
        name: statistics.median(timed(run, large_templates(one_device)) for _ in range(arguments.rounds))
        for name, run in runs.items()
    }
    for name, value in seconds.items():
        print(f"{name:22} {value:8.3f}  target {TARGETS_S[name]}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(seconds, indent=1) + "\n", encoding="utf-8")


def large_profile(devices_per_node: int) -> Profile:
    """Return a profile of 96 layers on H100s."""
    sizes = gpt_sizes(
        num_blocks=94, width=2048, num_heads=16, vocab_size=50257, sequence_length=2048, remat=Remat.LAYER
    )
    rates = rates_of(device_named("h100"), precision=Precision.MIXED, network_bytes_per_s=50e9, network_latency_s=1e-5)
    return estimate_profile(
        sizes,
        microbatch_size=8,
        precision=Precision.MIXED,
        remat=Remat.LAYER,
        rates=rates,
        devices_per_node=devices_per_node,
    )


def templates_of(profile: Profile, *, max_nodes: int, devices_per_node: int, num_microbatches: int) -> Templates:
    """Return templates that are made anew."""
    make_templates.cache_clear()
    return make_templates(
        profile,
        max_nodes=max_nodes,
        devices_per_node=devices_per_node,
        num_microbatches=num_microbatches,
        device_memory_bytes=device_named("h100").usable_memory_bytes,
    )


def large_templates(profile: Profile) -> Templates:
    return templates_of(profile, max_nodes=96, devices_per_node=1, num_microbatches=2048)


def timed(run: Callable[[Templates], object], templates: Templates) -> float:
    """Return the wall time of a run in seconds."""
    begin = time.perf_counter()
    run(templates)
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=__doc__)))
