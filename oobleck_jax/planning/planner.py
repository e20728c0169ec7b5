"""The best plan for the nodes that are alive.

1. Templates: for each number of nodes, the partitions worth having (templates.py, partition.py).
2. Shares: how many pipelines of which sizes, with how many microbatches (allocate.py). Exact by the cost model.
3. The best one, and the best ones of larger and larger pipelines, are played through (forecast.py), because fewer and
   deeper pipelines exchange fewer gradients. The fastest is taken.
4. Its pipelines get their schedules (schedule_choice.py).

All of it is a function of its arguments, to the byte, on every machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from oobleck_jax.config import Remat, ScheduleKind
from oobleck_jax.errors import NotEnoughNodes, PlanError
from oobleck_jax.planning.allocate import Share, best_shares
from oobleck_jax.planning.forecast import Forecast, StageForecast, forecast_plan, forecast_times
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan, check_plan
from oobleck_jax.planning.profile import Profile
from oobleck_jax.planning.schedule import StageCost
from oobleck_jax.planning.schedule_choice import Scheduled, choose_schedules
from oobleck_jax.planning.templates import Templates, make_templates, template_of


MAX_CANDIDATES = 6  # allocations that are played through


@dataclass(frozen=True, kw_only=True, slots=True)
class Planning:
    """A plan, why it is this one, and what it is predicted to do."""

    plan: Plan
    reason: str  # one sentence
    forecast: Forecast
    is_degraded: bool  # fewer than fault_tolerance + 1 replicas

    @property
    def num_replicas(self) -> int:
        """Pipelines; every layer is held by as many nodes."""
        return len(self.plan.pipelines)

    @property
    def step_s(self) -> float:
        """Predicted time of a step."""
        return self.forecast.step_s

    @property
    def stages(self) -> tuple[tuple[StageForecast, ...], ...]:
        return self.forecast.stages

    def costs_of(self, pipeline_index: int) -> tuple[StageCost, ...]:
        """Return the costs of a pipeline's stages, as schedules take them."""
        return tuple(stage.cost for stage in self.forecast.stages[pipeline_index])


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

    With fewer nodes than `fault_tolerance + 1` pipelines need, it is the best one with as many pipelines as fit, and
    says so.

    Args:
        profile: costs of the layers.
        nodes: the nodes that are alive, ascending.
        devices_per_node: devices of each.
        fault_tolerance: f; at least f + 1 pipelines wherever the nodes suffice.
        num_microbatches: of the global batch.
        device_memory_bytes: what a stage may use of each device.

    Raises:
        NotEnoughNodes: not even one pipeline fits on the nodes.
        PlanError: the model fits on no number of nodes, or there are fewer microbatches than pipelines.
    """
    templates = templates_for(
        profile,
        num_nodes=len(nodes),
        devices_per_node=devices_per_node,
        num_microbatches=num_microbatches,
        device_memory_bytes=device_memory_bytes,
    )
    return plan_from(templates, nodes=nodes, fault_tolerance=fault_tolerance)


def templates_for(
    profile: Profile,
    *,
    num_nodes: int,
    devices_per_node: int,
    num_microbatches: int,
    device_memory_bytes: int,
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
) -> Templates:
    """Return the templates for a number of nodes, and for fewer and somewhat more.

    They are kept, and the number is rounded up, so that those of the first plan serve the plans after losses, too.
    """
    return make_templates(
        profile,
        max_nodes=min(profile.num_layers, 1 << (max(num_nodes, 1) - 1).bit_length()),
        devices_per_node=devices_per_node,
        num_microbatches=num_microbatches,
        device_memory_bytes=device_memory_bytes,
        schedule=schedule,
    )


def plan_from(templates: Templates, *, nodes: tuple[NodeId, ...], fault_tolerance: int) -> Planning:
    """Return the best plan that uses given templates; see `best_plan`."""
    num_pipelines = required_pipelines(templates, len(nodes), fault_tolerance)
    plans = [bind(shares, nodes) for shares in candidates(templates, len(nodes), num_pipelines)]
    times = forecast_times(plans, templates.profile, templates.costs)
    best = min(range(len(plans)), key=lambda number: (times[number].step_ns, len(plans[number].spare_nodes), number))
    return planning_of(choose_schedules(plans[best], templates), templates, fault_tolerance)


def required_pipelines(templates: Templates, num_nodes: int, fault_tolerance: int) -> int:
    """Return how many pipelines a plan must have: f + 1, or as many as fit.

    Raises:
        NotEnoughNodes, PlanError: as `best_plan`.
    """
    wanted = fault_tolerance + 1
    if templates.num_microbatches < wanted:
        raise PlanError(
            f"{templates.num_microbatches} microbatches cannot feed {wanted} pipelines; lower --microbatch-size or "
            "--fault-tolerance"
        )
    smallest = templates.smallest
    if smallest is None or smallest > num_nodes:
        raise _no_pipeline_fits(templates, num_nodes)
    return min(wanted, num_nodes // smallest)


def planning_of(scheduled: Scheduled, templates: Templates, fault_tolerance: int) -> Planning:
    """Return a plan with its forecast and its reason."""
    plan = scheduled.plan
    check_plan(
        plan,
        num_layers=templates.profile.num_layers,
        num_microbatches=templates.num_microbatches,
        devices_per_node=templates.costs.devices_per_node,
    )
    forecast = forecast_plan(plan, templates.profile, templates.costs)
    return Planning(
        plan=plan,
        reason=_reason(scheduled, forecast, fault_tolerance + 1, templates.smallest or 0),
        forecast=forecast,
        is_degraded=len(plan.pipelines) <= fault_tolerance,
    )


@lru_cache(maxsize=256)
def candidates(templates: Templates, num_nodes: int, min_pipelines: int) -> tuple[tuple[Share, ...], ...]:
    """Return the best shares with pipelines of at least some size, for a few sizes. Pure; the last ones are kept."""
    return tuple(_candidates(templates, num_nodes, min_pipelines))


def _candidates(templates: Templates, num_nodes: int, min_pipelines: int) -> Iterator[tuple[Share, ...]]:
    choices = templates.choices
    least, step, at_least_ns = min(choices), 1, 0
    for _ in range(MAX_CANDIDATES):
        shares = best_shares(
            {size: choices[size] for size in choices if size >= least},
            num_nodes=num_nodes,
            min_pipelines=min_pipelines,
            num_microbatches=templates.num_microbatches,
            at_least_ns=at_least_ns,
        )
        if not shares:
            return
        yield shares
        smallest_used, at_least_ns = shares[-1].num_nodes, max(share.step_ns for share in shares)
        least, step = max(smallest_used + 1, least + step), 2 * step


def bind(shares: Sequence[Share], nodes: tuple[NodeId, ...]) -> Plan:
    """Return the plan that gives nodes to shares in order, and leaves the rest spare."""
    pipelines: list[Pipeline] = []
    first = 0
    for partition, group in groupby(shares, key=lambda share: share.partition):
        template = template_of(partition)
        for share in group:
            bound = nodes[first : first + share.num_nodes]
            pipelines.append(Pipeline(template=template, nodes=bound, num_microbatches=share.num_microbatches))
            first += share.num_nodes
    return Plan(pipelines=tuple(pipelines), spare_nodes=nodes[first:])


def _reason(scheduled: Scheduled, forecast: Forecast, wanted: int, smallest: int) -> str:
    plan = scheduled.plan
    sizes = sorted((len(pipeline.nodes) for pipeline in plan.pipelines), reverse=True)
    counts = " + ".join(f"{sizes.count(size)} x {_count(size, 'node')}" for size in sorted(set(sizes), reverse=True))
    text = f"{_count(len(sizes), 'pipeline')} ({counts}), {forecast.step_s:.3g} s per step predicted"
    if scheduled.reason:
        text += f"; {scheduled.reason}"
    if plan.spare_nodes:
        text += f"; {_count(len(plan.spare_nodes), 'node')} spare, because no faster plan uses them"
    if len(sizes) < wanted:
        text += (
            f"; degraded: {wanted} pipelines need {wanted * smallest} nodes ({smallest} each), "
            f"there {'is' if len(plan.nodes) == 1 else 'are'} {len(plan.nodes)}"
        )
    return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _no_pipeline_fits(templates: Templates, num_nodes: int) -> PlanError:
    """Return the error that says which limit binds, and the smallest change that helps."""
    costs, profile = templates.costs, templates.profile
    where = f"{costs.devices_per_node} x {templates.device_memory_bytes / 2**30:.3g} GiB ({profile.device}) per node"
    largest = make_templates(
        profile,
        max_nodes=profile.num_layers,
        devices_per_node=costs.devices_per_node,
        num_microbatches=templates.num_microbatches,
        device_memory_bytes=templates.device_memory_bytes,
    )
    ways = [] if profile.microbatch_size == 1 else ["lower --microbatch-size"]
    ways += [] if profile.remat is Remat.STAGE else ["keep less with --remat stage"]
    if largest.smallest is not None:
        ways = [f"add {_count(largest.smallest - num_nodes, 'node')}", *ways]
        return NotEnoughNodes(
            f"{_count(num_nodes, 'node')} of {where} cannot hold the model: the smallest pipeline needs "
            f"{largest.smallest}; {' or '.join(ways)}",
            num_nodes=num_nodes,
            num_needed=largest.smallest,
        )
    most = len(costs.device_counts) - 1
    sizes = [costs.memory_bytes(most, layer, layer + 1, 1) for layer in range(profile.num_layers)]
    layer = max(range(profile.num_layers), key=lambda layer: (sizes[layer], -layer))
    ways += ["raise --devices-per-node", "take devices with more memory"]
    if sizes[layer] > templates.device_memory_bytes:
        return PlanError(
            f"layer {layer} ({profile.layers[layer].kind}) alone needs {sizes[layer] / 2**30:.3g} GiB of each device "
            f"of a stage on {_count(costs.device_counts[-1], 'device')}, but a node has {where}; {' or '.join(ways)}"
        )
    return PlanError(
        f"no number of nodes of {where} can hold the residuals of the microbatches in flight; {' or '.join(ways)}"
    )
