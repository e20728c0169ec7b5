"""Compare the step times that the planner predicts with those of real runs.

    python scripts/bench_prediction.py --json prediction.json

Plans of one and two nodes, each node with one core and one compute thread: different cuts, different numbers of
microbatches. Every round measures a profile as a run does at its start, and then runs each plan with scripts/train.py.
Machines are shared, and their clocks go up and down: what counts is the median, of each kind of layer over all
profiles, and of each plan over all steps of all rounds.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import tyro

from models.presets import load_preset
from oobleck_jax.config import RunConfig
from oobleck_jax.errors import ConfigError, OobleckError
from oobleck_jax.launch import available_cores
from oobleck_jax.measured_profile import LIMIT_S, Profiler, place_of
from oobleck_jax.plan_text import read_plan
from oobleck_jax.planning.costs import tabulate
from oobleck_jax.planning.forecast import Forecast, forecast_plan
from oobleck_jax.planning.plan import Plan
from oobleck_jax.planning.profile import LayerCost, LayerProfile, Profile, Rate
from oobleck_jax.propose import make_proposer, memory_per_device
from oobleck_jax.script import make_room, run_script
from oobleck_jax.session import software_versions


TRAIN = Path(__file__).parent / "train.py"
RUN_LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this benchmark."""

    preset: str = "gpt-laptop"  # what to train
    microbatch_size: int = 1  # sequences per microbatch; few, so that many steps take little time
    rounds: int = 2  # each measures a profile and runs every plan once
    steps: int = 12  # of each run; the first is not counted
    cases: int | None = None  # run only the first so many plans, and the planner's (default: all)
    json: Path | None = None  # where to write the result


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A plan to run, with its number of microbatches over all pipelines."""

    text: str  # as `--plan` takes it, if it is one of ours
    num_nodes: int
    num_microbatches: int
    chosen: Plan | None = None  # by the planner; it may have schedules that no text tells

    @property
    def plan(self) -> Plan:
        return self.chosen or read_plan(self.text, num_microbatches=self.num_microbatches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What was predicted for a plan, and what it took."""

    plan: str
    nodes: int
    microbatches: int
    predicted_s: float
    measured_s: float
    is_favourite: bool

    @property
    def error(self) -> float:
        """How far the prediction is off, as a fraction of the measurement."""
        return self.predicted_s / self.measured_s - 1


def main(arguments: Arguments) -> int:
    """Run all rounds, print the table and write the result."""
    make_room(arguments.json, flag="--json")
    base = replace(load_preset(arguments.preset), microbatch_size=arguments.microbatch_size, nodes=2, eval_every=0)
    cores = available_cores()[:2]
    if len(cores) < 2:
        raise ConfigError("two cores are needed, one for each node")
    cases = cases_of(base.model.num_layers)[: arguments.cases]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profiles: list[Profile] = []
        times_s: dict[Case, list[float]] = {case: [] for case in cases}
        for number in range(arguments.rounds):
            profiles.append(measured(arguments.preset, base, folder, cores))
            for case in cases:
                times_s[case] += (steps_s := run(arguments, case, folder, cores))
                print(f"round {number + 1}: {case.text} takes {statistics.median(steps_s):.3f} s", flush=True)
        profile = usual(profiles)
        favourite = favourite_of(base, profile, cases)
        for number in range(arguments.rounds if favourite not in cases else 0):
            times_s.setdefault(favourite, []).extend(steps_s := run(arguments, favourite, folder, cores))
            median_s = statistics.median(steps_s)
            print(f"favourite, round {number + 1}: {favourite.text} takes {median_s:.3f} s", flush=True)
    rows = [
        Row(
            plan=case.text,
            nodes=case.num_nodes,
            microbatches=case.num_microbatches,
            predicted_s=forecast(base, case, profile).step_s,
            measured_s=statistics.median(found),
            is_favourite=case == favourite,
        )
        for case, found in times_s.items()
    ]
    report(arguments, rows)
    return 0


def cases_of(num_layers: int) -> list[Case]:
    """Return plans of one and two nodes: balanced, unbalanced either way, two pipelines, few microbatches."""
    end, half = num_layers, num_layers // 2
    left, right = half - 2, half + 2
    return [
        Case(text=f"0-{half},{half}-{end}", num_nodes=2, num_microbatches=8),
        Case(text=f"0-{left},{left}-{end}", num_nodes=2, num_microbatches=8),
        Case(text=f"0-{right},{right}-{end}", num_nodes=2, num_microbatches=8),
        Case(text=f"0-{end}:4 | 0-{end}:4", num_nodes=2, num_microbatches=8),
        Case(text=f"0-{end}:6 | 0-{end}:2", num_nodes=2, num_microbatches=8),
        Case(text=f"0-{half},{half}-{end}", num_nodes=2, num_microbatches=3),
        Case(text=f"0-{end}", num_nodes=1, num_microbatches=8),
        Case(text=f"0-{end}", num_nodes=1, num_microbatches=3),
    ]


def favourite_of(base: RunConfig, profile: Profile, cases: Sequence[Case]) -> Case:
    """Return the planner's choice for two nodes: one of these cases, or another one."""
    num_microbatches = cases[0].num_microbatches
    config = config_of(base, Case(text="", num_nodes=2, num_microbatches=num_microbatches))
    proposer = make_proposer(config, plan=None, device_memory_bytes=memory_per_device(2))
    plan = replace(proposer, profile=profile).first().plan
    same = (case for case in cases if case.num_nodes == 2 and case.plan == plan)
    return next(same, Case(text=text_of(plan), num_nodes=2, num_microbatches=num_microbatches, chosen=plan))


