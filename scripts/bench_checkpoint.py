"""Measure what checkpoints cost a real run, and how long a run takes to come back from one.

    python scripts/bench_checkpoint.py --json checkpoint.json

Runs with and without checkpoints take turns, with the same plan. Measured, by what the runs wrote:

    stall_fraction    what steps wait for a save (the copy in memory of the slowest node), of a usual step
    cost_fraction     by how much longer all steps take with checkpoints: 0.01 is one per cent
    bytes             of all states in a checkpoint
    durable_s         from the commit of a step to its checkpoint on disk
    restore_s         to read the states back, of the slowest node, when the finished run is given more steps

Machines are shared: what counts is the ratio of neighbouring runs, so medians over rounds are taken of these.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tyro

from oobleck_jax import events
from oobleck_jax.journal import read_journal
from oobleck_jax.script import make_room, run_script


TRAIN = Path(__file__).with_name("train.py")
LIMIT_S = 1800.0  # of a run
T = TypeVar("T", bound=events.Record)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this benchmark."""

    preset: str = "gpt-laptop"  # what to train
    nodes: int = 2  # of each run
    plan: str | None = None  # of each run (default: what the planner gives the first one)
    every: int = 10  # steps from one checkpoint to the next
    rounds: int = 3  # each round is one run with checkpoints and one without
    steps: int = 40  # of each run; the first `every` are not counted
    json: Path | None = None  # where to write the result


def main(arguments: Arguments) -> None:
    """Run, compare, print, write."""
    make_room(arguments.json, flag="--json")
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as name:
        folder = Path(name)
        flags = ["--preset", arguments.preset, "--nodes", str(arguments.nodes), "--eval-every", "0"]
        flags += ["--compilation-cache", str(folder / "programs")]
        plan = [] if arguments.plan is None else ["--plan", arguments.plan]
        if arguments.plan is None:
            first = folder / "first"
            train(first, [*flags, "--steps", "1", "--checkpoint-every", "0"])
            plan_file = folder / "plan.json"
            plan_file.write_bytes(msgspec.json.encode(records(first, events.Planned)[0].plan))
            plan = ["--plan", str(plan_file)]
        flags += plan
        costs: list[float] = []
        saved: list[events.Checkpointed] = []
        usual_s: list[float] = []
        run_dir = folder
        for number in range(arguments.rounds):
            times_s: dict[int, list[float]] = {}
            for every in (0, arguments.every) if number % 2 else (arguments.every, 0):
                run_dir = folder / f"round-{number}-every-{every}"
                train(run_dir, [*flags, "--steps", str(arguments.steps), "--checkpoint-every", str(every)])
                times_s[every] = steps_s(run_dir)[arguments.every :]
            run_dir = folder / f"round-{number}-every-{arguments.every}"
            costs.append(sum(times_s[arguments.every]) / sum(times_s[0]) - 1)
            usual_s += times_s[0]
            saved += records(run_dir, events.Checkpointed)
            print(f"round {number + 1}/{arguments.rounds}: {100 * costs[-1]:.1f} % longer with checkpoints", flush=True)
        restore_s = restored_s(run_dir, [*flags, "--steps", str(arguments.steps + 2)])
    result = {
        "stall_fraction": statistics.median(item.seconds["copy"] for item in saved) / statistics.median(usual_s),
        "cost_fraction": statistics.median(costs),
        "bytes": saved[0].num_bytes,
        "durable_s": statistics.median(item.seconds["total"] for item in saved),
        "restore_s": restore_s,
        "costs": costs,
        "usual_step_s": statistics.median(usual_s),
        "num_checkpoints": len(saved),
    }
    print(json.dumps(result, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def train(run_dir: Path, flags: Sequence[str]) -> None:
    """Run train.py to its end."""
    command = [sys.executable, str(TRAIN), "--run-dir", str(run_dir), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")


def records(run_dir: Path, kind: type[T]) -> list[T]:
    """Return the events of one kind, in order."""
    return [record for _, record in events.read_events(run_dir / "events.jsonl") if isinstance(record, kind)]


def steps_s(run_dir: Path) -> list[float]:
    """Return how long each step took."""
    return [record.step_time_s for _, record in read_journal(run_dir / "journal.jsonl").committed]


def restored_s(run_dir: Path, flags: Sequence[str]) -> float:
    """Let a finished run go on; return how long its slowest node took to read its states."""
    train(run_dir, flags)
    phases: dict[int, dict[str, Any]] = records(run_dir, events.Prepared)[-1].phases
    return max(phase["restore"] for phase in phases.values())


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=(__doc__ or "").partition("\n")[0])))
