"""A run as one HTML file that needs nothing else: for a colleague, a notebook, an archive."""

import io
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from models.presets import config_from_json
from oobleck_jax import events
from oobleck_jax.audit import Audit, audit
from oobleck_jax.config import RunConfig
from oobleck_jax.dashboard.facts import facts_of
from oobleck_jax.dashboard.run_state import RunState
from oobleck_jax.dashboard.snapshot import Snapshot
from oobleck_jax.errors import ConfigError, DataError
from oobleck_jax.planning.plan import Plan
from oobleck_jax.progress import describe_layers, format_duration
from oobleck_jax.run_plot import plot_history, read_history


_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2530; --dim: #64707d; --line: #dfe3e8; --good: #1f8a5b;
  --bad: #c8323c; --tile: #f5f6f8; }
@media (prefers-color-scheme: dark) { :root { --back: #14181d; --text: #e4e9ef; --dim: #93a0ae; --line: #2d353f;
  --good: #55c592; --bad: #f1767d; --tile: #1d232a; } }
body { margin: 0 auto; max-width: 1000px; padding: 24px 16px 60px; font: 15px/1.5 system-ui, sans-serif;
  background: var(--back); color: var(--text); }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 34px 0 10px; } p { margin: 6px 0; }
.dim { color: var(--dim); } .good { color: var(--good); } .bad { color: var(--bad); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px; margin: 20px 0; }
dl div { background: var(--tile); border-radius: 8px; padding: 9px 12px; } dt { color: var(--dim); font-size: .8rem; }
dd { margin: 0; font-weight: 600; font-size: 1.1rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; color: var(--dim); font-weight: 500; } th, td { padding: 6px 10px 6px 0; vertical-align: top;
  border-bottom: 1px solid var(--line); } td { overflow-wrap: break-word; }
th.number, td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.picture { background: #fff; border-radius: 8px; padding: 6px; }
.picture svg { width: 100%; height: auto; display: block; }
pre { white-space: pre-wrap; font-size: .82rem; background: var(--tile); padding: 12px; border-radius: 8px; }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the files of a run tell.

    Attributes:
        audit: what they prove; a text: why that could not be found out.
        picture: SVG of its curves; empty before the first step.
    """

    run: Snapshot
    config: RunConfig
    config_json: str
    plans: tuple[tuple[float, events.Planned], ...]
    layer_names: tuple[str, ...]
    audit: Audit | str
    picture: str


def read_report(run_dir: Path) -> Report:
    """Read a run, which may still go on.

    Raises:
        ConfigError: the folder holds none.
    """
    try:
        config_json = (run_dir / "config.json").read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{run_dir} is no folder of a run: {error}") from None
    preset, config = config_from_json(config_json)
    told = events.read_run(run_dir)
    state = RunState(facts_of(preset, config, run_dir))
    state.take_all(told)
    try:
        proof: Audit | str = audit(run_dir)
    except (ConfigError, DataError, OSError) as error:
        proof = str(error)
    return Report(
        run=state.snapshot(told[-1][0] if told else time.time()),
        config=config,
        config_json=config_json,
        plans=tuple(state.plans),
        layer_names=state.facts.layer_names,
        audit=proof,
        picture=_picture(run_dir, config),
    )


def _picture(run_dir: Path, config: RunConfig) -> str:
    try:
        history = read_history(run_dir)
    except ConfigError as error:  # the rest can be read
        return escape(str(error))
    if not history.committed:
        return ""
    drawn = io.StringIO()
    plot_history(history, drawn, tokens_per_step=config.tokens_per_step, title="")
    return re.sub(r"^.*?(?=<svg)", "", drawn.getvalue(), flags=re.DOTALL)  # without what only a file of its own has


def write_report(report: Report, path: Path) -> None:
    """Write the HTML file."""
    run = report.run
    when = "" if run.started is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
    title = escape(f"{run.preset}: {run.step} of {run.steps} steps")
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="{"bad" if run.phase == "failed" else "good"}">{run.phase}: {escape(run.reason or "goes on")}</p>',
        f'<p class="dim">{escape(run.run_dir)}<br>{when}</p>',
        _figures(report),
        f"<h2>What it proves</h2>{_audit(report.audit)}",
        f'<h2>Curves</h2><div class="picture">{report.picture or "No step is committed yet."}</div>',
        f"<h2>Incidents</h2>{_incidents(run)}",
        f"<h2>Plans</h2>{_plans(report)}",
        f"<h2>Configuration</h2><pre>{escape(report.config_json)}</pre>",
    ]
    path.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body>{''.join(parts)}</body></html>\n",
        encoding="utf-8",
    )


def _figures(report: Report) -> str:
    run = report.run
    incidents = ", ".join(f"{count} {kind}" for kind, count in sorted(run.num_incidents.items()))
    figures = (
        ("Loss", "-" if run.loss is None else f"{run.loss:.4f}"),
        ("Evaluation loss", "-" if run.eval_loss is None else f"{run.eval_loss:.4f}"),
        ("Time", "-" if run.started is None else format_duration(run.time - run.started)),
        ("Tokens per second, at the end", "-" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}"),
        ("Goodput", "-" if run.goodput is None else f"{run.goodput:.1%}"),
        ("Generations", str(run.generation)),
        ("Incidents", incidents or "none"),
        ("Microbatches redone", f"{run.num_redone_microbatches:,}"),
    )
    return f"<dl>{''.join(f'<div><dt>{name}</dt><dd>{escape(value)}</dd></div>' for name, value in figures)}</dl>"


def _audit(found: Audit | str) -> str:
    if isinstance(found, str):
        return f'<p class="dim">This could not be checked: {escape(found)}</p>'
    if found.violation is not None:
        return f'<p class="bad">VIOLATION: {escape(found.violation)}</p>'
    return (
        f'<p class="good">{found.end_step - found.first_step} steps, each committed once, in {found.num_generations} '
        f"generations; {found.num_samples:,} samples in {found.num_passes:.3f} passes, none twice in a pass</p>"
        f'<p class="dim">{found.num_undone_steps} steps were undone by {found.num_restores} restores.</p>'
    )


def _incidents(run: Snapshot) -> str:
    if not run.incidents:
        return '<p class="dim">None.</p>'
    rows = [
        (
            (str(it.step), True),
            (it.kind, False),
            (it.cause, False),
            (f"{it.seconds.get('total', 0.0):.2f} s", True),
            (", ".join(f"{name} {seconds:.2f}" for name, seconds in it.seconds.items() if name != "total"), False),
            (f"{it.received_bytes / 1e6:.1f} MB", True),
            (str(it.num_redone_microbatches), True),
        )
        for it in reversed(run.incidents)
    ]
    shown = sum(run.num_incidents.values())
    note = f'<p class="dim">The last {len(rows)} of {shown}.</p>' if shown > len(rows) else ""
    return note + _table(("step", "kind", "cause", "took", "of it, s", "copied", "redone"), rows)


def _plans(report: Report) -> str:
    if not report.plans:
        return '<p class="dim">None yet.</p>'
    began = report.run.started or 0.0
    rows = [
        (
            (str(planned.generation), True),
            (f"{now - began:.1f} s", True),
            (str(planned.step), True),
            (planned.reason, False),
            (f"{_plan_text(planned.plan, report.layer_names)}\n{planned.plan_reason}", False),
        )
        for now, planned in report.plans
    ]
    return _table(("generation", "at", "step", "because", "plan"), rows)


def _plan_text(plan: Plan, names: Sequence[str]) -> str:
    lines = [
        " → ".join(
            f"node {pipeline.node_of(index)}: {describe_layers(stage.layers, names)}"
            for index, stage in enumerate(pipeline.template.stages)
        )
        + f" ({pipeline.num_microbatches} microbatches)"
        for pipeline in plan.pipelines
    ]
    if plan.spare_nodes:
        lines.append(f"spare: {', '.join(map(str, plan.spare_nodes))}")
    return "\n".join(lines)


def _table(names: Iterable[str], rows: Iterable[Sequence[tuple[str, bool]]]) -> str:
    """Return a table of at least one row; each cell says whether it is a number. Lines of a cell stay lines."""
    rows = list(rows)
    are_numbers = [is_number for _, is_number in rows[0]]
    head = "".join(f"<th{_style(number)}>{name}</th>" for name, number in zip(names, are_numbers, strict=True))
    body = "".join(f"<tr>{''.join(_cell(text, is_number) for text, is_number in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(text: str, is_number: bool) -> str:
    return f"<td{_style(is_number)}>{escape(text).replace(chr(10), '<br>')}</td>"


def _style(is_number: bool) -> str:
    return ' class="number"' if is_number else ""
