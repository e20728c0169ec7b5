"""The evaluation of the Oobleck paper, replayed: five models on 30 A40 nodes, seven traces, every policy.

    python scripts/evaluate.py --json evaluation.json --figures docs/figures

writes {trace: {model: {policy: score}}}, prints the tables of docs/evaluation.md and draws its figures. The traces of
EC2 P3 and GCP are files of the paper's simulator (branch sosp23-artifact of its repository, tools/simulator/traces/
scaled); where they are not there, the others are replayed.
"""

import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import msgspec
import tyro
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from oobleck_jax.errors import ConfigError
from oobleck_jax.replay.generate import Recipe, generate_trace
from oobleck_jax.replay.layouts import Layouts
from oobleck_jax.replay.models import PAPER_MODELS, paper_workload
from oobleck_jax.replay.policies.entries import ALL, names_of
from oobleck_jax.replay.published import NODE_START_S
from oobleck_jax.replay.recovery_costs import read_costs
from oobleck_jax.replay.score import SLOWER, Score, hold
from oobleck_jax.replay.timeline import Spending
from oobleck_jax.replay.trace import Trace, read_trace
from oobleck_jax.script import make_room, run_script


NUM_NODES = 30
PERIODS_S = MappingProxyType({"6h": 21600.0, "3h": 10800.0, "1h": 3600.0, "30m": 1800.0, "10m": 600.0})
FILES = MappingProxyType({"p3": "scale_p3-trace.csv", "gcp": "scale_gcp-trace.csv"})
NOTICES_S = MappingProxyType({"p3": 120.0, "gcp": 30.0})  # that the two markets give
NOTICE = "+notice"  # of the name of a trace
SHOWN = ("ours", "oobleck", "oobleck-best", "recycle", "recycle-best", "bamboo-best", "varuna", "varuna-best")

