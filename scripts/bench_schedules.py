"""Compare the schedules of a pipeline in real runs: tokens/s, and how much of the nodes' time is bubble.

    python scripts/bench_schedules.py --preset gpt-laptop --nodes 2 --json schedules.json

One pipeline of all nodes trains with each schedule in turn, several rounds, since machines are shared: what counts is
the median of the ratios to 1F1B within a round. The measured bubble is the time from the first program of a step to
the last one in which a node computes nothing, by the traces of all nodes; the formulas are those of equal stages. Give
each node a core of its own (no more nodes than cores): where they share cores, others compute in a bubble. Everything
is kept for the backward (`--remat none`), so that it can be split.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import tyro

from models.presets import load_preset
from oobleck_jax import events
from oobleck_jax.config import ScheduleKind
from oobleck_jax.events import read_events
from oobleck_jax.planning.plan import Pipeline
from oobleck_jax.planning.schedule_kinds import bubble_of_equal_stages
from oobleck_jax.script import make_room, run_script
from oobleck_jax.timeline import PROGRAMS, Timeline, read_timeline


SCRIPTS = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this benchmark."""

    preset: str = "gpt-laptop"  # the model and its batch, as for scripts/train.py
    nodes: int = 2  # of the pipeline; each should have a core of its own
    schedules: tuple[Literal["1f1b", "interleaved", "zb-h1"], ...] = ("1f1b", "interleaved", "zb-h1")  # 1f1b first
    rounds: int = 3  # each round measures every schedule once
    steps: int = 16  # steps of each run; the first quarter is not counted
    json: Path | None = None  # write the figures into this file


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One run."""

    tokens_per_s: float
    bubble: float  # fraction of the nodes' time
    bubble_of_equal_stages: float  # by the formula
    stages_per_node: int


def main(arguments: Arguments) -> int:
    """Run all rounds, print and write the medians."""
    make_room(arguments.json, flag="--json")
    runs: dict[str, list[Measurement]] = {schedule: [] for schedule in arguments.schedules}
    for number in range(arguments.rounds):
        for schedule, measurements in runs.items():
            measurements.append(measure(arguments, schedule))
            print(f"round {number + 1}/{arguments.rounds}, {schedule}: {measurements[-1]}", flush=True)
    base = runs[arguments.schedules[0]]
    results: dict[str, dict[str, float]] = {}
    for schedule, measurements in runs.items():
        ratios = [one.tokens_per_s / first.tokens_per_s for one, first in zip(measurements, base, strict=True)]
        columns = {name: [asdict(one)[name] for one in measurements] for name in asdict(measurements[0])}
        results[schedule] = {name: statistics.median(values) for name, values in columns.items()}
        results[schedule]["ratio"] = statistics.median(ratios)
        found = results[schedule]
        print(
            f"{schedule}: {found['tokens_per_s']:.0f} tokens/s, {found['ratio']:.3f} of {arguments.schedules[0]}; "
            f"bubble {found['bubble']:.1%}, of equal stages {found['bubble_of_equal_stages']:.1%}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(arguments: Arguments, schedule: str) -> Measurement:
    """Train with one schedule."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, summary = Path(folder) / "run", Path(folder) / "summary.json"
        command = [sys.executable, str(SCRIPTS / "train.py"), "--preset", arguments.preset]
        command += ["--nodes", str(arguments.nodes), "--fault-tolerance", "0", "--steps", str(arguments.steps)]
        command += ["--schedule", schedule, "--remat", "none", "--trace", "--plan", even_plan(arguments, schedule)]
        command += ["--eval-every", "0", "--checkpoint-every", "0", "--run-dir", str(run_dir)]
        command += ["--summary-json", str(summary)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
        if result.returncode:
            raise SystemExit(f"the run with {schedule} failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
        pipeline = planned(run_dir)
        return Measurement(
            tokens_per_s=json.loads(summary.read_text())["median_tokens_per_s"],
            bubble=measured_bubble(read_timeline(run_dir, steps=range(arguments.steps // 4, arguments.steps))),
            bubble_of_equal_stages=bubble_of_equal_stages(pipeline),
            stages_per_node=len(pipeline.template.stages) // pipeline.template.num_lanes,
        )


def even_plan(arguments: Arguments, schedule: str) -> str:
    """Return one pipeline of all nodes with as many layers in each stage as possible; two stages if interleaved."""
    num_layers = load_preset(arguments.preset).model.num_layers
    num_stages = arguments.nodes * (2 if schedule == ScheduleKind.INTERLEAVED else 1)
    cuts = [round(number * num_layers / num_stages) for number in range(num_stages + 1)]
    return ",".join(f"{first}-{end}@{number % arguments.nodes}" for number, (first, end) in enumerate(pairwise(cuts)))


def planned(run_dir: Path) -> Pipeline:
    """Return the only pipeline of a run."""
    plans = [record.plan for _, record in read_events(run_dir / "events.jsonl") if isinstance(record, events.Planned)]
    (pipeline,) = plans[-1].pipelines
    return pipeline


def measured_bubble(timeline: Timeline) -> float:
    """Return which part of the nodes' time between first and last program of a step no program runs; the median."""
    spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for trace in timeline.traces:
        for record in trace.records:
            if record.activity in PROGRAMS:
                spans[record.step].append((record.began_ns, record.ended_ns))
    num_nodes = len(timeline.nodes)
    bubbles: list[float] = []
    for found in spans.values():
        length_ns = max(ended for _, ended in found) - min(began for began, _ in found)
        bubbles.append(1 - sum(ended - began for began, ended in found) / (num_nodes * length_ns))
    return statistics.median(bubbles)


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=__doc__)))
