"""What there is to say about a plan before it runs: templates, throughput, the price of fault tolerance, losses."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from oobleck_jax.errors import PlanError
from oobleck_jax.planning.guarantee import template_bounds
from oobleck_jax.planning.plan import NodeId, Plan, Template
from oobleck_jax.planning.planner import Planning, plan_from
from oobleck_jax.planning.reconfigure import reconfigure
from oobleck_jax.planning.templates import Templates, template_of


MAX_PRICES = 9  # values of f whose price is told, unless a larger one is asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is planned for."""

    name: str  # of the model, for people
    nodes: int
    fault_tolerance: int
    microbatch_size: int
    tokens_per_step: int
    flops_per_step: float  # floating-point operations of forward and backward, nothing recomputed
    peak_flops_per_s: float | None  # of a device; None: not known


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateChoice:
    """A template, and from how many microbatches on it is the fastest of its number of nodes."""

    num_nodes: int
    template: Template
    fill_s: float  # time of one microbatch
    slowest_s: float  # time of each further one
    from_microbatches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """How fast a plan is predicted to train."""

    num_pipelines: int
    num_spare: int
    step_s: float
    tokens_per_s: float
    model_flops_utilization: float | None  # of the peak of all devices, spare ones too


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultTolerancePrice:
    """What surviving f losses at once costs."""

    fault_tolerance: int
    throughput: Throughput
    loss: float  # of tokens/s, as a fraction of those without fault tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutcome:
    """What the plan becomes when one node is lost."""

    lost: tuple[NodeId, ...]  # any one of these; all have the same outcome
    sizes: tuple[int, ...]  # nodes of the pipelines after it
    throughput: Throughput
    copied_bytes: int
    copy_s: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All of it."""

    request: Request
    device: str
    source: str  # of the profile
    num_devices: int  # of each node
    device_memory_bytes: int
    smallest_pipeline: int
    templates: tuple[TemplateChoice, ...]
    templates_in_paper: int  # how many the paper asks for
    templates_enough: int  # how many are enough
    planning: Planning
    throughput: Throughput
    prices: tuple[FaultTolerancePrice, ...]
    losses: tuple[LossOutcome, ...]


def make_report(templates: Templates, request: Request) -> Report:
    """Plan, and find out all there is to say.

    Raises:
        NotEnoughNodes, PlanError: as `planner.best_plan`.
    """
    nodes = tuple(NodeId(node) for node in range(request.nodes))
    planning = plan_from(templates, nodes=nodes, fault_tolerance=request.fault_tolerance)
    smallest = templates.smallest or 0
    bounds = template_bounds(smallest, request.fault_tolerance)
    return Report(
        request=request,
        device=templates.profile.device,
        source=templates.profile.source,
        num_devices=templates.costs.devices_per_node,
        device_memory_bytes=templates.device_memory_bytes,
        smallest_pipeline=smallest,
        templates=tuple(_template_choices(templates)),
        templates_in_paper=bounds.in_paper,
        templates_enough=bounds.enough,
        planning=planning,
        throughput=_throughput(planning, templates, request),
        prices=tuple(_prices(templates, request, nodes)),
        losses=tuple(_losses(templates, request, planning)),
    )


def _template_choices(templates: Templates) -> Iterator[TemplateChoice]:
    for num_nodes, partitions in templates.choices.items():
        counts = range(1, templates.num_microbatches + 1)
        best = [min(partitions, key=lambda choice: (choice.step_ns(count), choice.slowest_ns)) for count in counts]
        for partition in reversed(partitions):
            if partition in best:
                yield TemplateChoice(
                    num_nodes=num_nodes,
                    template=template_of(partition),
                    fill_s=partition.fill_ns / 1e9,
                    slowest_s=partition.slowest_ns / 1e9,
                    from_microbatches=1 + best.index(partition),
                )


def _throughput(planning: Planning, templates: Templates, request: Request) -> Throughput:
    step_s = max(planning.step_s, 1e-12)
    num_devices = len(planning.plan.nodes) * templates.costs.devices_per_node
    peak = request.peak_flops_per_s
    return Throughput(
        num_pipelines=planning.num_replicas,
        num_spare=len(planning.plan.spare_nodes),
        step_s=planning.step_s,
        tokens_per_s=request.tokens_per_step / step_s,
        model_flops_utilization=None if peak is None else request.flops_per_step / (step_s * num_devices * peak),
    )


def _prices(templates: Templates, request: Request, nodes: tuple[NodeId, ...]) -> Iterator[FaultTolerancePrice]:
    """Yield what each f costs, from 0 to the largest that the nodes can keep, but not very many."""
    smallest = templates.smallest or 1
    most = min(len(nodes) // smallest, templates.num_microbatches) - 1
    unprotected: float | None = None
    for fault_tolerance in range(min(most, max(MAX_PRICES, request.fault_tolerance)) + 1):
        planning = plan_from(templates, nodes=nodes, fault_tolerance=fault_tolerance)
        throughput = _throughput(planning, templates, request)
        if unprotected is None:
            unprotected = throughput.tokens_per_s
        loss = 1 - throughput.tokens_per_s / unprotected
        yield FaultTolerancePrice(fault_tolerance=fault_tolerance, throughput=throughput, loss=loss)


def _losses(templates: Templates, request: Request, planning: Planning) -> Iterator[LossOutcome]:
    """Yield what the plan becomes after each possible single loss; nodes with the same role are alike."""
    plan = planning.plan
    holdings: defaultdict[NodeId, list[int]] = defaultdict(list)
    for pipeline in plan.pipelines:
        for stage in pipeline.template.stages:
            holdings[pipeline.nodes[stage.node_index]] += stage.layers
    for lost in _alike_nodes(plan):
        alive = tuple(node for node in plan.nodes if node != lost[0])
        try:
            after = reconfigure(
                templates, nodes=alive, holdings=holdings, fault_tolerance=request.fault_tolerance, old=plan
            )
        except PlanError as error:
            nothing = Throughput(
                num_pipelines=0, num_spare=0, step_s=0.0, tokens_per_s=0.0, model_flops_utilization=None
            )
            yield LossOutcome(lost=lost, sizes=(), throughput=nothing, copied_bytes=0, copy_s=0.0, reason=str(error))
            continue
        yield LossOutcome(
            lost=lost,
            sizes=tuple(len(pipeline.nodes) for pipeline in after.planning.plan.pipelines),
            throughput=_throughput(after.planning, templates, request),
            copied_bytes=after.num_bytes,
            copy_s=after.copy_s,
            reason=after.planning.reason,
        )


def _alike_nodes(plan: Plan) -> tuple[tuple[NodeId, ...], ...]:
    """Group the nodes that do the same: the same place of the same template with as many microbatches."""
    groups: defaultdict[tuple[Template, int, int] | None, list[NodeId]] = defaultdict(list)
    for pipeline in plan.pipelines:
        for index, node in enumerate(pipeline.nodes):
            groups[pipeline.template, pipeline.num_microbatches, index].append(node)
    if plan.spare_nodes:
        groups[None] = list(plan.spare_nodes)
    return tuple(tuple(sorted(nodes)) for nodes in groups.values())