Results: TypeAlias = dict[str, dict[str, dict[str, Score]]]  # by trace, model and policy


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to evaluate."""

    json: Path | None = None  # write everything into this file
    figures: Path | None = None  # draw the figures into this folder
    policies: str = "all"  # names with commas between them, or all
    models: str = "all"  # likewise
    fault_tolerance: int = 1  # f of the systems that have one
    traces: Path = Path(__file__).parents[2] / "shared" / "traces" / "oobleck"  # folder of the P3 and GCP traces
    recovery: Path | None = None  # result of scripts/bench_recovery.py (default: one in the package)
    checkpoint: Path | None = None  # result of scripts/bench_checkpoint.py (default: likewise)
    processes: int = os.cpu_count() or 1  # at once


def main(arguments: Arguments) -> int:
    """Replay all, print, write, draw; return the exit code."""
    make_room(arguments.json, flag="--json")
    console = Console()
    began_s = time.monotonic()
    try:
        names_of(arguments.policies)
        traces = traces_of(arguments)
        results = evaluate(arguments, traces, console)
    except ConfigError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    for line in tables(results):
        print(line)
    if arguments.figures is not None:
        draw(results, arguments.figures)
    missing = [name for name in FILES if name not in traces]
    if missing:
        print(f"left out: {', '.join(missing)}, because {arguments.traces} has no {FILES[missing[0]]}")
    print(f"evaluated in {time.monotonic() - began_s:.0f} s")
    return 0


def traces_of(arguments: Arguments) -> dict[str, Trace]:
    """Return the traces of nodes that are live, by name."""
    traces = {
        name: generate_trace(Recipe(kind="periodic", mtbf=period_s), num_nodes=NUM_NODES)
        for name, period_s in PERIODS_S.items()
    }
    for name, file in FILES.items():
        if (arguments.traces / file).exists():
            trace = replace(read_trace(arguments.traces / file).starting(NODE_START_S), name=name)
            traces[name] = trace
            traces[name + NOTICE] = replace(trace, notice_s=NOTICES_S[name])
    return traces


def models_of(text: str) -> tuple[str, ...]:
    """Return the models in a list, or all.

    Raises:
        ConfigError: there is no such model.
    """
    models = tuple(PAPER_MODELS) if text == ALL else tuple(dict.fromkeys(text.split(",")))
    if unknown := [model for model in models if model not in PAPER_MODELS]:
        raise ConfigError(f"--models {unknown[0]} is not known; there are {', '.join(PAPER_MODELS)}, and {ALL}")
    return models


def evaluate(arguments: Arguments, traces: Mapping[str, Trace], console: Console) -> Results:
    """Play all policies against all traces, several at once; the results do not depend on how many."""
    models = models_of(arguments.models)
    results: Results = {name: {model: {} for model in models} for name in traces}
    columns = (TextColumn("replaying {task.fields[what]}"), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        futures = {
            pool.submit(_scores, arguments, model, trace, name): (name, model)
            for model in models
            for name, trace in traces.items()
        }
        task = progress.add_task("", total=len(futures), what="")
        for future in as_completed(futures):
            name, model = futures[future]
            results[name][model] = future.result()
            progress.update(task, advance=1, what=f"{model} on {name}")
    return results


def _scores(arguments: Arguments, model: str, trace: Trace, name: str) -> dict[str, Score]:
    recovery, checkpoints = read_costs(recovery=arguments.recovery, checkpoint=arguments.checkpoint)
    policies = ("oracle", "ours") if name.endswith(NOTICE) else names_of(arguments.policies)
    return hold(
        trace,
        _layouts(model),
        policies=policies,
        fault_tolerance=arguments.fault_tolerance,
        recovery=recovery,
        checkpoints=checkpoints,
    ).scores


@lru_cache
def _layouts(model: str) -> Layouts:
    return Layouts(paper_workload(model), max_nodes=NUM_NODES)


def tables(results: Results) -> list[str]:
    """Return the results as tables in Markdown: shares of the oracle, and what ours is lost to."""
    lines: list[str] = []
    for name, models in results.items():
        if name.endswith(NOTICE):
            continue
        lines += [f"### {name}", "", "| share of the oracle (samples/s) | " + " | ".join(models) + " |"]
        lines.append("|---|" + "---|" * len(models))
        for policy in next(iter(models.values())):
            cells = (_cell(scores[policy]) for scores in models.values())
            lines.append(f"| {policy} | " + " | ".join(cells) + " |")
        lines.append("")
    kinds = (Spending.REDONE, Spending.RECOVERY, Spending.CHECKPOINT, Spending.IDLE, SLOWER)
    lines += ["### What ours is lost to", "", "| trace | model | reached | of our plans | " + " | ".join(kinds) + " |"]
    lines.append("|---|---|---|---|" + "---|" * len(kinds))
    for name, models in results.items():
        for model, scores in models.items():
            score = scores["ours"]
            lost = (f"{score.lost.get(kind, 0.0):.1%}" for kind in kinds)
            reached = f"{score.share_of_oracle:.1%} | {score.share_of_plans:.1%}"
            lines.append(f"| {name} | {model} | {reached} | " + " | ".join(lost) + " |")
    return lines


def _cell(score: Score) -> str:
    return "cannot run" if score.note else f"{score.share_of_oracle:.1%} ({score.samples_per_s:.3g})"


def draw(results: Results, folder: Path) -> None:
    """Draw the figures."""
    from oobleck_jax.replay.plot import draw_losses, draw_shares  # imported here, because matplotlib takes its time

    folder.mkdir(parents=True, exist_ok=True)
    some = next(iter(next(iter(results.values())).values()))
    shown = [policy for policy in SHOWN if policy in some]
    draw_shares({name: results[name] for name in PERIODS_S}, shown, folder / "shares-periodic.png")
    spot = [name for name in results if name not in PERIODS_S]
    if spot:
        plain = {name: results[name] for name in spot if not name.endswith(NOTICE)}
        draw_shares(plain, shown, folder / "shares-spot.png")
        ours = {name: {model: scores["ours"] for model, scores in results[name].items()} for name in spot}
        draw_losses(ours, folder / "losses-spot.png", title="What ours reaches of the oracle, and what is lost to what")


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=__doc__)))
