"""The best plan for the nodes that are alive.

The inside of this file is a first, simple one: pipelines of nearly equal size, balanced stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from oobleck_jax.errors import NotEnoughNodes, PlanError
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan, Stage, Template, check_plan
from oobleck_jax.planning.profile import Profile
from oobleck_jax.planning.schedule import StageCost


@dataclass(frozen=True, kw_only=True, slots=True)
class StageForecast:
    """What a stage is predicted to take."""

    cost: StageCost  # of one microbatch
    memory_bytes: int  # of each of its devices, at the peak


@dataclass(frozen=True, kw_only=True, slots=True)
class Planning:
    """A plan, why it is this one, and what it is predicted to do."""

    plan: Plan
    reason: str  # one sentence
    step_s: float  # predicted time of one step
    stages: tuple[tuple[StageForecast, ...], ...]  # of each pipeline
    num_replicas: int  # pipelines; every layer is held by as many nodes
    is_degraded: bool  # fewer than fault_tolerance + 1 replicas

    def costs_of(self, pipeline_index: int) -> tuple[StageCost, ...]:
        """Return the costs of a pipeline's stages, as schedules take them."""
        return tuple(stage.cost for stage in self.stages[pipeline_index])


def best_plan(
    profile: Profile,
    *,
    nodes: tuple[NodeId, ...],
    devices_per_node: int,
    fault_tolerance: int,
    num_microbatches: int,
    device_memory_bytes: int,
) -> Planning:
    """Return the plan that takes the least time for a step.

    Args:
        profile: costs of the layers; has costs for 1 and, where devices_per_node is more, more devices.
        nodes: the nodes that are alive, ascending.
        devices_per_node: devices of each.
        fault_tolerance: f; at least f + 1 pipelines wherever the nodes suffice.
        num_microbatches: of the global batch.
        device_memory_bytes: what a stage may use of each device.

    Raises:
        NotEnoughNodes: not even one pipeline fits.
        PlanError: more pipelines than microbatches are asked for.
    """
    if num_microbatches <= fault_tolerance:
        raise PlanError(
            f"{num_microbatches} microbatches cannot feed {fault_tolerance + 1} pipelines; lower --microbatch-size or "
            "--fault-tolerance"
        )
    num_devices = 1 << (devices_per_node.bit_length() - 1)
    fitting: dict[int, tuple[Template, tuple[StageForecast, ...]]] = {}
    for size in range(1, min(len(nodes), profile.num_layers) + 1):
        stages = _balanced(profile, size, num_devices)
        forecasts = tuple(_forecast(profile, stage, size - i, num_microbatches) for i, stage in enumerate(stages))
        if max(forecast.memory_bytes for forecast in forecasts) <= device_memory_bytes:
            fitting[size] = (Template(stages=stages), forecasts)
    if not fitting:
        raise NotEnoughNodes(
            f"{len(nodes)} nodes left, but the model does not fit on them ({profile.device}, "
            f"{device_memory_bytes / 2**30:.1f} GiB per device); add nodes or lower --microbatch-size",
            num_nodes=len(nodes),
            num_needed=len(nodes) + 1,
        )
    num_needed = min(fault_tolerance + 1, len(nodes) // min(fitting))
    candidates = [
        _bind(fitting, nodes, count, num_microbatches)
        for count in range(num_needed, min(len(nodes), num_microbatches) + 1)
        if len(nodes) // count >= min(fitting)
    ]
    step_s, plan = min(candidates, key=lambda item: item[0])
    check_plan(
        plan, num_layers=profile.num_layers, num_microbatches=num_microbatches, devices_per_node=devices_per_node
    )
    is_degraded = len(plan.pipelines) <= fault_tolerance
    replicas = f"{len(plan.pipelines)} pipelines on {len(nodes) - len(plan.spare_nodes)} of {len(nodes)} nodes"
    needed = (
        f"; {fault_tolerance + 1} pipelines need {(fault_tolerance + 1) * min(fitting)} nodes" if is_degraded else ""
    )
    return Planning(
        plan=plan,
        reason=f"{replicas}, predicted {step_s:.3g} s per step{needed}",
        step_s=step_s,
        stages=tuple(fitting[len(pipeline.nodes)][1] for pipeline in plan.pipelines),
        num_replicas=len(plan.pipelines),
        is_degraded=is_degraded,
    )


def _bind(
    fitting: dict[int, tuple[Template, tuple[StageForecast, ...]]],
    nodes: tuple[NodeId, ...],
    count: int,
    num_microbatches: int,
) -> tuple[float, Plan]:
    wanted = [len(nodes) // count + (index < len(nodes) % count) for index in range(count)]
    sizes = [max(size for size in fitting if size <= want) for want in wanted]
    shares = [1] * count
    times = [fitting[size][1] for size in sizes]
    for _ in range(num_microbatches - count):
        index = min(range(count), key=lambda i: _pipeline_s(times[i], shares[i] + 1))
        shares[index] += 1
    first = [sum(sizes[:index]) for index in range(count)]
    pipelines = tuple(
        Pipeline(template=fitting[size][0], nodes=nodes[begin : begin + size], num_microbatches=share)
        for size, begin, share in zip(sizes, first, shares, strict=True)
    )
    step_s = max(_pipeline_s(time, share) for time, share in zip(times, shares, strict=True))
    return step_s, Plan(pipelines=pipelines, spare_nodes=nodes[sum(sizes) :])


def _pipeline_s(stages: Sequence[StageForecast], num_microbatches: int) -> float:
    times = [stage.cost.forward_s + stage.cost.backward_s for stage in stages]
    return sum(times) + (num_microbatches - 1) * max(times)


def _balanced(profile: Profile, num_stages: int, num_devices: int) -> tuple[Stage, ...]:
    """Cut the layers into runs such that the slowest is as fast as possible."""
    costs = [_cost(profile, layer, num_devices) for layer in range(profile.num_layers)]
    end = len(costs)
    best: list[tuple[float, tuple[int, ...]]] = [(sum(costs[first:]), (end,)) for first in range(end)]
    for _ in range(num_stages - 1):
        best = [
            min(
                ((max(sum(costs[first:cut]), best[cut][0]), (cut, *best[cut][1])) for cut in range(first + 1, end)),
                default=(float("inf"), ()),
            )
            for first in range(end)
        ]
    cuts = (0, *best[0][1])
    return tuple(
        Stage(first_layer=cuts[i], end_layer=cuts[i + 1], node_index=i, num_devices=num_devices)
        for i in range(num_stages)
    )


def _cost(profile: Profile, layer: int, num_devices: int) -> float:
    cost = profile.layers[layer].cost_on(num_devices)
    if cost is None:
        raise PlanError(f"the profile has no costs for {num_devices} devices; profile with --devices-per-node")
    return cost.forward_s + cost.backward_s


def _forecast(profile: Profile, stage: Stage, num_left: int, num_microbatches: int) -> StageForecast:
    costs = [cost for layer in stage.layers if (cost := profile.layers[layer].cost_on(stage.num_devices))]
    states = [profile.layers[layer].state for layer in stage.layers]
    states += [group.state for group in profile.tied_groups if set(group.layers) & set(stage.layers)]
    in_flight = min(num_left, num_microbatches)
    return StageForecast(
        cost=StageCost(
            forward_s=sum(cost.forward_s for cost in costs), backward_s=sum(cost.backward_s for cost in costs)
        ),
        memory_bytes=-(-sum(state.total_bytes for state in states) // stage.num_devices)
        + in_flight * sum(cost.residual_bytes for cost in costs)
        + max(cost.temporary_bytes for cost in costs),
    )
