"""What a plan will take: its real schedules and gradient sums, played through with the costs of a profile.

Finer than the cost model that partitions are chosen by: forward and backward are separate, activations and gradients
travel while others compute, and each bucket of gradients is summed as soon as all its holders have it, one after the
other on each node, last layers first. Then every node updates its layers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, product
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from oobleck_jax.config import ScheduleKind
from oobleck_jax.planning.costs import NS_PER_S, Costs, Ints
from oobleck_jax.planning.lane_memory import lanes_memory_bytes
from oobleck_jax.planning.plan import Pipeline, Plan, Template
from oobleck_jax.planning.profile import Profile
from oobleck_jax.planning.schedule import Phase, StageCost, stage_ends
from oobleck_jax.planning.schedule_kinds import schedule_with


@dataclass(frozen=True, kw_only=True, slots=True)
class StageForecast:
    """What a stage is predicted to take."""

    cost: StageCost  # of one microbatch
    transfer_s: float  # of one activation to the next stage; 0 where that is on the same node, or there is none
    memory_bytes: int  # of each of its devices, at the peak, with the other stages that are on them


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a plan is predicted to take."""

    step_s: float
    compute_s: float  # until the last pipeline has done its last backward
    exposed_sum_s: float  # of the gradient sums, the time after that
    update_s: float  # of the parameters, after the sums
    bubble_fraction: float  # of the time of all devices of working nodes, what they do not compute in
    stages: tuple[tuple[StageForecast, ...], ...]  # of each pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTimes:
    """When the parts of a step end, in nanoseconds from its start."""

    compute_ns: int  # the last backward of the last pipeline
    sums_ns: int  # the last gradient sum
    step_ns: int  # the last update


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Times of a pipeline's stages in nanoseconds, for one microbatch."""

    forward_ns: Ints
    backward_ns: Ints
    weight_ns: Ints  # of the backward, what can wait where it is split
    transfer_ns: Ints  # of an activation or a gradient between each stage and the next; the last is not used


_Kind: TypeAlias = tuple[Template, int, ScheduleKind]  # pipelines alike: with the same number of microbatches

MAX_KNOWN = 10_000  # kinds of pipelines that are kept

_known_ends: WeakKeyDictionary[Costs, dict[_Kind, tuple[int, ...]]] = WeakKeyDictionary()


def forecast_times(plans: Sequence[Plan], profile: Profile, costs: Costs) -> tuple[PlanTimes, ...]:
    """Return when a step of each plan is predicted to end; see `forecast_plan`."""
    counts = [_count_kinds(plan) for plan in plans]
    kinds = list(dict.fromkeys(kind for count in counts for kind in count))
    ends_of = _ends_of(kinds, costs)
    updates_ns = {template: _update_ns(template, profile, costs) for template, _, _ in kinds}
    times: list[PlanTimes] = []
    for count in counts:
        compute_ns = max(max(ends_of[kind]) for kind in count)
        sums_ns = _sums_end_ns([(kind[0], number, ends_of[kind]) for kind, number in count.items()], profile)
        sums_ns = max(compute_ns, sums_ns)
        step_ns = sums_ns + max(updates_ns[template] for template, _, _ in count)
        times.append(PlanTimes(compute_ns=compute_ns, sums_ns=sums_ns, step_ns=step_ns))
    return tuple(times)


def pipeline_end_ns(template: Template, num_microbatches: int, schedule: ScheduleKind, costs: Costs) -> int:
    """Return when a pipeline is predicted to have done its last backward."""
    kind = (template, num_microbatches, schedule)
    return max(_ends_of([kind], costs)[kind])


def _ends_of(kinds: Sequence[_Kind], costs: Costs) -> dict[_Kind, tuple[int, ...]]:
    """Return when the stages of each kind of pipeline end; each is played through once, and all new ones together."""
    known = _known_ends.setdefault(costs, {})
    if len(known) > MAX_KNOWN:
        known.clear()
    new = [kind for kind in kinds if kind not in known]
    plain = [kind for kind in new if kind[2] is ScheduleKind.ONE_F_ONE_B]
    ends_ns = stage_ends_ns([(stage_times(template, costs), number) for template, number, _ in plain]) if plain else []
    known |= {kind: tuple(ends.tolist()) for kind, ends in zip(plain, ends_ns, strict=True)}
    known |= {kind: _simulated_ends(kind, costs) for kind in new if kind[2] is not ScheduleKind.ONE_F_ONE_B}
    return known


def _simulated_ends(kind: _Kind, costs: Costs) -> tuple[int, ...]:
    template, num_microbatches, schedule = kind
    times = stage_times(template, costs)
    ends_ns = stage_ends(
        schedule_with(template, schedule, num_microbatches),
        _stage_costs(times, schedule, 1.0),
        times.transfer_ns.tolist(),
    )
    return tuple(int(end_ns) for end_ns in ends_ns)


