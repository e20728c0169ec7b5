"""A picture of a run: loss and throughput over time, with the incidents marked."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from oobleck_jax import events
from oobleck_jax.journal import read_journal


_COLOURS = {"loss": "tab:red", "leave": "tab:orange", "join": "tab:green", "coordinator": "tab:purple"}


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What the files of a run tell, with times in seconds since its first record."""

    committed: tuple[tuple[float, events.Committed], ...]  # those that count
    incidents: tuple[tuple[float, events.Incident], ...]  # at the first commit after each
    working: tuple[tuple[float, int], ...]  # from when on how many nodes work


def read_history(run_dir: Path) -> History:
    """Read a run directory.

    Raises:
        FileNotFoundError: it is none.
    """
    told = events.read_run(run_dir)
    start_s = told[0][0] if told else 0.0
    committed = read_journal(run_dir / "journal.jsonl").committed
    since = [(time_s - start_s, record) for time_s, record in told]
    return History(
        committed=tuple((time_s - start_s, record) for time_s, record in committed),
        incidents=tuple((time_s, record) for time_s, record in since if isinstance(record, events.Incident)),
        working=tuple(
            (time_s, len(record.plan.working_nodes)) for time_s, record in since if isinstance(record, events.Planned)
        ),
    )


def plot_history(history: History, target: "Path | TextIO", *, tokens_per_step: int, title: str) -> None:
    """Draw a run into a file; the ending of its name says which format, SVG where it has none.

    Args:
        history: what happened.
        target: file of the picture, or where its SVG goes.
        tokens_per_step: of the global batch.
        title: above it.
    """
    figure = Figure(figsize=(11, 7), layout="constrained")
    loss, speed, nodes = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2, 1])
    times_s = [time_s for time_s, _ in history.committed]
    losses = [math.nan if record.loss is None else record.loss for _, record in history.committed]
    loss.plot(times_s, losses, color="tab:blue", linewidth=1.2)
    loss.set_ylabel("loss")
    loss.set_title(title)
    rates = [tokens_per_step / record.step_time_s for _, record in history.committed]
    speed.plot(times_s, rates, color="tab:blue", linewidth=0.8, marker=".", markersize=3)
    speed.set_ylabel("tokens/s")
    speed.set_ylim(bottom=0)
    end_s = max(times_s, default=0.0)
    steps = [*history.working, *((end_s, count) for _, count in history.working[-1:])]
    nodes.step([time_s for time_s, _ in steps], [count for _, count in steps], where="post", color="black")
    nodes.set_ylabel("working nodes")
    nodes.set_ylim(bottom=0)
    nodes.yaxis.get_major_locator().set_params(integer=True)
    nodes.set_xlabel("seconds since the start")
    for time_s, incident in history.incidents:
        began_s = time_s - incident.seconds.get("total", 0.0)
        for axes in (loss, speed, nodes):
            axes.axvspan(began_s, time_s, color=_COLOURS[incident.kind], alpha=0.25, linewidth=0)
            axes.axvline(began_s, color=_COLOURS[incident.kind], linewidth=1)
        _label(loss, began_s, incident)
    for axes in (loss, speed, nodes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=150, format=None if isinstance(target, Path) else "svg")


def _label(axes: Axes, time_s: float, incident: events.Incident) -> None:
    words = {"loss": "lost", "leave": "left", "join": "joined", "coordinator": "coordinator restarted"}[incident.kind]
    who = " ".join(f"node {node}" for node in incident.nodes)
    text = f"{who} {words}".strip() + f": {incident.seconds.get('total', 0.0):.2f} s"
    axes.annotate(
        text,
        (time_s, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(3, -4),
        textcoords="offset points",
        rotation=90,
        va="top",
        fontsize=8,
        color=_COLOURS[incident.kind],
    )
