"""Check on the devices of this machine that runs survive, and how fast one node is against plain JAX.

    python scripts/check_devices.py --json devices.json                     # GPT-2 small on a GPU that nodes share
    python scripts/check_devices.py --preset gpt-test --nodes 2 --rounds 0  # anywhere, in a minute

For each number of nodes a run is started on this machine, a worker is killed (SIGKILL) once all nodes train, and again
once its successor does; then the run is ended and its files are audited. Nodes share the devices: each may use an equal
part of a GPU's memory. After that one node and plain JAX (scripts/bench_throughput.py) take turns.
"""

import json
import os
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from models.presets import load_preset
from oobleck_jax import events
from oobleck_jax.audit import audit
from oobleck_jax.config import Precision
from oobleck_jax.dashboard.facts import flops_per_step, peak_flops_per_s
from oobleck_jax.live_run import LiveRun
from oobleck_jax.script import make_room, run_script
from scripts.bench_throughput import Case, run_pipeline, run_plain


TRAIN = Path(__file__).with_name("train.py")
LIMIT_S = 600.0  # for any one thing that is waited for
MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
MEMORY_FOR_ALL = 0.9
MANY_STEPS = 1_000_000
STEPS_BETWEEN = 3  # of all nodes together, before a kill and after the last one


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this script."""

    preset: str = "gpt2-small"  # what to train
    precision: Precision = Precision.MIXED  # of the runs
    nodes: tuple[int, ...] = (2, 3)  # of the runs in which workers are killed; they share the devices
    kills: int = 2  # in each of these runs
    global_batch_size: int | None = 32  # sequences per step of these runs (default of the preset: None)
    rounds: int = 3  # of one node against plain JAX; 0: none
    steps: int = 12  # of each side in a round
    json: Path | None = None  # where to write the result


@dataclass(frozen=True, kw_only=True, slots=True)
class Survival:
    """What came of a run in which workers were killed."""

    nodes: int
    device: str
    kills: int
    recovery_s: tuple[float, ...]  # of each, by the record of the run: until the next step counted
    steps: int
    violation: str | None  # the first that its files show (audit.py)


def main(arguments: Arguments) -> int:
    """Kill, compare, print, write; return the exit code."""
    make_room(arguments.json, flag="--json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without ending what was started
    survivals: list[Survival] = []
    with tempfile.TemporaryDirectory(prefix="check-devices-") as folder:
        for count in arguments.nodes:
            survivals.append(survive(arguments, count, Path(folder)))
            print(survivals[-1], flush=True)
    throughput = compare(arguments, survivals[-1].device if survivals else "")
    result = {"survival": [asdict(survival) for survival in survivals], "throughput": throughput}
    print(json.dumps(throughput, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if any(survival.violation for survival in survivals) else 0


def survive(arguments: Arguments, num_nodes: int, folder: Path) -> Survival:
    """Run so many nodes, and kill a worker again and again.

    Raises:
        LiveRunError: the run ends, or does not go on.
    """
    command = [sys.executable, str(TRAIN), "--preset", arguments.preset, "--precision", arguments.precision]
    command += ["--nodes", str(num_nodes), "--fault-tolerance", "1", "--forgive-minutes", "0"]
    command += ["--steps", str(MANY_STEPS), "--eval-every", "0", "--checkpoint-every", "0"]
    if arguments.global_batch_size is not None:
        command += ["--global-batch-size", str(arguments.global_batch_size)]
    run_dir = folder / f"nodes-{num_nodes}"
    environment = {**os.environ, MEMORY: f"{MEMORY_FOR_ALL / num_nodes:.2f}"}
    run = LiveRun(run_dir, [*command, "--run-dir", str(run_dir)], environment=environment)
    run.start()
    try:
        for number in range(arguments.kills):
            _await_all(run, num_nodes)
            os.kill(run.workers[number % num_nodes], signal.SIGKILL)
            run.wait("loss that is recovered from", lambda number=number: len(_losses(run)) > number, limit_s=LIMIT_S)
        _await_all(run, num_nodes)
        run.interrupt(limit_s=LIMIT_S)
    except BaseException:
        run.kill_all()
        raise
    (_, ready), *_ = run.records(events.Ready)
    return Survival(
        nodes=num_nodes,
        device=ready.device_kind,
        kills=len(_losses(run)),
        recovery_s=tuple(round(loss.seconds["total"], 3) for loss in _losses(run)),
        steps=run.num_steps,
        violation=audit(run_dir).violation,
    )


def _await_all(run: LiveRun, num_nodes: int) -> None:
    """Wait until all nodes have trained together for some steps."""

    def is_whole() -> bool:
        prepared = run.records(events.Prepared)
        if not prepared or len(prepared[-1][1].num_compilations) < num_nodes:
            return False
        return len(run.records(events.Committed, prepared[-1][0])) >= STEPS_BETWEEN

    run.wait(f"generation of all {num_nodes} nodes", is_whole, limit_s=LIMIT_S)


def _losses(run: LiveRun) -> list[events.Incident]:
    return [record for _, record in run.records(events.Incident) if record.kind == "loss"]


def compare(arguments: Arguments, device: str) -> dict[str, Any]:
    """Return tokens/s of one node and of plain JAX, in turns, and the share of the device's peak where it is known."""
    text = f"{arguments.preset}:{arguments.precision}"
    plain: list[float] = []
    ours: list[float] = []
    for _ in range(arguments.rounds):
        plain.append(run_plain(text, arguments.steps))
        ours.append(run_pipeline(Case.parse(text), 1, arguments.steps)["median_tokens_per_s"])
        print(f"plain JAX {plain[-1]:.0f} tokens/s, one node {ours[-1]:.0f}", flush=True)
    if not plain:
        return {}
    config = replace(load_preset(arguments.preset), precision=arguments.precision)
    flops, peak = flops_per_step(config), peak_flops_per_s(device, arguments.precision)
    rate = statistics.median(ours)
    return {
        "plain_tokens_per_s": statistics.median(plain),
        "tokens_per_s": rate,
        "ratio": statistics.median(one / other for one, other in zip(ours, plain, strict=True)),
        "mfu": None if flops is None or peak is None else flops / config.tokens_per_step * rate / peak,
    }


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=(__doc__ or "").partition("\n")[0])))
