"""Schedules: which stage runs which microbatch in which order. A schedule is data, checked before it is used.

A schedule of a pipeline is one sequence of actions for each lane. A lane is devices that do one thing at a time: those
of one stage, or of several (`ScheduleKind.INTERLEAVED`); of L lanes, lane i has stages i, i + L, i + 2 L, ... Stages
take activations and gradients by key, so an action waits only for the data that it needs, and never for a partner to be
ready: forward of microbatch j needs the forward of j on the stage before; backward of j needs the backward of j on the
stage after, and the stage's own forward of j. In text an action is stage, phase, microbatch: `0F0 0F1 0B0 0B1`.

A schedule may split the backward (`ScheduleKind.ZB_H1`): then B is only the gradient of the stage's input, which others
wait for, and W, at any time after it, the gradient of its weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from oobleck_jax.errors import PlanError


class Phase(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One phase of one microbatch on one stage. Microbatches are numbered from 0 within the pipeline."""

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.microbatch}"


Schedule: TypeAlias = tuple[tuple[Action, ...], ...]  # one row of actions for each lane


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """Seconds that one microbatch takes on a stage."""

    forward_s: float
    backward_s: float  # where it is split: of the gradient of the input
    weight_s: float = 0.0  # where it is split: of the gradient of the weights

    def of(self, phase: Phase) -> float:
        match phase:
            case Phase.FORWARD:
                return self.forward_s
            case Phase.BACKWARD:
                return self.backward_s
            case Phase.WEIGHT:
                return self.weight_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """When an action runs, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


def check_schedule(schedule: Schedule, *, num_stages: int, num_microbatches: int, limits: Sequence[int]) -> None:
    """Check that a schedule is complete, fits the memory model and ends (properties S1, S2, S3 of ARCHITECTURE.md).

    S1: a stage runs the forward and the backward (if split, both of its parts) of every microbatch once, in this
    order; the last stage the backward right after its forward, which its one program for loss and gradient needs. S2:
    a lane keeps no more microbatches between forward and the end of backward than its limit, which is what the planner
    counts memory for. S3: run as written, with every action waiting for its data, it ends.

    Args:
        schedule: one row for each lane.
        num_stages: of the pipeline.
        num_microbatches: of the pipeline.
        limits: of each lane, the microbatches that it keeps at most; of several stages, of all of them together.

    Raises:
        PlanError: a rule is broken; the message names the stage and the action.
    """
    if len(schedule) != len(limits):
        raise PlanError(f"the schedule has {len(schedule)} rows of actions, the pipeline has {len(limits)} lanes")
    for lane, (row, limit) in enumerate(zip(schedule, limits, strict=True)):
        _check_row(row, range(lane, num_stages, len(schedule)), num_stages, num_microbatches, limit)
    costs = [StageCost(forward_s=1.0, backward_s=1.0, weight_s=1.0)] * num_stages
    _, waiting = _run(schedule, costs, [0.0] * (num_stages - 1))
    if waiting:
        names = ", ".join(f"stage {action.stage} before {action}" for action in waiting)
        raise PlanError(f"the schedule never ends: these wait for each other: {names}")


def _check_row(row: tuple[Action, ...], stages: range, num_stages: int, num_microbatches: int, limit: int) -> None:
    is_split = any(action.phase is Phase.WEIGHT for action in row)
    name = f"stage {stages[0]}" if len(stages) == 1 else f"the lane of stages {', '.join(map(str, stages))}"
    in_flight: set[tuple[int, int]] = set()
    done: set[Action] = set()
    last: Action | None = None  # the backward of the last stage that must come now
    for action in row:
        item = (action.stage, action.microbatch)
        if action.stage not in stages or not 0 <= action.microbatch < num_microbatches:
            raise PlanError(f"{name} of {num_stages} with {num_microbatches} microbatches cannot run {action}")
        if action in done:
            raise PlanError(f"{name} runs {action} twice")
        done.add(action)
        if last is not None and action != last:
            raise PlanError(f"{name} runs {action} before {last}, which must follow its forward")
        last = None
        if action.phase is Phase.FORWARD:
            if action.stage == num_stages - 1:
                last = Action(stage=action.stage, phase=Phase.BACKWARD, microbatch=action.microbatch)
            in_flight.add(item)
            if len(in_flight) > limit:
                raise PlanError(
                    f"{name} keeps {len(in_flight)} microbatches at {action}; memory is planned for {limit}"
                )
        elif item not in in_flight:
            raise PlanError(f"{name} runs {action} before its forward")
        elif action.phase is Phase.WEIGHT and replace(action, phase=Phase.BACKWARD) not in done:
            raise PlanError(f"{name} runs {action} before its backward")
        elif action.phase is Phase.WEIGHT or not is_split:
            in_flight.remove(item)
    num_needed = (3 if is_split else 2) * num_microbatches * len(stages)
    if len(done) != num_needed:
        raise PlanError(f"{name} has {len(done)} actions; {num_microbatches} microbatches need {num_needed}")


def simulate(
    schedule: Schedule, costs: Sequence[StageCost], transfer_s: Sequence[float] | None = None
) -> tuple[tuple[Interval, ...], ...]:
    """Return when each action runs if every lane has its own devices and starts as soon as its data is there.

    Args:
        schedule: a schedule that ends.
        costs: of each stage.
        transfer_s: seconds that an activation or gradient needs from stage i to i+1 or back, for each i; hidden
            behind other work where there is some. None: no time.

    Returns:
        One row of intervals for each lane, in the order of the schedule.

    Raises:
        PlanError: the schedule does not end.
    """
    rows, waiting = _run(schedule, costs, [0.0] * (len(costs) - 1) if transfer_s is None else transfer_s)
    if waiting:
        raise PlanError(f"the schedule never ends: {waiting[0]} waits for ever; see check_schedule")
    return tuple(
        tuple(
            Interval(action=action, start_s=start_s, end_s=end_s)
            for action, (_, start_s, end_s) in zip(actions, row, strict=True)
        )
        for actions, row in zip(schedule, rows, strict=True)
    )


def stage_ends(schedule: Schedule, costs: Sequence[StageCost], transfer_s: Sequence[float]) -> tuple[float, ...]:
    """Return when each stage has done its last action; see `simulate`."""
    rows, waiting = _run(schedule, costs, transfer_s)
    if waiting:
        raise PlanError(f"the schedule never ends: {waiting[0]} waits for ever; see check_schedule")
    ends: dict[int, float] = {}
    for actions, row in zip(schedule, rows, strict=True):
        ends |= {action.stage: end_s for action, (_, _, end_s) in zip(actions, row, strict=True)}
    return tuple(ends[stage] for stage in range(len(costs)))


_Timed: TypeAlias = tuple[int, float, float]  # in which order data becomes available; start and end of an action


def _run(
    schedule: Schedule, costs: Sequence[StageCost], transfer_s: Sequence[float]
) -> tuple[list[list[_Timed]], list[Action]]:
    """Run a schedule; return the times of each lane's actions, and the actions that wait for ever."""
    num_stages, num_lanes = len(costs), len(schedule)
    rows: list[list[_Timed]] = [[] for _ in schedule]
    end_of: dict[tuple[int, bool, int], float] = {}
    ready = list(range(num_lanes))
    number = 0
    while ready:
        lane = ready.pop()
        row = rows[lane]
        now_s = row[-1][2] if row else 0.0
        for action in schedule[lane][len(row) :]:
            stage, is_forward = action.stage, action.phase is Phase.FORWARD
            if action.phase is Phase.WEIGHT:  # nobody waits for it, and its data is there
                row.append((number, now_s, now_s + costs[stage].weight_s))
                now_s += costs[stage].weight_s
                number += 1
                continue
            source = stage - 1 if is_forward else stage + 1
            if 0 <= source < num_stages:
                there_s = end_of.get((source, is_forward, action.microbatch))
                if there_s is None:
                    break
                now_s = max(now_s, there_s + transfer_s[min(stage, source)])
            start_s = now_s
            now_s = start_s + (costs[stage].forward_s if is_forward else costs[stage].backward_s)
            end_of[stage, is_forward, action.microbatch] = now_s
            row.append((number, start_s, now_s))
            number += 1
            consumer = stage + 1 if is_forward else stage - 1
            if 0 <= consumer < num_stages:
                ready.append(consumer % num_lanes)
    waiting = [actions[len(row)] for actions, row in zip(schedule, rows, strict=True) if len(row) < len(actions)]
    return rows, waiting


def merge_for_node(schedule: Schedule, lanes: Iterable[int], costs: Sequence[StageCost]) -> tuple[Action, ...]:
    """Return the actions of several lanes of one node in one order.

    A node with several devices may have several lanes, but has one thread that starts their programs. The order is
    that of the start times when every lane has its own device. It is a part of one global order in which everything
    comes after what it needs, so nodes that follow it, even one action after the other, never wait for each other in
    a circle.
    """
    rows, waiting = _run(schedule, costs, [0.0] * (len(costs) - 1))
    if waiting:
        raise PlanError(f"the schedule never ends: {waiting[0]} waits for ever; see check_schedule")
    merged = [
        (start_s, number, action)
        for lane in lanes
        for action, (number, start_s, _) in zip(schedule[lane], rows[lane], strict=True)
    ]
    return tuple(action for _, _, action in sorted(merged, key=lambda item: item[:2]))
