"""Figures of replays: throughput over time with the number of nodes, and what the time was spent on."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from oobleck_jax.replay.score import SLOWER, Contest, Score
from oobleck_jax.replay.simulator import Replay
from oobleck_jax.replay.timeline import Spending


NUM_BINS = 60  # of the time axis
LINES_SHOWN = ("oracle", "ours", "oobleck", "recycle-best", "varuna-best")  # over time; more would hide each other
COLORS = {
    Spending.USEFUL: "#54a24b",
    Spending.REDONE: "#e45756",
    Spending.RECOVERY: "#f58518",
    Spending.CHECKPOINT: "#4c78a8",
    Spending.REDUNDANT: "#b279a2",
    Spending.IDLE: "#bab0ac",
}
SLOWER_COLOR = "#eeca3b"
LINES = ("#222222", "#54a24b", "#4c78a8", "#e45756", "#b279a2", "#f58518", "#9d755d", "#72b7b2")


def draw_contest(contest: Contest, path: Path) -> None:
    """Draw throughput over time above the number of live nodes, and the time of each policy as a bar."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=[2.2, 1], height_ratios=[3, 1])
    rates, nodes = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    bars = figure.add_subplot(grid[:, 1])
    trace = contest.trace
    figure.suptitle(
        f"{contest.workload.name} on {trace.name}: {trace.num_losses} losses in {trace.duration_s / 3600:.3g} h"
    )
    _draw_rates(rates, contest)
    _draw_nodes(nodes, contest)
    _draw_time(bars, contest.scores, trace.duration_s)
    figure.savefig(path, dpi=110)


def draw_shares(shares: Mapping[str, Mapping[str, Mapping[str, Score]]], policies: Sequence[str], path: Path) -> None:
    """Draw the share of the oracle of policies: a row of panels for each trace, a group of bars for each model.

    Args:
        shares: by trace, model and policy.
        policies: to be shown, in this order.
        path: of the file.
    """
    figure = Figure(figsize=(12, 1.2 + 2.1 * len(shares)), layout="constrained")
    panels = figure.subplots(len(shares), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (trace, models) in zip(panels, shares.items(), strict=True):
        width = 0.84 / len(policies)
        for number, policy in enumerate(policies):
            places = [place + (number - (len(policies) - 1) / 2) * width for place in range(len(models))]
            heights = [scores[policy].share_of_oracle for scores in models.values()]
            axes.bar(places, heights, width, color=LINES[(number + 1) % len(LINES)], label=policy)
            for place, height, scores in zip(places, heights, models.values(), strict=True):
                text = "cannot run" if scores[policy].note else f"{100 * height:.0f}"
                rotation = 90 if scores[policy].note else 0
                axes.text(place, height + 0.01, text, ha="center", va="bottom", fontsize=6.5, rotation=rotation)
        axes.set_title(trace, fontsize=9, loc="left")
        axes.set_ylim(0, 1.12)
        axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
        axes.set_xticks(range(len(models)), list(models))
        _clean(axes)
    panels[0].legend(ncols=len(policies), fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1.08))
    figure.suptitle("Share of the oracle", x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=110)


def draw_losses(shares: Mapping[str, Mapping[str, Score]], path: Path, *, title: str) -> None:
    """Draw what the oracle's samples became: a bar for each model, for one policy on each of some traces.

    Args:
        shares: by trace and model.
        path: of the file.
        title: above it.
    """
    figure = Figure(figsize=(11, 1.0 + 1.9 * len(shares)), layout="constrained")
    panels = figure.subplots(len(shares), 1, squeeze=False, sharex=True)[:, 0]
    kinds = [spending for spending in Spending if spending is not Spending.USEFUL]
    for axes, (trace, models) in zip(panels, shares.items(), strict=True):
        places = range(len(models))
        left = np.array([score.share_of_oracle for score in models.values()])
        axes.barh(places, left, color=COLORS[Spending.USEFUL], label="reached")
        for place, share in zip(places, left, strict=True):
            axes.text(share - 0.004, place, f"{share:.1%}", ha="right", va="center", fontsize=8, color="white")
        for kind, color in [*((kind, COLORS[kind]) for kind in kinds), (SLOWER, SLOWER_COLOR)]:
            widths = np.array([max(score.lost.get(str(kind), 0.0), 0.0) for score in models.values()])
            if widths.max() > 0.0005:
                label = "slower layout, late joins" if kind == SLOWER else str(kind)
                axes.barh(places, widths, left=left, color=color, label=label)
            left = left + widths
        axes.set_yticks(places, list(models))
        axes.invert_yaxis()
        axes.set_xlim(0.7, 1.0)
        axes.set_title(trace, fontsize=9, loc="left")
        _clean(axes)
    ticks = [0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0]
    panels[-1].set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
    panels[-1].set_xlabel("of the oracle's samples")
    handles = {text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    panels[0].legend(
        list(handles.values()),
        list(handles),
        ncols=len(handles),
        fontsize=8,
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1, 1.02),
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=110)


