"""The schedules there are: 1F1B, its interleaved form, and ZB-H1, which splits the backward."""

from functools import lru_cache

from oobleck_jax.config import ScheduleKind
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.plan import Pipeline, Template
from oobleck_jax.planning.schedule import Action, Phase, Schedule


def schedule_of(pipeline: Pipeline) -> Schedule:
    """Return the schedule of a pipeline."""
    return schedule_with(pipeline.template, pipeline.schedule, pipeline.num_microbatches)


def schedule_with(template: Template, kind: ScheduleKind, num_microbatches: int) -> Schedule:
    """Return the schedule of a pipeline to be."""
    return make_schedule(
        kind, num_lanes=template.num_lanes, num_stages=len(template.stages), num_microbatches=num_microbatches
    )


def limits_of(pipeline: Pipeline) -> tuple[int, ...]:
    """Return how many microbatches each lane of a pipeline keeps at most; see `in_flight_limits`."""
    template = pipeline.template
    return in_flight_limits(
        pipeline.schedule,
        num_lanes=template.num_lanes,
        num_stages=len(template.stages),
        num_microbatches=pipeline.num_microbatches,
    )


def bubble_of_equal_stages(pipeline: Pipeline) -> float:
    """Return which part of the time is bubble if all stages take the same time, and transfers none.

    Exact where there are no fewer microbatches than lanes; of interleaved, where the lanes divide them. Of ZB-H1 for
    F = B = W.
    """
    num_others = pipeline.template.num_lanes - 1
    parts = 3 if pipeline.schedule is ScheduleKind.ZB_H1 else len(pipeline.template.stages) // (num_others + 1)
    return num_others / (parts * pipeline.num_microbatches + num_others)


@lru_cache(maxsize=64)
def make_schedule(kind: ScheduleKind, *, num_lanes: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Return the schedule of a pipeline. Pure; the last ones are kept.

    Args:
        kind: of the pipeline, so not `AUTO`.
        num_lanes: with one stage each, unless interleaved.
        num_stages: a multiple of the lanes.
        num_microbatches: any number.
    """
    if num_lanes < 1 or num_microbatches < 1:
        raise PlanError(f"a schedule needs a stage and a microbatch, but has {num_lanes} and {num_microbatches}")
    if kind is ScheduleKind.INTERLEAVED:
        return interleaved(num_lanes, num_stages // num_lanes, num_microbatches)
    if kind is ScheduleKind.ZB_H1:
        return zb_h1(num_stages, num_microbatches)
    assert kind is ScheduleKind.ONE_F_ONE_B, f"{kind} is not the schedule of a pipeline"
    return one_f_one_b(num_stages, num_microbatches)


def in_flight_limits(kind: ScheduleKind, *, num_lanes: int, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return how many microbatches each lane keeps at most; those of several stages count for each."""
    if kind is ScheduleKind.INTERLEAVED:
        before, most = num_stages - num_lanes, num_stages // num_lanes * num_microbatches
        return tuple(min(before + 2 * (num_lanes - lane) - 1, most) for lane in range(num_lanes))
    if kind is ScheduleKind.ZB_H1:
        return (min(num_lanes, num_microbatches),) * num_lanes
    return tuple(min(num_lanes - lane, num_microbatches) for lane in range(num_lanes))


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the 1F1B schedule, the non-interleaved one of PipeDream-Flush (Narayanan et al. 2021, figure 3).

    Stage i first runs the forwards of as many microbatches as there are stages after it, then alternates forward and
    backward, then runs the backwards that are left. So it keeps min(num_stages - i, num_microbatches) microbatches
    at most. Any number of microbatches works; with fewer than stages there is no steady state. With equal stages
    p - 1 of every m + p - 1 units of time are bubble.
    """
    numbers = range(num_microbatches)
    return tuple(
        _alternate(
            [Action(stage=stage, phase=Phase.FORWARD, microbatch=number) for number in numbers],
            [Action(stage=stage, phase=Phase.BACKWARD, microbatch=number) for number in numbers],
            num_warmup=num_stages - 1 - stage,
        )
        for stage in range(num_stages)
    )


def interleaved(num_lanes: int, num_chunks: int, num_microbatches: int) -> Schedule:
    """Return the interleaved 1F1B schedule (Narayanan et al. 2021, section 2.2) of `num_lanes * num_chunks` stages.

    A lane takes its stages in turn, each with as many microbatches as there are lanes, so that the first of them come
    back from the last lane just when they are needed. With equal stages, and where the lanes divide the microbatches,
    p - 1 of every v m + p - 1 units of time are bubble. Where they do not, which the paper excludes, the schedule is
    that of the next larger number without the microbatches that there are not, so never slower than 1F1B.
    """
    num_stages = num_lanes * num_chunks
    firsts = range(0, num_microbatches, num_lanes)
    rows: list[tuple[Action, ...]] = []
    for lane in range(num_lanes):
        stages = range(lane, num_stages, num_lanes)
        forwards, backwards = (
            [
                Action(stage=stage, phase=phase, microbatch=number)
                for first in firsts
                for stage in order
                for number in range(first, first + num_lanes)
            ]
            for phase, order in ((Phase.FORWARD, stages), (Phase.BACKWARD, stages[::-1]))
        )
        row = _alternate(forwards, backwards, num_warmup=num_stages - num_lanes + 2 * (num_lanes - 1 - lane))
        rows.append(tuple(action for action in row if action.microbatch < num_microbatches))
    return tuple(rows)


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the ZB-H1 schedule (Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.1).

    It is 1F1B with the gradients of weights put off: on stage i by i microbatches, so that each stage keeps as many as
    the first one does under 1F1B, and those that were put off fill the time in which 1F1B waits for its last
    microbatches. With equal stages, F = B = W, and no fewer microbatches than stages, p - 1 of every 3 m + p - 1 units
    of time are bubble: a third of what it is under 1F1B.
    """
    rows: list[tuple[Action, ...]] = []
    for stage, row in enumerate(one_f_one_b(num_stages, num_microbatches)):
        weights = [Action(stage=stage, phase=Phase.WEIGHT, microbatch=number) for number in range(num_microbatches)]
        actions: list[Action] = []
        for action in row:
            actions.append(action)
            if action.phase is Phase.BACKWARD and action.microbatch >= stage:
                actions.append(weights[action.microbatch - stage])
        rows.append((*actions, *weights[max(num_microbatches - stage, 0) :]))
    return tuple(rows)


def _alternate(forwards: list[Action], backwards: list[Action], *, num_warmup: int) -> tuple[Action, ...]:
    """Return some forwards, then forward and backward in turn, then the backwards that are left."""
    num_warmup = min(num_warmup, len(forwards))
    steady = [action for pair in zip(forwards[num_warmup:], backwards, strict=False) for action in pair]
    return (*forwards[:num_warmup], *steady, *backwards[len(forwards) - num_warmup :])
