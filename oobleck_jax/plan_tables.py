"""A plan report as tables for a terminal."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from oobleck_jax.config import ScheduleKind
from oobleck_jax.plan_report import Report, Throughput
from oobleck_jax.planning.forecast import StageForecast
from oobleck_jax.planning.plan import Stage, Template


MAX_ROWS = 16  # of tables that can be long
GIB = 2**30


def print_report(report: Report, console: Console) -> None:
    """Print all of a report."""
    request, planning = report.request, report.planning
    console.print(
        f"[bold]{request.name}[/bold] on {request.nodes} nodes of {report.num_devices} x {report.device} "
        f"({report.device_memory_bytes / GIB:.3g} GiB usable each), costs {report.source}"
    )
    console.print(
        f"{planning.plan.num_microbatches} microbatches of {request.microbatch_size} sequences, "
        f"{request.tokens_per_step:,} tokens per step; f = {request.fault_tolerance}"
    )
    style = "yellow" if planning.is_degraded else "green"
    console.print(f"[{style}]{planning.reason}[/{style}]\n")
    console.print(_templates_table(report))
    console.print(_pipelines_table(report))
    console.print(_memory_table(report))
    console.print(_summary(report), "\n")
    console.print(_prices_table(report))
    console.print(_losses_table(report))


def _templates_table(report: Report) -> Table:
    sizes = len({choice.num_nodes for choice in report.templates})
    title = (
        f"Templates: the smallest pipeline has {report.smallest_pipeline} nodes. To use every node after any losses "
        f"down to f + 1 pipelines, {report.templates_enough} sizes are enough (the paper asks for "
        f"{report.templates_in_paper}); there are {sizes}."
    )
    table = _table(
        title,
        ("nodes", "right"),
        ("first microbatch", "right"),
        ("each further", "right"),
        ("layers of the stages (for a fair share of the microbatches)", "left"),
    )
    by_size = [list(group) for _, group in groupby(report.templates, key=lambda choice: choice.num_nodes)]
    for choices in by_size[:MAX_ROWS]:
        share = report.planning.plan.num_microbatches * choices[0].num_nodes // report.request.nodes
        choice = [choice for choice in choices if choice.from_microbatches <= max(share, 1)][-1]
        table.add_row(
            str(choice.num_nodes), seconds(choice.fill_s), seconds(choice.slowest_s), layers_text(choice.template)
        )
    _add_rest(table, len(by_size))
    return table


def _pipelines_table(report: Report) -> Table:
    table = _table(
        "Plan", ("pipelines", "right"), ("nodes", "left"), ("microbatches", "right"), ("layers of the stages", "left")
    )
    pipelines = enumerate(report.planning.plan.pipelines)
    for (template, count), group in groupby(pipelines, key=lambda item: (item[1].template, item[1].num_microbatches)):
        members = list(group)
        nodes = [node for _, pipeline in members for node in pipeline.nodes]
        numbers = [number for number, _ in members]
        table.add_row(ranges_text(numbers), ranges_text(nodes), str(count), layers_text(template))
    if report.planning.plan.spare_nodes:
        table.add_row("spare", ranges_text(report.planning.plan.spare_nodes), "", "")
    return table


def _memory_table(report: Report) -> Table:
    usable = f"{report.device_memory_bytes / GIB:.3g} GiB"
    title = f"Stages: time of one microbatch, and peak memory of each device (of {usable})"
    table = _table(
        title,
        ("pipeline", "right"),
        ("stages", "right"),
        ("layers", "left"),
        ("devices", "right"),
        ("forward", "right"),
        ("backward", "right"),
        ("memory", "right"),
        ("", "left"),
    )
    shown: set[tuple[Template, int]] = set()
    num_rows = 0
    pipelines = zip(report.planning.plan.pipelines, report.planning.stages, strict=True)
    for number, (pipeline, forecasts) in enumerate(pipelines):
        if (pipeline.template, pipeline.num_microbatches) in shown:
            continue
        shown.add((pipeline.template, pipeline.num_microbatches))
        stages = enumerate(zip(pipeline.template.stages, forecasts, strict=True))
        schedule = pipeline.schedule
        name = str(number) if schedule is ScheduleKind.ONE_F_ONE_B else f"{number} ({schedule})"
        for _, group in groupby(stages, key=lambda item: _likeness(*item[1])):
            num_rows += 1
            if num_rows <= 2 * MAX_ROWS:
                table.add_row(name, *_stages_row(list(group), report.device_memory_bytes))
            name = ""
    _add_rest(table, num_rows, 2 * MAX_ROWS)
    return table


def _likeness(stage: Stage, forecast: StageForecast) -> tuple[object, ...]:
    """Return what stages must share to be told in one row."""
    return len(stage.layers), stage.num_devices, forecast.cost


def _stages_row(stages: list[tuple[int, tuple[Stage, StageForecast]]], limit_bytes: int) -> tuple[str, ...]:
    (first, (stage, forecast)), (last, (last_stage, _)) = stages[0], stages[-1]
    memory_bytes = max(forecast.memory_bytes for _, (_, forecast) in stages)
    fraction = memory_bytes / limit_bytes
    length = round(20 * fraction)
    return (
        str(first) if first == last else f"{first}-{last}",
        ranges_text(range(stage.first_layer, last_stage.end_layer)),
        str(stage.num_devices),
        seconds(forecast.cost.forward_s),
        seconds(forecast.cost.backward_s),
        f"{memory_bytes / GIB:.3g} GiB",
        "#" * length + "." * (20 - length) + f" {fraction:4.0%}",
    )


def _summary(report: Report) -> str:
    forecast = report.planning.forecast
    return (
        f"Predicted: {_throughput_text(report.throughput)}\n"
        f"  {seconds(forecast.compute_s)} until the last backward, then {seconds(forecast.exposed_sum_s)} of gradient "
        f"sums and {seconds(forecast.update_s)} of updates; {forecast.bubble_fraction:.1%} of the time of the devices "
        "is idle"
    )


def _throughput_text(throughput: Throughput) -> str:
    utilization = throughput.model_flops_utilization
    mfu = "" if utilization is None else f", {utilization:.1%} MFU"
    return f"{seconds(throughput.step_s)} per step, {throughput.tokens_per_s:,.0f} tokens/s{mfu}"


def _prices_table(report: Report) -> Table:
    table = _table(
        "What fault tolerance costs",
        ("f", "right"),
        ("pipelines", "right"),
        ("spare nodes", "right"),
        ("step", "right"),
        ("tokens/s", "right"),
        ("less", "right"),
    )
    for price in report.prices:
        mark = "*" if price.fault_tolerance == report.request.fault_tolerance else ""
        table.add_row(
            f"{mark}{price.fault_tolerance}",
            str(price.throughput.num_pipelines),
            str(price.throughput.num_spare),
            seconds(price.throughput.step_s),
            f"{price.throughput.tokens_per_s:,.0f}",
            f"{price.loss:.1%}",
        )
    return table


def _losses_table(report: Report) -> Table:
    table = _table(
        "After one loss",
        ("lost", "left"),
        ("pipelines of nodes", "left"),
        ("tokens/s", "right"),
        ("copied", "right"),
        ("in", "right"),
    )
    for outcome in report.losses[:MAX_ROWS]:
        if not outcome.sizes:
            table.add_row(_lost_text(outcome.lost), outcome.reason, "0", "", "")
            continue
        table.add_row(
            _lost_text(outcome.lost),
            sizes_text(outcome.sizes),
            f"{outcome.throughput.tokens_per_s:,.0f}",
            f"{outcome.copied_bytes / GIB:.3g} GiB",
            seconds(outcome.copy_s),
        )
    _add_rest(table, len(report.losses))
    return table


def _lost_text(nodes: Sequence[int]) -> str:
    text = ranges_text(nodes)
    if len(nodes) == 1:
        return f"node {text}"
    return f"any of {text}" if len(text) <= 24 else f"any of {len(nodes)} nodes like {nodes[0]}"


def layers_text(template: Template) -> str:
    """Return the numbers of layers of a template's stages, shortened: `3 x 4, 2`; `/2` marks stages of two devices."""
    words = [
        f"{len(stage.layers)}" + (f"/{stage.num_devices}" if stage.num_devices > 1 else "") for stage in template.stages
    ]
    return ", ".join(_repeated(words))


def sizes_text(sizes: Iterable[int]) -> str:
    """Return sizes, shortened: `3 x 4, 2`."""
    return ", ".join(_repeated([str(size) for size in sizes]))


def _repeated(words: list[str]) -> list[str]:
    counts = [(word, len(list(group))) for word, group in groupby(words)]
    return [word if count == 1 else f"{count} x {word}" for word, count in counts]


def ranges_text(numbers: Iterable[int]) -> str:
    """Return ascending numbers as ranges: `0-3, 7`."""
    parts: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def seconds(time_s: float) -> str:
    """Return a time with its best unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if time_s >= size:
            return f"{time_s / size:.3g} {unit}"
    return "0 s" if time_s == 0 else f"{time_s / 1e-9:.3g} ns"


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    return table


def _add_rest(table: Table, num_rows: int, most: int = MAX_ROWS) -> None:
    if num_rows > most:
        table.caption = f"and {num_rows - most} more (--json has all)"