def rates_over_time(replay: Replay, num_bins: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the ends of equal parts of the trace, and the mean samples per second in each."""
    times_s, samples = [0.0], [0.0]
    for segment in replay.segments:
        times_s.append(segment.end_s)
        samples.append(samples[-1] + segment.samples)
    edges = np.linspace(0.0, replay.trace.duration_s, num_bins + 1)
    done = np.interp(edges, times_s, samples)
    return edges, np.diff(done) / np.diff(edges)


def _draw_rates(axes: Axes, contest: Contest) -> None:
    names = [name for name in LINES_SHOWN if name in contest.replays] or list(contest.replays)[: len(LINES)]
    for number, name in enumerate(names):
        edges, rates = rates_over_time(contest.replays[name], NUM_BINS)
        width = 2.2 if name == "ours" else 1.2
        label = f"{name} ({contest.scores[name].share_of_oracle:.0%})"
        axes.stairs(rates, edges / 3600, baseline=None, label=label, color=LINES[number % len(LINES)], linewidth=width)
    axes.set_ylabel(f"samples/s, means of {contest.trace.duration_s / NUM_BINS / 60:.2g} min")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, ncols=len(names), loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    _clean(axes)


def _draw_nodes(axes: Axes, contest: Contest) -> None:
    count, times, counts = 0, list[float](), list[int]()
    for change in contest.trace.changes:
        count += len(change.joined) - len(change.left)
        times.append(change.time_s / 3600)
        counts.append(count)
    axes.step([*times, contest.trace.duration_s / 3600], [*counts, count], where="post", color="black", linewidth=1)
    axes.set_ylabel("live nodes")
    axes.set_xlabel("hours")
    axes.set_ylim(bottom=0)
    _clean(axes)


def _draw_time(axes: Axes, scores: Mapping[str, Score], duration_s: float) -> None:
    names = [name for name in scores if name != "oracle"]
    left = np.zeros(len(names))
    for spending in Spending:
        widths = np.array([scores[name].breakdown[spending] / duration_s for name in names])
        if widths.any():
            axes.barh(names, widths, left=left, color=COLORS[spending], label=str(spending))
        left += widths
    for place, name in enumerate(names):
        if scores[name].note:
            axes.text(0.02, place, "cannot run", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.set_title("What the time was spent on", fontsize=9, loc="left")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.04), ncols=3, frameon=False)
    _clean(axes)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def draw_sweep(name: str, values: Sequence[float], scores: Sequence[Mapping[str, Score]], path: Path) -> None:
    """Draw the share of the oracle of each policy over what is swept."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, policy in enumerate(scores[0]):
        if policy != "oracle":
            shares = [row[policy].share_of_oracle for row in scores]
            style = "o-" if number < len(LINES) else "o--"
            axes.plot(values, shares, style, color=LINES[number % len(LINES)], markersize=4, label=policy)
    if min(values) > 0 and max(values) > 8 * min(values):
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values], minor=False)
    axes.set_xlabel("seconds between losses" if name == "mtbf" else name)
    axes.set_ylabel("share of the oracle")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8, ncols=2)
    _clean(axes)
    figure.savefig(path, dpi=110)
