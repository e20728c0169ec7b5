"""Measure what it costs a real run to record what its nodes do when (`train.py --trace`).

    python scripts/bench_trace.py --json trace.json

Runs with and without recording take turns, with the same plan. Machines are shared: what counts is the ratio of
neighbouring runs, so the median over rounds is taken of these.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from oobleck_jax.live_run import LiveRun
from oobleck_jax.script import make_room, run_script


TRAIN = Path(__file__).with_name("train.py")
LIMIT_S = 600.0  # of a run
END_S = 30.0  # for a run that is told to end


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this benchmark."""

    preset: str = "gpt-laptop"  # what to train
    nodes: int = 2  # of each run
    plan: str = "0-5,5-10"  # of each run: stages wait for each other, which is recorded, too
    rounds: int = 4  # each round is one run with recording and one without
    steps: int = 40  # of each run; the first quarter is not counted
    json: Path | None = None  # where to write the result


def main(arguments: Arguments) -> None:
    """Run, compare, print, write."""
    make_room(arguments.json, flag="--json")
    costs: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-trace-") as name:
        folder = Path(name)
        flags = ["--preset", arguments.preset, "--nodes", str(arguments.nodes), "--plan", arguments.plan]
        flags += ["--steps", str(arguments.steps), "--eval-every", "0", "--checkpoint-every", "0"]
        flags += ["--compilation-cache", str(folder / "programs")]
        for number in range(arguments.rounds):
            step_s: dict[bool, float] = {}
            for is_traced in (False, True) if number % 2 else (True, False):
                run_dir = folder / f"round-{number}-{'with' if is_traced else 'without'}"
                step_s[is_traced] = usual_step_s(run_dir, [*flags, *["--trace"] * is_traced])
            costs.append(step_s[True] / step_s[False] - 1)
            print(
                f"round {number + 1}/{arguments.rounds}: {step_s[False]:.3f} s a step, {costs[-1]:+.1%} with recording",
                flush=True,
            )
    result = {"cost_fraction": statistics.median(costs), "costs": costs}
    print(f"recording takes {result['cost_fraction']:+.2%} of a step (median)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def usual_step_s(run_dir: Path, flags: Sequence[str]) -> float:
    """Run train.py to its end; return the median time of its steps."""
    run = LiveRun(run_dir, [sys.executable, str(TRAIN), "--run-dir", str(run_dir), *flags])
    return statistics.median(run.undisturbed_steps_s(limit_s=LIMIT_S, end_s=END_S))


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=(__doc__ or "").partition("\n")[0])))
