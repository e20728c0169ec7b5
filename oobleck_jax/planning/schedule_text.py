"""Schedules as text: `0F0 0F1 0B0 0B1` for machines and tests, a grid for people."""

import re
from collections.abc import Iterable, Sequence

from oobleck_jax.errors import PlanError
from oobleck_jax.planning.schedule import Action, Interval, Phase, Schedule, StageCost, simulate


def render(actions: Iterable[Action]) -> str:
    """Return actions as text: `0F0 0F1 0B0`."""
    return " ".join(str(action) for action in actions)


def parse(text: str) -> tuple[Action, ...]:
    """Return the actions that `render` wrote.

    Raises:
        PlanError: a word that is not an action.
    """
    return tuple(_parse_action(word) for word in text.split())


def _parse_action(word: str) -> Action:
    match = re.fullmatch(r"([0-9]+)([FBW])([0-9]+)", word)
    if match is None:
        raise PlanError(f"{word!r} is not an action; write stage, F, B or W, microbatch, such as 0F3")
    return Action(stage=int(match[1]), phase=Phase(match[2]), microbatch=int(match[3]))


def render_grid(schedule: Schedule, costs: Sequence[StageCost], *, width: int = 120) -> str:
    """Draw a schedule: time from left to right, one line for each lane, in bands of `width` characters.

    `F3`, `B3` and `W3` begin the phases of microbatch 3, where a lane has several stages with the stage in front;
    dashes fill the time that they take.
    """
    rows = simulate(schedule, costs)
    num_lanes = len(rows)
    has_chunks = len(costs) > num_lanes
    phases = {action.phase for row in schedule for action in row}
    longest_s = max(cost.of(phase) for cost in costs for phase in phases) or 1.0
    shortest_s = min(cost.of(phase) for cost in costs for phase in phases)
    label_width = max(len(_label(action, has_chunks)) for row in schedule for action in row)
    columns_per_s = (label_width + 1) / max(shortest_s, longest_s / 4)
    lines = [_draw_row(row, columns_per_s, has_chunks) for row in rows]
    length = max(len(line) for line in lines)
    words = "stages" if has_chunks else "stage"
    names = [f"{words} {' '.join(map(str, range(lane, len(costs), num_lanes)))} " for lane in range(num_lanes)]
    names = [name.rjust(max(map(len, names))) for name in names]
    room = max(width - len(names[0]), 2 * (label_width + 1))
    bands = [
        "\n".join((name + line[left : left + room]).rstrip() for name, line in zip(names, lines, strict=True))
        for left in range(0, length, room)
    ]
    return "\n\n".join(bands)


def _label(action: Action, has_chunks: bool) -> str:
    return str(action) if has_chunks else f"{action.phase}{action.microbatch}"


def _draw_row(row: tuple[Interval, ...], columns_per_s: float, has_chunks: bool) -> str:
    line = ""
    for interval in row:
        start, end = (int(time_s * columns_per_s + 1e-6) for time_s in (interval.start_s, interval.end_s))
        cell = _label(interval.action, has_chunks).ljust(end - start - 1, "-")
        line = line.ljust(start) + cell[: max(end - start - 1, 0)] + " "
    return line.rstrip()
