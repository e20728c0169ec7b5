"""Compare the memory model with what nodes really use, over rematerialisation policies, precisions and schedules.

    python scripts/bench_memory.py --preset gpt-laptop --json memory.json

Predicted is the model of the planner, with costs from XLA's analysis; actual are the arrays that a stage has when it
starts a program, with what the program adds (`oobleck_jax/execution/stage_memory.py`). Each node does the whole batch
of a pipeline, on one device: with one stage, or interleaved with two.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

from models.presets import load_preset
from oobleck_jax.config import Precision, Remat, RunConfig, ScheduleKind
from oobleck_jax.errors import PlanError
from oobleck_jax.execution.home import Home
from oobleck_jax.execution.profiler import estimate_profile_with_xla
from oobleck_jax.execution.stage_memory import stage_peak_bytes
from oobleck_jax.planning.costs import tabulate
from oobleck_jax.planning.estimate import LAPTOP_RATES
from oobleck_jax.planning.forecast import forecast_stages
from oobleck_jax.planning.interleave import interleave
from oobleck_jax.planning.plan import NodeId, Stage, Template
from oobleck_jax.script import make_room, run_script


_UNLIMITED_BYTES = 1 << 50


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this script."""

    preset: str = "gpt-laptop"  # the model, as for scripts/train.py
    stages: int = 3  # of the pipeline; as many layers in each as possible
    microbatch_size: int | None = None  # sequences per microbatch (default: the preset's)
    remats: tuple[Literal["none", "dots", "layer", "stage"], ...] = ("none", "dots", "layer", "stage")  # policies
    precisions: tuple[Literal["float32", "bfloat16", "mixed"], ...] = ("float32", "mixed")  # precisions
    schedules: tuple[Literal["1f1b", "interleaved", "zb-h1"], ...] = ("1f1b", "interleaved", "zb-h1")  # schedules
    json: Path | None = None  # write the figures into this file


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One node."""

    precision: str
    remat: str
    schedule: str
    node: int
    layers: tuple[tuple[int, int], ...]  # of its stages
    predicted_bytes: int
    actual_bytes: int


def main(arguments: Arguments) -> int:
    """Measure, print a table, and write the JSON."""
    make_room(arguments.json, flag="--json")
    config = load_preset(arguments.preset)
    config = replace(config, devices_per_node=1, microbatch_size=arguments.microbatch_size or config.microbatch_size)
    if not 1 <= arguments.stages <= config.model.num_layers:
        raise PlanError(f"--stages {arguments.stages} of {config.model.num_layers} layers cannot be; give fewer")
    console = Console()
    table = Table(title=f"{arguments.preset}: peak memory of a node, MB")
    for name in ("precision", "remat", "schedule", "node", "layers", "predicted", "actual", "ratio"):
        table.add_column(name, justify="left" if name in ("precision", "remat", "schedule") else "right")
    rows: list[Row] = []
    for precision in arguments.precisions:
        for remat in arguments.remats:
            variant = replace(config, precision=Precision(precision), remat=Remat(remat))
            template = even_template(config.model.num_layers, arguments.stages)
            schedules = [ScheduleKind(schedule) for schedule in arguments.schedules]
            for row in measure(variant, template, schedules):
                rows.append(row)
                table.add_row(
                    row.precision,
                    row.remat,
                    row.schedule,
                    str(row.node),
                    ", ".join(f"{first}-{end}" for first, end in row.layers),
                    f"{row.predicted_bytes / 1e6:.2f}",
                    f"{row.actual_bytes / 1e6:.2f}",
                    f"{row.predicted_bytes / row.actual_bytes:.3f}",
                )
    console.print(table)
    if arguments.json is not None:
        result = {"preset": arguments.preset, "jax": jax.__version__, "nodes": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(config: RunConfig, template: Template, schedules: list[ScheduleKind]) -> list[Row]:
    """Return predicted and actual peak of each node of a pipeline; `template` has one stage on each."""
    home = Home(jax.local_devices()[:1])
    profile = estimate_profile_with_xla(config, LAPTOP_RATES, home=home)
    costs = tabulate(
        profile,
        devices_per_node=1,
        num_microbatches=config.num_microbatches,
        device_memory_bytes=_UNLIMITED_BYTES,
    )
    rows: list[Row] = []
    for schedule in schedules:
        form = interleave(template, 2, costs) if schedule is ScheduleKind.INTERLEAVED else template
        if form is None or (schedule is ScheduleKind.ZB_H1 and config.remat is not Remat.NONE):
            continue
        forecasts = forecast_stages(form, config.num_microbatches, costs, schedule)
        rows += [
            Row(
                precision=config.precision,
                remat=config.remat,
                schedule=schedule,
                node=node,
                layers=tuple((s.first_layer, s.end_layer) for s in form.stages if s.node_index == node),
                predicted_bytes=forecasts[node].memory_bytes,
                actual_bytes=stage_peak_bytes(config, form, NodeId(node), home, schedule),
            )
            for node in range(form.num_nodes)
        ]
    return rows


def even_template(num_layers: int, num_stages: int) -> Template:
    """Return a template of stages with as many layers each as possible, one on each node."""
    cuts = [round(number * num_layers / num_stages) for number in range(num_stages + 1)]
    return Template(
        stages=tuple(
            Stage(first_layer=first, end_layer=end, node_index=index, num_devices=1)
            for index, (first, end) in enumerate(pairwise(cuts))
        )
    )


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=__doc__)))
