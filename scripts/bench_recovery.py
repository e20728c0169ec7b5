"""Measure how fast a run recovers from a real `kill -9`, and what being able to costs while nothing fails.

    python scripts/bench_recovery.py --json recovery.json

Workers of a real run are killed at random moments, spread over the whole step; their agents start new ones, which join
again before the next kill. Measured, by the clock of this machine:

    notice      from the kill to the record of the loss
    regrouped   from the kill until all workers that are left train again, by the run's own record
    recovery    from the kill to the first commit after it, less the usual time of a step of the plan that follows,
                which is measured in a run of its own: here it lasts only while the new worker starts on the same cores

Machines are shared, so medians count. The cost of fault tolerance is the ratio of the median step times of runs with
and without it (the same plan, taking turns), less one.
"""

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import tyro

from oobleck_jax import events
from oobleck_jax.errors import ConfigError
from oobleck_jax.live_run import LiveRun
from oobleck_jax.planning.plan import NodeId, Plan
from oobleck_jax.script import make_room, run_script


TRAIN = Path(__file__).with_name("train.py")
LIMIT_S = 600.0  # for any one thing that is waited for
END_S = 60.0  # to end after Ctrl-C
NUM_USUAL = 3  # steps of a generation that must be committed before the next kill, and after it
MANY_STEPS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this benchmark."""

    preset: str = "gpt-laptop"  # what to train
    nodes: int = 4  # of the run
    plan: str | None = None  # while all nodes work (default: the planner's)
    kills: int = 20  # workers to kill
    seed: int = 0  # decides who is killed, and when
    rounds: int = 3  # runs with and without fault tolerance, to compare; 0: do not
    steps: int = 24  # of each of these; the first quarter is not counted
    json: Path | None = None  # where to write the result


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """What was seen of one kill."""

    notice_s: float
    until_commit_s: float  # to the first commit after it
    plan: Plan  # that followed
    incident: events.Incident

    @property
    def regrouped_s(self) -> float:
        """From the kill until all that are left train again."""
        return self.notice_s + self.incident.seconds["total"] - self.incident.seconds.get("first_step", 0.0)


def _run(folder: Path, flags: Sequence[str]) -> LiveRun:
    command = [sys.executable, str(TRAIN), "--run-dir", str(folder), "--eval-every", "0", "--checkpoint-every", "0"]
    return LiveRun(folder, [*command, *flags])


def main(arguments: Arguments) -> None:
    """Kill, compare, print, write."""
    make_room(arguments.json, flag="--json")
    if arguments.kills < 1:
        raise ConfigError(f"--kills is {arguments.kills}; it must be at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without ending what was started
    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as folder:
        flags = ["--preset", arguments.preset, "--nodes", str(arguments.nodes)]
        flags += ["--compilation-cache", str(Path(folder) / "programs")]
        kills, plan = _kill(arguments, Path(folder), flags)
        followed = {_form(kill.plan): kill.plan for kill in kills}
        usual_s = {form: _usual_step_s(arguments, other, Path(folder), flags) for form, other in followed.items()}
        recovery_s = [kill.until_commit_s - usual_s[_form(kill.plan)] for kill in kills]
        result: dict[str, Any] = {
            "kills": arguments.kills,
            "survived": len(kills),
            "notice_s": _quantiles([kill.notice_s for kill in kills]),
            "regrouped_s": _quantiles([kill.regrouped_s for kill in kills]),
            "recovery_s": _quantiles(recovery_s),
            "compilations_on_path": sum(kill.incident.num_compilations for kill in kills),
            "redone_microbatches": statistics.mean(kill.incident.num_redone_microbatches for kill in kills),
            "phases_s": {
                phase: statistics.median(kill.incident.seconds.get(phase, 0.0) for kill in kills)
                for phase in ("plan", "compile", "copy", "fabric", "first_step", "total")
            },
            "usual_step_s": list(usual_s.values()),
            "received_bytes": statistics.median(kill.incident.received_bytes for kill in kills),
        }
        if arguments.rounds:
            result["fault_tolerance_cost"] = _cost(
                arguments, Path(folder), [*flags, "--plan", _plan_file(plan, Path(folder))]
            )
    print(json.dumps(result, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _kill(arguments: Arguments, folder: Path, flags: Sequence[str]) -> tuple[list[Kill], Plan]:
    """Return what was seen of each kill, and the first plan."""
    draw = random.Random(arguments.seed)
    plan = [] if arguments.plan is None else ["--plan", arguments.plan]
    run = _run(
        folder / "killed",
        [*flags, *plan, "--fault-tolerance", "1", "--forgive-minutes", "0", "--steps", str(MANY_STEPS)],
    )
    run.start()
    kills: list[Kill] = []
    try:
        for number in range(arguments.kills):
            step_s = run.wait(
                "generation of all nodes that is compiled ahead",
                lambda: _is_whole(run, arguments.nodes),
                limit_s=LIMIT_S,
            )
            node = draw.randrange(arguments.nodes)
            time.sleep(draw.random() * step_s)
            kills.append(_kill_one(run, node))
            last = kills[-1]
            print(
                f"kill {number + 1}/{arguments.kills}, node {node}: noticed after {last.notice_s * 1e3:.0f} ms, "
                f"all train after {last.regrouped_s:.2f} s, committed after {last.until_commit_s:.2f} s, "
                f"{last.incident.num_compilations} compilations",
                flush=True,
            )
        return kills, run.records(events.Planned)[0][1].plan
    finally:
        run.interrupt(limit_s=END_S)


def _kill_one(run: LiveRun, node: int) -> Kill:
    worker = run.workers[node]
    killed = time.time()
    os.kill(worker, signal.SIGKILL)
    since = killed - 0.001  # records have milliseconds

    def recovered() -> tuple[float, events.Committed, events.Incident] | None:
        losses = [record for _, record in run.records(events.Incident, since) if record.kind == "loss"]
        if not losses:
            return None
        commits = run.records(events.Committed, since)
        return next(
            ((when, record, losses[0]) for when, record in commits if record.generation >= losses[0].generation), None
        )

    committed, record, incident = run.wait(f"recovery from the loss of node {node}", recovered, limit_s=LIMIT_S)
    noticed = min(when for when, _ in run.records(events.Failed, since))
    return Kill(
        notice_s=max(noticed - killed, 0.0),
        until_commit_s=committed - killed,
        plan=next(item.plan for _, item in run.records(events.Planned) if item.generation == record.generation),
        incident=incident,
    )


def _is_whole(run: LiveRun, num_nodes: int) -> float | None:
    """Return the usual time of a step once all nodes work, and have compiled what later plans may need."""
    prepared = run.records(events.Prepared)
    if not prepared or len(prepared[-1][1].num_compilations) < num_nodes:
        return None
    when, generation = prepared[-1][0], prepared[-1][1].generation
    compiled = {record.node for _, record in run.records(events.CompiledAhead, when)}
    steps_s = [record.step_time_s for _, record in run.records(events.Committed, when)]
    is_last = run.records(events.Planned)[-1][1].generation == generation
    is_ready = is_last and len(compiled) == num_nodes and len(steps_s) > NUM_USUAL
    return statistics.median(steps_s[1:]) if is_ready else None


def _form(plan: Plan) -> str:
    """Return what is equal for plans that take equally long: all but which nodes they are bound to."""
    return repr([(pipeline.template, pipeline.num_microbatches) for pipeline in plan.pipelines])


def _usual_step_s(arguments: Arguments, plan: Plan, folder: Path, flags: Sequence[str]) -> float:
    """Return the median time of a step of a plan that nothing happens to."""
    numbers = {node: NodeId(number) for number, node in enumerate(plan.working_nodes)}
    pipelines = tuple(
        replace(pipeline, nodes=tuple(numbers[node] for node in pipeline.nodes)) for pipeline in plan.pipelines
    )
    run_dir = folder / f"usual-{len(list(folder.glob('usual-*')))}"
    alone = [*flags, "--nodes", str(len(numbers)), "--plan", _plan_file(Plan(pipelines=pipelines), folder)]
    return statistics.median(_undisturbed_steps_s(arguments, run_dir, [*alone, "--fault-tolerance", "0"]))


def _undisturbed_steps_s(arguments: Arguments, run_dir: Path, flags: Sequence[str]) -> list[float]:
    """Return the times of the steps of a run that nothing happens to, without the first quarter."""
    run = _run(run_dir, [*flags, "--steps", str(arguments.steps)])
    return run.undisturbed_steps_s(limit_s=LIMIT_S, end_s=END_S)


def _plan_file(plan: Plan, folder: Path) -> str:
    path = folder / "plan.json"
    path.write_bytes(msgspec.json.encode(plan))
    return str(path)


def _cost(arguments: Arguments, folder: Path, flags: Sequence[str]) -> float:
    """Return by how much longer a step takes with fault tolerance than without: 0.01 is one per cent."""
    times: dict[str, list[float]] = {"0": [], "1": []}
    for number in range(arguments.rounds):
        for tolerance in ("0", "1") if number % 2 else ("1", "0"):
            run_dir = folder / f"tolerance-{tolerance}-{number}"
            steps_s = _undisturbed_steps_s(arguments, run_dir, [*flags, "--fault-tolerance", tolerance])
            times[tolerance] += steps_s
            print(f"fault tolerance {tolerance}: {statistics.median(steps_s):.3f} s per step", flush=True)
    return statistics.median(times["1"]) / statistics.median(times["0"]) - 1


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 4),
    }


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=(__doc__ or "").partition("\n")[0])))
