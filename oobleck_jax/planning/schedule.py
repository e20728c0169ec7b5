"""Schedules: which stage runs which microbatch in which order. A schedule is data, checked before it is used.

A schedule of a pipeline is one sequence of actions for each stage. Stages take activations and gradients by key, so
an action waits only for the data that it needs, and never for a partner to be ready: forward of microbatch j needs
the forward of j on the stage before; backward of j needs the backward of j on the stage after, and the stage's own
forward of j. In text an action is stage, phase, microbatch: `0F0 0F1 0B0 0B1`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from oobleck_jax.errors import PlanError


class Phase(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One phase of one microbatch on one stage. Microbatches are numbered from 0 within the pipeline."""

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.microbatch}"


Schedule: TypeAlias = tuple[tuple[Action, ...], ...]  # one row of actions for each stage


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """Seconds that one microbatch takes on a stage."""

    forward_s: float
    backward_s: float

    def of(self, phase: Phase) -> float:
        return self.forward_s if phase is Phase.FORWARD else self.backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """When an action runs, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the 1F1B schedule, the non-interleaved one of PipeDream-Flush (Narayanan et al. 2021, figure 3).

    Stage i first runs the forwards of as many microbatches as there are stages after it, then alternates forward and
    backward, then runs the backwards that are left. So it keeps min(num_stages - i, num_microbatches) microbatches
    at most. Any number of microbatches works; with fewer than stages there is no steady state.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise PlanError(f"a schedule needs a stage and a microbatch, but has {num_stages} and {num_microbatches}")
    return tuple(
        _row(stage, min(num_stages - 1 - stage, num_microbatches), num_microbatches) for stage in range(num_stages)
    )


def _row(stage: int, num_warmup: int, num_microbatches: int) -> tuple[Action, ...]:
    forwards = [Action(stage=stage, phase=Phase.FORWARD, microbatch=number) for number in range(num_microbatches)]
    backwards = [Action(stage=stage, phase=Phase.BACKWARD, microbatch=number) for number in range(num_microbatches)]
    steady = [action for pair in zip(forwards[num_warmup:], backwards, strict=False) for action in pair]
    return (*forwards[:num_warmup], *steady, *backwards[num_microbatches - num_warmup :])


def check_schedule(schedule: Schedule, *, num_stages: int, num_microbatches: int) -> None:
    """Check that a schedule is complete, fits the memory model and ends (properties S1, S2, S3 of ARCHITECTURE.md).

    S1: a stage runs the forward and the backward of every microbatch once, the forward first. S2: stage i keeps at
    most min(num_stages - i, num_microbatches) microbatches between forward and backward, which is what the planner
    counts memory for; so the last stage runs each backward right after its forward, which its one program for loss
    and gradient needs. S3: run as written, with every action waiting for its data, it ends.

    Raises:
        PlanError: a rule is broken; the message names the stage and the action.
    """
    if len(schedule) != num_stages:
        raise PlanError(f"the schedule has {len(schedule)} rows of actions, the pipeline has {num_stages} stages")
    for stage, row in enumerate(schedule):
        _check_row(stage, row, num_stages, num_microbatches)
    _, waiting = _run(schedule, [StageCost(forward_s=1.0, backward_s=1.0)] * num_stages, [0.0] * (num_stages - 1))
    if waiting:
        names = ", ".join(f"stage {action.stage} before {action}" for action in waiting)
        raise PlanError(f"the schedule never ends: these wait for each other: {names}")


def _check_row(stage: int, row: tuple[Action, ...], num_stages: int, num_microbatches: int) -> None:
    limit = min(num_stages - stage, num_microbatches)
    in_flight: set[int] = set()
    done: set[Action] = set()
    for action in row:
        if action.stage != stage or not 0 <= action.microbatch < num_microbatches:
            raise PlanError(f"stage {stage} of {num_stages} with {num_microbatches} microbatches cannot run {action}")
        if action in done:
            raise PlanError(f"stage {stage} runs {action} twice")
        done.add(action)
        if action.phase is Phase.FORWARD:
            in_flight.add(action.microbatch)
            if len(in_flight) > limit:
                raise PlanError(
                    f"stage {stage} keeps {len(in_flight)} microbatches at {action}; memory is planned for {limit}"
                )
        elif action.microbatch not in in_flight:
            raise PlanError(f"stage {stage} runs {action} before its forward")
        else:
            in_flight.remove(action.microbatch)
    if len(done) != 2 * num_microbatches:
        raise PlanError(f"stage {stage} has {len(done)} actions; {num_microbatches} microbatches need twice as many")


def simulate(
    schedule: Schedule, costs: Sequence[StageCost], transfer_s: Sequence[float] | None = None
) -> tuple[tuple[Interval, ...], ...]:
    """Return when each action runs if every stage has its own device and starts as soon as its data is there.

    Args:
        schedule: a schedule that ends.
        costs: of each stage.
        transfer_s: seconds that an activation or gradient needs from stage i to i+1 or back, for each i; hidden
            behind other work where there is some. None: no time.

    Returns:
        One row of intervals for each stage, in the order of the schedule.

    Raises:
        PlanError: the schedule does not end.
    """
    rows, waiting = _run(schedule, costs, [0.0] * (len(schedule) - 1) if transfer_s is None else transfer_s)
    if waiting:
        raise PlanError(f"the schedule never ends: {waiting[0]} waits for ever; see check_schedule")
    return tuple(tuple(interval for _, interval in row) for row in rows)


_Numbered: TypeAlias = tuple[int, Interval]  # the number says in which order data becomes available


def _run(
    schedule: Schedule, costs: Sequence[StageCost], transfer_s: Sequence[float]
) -> tuple[list[list[_Numbered]], list[Action]]:
    """Run a schedule; return the intervals of each stage, and the actions that wait for ever."""
    num_stages = len(schedule)
    rows: list[list[_Numbered]] = [[] for _ in schedule]
    end_s: dict[Action, float] = {}
    ready = list(range(num_stages))
    number = 0
    while ready:
        stage = ready.pop()
        for action in schedule[stage][len(rows[stage]) :]:
            source = _source(action, num_stages)
            if source is not None and source not in end_s:
                break
            start_s = rows[stage][-1][1].end_s if rows[stage] else 0.0
            if source is not None:
                start_s = max(start_s, end_s[source] + transfer_s[min(stage, source.stage)])
            end_s[action] = start_s + costs[stage].of(action.phase)
            rows[stage].append((number, Interval(action=action, start_s=start_s, end_s=end_s[action])))
            number += 1
            consumer = stage + 1 if action.phase is Phase.FORWARD else stage - 1
            if 0 <= consumer < num_stages:
                ready.append(consumer)
    waiting = [row[len(done)] for row, done in zip(schedule, rows, strict=True) if len(done) < len(row)]
    return rows, waiting


def _source(action: Action, num_stages: int) -> Action | None:
    """Return the action of a neighbouring stage whose result an action takes."""
    stage = action.stage - 1 if action.phase is Phase.FORWARD else action.stage + 1
    if not 0 <= stage < num_stages:
        return None
    return Action(stage=stage, phase=action.phase, microbatch=action.microbatch)


def merge_for_node(schedule: Schedule, stage_indices: Iterable[int], costs: Sequence[StageCost]) -> tuple[Action, ...]:
    """Return the actions of several stages of one node in one order.

    A node with several devices may hold several stages, but has one thread that starts their programs. The order is
    that of the start times when every stage has its own device. It is a part of one global order in which everything
    comes after what it needs, so nodes that follow it, even one action after the other, never wait for each other in
    a circle.
    """
    rows, waiting = _run(schedule, costs, [0.0] * (len(schedule) - 1))
    if waiting:
        raise PlanError(f"the schedule never ends: {waiting[0]} waits for ever; see check_schedule")
    merged = [
        (interval.start_s, number, interval.action) for stage in stage_indices for number, interval in rows[stage]
    ]
    return tuple(action for _, _, action in sorted(merged, key=lambda item: item[:2]))


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
    match = re.fullmatch(r"([0-9]+)([FB])([0-9]+)", word)
    if match is None:
        raise PlanError(f"{word!r} is not an action; write stage, F or B, microbatch, such as 0F3")
    return Action(stage=int(match[1]), phase=Phase(match[2]), microbatch=int(match[3]))


def render_grid(schedule: Schedule, costs: Sequence[StageCost], *, width: int = 120) -> str:
    """Draw a schedule: time from left to right, one line for each stage, in bands of `width` characters.

    `F3` and `B3` begin the forward and the backward of microbatch 3; dashes fill the time that it takes.
    """
    rows = simulate(schedule, costs)
    longest_s = max(max(cost.forward_s, cost.backward_s) for cost in costs) or 1.0
    shortest_s = min([*(cost.of(phase) for cost in costs for phase in Phase), longest_s])
    label_width = 1 + max(len(str(action.microbatch)) for action in schedule[0])
    columns_per_s = (label_width + 1) / max(shortest_s, longest_s / 4)
    lines = [_draw_row(row, columns_per_s) for row in rows]
    length = max(len(line) for line in lines)
    names = [f"stage {stage} ".rjust(len(f"stage {len(rows)} ")) for stage in range(len(rows))]
    room = max(width - len(names[0]), 2 * (label_width + 1))
    bands = [
        "\n".join((name + line[left : left + room]).rstrip() for name, line in zip(names, lines, strict=True))
        for left in range(0, length, room)
    ]
    return "\n\n".join(bands)


def _draw_row(row: tuple[Interval, ...], columns_per_s: float) -> str:
    line = ""
    for interval in row:
        start, end = (int(time_s * columns_per_s + 1e-6) for time_s in (interval.start_s, interval.end_s))
        cell = f"{interval.action.phase}{interval.action.microbatch}".ljust(end - start - 1, "-")
        line = line.ljust(start) + cell[: max(end - start - 1, 0)] + " "
    return line.rstrip()
