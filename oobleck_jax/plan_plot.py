"""A plan report as a picture: who runs which layers, how full the devices are, and how a step goes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from oobleck_jax.plan_report import Report
from oobleck_jax.plan_tables import ranges_text
from oobleck_jax.planning.plan import NodeId, Pipeline, Stage
from oobleck_jax.planning.schedule import Interval, Phase, simulate
from oobleck_jax.planning.schedule_kinds import schedule_of


MAX_PIPELINES = 24  # rows of the plan that are drawn
MAX_SHOWN = 12  # microbatches that are drawn at each end of a long schedule
FORWARD, BACKWARD, SUM, UPDATE = "#4c78a8", "#f58518", "#98c793", "#b279a2"
GIB = 2**30


def draw_plan(report: Report, path: Path) -> None:
    """Write the picture into a file; its suffix decides the format."""
    rows = _rows(report)
    slowest = max((numbers[0] for _, numbers in rows), key=lambda number: _intervals(report, number)[0][-1].end_s)
    pipeline = report.planning.plan.pipelines[slowest]
    is_long = pipeline.num_microbatches > 2 * MAX_SHOWN
    heights = [0.5 * len(rows) + 1.0, 2.4, min(0.3 * len(pipeline.template.stages), 8.0) + 1.4]
    figure = Figure(figsize=(15, sum(heights) + 1.0), layout="constrained")
    figure.suptitle(f"{_title(report)}\n{report.planning.reason}", fontsize=11)
    parts: Any = figure.subfigures(3, 1, height_ratios=heights)
    top, middle, bottom = parts
    _draw_layers(top.subplots(), rows, report)
    _draw_memory(middle.subplots(), rows, report)
    _draw_schedule(bottom.subplots(1, 2 if is_long else 1, squeeze=False)[0], report, slowest)
    figure.savefig(path, dpi=110)


def _title(report: Report) -> str:
    request, throughput = report.request, report.throughput
    mfu = "" if throughput.model_flops_utilization is None else f", {throughput.model_flops_utilization:.1%} MFU"
    return (
        f"{request.name} on {request.nodes} nodes of {report.num_devices} x {report.device}, "
        f"f = {request.fault_tolerance}: {throughput.tokens_per_s:,.0f} tokens/s{mfu}"
    )


def _rows(report: Report) -> list[tuple[Pipeline, list[int]]]:
    """Return each kind of pipeline with the numbers of the pipelines of this kind."""
    rows: list[tuple[Pipeline, list[int]]] = []
    for number, pipeline in enumerate(report.planning.plan.pipelines):
        for other, numbers in rows:
            if replace(other, nodes=pipeline.nodes) == pipeline:
                numbers.append(number)
                break
        else:
            rows.append((pipeline, [number]))
    return rows[:MAX_PIPELINES]


def _draw_layers(axes: Axes, rows: Sequence[tuple[Pipeline, list[int]]], report: Report) -> None:
    """Draw a row for each kind of pipeline: its stages over the layers, and the nodes that run them."""
    colors = matplotlib.colormaps["tab20"]
    names: list[str] = []
    for row, (pipeline, numbers) in enumerate(rows):
        for stage in pipeline.template.stages:
            color = colors((stage.node_index % 10) * 2 + 1)
            place = (stage.first_layer, row - 0.4)
            axes.add_patch(Rectangle(place, len(stage.layers), 0.8, facecolor=color, edgecolor="black", linewidth=0.5))
        for index in range(pipeline.template.num_nodes):
            stages = [stage for stage in pipeline.template.stages if stage.node_index == index]
            layers = len(stages[0].layers) if _is_apart(stages) else stages[-1].end_layer - stages[0].first_layer
            nodes = [report.planning.plan.pipelines[number].nodes[index] for number in numbers]
            room = 130 * layers // pipeline.template.num_layers  # characters
            splits = f"\n{len(stages)} stages" if len(stages) > 1 else ""
            text = _node_text(nodes, room) + (splits if room > 9 else "")
            axes.text(stages[0].first_layer + layers / 2, row, text, ha="center", va="center", fontsize=7)
        count = f"{len(numbers)} x " if len(numbers) > 1 else ""
        names.append(f"{count}pipeline {ranges_text(numbers)}\n{pipeline.num_microbatches} microbatches")
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_xlim(0, report.planning.plan.num_layers)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("layer")
    spare = report.planning.plan.spare_nodes
    axes.set_title(
        "Which nodes run which layers" + (f" (spare: {ranges_text(spare)})" if spare else ""), fontsize=9, loc="left"
    )


def _is_apart(stages: Sequence[Stage]) -> bool:
    return any(before.end_layer != after.first_layer for before, after in pairwise(stages))


def _node_text(nodes: Sequence[NodeId], room: int) -> str:
    """Return the names of nodes in at most so many characters, as far as possible."""
    names = ", ".join(str(node) for node in nodes)
    texts = (
        f"node {names}" if len(nodes) == 1 else f"nodes {names}",
        names,
        f"{nodes[0]}, ... {nodes[-1]}",
        f"{nodes[0]}, ...",
    )
    return next((text for text in texts if len(text) <= room), "")


def _draw_memory(axes: Axes, rows: Sequence[tuple[Pipeline, list[int]]], report: Report) -> None:
    """Draw a bar for each stage: peak memory of its devices, against what there is."""
    position = 0
    ticks: list[float] = []
    names: list[str] = []
    for _, numbers in rows:
        stages = report.planning.stages[numbers[0]]
        heights = [stage.memory_bytes / GIB for stage in stages]
        axes.bar(range(position, position + len(stages)), heights, color=FORWARD, edgecolor="white")
        ticks.append(position + (len(stages) - 1) / 2)
        names.append(f"pipeline {ranges_text(numbers)}")
        position += len(stages) + 1
    limit = report.device_memory_bytes / GIB
    axes.axhline(limit, color="black", linestyle="--", linewidth=1)
    axes.text(position - 1.5, limit, f"usable: {limit:.3g} GiB", ha="right", va="bottom", fontsize=8)
    axes.set_ylim(0, limit * 1.15)
    axes.set_xlim(-1, position - 1)
    axes.set_xticks(ticks, names, fontsize=7 if len(names) < 10 else 5)
    axes.set_ylabel("GiB of each device")
    axes.set_title("Peak memory of each stage, first to last", fontsize=9, loc="left")


def _intervals(report: Report, number: int) -> tuple[tuple[Interval, ...], ...]:
    pipeline, stages = report.planning.plan.pipelines[number], report.planning.stages[number]
    return simulate(
        schedule_of(pipeline), [stage.cost for stage in stages], [stage.transfer_s for stage in stages[:-1]]
    )


def _draw_schedule(axes_row: Sequence[Axes], report: Report, number: int) -> None:
    """Draw when each stage of a pipeline computes; of a long schedule, how it begins and how it ends."""
    rows = _intervals(report, number)
    num_microbatches = report.planning.plan.pipelines[number].num_microbatches
    step_s = report.planning.step_s
    windows = [(0.0, step_s)]
    if len(axes_row) > 1:
        first = [interval.end_s for interval in rows[0] if interval.action.microbatch < MAX_SHOWN]
        last = [interval.start_s for interval in rows[-1] if interval.action.microbatch >= num_microbatches - MAX_SHOWN]
        windows = [(0.0, max(first)), (min(last), step_s)]
    for axes, (begin_s, end_s), part in zip(axes_row, windows, ("the step begins", "it ends"), strict=False):
        for stage, row in enumerate(rows):
            shown_row = [interval for interval in row if interval.end_s > begin_s and interval.start_s < end_s]
            _draw_row(axes, stage, shown_row, end_s - begin_s)
        forecast = report.planning.forecast
        summed_s = forecast.compute_s + forecast.exposed_sum_s
        for start_s, length_s, color in (
            (forecast.compute_s, forecast.exposed_sum_s, SUM),
            (summed_s, forecast.update_s, UPDATE),
        ):
            axes.add_patch(Rectangle((start_s, -0.4), length_s, len(rows) - 0.2, facecolor=color))
        axes.set_xlim(begin_s, end_s)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        word = "stage" if len(rows) == len(report.planning.stages[number]) else "devices"
        shown = range(0, len(rows), 1 + len(rows) // 30)
        axes.set_yticks(shown, [f"{word} {stage}" for stage in shown], fontsize=7)
        axes.set_xlabel("seconds")
        what = f"Schedule of pipeline {number}" + (f": how {part}" if len(windows) > 1 else "")
        axes.set_title(what, fontsize=9, loc="left")
    handles = [
        Rectangle((0, 0), 1, 1, color=color, label=label)
        for color, label in (
            (FORWARD, "forward"),
            (BACKWARD, "backward"),
            (SUM, "gradient sums not hidden"),
            (UPDATE, "update"),
        )
    ]
    axes_row[-1].legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.2,
        ncols=len(handles),
        fontsize=7,
        frameon=False,
    )


def _draw_row(axes: Axes, stage: int, row: Sequence[Interval], shown_s: float) -> None:
    """Draw what a stage does, each phase as one collection of bars: single rectangles would be far too many."""
    for phase, color in ((Phase.FORWARD, FORWARD), (Phase.BACKWARD, BACKWARD)):
        bars = [(item.start_s, item.end_s - item.start_s) for item in row if item.action.phase is phase]
        line = 0.4 if max((length_s for _, length_s in bars), default=0.0) > shown_s / 200 else 0.0
        axes.broken_barh(bars, (stage - 0.4, 0.8), facecolor=color, edgecolor="white", linewidth=line)
    for item in row:
        if item.end_s - item.start_s > shown_s / 60:
            middle_s, name = (item.start_s + item.end_s) / 2, str(item.action.microbatch)
            axes.text(middle_s, stage, name, ha="center", va="center", fontsize=6, color="white", clip_on=True)