def text_of(plan: Plan) -> str:
    """Return what tells a plan from others."""
    kinds = [
        f"{len(pipeline.nodes)} nodes, {len(pipeline.template.stages)} stages, {pipeline.schedule}, "
        f"{pipeline.num_microbatches} microbatches"
        for pipeline in plan.pipelines
    ]
    return " | ".join(kinds)


def config_of(base: RunConfig, case: Case) -> RunConfig:
    return replace(base, nodes=case.num_nodes, global_batch_size=base.microbatch_size * case.num_microbatches)


def measured(preset: str, base: RunConfig, folder: Path, cores: Sequence[int]) -> Profile:
    """Measure a profile, as `train.py` does at its start."""
    profiler = Profiler(
        compilation_cache=folder / "programs",
        place=place_of(num_nodes=2, cores=cores),
        versions=software_versions(),
        limit_s=2 * LIMIT_S,
        say=lambda text: print(text, flush=True),
    )
    profile = profiler.profile(preset, base)
    if profile.source != "measured":
        raise OobleckError("without a profile there is nothing to compare")
    profiler.path(preset, base).unlink()  # so that the next round measures again
    return profile


def run(arguments: Arguments, case: Case, folder: Path, cores: Sequence[int]) -> list[float]:
    """Run a plan, each node on its own core; return the times of its steps but the first."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        run_dir = Path(name) / "run"
        command = [sys.executable, str(TRAIN), "--preset", arguments.preset, "--nodes", str(case.num_nodes)]
        command += ["--microbatch-size", str(arguments.microbatch_size), "--eval-every", "0", "--checkpoint-every", "0"]
        command += ["--global-batch-size", str(arguments.microbatch_size * case.num_microbatches)]
        plan_file = Path(name) / "plan.json"
        plan_file.write_bytes(msgspec.json.encode(case.plan))
        command += ["--steps", str(arguments.steps), "--plan", str(plan_file), "--run-dir", str(run_dir)]
        command += ["--compilation-cache", str(folder / "programs"), "--patience", "4"]
        own = set(cores[: case.num_nodes])
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, own)  # what this process starts may use no other cores
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise OobleckError(f"the run of {case.text} did not end within {RUN_LIMIT_S:.0f} s") from None
        finally:
            os.sched_setaffinity(0, before)
        if result.returncode:
            raise OobleckError(f"the run of {case.text} failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step_time_s"] for line in lines[1:]]


def usual(profiles: Sequence[Profile]) -> Profile:
    """Return the medians of several profiles of one model."""
    layers = tuple(
        replace(
            layer, costs=tuple(_median_cost([other.layers[number] for other in profiles], cost) for cost in layer.costs)
        )
        for number, layer in enumerate(profiles[0].layers)
    )
    return replace(
        profiles[0],
        layers=layers,
        link=_median_rate([profile.link for profile in profiles]),
        sum=_median_rate([profile.sum for profile in profiles]),
        update_s_per_byte=statistics.median(profile.update_s_per_byte for profile in profiles),
    )


def _median_cost(layers: Sequence[LayerProfile], cost: LayerCost) -> LayerCost:
    found = [other for layer in layers if (other := layer.cost_on(cost.num_devices)) is not None]
    return replace(
        cost,
        forward_s=statistics.median(other.forward_s for other in found),
        backward_s=statistics.median(other.backward_s for other in found),
    )


def _median_rate(rates: Sequence[Rate]) -> Rate:
    return sorted(rates, key=lambda rate: rate.seconds(1e6))[len(rates) // 2]


def forecast(base: RunConfig, case: Case, profile: Profile) -> Forecast:
    """Return what the planner predicts for a plan."""
    costs = tabulate(
        profile,
        devices_per_node=1,
        num_microbatches=case.num_microbatches,
        device_memory_bytes=memory_per_device(2),
    )
    return forecast_plan(case.plan, profile, costs)


def report(arguments: Arguments, rows: Sequence[Row]) -> None:
    """Print the rows and what they come to, and write them where `--json` says."""
    width = max(len(row.plan) for row in rows) + 2
    print(f"{'plan':{width}}{'nodes':>6}{'microbatches':>14}{'predicted s':>13}{'measured s':>12}{'error':>8}")
    for row in rows:
        mark = "  favourite" if row.is_favourite else ""
        print(
            f"{row.plan:{width}}{row.nodes:6}{row.microbatches:14}{row.predicted_s:13.3f}{row.measured_s:12.3f}"
            f"{row.error:8.1%}{mark}"
        )
    (favourite,) = [row for row in rows if row.is_favourite]
    rivals = [row for row in rows if (row.nodes, row.microbatches) == (favourite.nodes, favourite.microbatches)]
    result: dict[str, Any] = {
        "preset": arguments.preset,
        "median_error": statistics.median(abs(row.error) for row in rows),
        "max_error": max(abs(row.error) for row in rows),
        "favourite_ratio": favourite.measured_s / min(row.measured_s for row in rivals),
        "rows": [
            {
                "plan": row.plan,
                "nodes": row.nodes,
                "microbatches": row.microbatches,
                "predicted_s": row.predicted_s,
                "measured_s": row.measured_s,
                "error": row.error,
            }
            for row in rows
        ],
    }
    print(
        f"median error {result['median_error']:.1%}, largest {result['max_error']:.1%}; the planner's favourite takes "
        f"{result['favourite_ratio']:.3f} times the time of the fastest"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=__doc__)))
