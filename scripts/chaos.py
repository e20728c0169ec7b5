"""Let a real run suffer random failures, and check that it does what it would have done without them.

    python scripts/chaos.py --seed 3 --incidents 200 --json chaos.json

Workers and agents are killed, stopped and asked to leave, the coordinator is killed and started again, nodes come back.
The same seed strikes the same nodes in the same way again. Written: {"incidents", "survived", "violations"}.
"""

import json
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from models.presets import load_preset
from oobleck_jax.chaos import Chaos, draw_strikes, violations_of
from oobleck_jax.errors import ConfigError
from oobleck_jax.live_run import LiveRun, LiveRunError
from oobleck_jax.plan_text import read_plan
from oobleck_jax.script import make_room, run_script


TRAIN = Path(__file__).with_name("train.py")
PRESET = "gpt-test"
NUM_STEPS = 1_000_000  # more than any run reaches
LIMIT_S = 60.0  # of the run without strikes: to begin, and to end


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this script."""

    seed: int = 0  # decides what is struck, and when
    incidents: int = 20  # strikes
    nodes: int = 4  # of the run
    fault_tolerance: int = 1  # of the run; from 2 on, two nodes are struck at once, too
    plan: str = "0-3,3-6 | 0-3,3-6"  # while all nodes work
    folder: Path | None = None  # for the run's files (default: a new one)
    programs: Path | None = None  # folder of compiled programs (default: in --folder)
    relative: float = 1e-6  # how much a loss may differ from the undisturbed run's
    json: Path | None = None  # write the result into this file


def main(arguments: Arguments) -> int:
    """Run, check, print, write; return the exit code."""
    make_room(arguments.json, flag="--json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without ending what was started
    if arguments.nodes < 2:
        raise ConfigError(f"--nodes is {arguments.nodes}; two at least, or nobody is left to go on")
    read_plan(arguments.plan, num_microbatches=load_preset(PRESET).num_microbatches)  # refuse what is none
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    strikes = draw_strikes(
        arguments.seed,
        count=arguments.incidents,
        num_nodes=arguments.nodes,
        fault_tolerance=arguments.fault_tolerance,
    )
    slow = ",".join(f"slow:{node}@0:0.5" for node in range(arguments.nodes))  # leaves the cores to those that start
    run_dir = folder / "struck"
    flags = ["--nodes", str(arguments.nodes), "--plan", arguments.plan]
    flags += ["--fault-tolerance", str(arguments.fault_tolerance), "--inject", slow]
    flags += ["--forgive-minutes", "0"]  # nodes fail more often than any would be kept for
    chaos = Chaos(
        _command(folder, run_dir, arguments, *flags),
        run_dir,
        join_command=[
            sys.executable,
            str(TRAIN),
            "--compilation-cache",
            str(arguments.programs or folder / "programs"),
        ],
        num_nodes=arguments.nodes,
    )
    violations: list[str] = []
    try:
        chaos.run(strikes, lambda text: print(text, flush=True))
    except LiveRunError as error:
        violations.append(f"after strike {chaos.struck} of seed {arguments.seed}: {error}")
    metrics = run_dir / "metrics.jsonl"
    num_steps = len(metrics.read_text(encoding="utf-8").splitlines()) if metrics.exists() else 0
    print(f"{chaos.survived} of {chaos.struck} survived, {num_steps} steps; now the same without strikes", flush=True)
    losses = _undisturbed(folder, arguments, num_steps) if num_steps else []
    violations += violations_of(run_dir, losses, relative=arguments.relative)
    result = {"incidents": chaos.struck, "survived": chaos.survived, "violations": violations}
    print(json.dumps({**result, "violations": violations[:10]}, indent=2))
    print(f"files: {folder}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if violations else 0


def _command(folder: Path, run_dir: Path, arguments: Arguments, *flags: str) -> list[str]:
    command = [sys.executable, str(TRAIN), "--preset", PRESET, "--profile", "estimate", "--run-dir", str(run_dir)]
    command += [*_programs(folder, arguments), "--steps", str(NUM_STEPS), "--eval-every", "0"]
    # The learning rate is low: the rounding differences of unequal plans grow with it, over thousands of steps.
    return [*command, "--peak-learning-rate", "1e-5", *flags]


def _programs(folder: Path, arguments: Arguments) -> list[str]:
    return ["--compilation-cache", str(arguments.programs or folder / "programs")]


def _undisturbed(folder: Path, arguments: Arguments, num_steps: int) -> list[float]:
    """Return the losses of the same run without strikes.

    Its pipelines have one stage each: where the batch is split in the same way, the cuts change no bit.
    """
    plan = read_plan(arguments.plan, num_microbatches=load_preset(PRESET).num_microbatches)
    whole = " | ".join(f"0-{pipeline.template.num_layers}:{pipeline.num_microbatches}" for pipeline in plan.pipelines)
    flags = ["--nodes", str(len(plan.pipelines)), "--plan", whole]
    run = LiveRun(folder / "undisturbed", _command(folder, folder / "undisturbed", arguments, *flags))
    run.start()
    try:
        run.wait(f"step {num_steps - 1}", lambda: run.num_steps >= num_steps, limit_s=LIMIT_S + num_steps)
        run.interrupt(limit_s=LIMIT_S)
    finally:
        run.kill_all()
    return [line["loss"] for line in run.metrics[:num_steps]]


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=(__doc__ or "").partition("\n")[0])))
