"""Replay a failure trace: what would this cluster have achieved, with this system and with others?

    python scripts/replay.py --preset gpt3-6.7b --device a40 --nodes 30 --trace poisson:mtbf=1800,return=1200
    python scripts/replay.py --preset gpt3-6.7b --device a40 --nodes 30 --trace spot.csv --policies ours,varuna-best
    python scripts/replay.py --preset gpt2-medium --device a40 --nodes 30 --trace poisson:mtbf=1800 --sweep f=0..4
    python scripts/replay.py --preset gpt2-medium --device a40 --nodes 30 --trace poisson:mtbf=1 --sweep mtbf=600,3600
    python scripts/replay.py --live            # real kills and joins on this machine, against their simulation

Traces are files (oobleck_jax/replay/trace.py says which) or recipes (generate.py). Costs of the model are those of
scripts/plan.py; costs of recoveries are measured ones that come with the package, or your own.
"""

import dataclasses
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import tyro
from rich.console import Console
from rich.progress import track

from oobleck_jax.config import RunConfig
from oobleck_jax.launch import available_cores
from oobleck_jax.planning.devices import device_named
from oobleck_jax.replay.generate import generate_trace, parse_recipe
from oobleck_jax.replay.layouts import Layouts
from oobleck_jax.replay.policies.entries import names_of
from oobleck_jax.replay.published import NODE_START_S
from oobleck_jax.replay.recovery_costs import read_costs
from oobleck_jax.replay.score import Contest, hold
from oobleck_jax.replay.sweep import Sweep, parse_sweep
from oobleck_jax.replay.tables import scores_table, settings_table, sweep_table
from oobleck_jax.replay.trace import Trace, read_trace
from oobleck_jax.replay.workload import Workload
from oobleck_jax.script import make_room, make_room_for_picture, run_script
from oobleck_jax.target import config_of, memory_of, profile_of


