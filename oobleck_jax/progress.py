"""What people see of a run: the plan, how its nodes come up, a bar or lines while it trains, and why it failed."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from oobleck_jax import events
from oobleck_jax.config import ScheduleKind
from oobleck_jax.node_logs import NodeLogs, last_lines, printable
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan


_MAX_LOGS = 3  # of which the end is shown in one incident


class Display(Protocol):
    """Shows records as they come."""

    def show(self, record: events.Record) -> None: ...

    def note(self, text: str) -> None:
        """Print a line that stays."""
        ...

    def close(self) -> None: ...


def make_display(
    *, num_nodes: int, steps: int, tokens_per_step: int, logs: NodeLogs, stream: "Console | None" = None
) -> Display:
    """Return a live display on a terminal, and one of plain lines elsewhere."""
    console = stream or Console(highlight=False, soft_wrap=True)
    story = Story(num_nodes=num_nodes, steps=steps, tokens_per_step=tokens_per_step, logs=logs)
    return LiveDisplay(story, console) if console.is_terminal else LineDisplay(story)


class Story:
    """What there is to tell of a run, as text; knows neither terminal nor clock."""

    def __init__(self, *, num_nodes: int, steps: int, tokens_per_step: int, logs: NodeLogs) -> None:
        self.steps = steps
        self.step = 0  # committed steps
        self.loss: float | None = None
        self._num_nodes = num_nodes
        self._tokens_per_step = tokens_per_step
        self._logs = logs
        self._logs_shown: set[NodeId | None] = set()  # in the incident that is going on
        self._recent_steps_s: deque[float] = deque(maxlen=20)
        self._joined: set[NodeId] = set()
        self._ready: set[NodeId] = set()
        self._advance: dict[NodeId, tuple[str, int, int]] = {}
        self._ahead: dict[NodeId, bool] = {}
        self._is_ahead = False

    def take(self, record: events.Record) -> str | None:
        """Take note of a record; return a line that is worth keeping, if it makes one."""
        match record:
            case events.Joined():
                self._joined.add(record.node)
            case events.Ready():
                self._ready.add(record.node)
            case events.Advanced():
                self._advance[record.node] = (record.phase, record.done, record.total)
            case events.Planned() if record.generation > 1:
                self._advance.clear()
            case events.Failed() if not record.is_collateral:
                return self._lost(record)
            case events.Leaving():
                return f"node {record.node} leaves after this step ({record.reason})"
            case events.Respawned():
                wait = f" in {record.delay_s:.0f} s" if record.delay_s else ""
                return f"node {record.node} gets a new worker{wait} (number {record.incarnation})"
            case events.Resumed():
                self.step = record.step
                return f"this coordinator takes over after generation {record.generation}; next is step {record.step}"
            case events.Incident():
                self._logs_shown.clear()
                return incident_text(record)
            case events.CompiledAhead():
                return self._compiled_ahead(record)
            case events.Prepared() if record.generation == 1:
                return f"all nodes are prepared after {record.seconds:.1f} s; step {record.step} begins"
            case events.Committed():
                self.step, self.loss = record.step + 1, self.loss if record.loss is None else record.loss
                self._recent_steps_s.append(record.step_time_s)
                if record.grad_norm is None:
                    return f"step {record.step} skipped: a gradient is not finite"
            case events.Restored():
                self.step = record.step
                return f"goes on with step {record.step}, from {record.checkpoint} ({record.reason})"
            case events.Checkpointed():
                return (
                    f"checkpoint of step {record.step}: {record.num_bytes / 1e6:.1f} MB in "
                    f"{record.seconds.get('total', 0.0):.1f} s"
                )
            case events.NotCheckpointed():
                return f"WARNING: no checkpoint of step {record.step}: {record.reason}; training goes on"
            case events.Damaged():
                return f"WARNING: {record.what}"
            case events.Evaluated():
                loss = "not finite" if record.loss is None else f"{record.loss:.4f}"
                return f"after step {record.step}: evaluation loss {loss} over {record.num_tokens:,} tokens"
            case events.Rejected():
                return f"{record.name} may not take part: {record.reason}"
            case events.Gathering():
                return f"waiting for nodes: {record.reason}"
            case _:
                pass
        return None

    def _lost(self, failed: events.Failed) -> str:
        """Say what was lost and, of a worker that failed by an error of its own, where its log is and how it ends."""
        first, node = f"lost: {failed.cause}", failed.node
        if not failed.is_error or node in self._logs_shown or len(self._logs_shown) == _MAX_LOGS:
            return first
        self._logs_shown.add(node)
        where, lines = self._logs.where(node), last_lines(failed.detail)
        if not lines:
            return f"{first}\n  its log: {where}" if where else first
        return "\n".join([first, f"  the end of its log{f' ({where})' if where else ''}:", *lines])

    def _compiled_ahead(self, record: events.CompiledAhead) -> str | None:
        """Say once that no loss will have to wait for a compilation any more."""
        self._ahead[record.node] = record.done == record.total
        if self._is_ahead or len(self._ahead) < len(self._ready) or not all(self._ahead.values()):
            return None
        self._is_ahead = True
        return f"every node has the programs of later plans ready ({record.total} each)"

    @property
    def start_up(self) -> str:
        """How far the nodes are, before the first step; what they do then is counted over all of them."""
        if len(self._ready) < self._num_nodes:
            return f"{len(self._joined)} of {self._num_nodes} nodes joined, {len(self._ready)} ready"
        if not self._advance:
            return f"{self._num_nodes} nodes ready"
        phase = min(self._advance.values())[0]
        done = sum(done for _, done, _ in self._advance.values())
        total = sum(total for _, _, total in self._advance.values())
        return f"{phase} {done} of {total}"

    @property
    def training(self) -> str:
        """Where training is."""
        if self.loss is None:
            return "..."
        return f"loss {self.loss:.4f}  {self.tokens_per_s:,.0f} tokens/s  {self.time_left} left"

    @property
    def tokens_per_s(self) -> float:
        recent = self._recent_steps_s
        return self._tokens_per_step * len(recent) / sum(recent)

    @property
    def time_left(self) -> str:
        recent = self._recent_steps_s
        return format_duration((self.steps - self.step) * sum(recent) / len(recent))


def _print(text: str) -> None:
    print(printable(text), flush=True)  # noqa: T201


class LineDisplay:
    """Plain lines: for logs, pipes and CI. A line at most every few seconds, and one for each event."""

    def __init__(
        self,
        story: Story,
        *,
        write: Callable[[str], object] = _print,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = 5.0,
    ) -> None:
        self._story = story
        self._write = write
        self._clock = clock
        self._every_s = every_s
        self._last_s = -float("inf")
        self._last_text = ""

    def show(self, record: events.Record) -> None:
        line = self._story.take(record)
        if line is not None:
            self.note(line)
        elif isinstance(record, events.Committed):
            is_edge = record.step == 0 or record.step + 1 == self._story.steps
            self._say(f"step {record.step}/{self._story.steps}  {self._story.training}", at_once=is_edge)
        elif isinstance(record, events.Joined | events.Ready | events.Advanced):
            self._say(self._story.start_up, at_once=isinstance(record, events.Ready))

    def note(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody reads any more (`| head`): that must not end a run
            self._write(text)

    def close(self) -> None:
        pass

    def _say(self, text: str, *, at_once: bool) -> None:
        now_s = self._clock()
        if text != self._last_text and (at_once or now_s - self._last_s >= self._every_s):
            self._last_s, self._last_text = now_s, text
            self.note(text)


class LiveDisplay:
    """A progress bar that lives at the bottom of a terminal; events scroll above it."""

    def __init__(self, story: Story, console: Console) -> None:
        self._story = story
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=console,
            expand=True,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("starting", total=None, text="")

    def show(self, record: events.Record) -> None:
        line = self._story.take(record)
        if line is not None:
            self.note(line)
        story = self._story
        if isinstance(record, events.Started):
            self._progress.start()
        elif isinstance(record, events.Prepared | events.Committed):
            text = f"{story.step}/{story.steps}  {story.training}"
            self._progress.update(
                self._task, description="training", completed=story.step, total=story.steps, text=text
            )
        elif isinstance(record, events.Joined | events.Ready | events.Advanced):
            self._progress.update(self._task, text=story.start_up)

    def note(self, text: str) -> None:
        self._progress.console.print(printable(text), markup=False, emoji=False)

    def close(self) -> None:
        self._progress.stop()


def failure_text(failed: events.Failed, log: str | None) -> str:
    """Return the message that ends a run: the cause, where it was, and the last lines of what is known."""
    where = f" (generation {failed.generation}, step {failed.step}{f', log {log}' if log else ''})"
    return "\n".join([f"failed: {failed.cause}{where}", *last_lines(failed.detail)])


def incident_text(incident: events.Incident) -> str:
    """Return what an incident was and what it cost, in one line."""
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in incident.seconds.items() if name != "total")
    costs = [
        f"{incident.received_bytes / 1e6:.1f} MB copied",
        f"{incident.num_redone_microbatches} microbatches redone",
        f"{incident.num_compilations} compilations",
    ]
    if incident.num_generations > 1:
        costs.append(f"{incident.num_generations} attempts")
    if incident.num_redone_steps:
        costs.append(f"{incident.num_redone_steps} steps redone")
    if incident.collateral:
        costs.append(f"nodes {list(incident.collateral)} were lost as a consequence")
    total_s = incident.seconds.get("total", 0.0)
    return (
        f"{incident.kind}: {incident.cause}; step {incident.step} is committed {total_s:.2f} s later "
        f"({phases}); {', '.join(costs)}"
    )


def _share_text(pipeline: Pipeline) -> str:
    is_plain = pipeline.schedule is ScheduleKind.ONE_F_ONE_B
    return f"{pipeline.num_microbatches}" + ("" if is_plain else f" ({pipeline.schedule})")


def plan_table(plan: Plan, *, names: Sequence[str], cores: Mapping[NodeId, Sequence[int]]) -> str:
    """Return a plan as a table: which node runs which layers of which pipeline."""
    rows: list[tuple[str, ...]] = [("pipeline", "node", "layers", "microbatches", "cores")]
    for number, pipeline in enumerate(plan.pipelines):
        for index, stage in enumerate(pipeline.template.stages):
            node = pipeline.node_of(index)
            devices = f" on {stage.num_devices} devices" if stage.num_devices > 1 else ""
            rows.append(
                (
                    str(number) if index == 0 else "",
                    str(node),
                    describe_layers(stage.layers, names) + devices,
                    _share_text(pipeline) if index == 0 else "",
                    ",".join(map(str, cores.get(node, ()))) or "any",
                )
            )
    rows += [("spare", str(node), "-", "", "") for node in plan.spare_nodes]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def describe_layers(layers: range, names: Sequence[str]) -> str:
    """Name a run of layers: `embedding, block 0-3`."""
    parts: list[tuple[str, str, str]] = []  # kind, first and last number
    for layer in layers:
        kind, _, number = names[layer].partition(" ")
        if parts and number and parts[-1][0] == kind:
            parts[-1] = (kind, parts[-1][1], number)
        else:
            parts.append((kind, number, number))
    return ", ".join(
        kind if not first else f"{kind} {first}" if first == last else f"{kind} {first}-{last}"
        for kind, first, last in parts
    )


def format_duration(seconds: float) -> str:
    """Return a duration as `12 s`, `3:05` or `2:03:05`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