def _stage_costs(times: StageTimes, schedule: ScheduleKind, unit_ns: float) -> list[StageCost]:
    """Return what one microbatch takes on each stage, in a unit of time."""
    weight_ns = times.weight_ns if schedule is ScheduleKind.ZB_H1 else np.zeros_like(times.weight_ns)
    columns = (times.forward_ns.tolist(), (times.backward_ns - weight_ns).tolist(), weight_ns.tolist())
    return [
        StageCost(forward_s=forward / unit_ns, backward_s=backward / unit_ns, weight_s=weight / unit_ns)
        for forward, backward, weight in zip(*columns, strict=True)
    ]


def _count_kinds(plan: Plan) -> Counter[_Kind]:
    """Count the pipelines of each kind; neighbours first, because comparing them is far cheaper than hashing."""
    counts: Counter[_Kind] = Counter()
    for kind, group in groupby(plan.pipelines, key=_kind_of):
        counts[kind] += len(list(group))
    return counts


def _kind_of(pipeline: Pipeline) -> _Kind:
    return pipeline.template, pipeline.num_microbatches, pipeline.schedule


def forecast_plan(plan: Plan, profile: Profile, costs: Costs) -> Forecast:
    """Return what a plan is predicted to take.

    Args:
        plan: any plan of the model.
        profile: costs of the layers.
        costs: its tables, for the nodes of the plan.
    """
    ends = forecast_times([plan], profile, costs)[0]
    stages: list[tuple[StageForecast, ...]] = []
    busy_s = 0.0
    for (template, number, schedule), group in groupby(plan.pipelines, key=_kind_of):
        forecasts = forecast_stages(template, number, costs, schedule)
        times = [sum(forecast.cost.of(phase) for phase in Phase) for forecast in forecasts]
        num_pipelines = len(list(group))
        stages += [forecasts] * num_pipelines
        device_s = sum(stage.num_devices * time_s for stage, time_s in zip(template.stages, times, strict=True))
        busy_s += num_pipelines * number * device_s
    num_devices = costs.devices_per_node * (len(plan.nodes) - len(plan.spare_nodes))
    step_s = ends.step_ns / NS_PER_S
    return Forecast(
        step_s=step_s,
        compute_s=ends.compute_ns / NS_PER_S,
        exposed_sum_s=(ends.sums_ns - ends.compute_ns) / NS_PER_S,
        update_s=(ends.step_ns - ends.sums_ns) / NS_PER_S,
        bubble_fraction=1 - busy_s / (step_s * num_devices) if step_s else 0.0,
        stages=tuple(stages),
    )


def forecast_stages(
    template: Template,
    num_microbatches: int,
    costs: Costs,
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
) -> tuple[StageForecast, ...]:
    """Return what each stage of a pipeline is predicted to take."""
    times = stage_times(template, costs)
    stage_costs = _stage_costs(times, schedule, NS_PER_S)
    memory_bytes = lanes_memory_bytes(template, num_microbatches, costs, schedule)
    return tuple(
        StageForecast(
            cost=cost,
            transfer_s=int(times.transfer_ns[index]) / NS_PER_S,
            memory_bytes=memory_bytes[index % len(memory_bytes)],
        )
        for index, cost in enumerate(stage_costs)
    )


def stage_times(template: Template, costs: Costs) -> StageTimes:
    """Return the times of a template's stages."""
    first = np.array([stage.first_layer for stage in template.stages])
    end = np.array([stage.end_layer for stage in template.stages])
    devices = np.array([costs.device_counts.index(stage.num_devices) for stage in template.stages])
    node = np.array([stage.node_index for stage in template.stages])
    stays = np.concatenate([node[1:] == node[:-1], [True]])
    return StageTimes(
        forward_ns=costs.forward_ns[devices, first, end],
        backward_ns=costs.backward_ns[devices, first, end],
        weight_ns=costs.weight_ns[devices, first, end],
        transfer_ns=np.where(stays, 0, costs.link_ns[end]),
    )