DEFAULT_TRACE = "poisson:mtbf=3600,return=1800"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to replay. Flags that are left out come from the preset."""

    trace: str | None = None  # a file, or a recipe (default: poisson:mtbf=3600,return=1800; --live has its own)
    policies: str = "all"  # names with commas between them, or all
    sweep: str | None = None  # f=0..4, or mtbf=600,1800,3600 of a recipe: replay for each
    seed: int = 0  # of recipes, and of who leaves where a file has only numbers of nodes
    hours: float | None = None  # of the trace: cut, or longer with the last nodes
    trace_unit_s: float | None = None  # of the times in a file (default: 0.001 of events, 1 of counts)
    node_start_s: float = NODE_START_S  # from "add" until a node is live, for all policies
    notice_s: float = 0.0  # nodes are told so long before they leave; only our policy heeds it
    recovery: Path | None = None  # result of scripts/bench_recovery.py (default: one in the package)
    checkpoint: Path | None = None  # result of scripts/bench_checkpoint.py (default: likewise)

    preset: str = "gpt-laptop"  # the model and its batch: a name, or FILE.py:FUNCTION
    nodes: int | None = None  # nodes at the beginning, for recipes; files say it themselves
    fault_tolerance: int | None = None  # f: losses of nodes that must be survivable at once
    devices_per_node: int | None = None  # devices of each node
    tensor_parallel: bool = False  # devices of a stage share out its products, not the samples
    microbatch_size: int | None = None  # sequences per microbatch
    global_batch_size: int | None = None  # sequences per step
    remat: Literal["none", "dots", "layer", "stage", "auto"] | None = None  # what forward keeps for backward
    device: str | None = None  # replay on this device (a40, h100, ...), with estimated costs; without: this machine
    profile: str | None = None  # costs: a file of scripts/profile.py, "estimate", or "xla"
    precision: Literal["float32", "bfloat16", "mixed"] | None = None  # default: mixed on a --device, else the preset's
    device_memory_gib: float | None = None  # memory of a device (default: what --device has, less a reserve)
    network_gbit: float = 100.0  # peak rate of the network of a node, in each direction, for --device
    network_latency_us: float = 10.0  # latency of the network, for --device

    live: bool = False  # play a trace for real, with scripts/train.py on this machine, and compare
    live_minutes: float = 3.0  # of that trace

    json: Path | None = None  # write everything into this file
    plot: Path | None = None  # draw throughput and time into this file (.png, .pdf, .svg)


def main(arguments: Arguments) -> int:
    """Replay, print, write; return the exit code."""
    make_room(arguments.json, flag="--json")
    make_room_for_picture(arguments.plot, flag="--plot")
    console = Console()
    config = config_of(arguments)
    if arguments.live:
        return _live(arguments, config, console)
    if arguments.sweep is not None:
        return _sweep(arguments, parse_sweep(arguments.sweep), config, console)
    contest = contest_of(arguments, config)
    console.print(scores_table(contest))
    console.print(settings_table(contest))
    if arguments.json is not None:
        _write(arguments.json, contest.scores)
    if arguments.plot is not None:
        from oobleck_jax.replay.plot import draw_contest  # imported here, because matplotlib takes its time

        draw_contest(contest, arguments.plot)
        console.print(f"drawn: {arguments.plot}")
    return 0


def contest_of(arguments: Arguments, config: RunConfig) -> Contest:
    """Play all policies against the trace.

    Raises:
        ConfigError: something that was given cannot be used.
    """
    policies = names_of(arguments.policies)
    trace = trace_of(arguments, config)
    recovery, checkpoints = read_costs(recovery=arguments.recovery, checkpoint=arguments.checkpoint)
    return hold(
        trace,
        Layouts(workload_of(arguments, config), max_nodes=trace.most_nodes),
        policies=policies,
        fault_tolerance=config.fault_tolerance,
        recovery=recovery,
        checkpoints=checkpoints,
    )


def trace_of(arguments: Arguments, config: RunConfig) -> Trace:
    """Return the trace of nodes that are live."""
    given = arguments.trace or DEFAULT_TRACE
    recipe = parse_recipe(given)
    duration_s = None if arguments.hours is None else 3600 * arguments.hours
    if recipe is None:
        trace = read_trace(Path(given), seed=arguments.seed, unit_s=arguments.trace_unit_s)
        trace = trace if duration_s is None else trace.within(duration_s)
    else:
        trace = generate_trace(recipe, num_nodes=config.nodes, duration_s=duration_s, seed=arguments.seed)
    return dataclasses.replace(trace.starting(arguments.node_start_s), notice_s=arguments.notice_s)


def workload_of(arguments: Arguments, config: RunConfig) -> Workload:
    """Return what is trained, with its costs."""
    device = None if arguments.device is None else device_named(arguments.device)
    return Workload(
        name=arguments.preset,
        profile=profile_of(arguments, config, device),
        num_microbatches=config.num_microbatches,
        sequence_length=config.sequence_length,
        devices_per_node=config.devices_per_node,
        device_memory_bytes=memory_of(arguments, config, device),
    )


def _sweep(arguments: Arguments, sweep: Sweep, config: RunConfig, console: Console) -> int:
    """Replay for each value, and print a table of shares."""
    contests: list[Contest] = []
    for value in track(sweep.values, description=f"sweeping {sweep.name}", console=console, transient=True):
        if sweep.name == "f":
            contests.append(contest_of(arguments, dataclasses.replace(config, fault_tolerance=int(value))))
        else:
            changed = dataclasses.replace(arguments, trace=sweep.in_recipe(arguments.trace or DEFAULT_TRACE, value))
            contests.append(contest_of(changed, config))
    names = [f"{value:g}" for value in sweep.values]
    console.print(sweep_table(sweep.name, names, [contest.scores for contest in contests]))
    if arguments.json is not None:
        _write(arguments.json, {name: contest.scores for name, contest in zip(names, contests, strict=True)})
    if arguments.plot is not None:
        from oobleck_jax.replay.plot import draw_sweep

        draw_sweep(sweep.name, sweep.values, [contest.scores for contest in contests], arguments.plot)
        console.print(f"drawn: {arguments.plot}")
    return 0


def _live(arguments: Arguments, config: RunConfig, console: Console) -> int:
    """Play a trace for real, simulate it, compare."""
    from oobleck_jax.live_replay import LiveRun, compare, short_trace

    num_nodes = arguments.nodes or max(min(len(available_cores()), 4), 2)
    tolerance = 1 if arguments.fault_tolerance is None else arguments.fault_tolerance
    config = dataclasses.replace(config, nodes=num_nodes, fault_tolerance=tolerance)
    if arguments.trace is None:
        trace = short_trace(num_nodes, 60 * arguments.live_minutes)
    else:
        trace = trace_of(dataclasses.replace(arguments, nodes=num_nodes, node_start_s=0.0, notice_s=0.0), config)
    flags = ["--preset", arguments.preset, "--fault-tolerance", str(tolerance)]
    for name in ("microbatch_size", "global_batch_size", "devices_per_node", "remat"):
        value = getattr(arguments, name)
        flags += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    flags += ["--tensor-parallel"] if arguments.tensor_parallel else []
    folder = Path(tempfile.mkdtemp(prefix="live-replay-"))
    run = LiveRun(
        flags,
        train=Path(__file__).with_name("train.py"),
        run_dir=folder / "run",
        num_nodes=num_nodes,
        most_nodes=trace.most_nodes,
    )
    try:
        console.print(f"{num_nodes} nodes come up; files: {folder}")
        usual_step_s = run.usual_step_s()
        console.print(f"a step takes {usual_step_s:.3g} s; now {trace.duration_s:.0f} s of trace")
        measured = run.play(trace, console.print)
        recoveries_s = run.recoveries_s()
    finally:
        run.end()
    costs, _ = read_costs(recovery=arguments.recovery, hosts_vanish=False)
    result = compare(
        trace,
        workload_of(arguments, config),
        fault_tolerance=tolerance,
        costs=costs,
        usual_step_s=usual_step_s,
        measured_steps=measured,
        recoveries_s=recoveries_s,
    )
    console.print(
        f"committed {result.measured_steps} steps, simulated {result.simulated_steps:.1f}: off by {result.error:+.1%}; "
        f"recoveries took {', '.join(f'{seconds:.2f}' for seconds in recoveries_s)} s"
    )
    if arguments.json is not None:
        _write(arguments.json, {**dataclasses.asdict(result), "error": result.error})
    return 0


def _write(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=__doc__)))