def stage_ends_ns(pipelines: Sequence[tuple[StageTimes, int]]) -> list[Ints]:
    """Return for each pipeline when its stages end their last backward under 1F1B.

    The same as `schedule.simulate` of that schedule, with which tests compare it, but many times faster. If all
    actions took one unit of time, each would have its slot: stage i of S runs forward j in slot i + j while it
    warms up (j < S - i), in slot i + 2j afterwards, and backward j in slot 2S - 1 - i + 2j. What an action needs is
    then always the newest result of its neighbour from the slots before. So the slots are played one after the other,
    with all stages of all pipelines at once.

    Args:
        pipelines: times of the stages, and the number of microbatches.
    """
    sizes = np.array([len(times.forward_ns) for times, _ in pipelines])[:, None]
    counts = np.array([count for _, count in pipelines])[:, None]
    forward_ns = _table([times.forward_ns for times, _ in pipelines])
    backward_ns = _table([times.backward_ns for times, _ in pipelines])
    hop_ns = _table([times.transfer_ns for times, _ in pipelines])[:, :-1]
    stage: Ints = np.arange(forward_ns.shape[1], dtype=np.int64)
    is_stage = stage < sizes
    warm_end = np.where(is_stage, stage + np.minimum(sizes - stage, counts), 0)
    steady_begin, steady_end = 2 * sizes - stage, np.where(is_stage, stage + 2 * counts, 0)
    back_begin, back_end = steady_begin - 1, np.where(is_stage, steady_begin - 1 + 2 * counts, 0)
    now = np.zeros_like(forward_ns)
    input_ns = np.zeros_like(now)  # when the newest activation of the stage before is there
    gradient_ns = np.zeros_like(now)  # when the newest gradient of the stage after is there
    for slot in range(int((2 * (counts + sizes - 1)).max())):
        is_even = (slot - stage) % 2 == 0
        is_forward = (slot >= stage) & (slot < warm_end) | is_even & (slot >= steady_begin) & (slot < steady_end)
        is_backward = ~is_even & (slot >= back_begin) & (slot < back_end)
        end = np.maximum(now, np.where(is_forward, input_ns, gradient_ns)) + np.where(
            is_forward, forward_ns, backward_ns
        )
        now = np.where(is_forward | is_backward, end, now)
        input_ns[:, 1:] = np.where(is_forward[:, :-1], end[:, :-1] + hop_ns, input_ns[:, 1:])
        gradient_ns[:, :-1] = np.where(is_backward[:, 1:], end[:, 1:] + hop_ns, gradient_ns[:, :-1])
    return [row[: len(times.forward_ns)] for row, (times, _) in zip(now, pipelines, strict=True)]


def _table(rows: Sequence[Ints]) -> Ints:
    """Stack rows of different lengths, filled up with zeros."""
    table = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.int64)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return table


def _sums_end_ns(kinds: Sequence[tuple[Template, int, tuple[int, ...]]], profile: Profile) -> int:
    """Return when the last gradient sum ends; 0 where every layer has one holder.

    Args:
        kinds: template, number of pipelines, and when their stages end.
        profile: sizes of the gradients, and the rate of sums.
    """
    stage_of = [[stage for stage in template.stages for _ in stage.layers] for template, _, _ in kinds]
    end_of = [
        [end for stage, end in zip(template.stages, ends, strict=True) for _ in stage.layers]
        for template, _, ends in kinds
    ]
    cuts = sorted({stage.first_layer for template, _, _ in kinds for stage in template.stages} | {profile.num_layers})
    gradient_bytes = [layer.state.gradient_bytes for layer in profile.layers]
    buckets = [((first,), sum(gradient_bytes[first:end])) for first, end in pairwise(cuts)]
    buckets += [(group.layers, group.state.gradient_bytes) for group in profile.tied_groups]
    free_ns: dict[tuple[int, int], int] = {}  # of each node of each kind
    end_ns = 0
    for layers, num_bytes in sorted(buckets, key=lambda bucket: -bucket[0][0]):
        ready_ns: dict[tuple[int, int], int] = {}
        for number, layer in product(range(len(kinds)), layers):
            node = (number, stage_of[number][layer].node_index)
            ready_ns[node] = max(end_of[number][layer], ready_ns.get(node, free_ns.get(node, 0)))
        num_holders = sum(kinds[number][1] for number, _ in ready_ns)
        if num_holders > 1:
            bucket_end_ns = max(ready_ns.values()) + round(profile.sum_s(num_bytes, num_holders) * NS_PER_S)
            free_ns |= dict.fromkeys(ready_ns, bucket_end_ns)
            end_ns = max(end_ns, bucket_end_ns)
    return end_ns


def _update_ns(template: Template, profile: Profile, costs: Costs) -> int:
    """Return how long the devices that update the most bytes need for it."""
    num_lanes = template.num_lanes
    lane_bytes = [0] * num_lanes
    for index, stage in enumerate(template.stages):
        lane_bytes[index % num_lanes] += (
            int(costs.gradient_bytes[stage.first_layer, stage.end_layer]) // stage.num_devices
        )
    return round(max(lane_bytes) * profile.update_s_per_byte * NS_PER_S)
