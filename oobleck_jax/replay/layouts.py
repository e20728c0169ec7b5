"""How fast the layouts are that policies choose from, all by the planner's own costs and forecasts.

A *grid* is what systems without pipeline templates run: pipelines of equal depth. The planner's plans may be anything.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from oobleck_jax.errors import NotEnoughNodes
from oobleck_jax.planning.allocate import Share
from oobleck_jax.planning.costs import NS_PER_S
from oobleck_jax.planning.forecast import forecast_times
from oobleck_jax.planning.partition import Partition
from oobleck_jax.planning.plan import NodeId, Plan
from oobleck_jax.planning.planner import bind, candidates, required_pipelines, templates_for
from oobleck_jax.planning.templates import Templates
from oobleck_jax.replay.workload import Workload


FILLABLE = 2 / 3  # of the bubbles


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """What a stage of a grid takes for a microbatch."""

    forward_s: float
    backward_s: float
    state_bytes: int
    memory_bytes: int  # at the peak, on each device

    @property
    def work_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Pipelines of equal depth."""

    num_pipelines: int
    depth: int  # nodes of each
    step_s: float
    busy_s: float  # of the slowest node, in a step
    bubble_s: float  # of the same, until the last backward of the step
    stages: tuple[StageTime, ...]

    @property
    def num_nodes(self) -> int:
        return self.num_pipelines * self.depth

    def spread(self, num_nodes: int) -> tuple[int, ...]:
        """Return how many nodes of each stage live, if so many are spread in the best way; at least one of each."""
        live = [1] * self.depth
        for _ in range(num_nodes - self.depth):
            free = [stage for stage in range(self.depth) if live[stage] < self.num_pipelines]
            live[max(free, key=lambda stage: (self.stages[stage].work_s / live[stage], -stage))] += 1
        return tuple(live)

    def rerouted_step_s(self, live: Sequence[int], num_microbatches: int) -> float:
        """Return the step if the live nodes of each stage do the microbatches of its dead ones, too.

        What they have more to do fits into bubbles, as far as a schedule that puts off the gradients of weights can
        fill them (ReCycle, SOSP '24; Zero Bubble, ICLR '24: ZB-H1 leaves a third of the bubbles of 1F1B); the rest
        makes the step longer.

        Args:
            live: nodes of each stage; none is 0.
            num_microbatches: of the global batch.
        """
        busy_s = max(
            stage.work_s * ceil(num_microbatches / count) for stage, count in zip(self.stages, live, strict=True)
        )
        return self.step_s + max(busy_s - self.busy_s - FILLABLE * self.bubble_s, 0.0)


class Layouts:
    """The layouts of a workload for up to some number of nodes."""

    def __init__(self, workload: Workload, *, max_nodes: int) -> None:
        """Make templates and grids.

        Args:
            workload: what is trained.
            max_nodes: the most nodes there will be.

        Raises:
            PlanError: the model fits on no number of these nodes.
        """
        self.workload = workload
        self.max_nodes = max_nodes
        self.num_microbatches = workload.num_microbatches
        self.templates: Templates = templates_for(
            workload.profile,
            num_nodes=max_nodes,
            devices_per_node=workload.devices_per_node,
            num_microbatches=workload.num_microbatches,
            device_memory_bytes=workload.device_memory_bytes,
        )
        required_pipelines(self.templates, max_nodes, 0)
        self.grids = _grids(self.templates, max_nodes)
        self.ideal_step_s = lru_cache(maxsize=None)(self._ideal_step_s)
        self.plan_step_s = lru_cache(maxsize=None)(self._plan_step_s)

    @property
    def samples_per_step(self) -> int:
        return self.workload.samples_per_step

    def grid_for(self, num_nodes: int, is_allowed: Callable[[Grid], bool] = lambda _: True) -> Grid | None:
        """Return the fastest grid of at most so many nodes; of equally fast ones that of the fewest nodes."""
        fitting = [grid for grid in self.grids if grid.num_nodes <= num_nodes and is_allowed(grid)]
        return min(fitting, key=lambda grid: (grid.step_s, grid.num_nodes), default=None)

    def ideal_rate(self, num_nodes: int, fault_tolerance: int) -> float:
        """Return the samples per second of the fastest known layout of at most so many nodes; 0 if there is none.

        Layouts are the planner's, with and without fault tolerance, all grids, and grids of more nodes where the live
        ones, spread in the best way, do the work of the others (`Grid.rerouted_step_s`).
        """
        step_s = self.ideal_step_s(num_nodes, fault_tolerance)
        return self.samples_per_step / step_s if step_s else 0.0

    def _ideal_step_s(self, num_nodes: int, fault_tolerance: int) -> float | None:
        if num_nodes < 1:
            return None
        steps_s = [self.ideal_step_s(num_nodes - 1, fault_tolerance)]
        steps_s += [self.plan_step_s(num_nodes, tolerance) for tolerance in {0, fault_tolerance}]
        steps_s += [grid.step_s for grid in self.grids if grid.num_nodes == num_nodes]
        steps_s += [
            grid.rerouted_step_s(grid.spread(num_nodes), self.num_microbatches)
            for grid in self.grids
            if grid.num_nodes > num_nodes >= grid.depth
        ]
        return min((step_s for step_s in steps_s if step_s is not None), default=None)

    def _plan_step_s(self, num_nodes: int, fault_tolerance: int) -> float | None:
        """Return the step of the fastest plan; None where no pipeline fits."""
        try:
            num_pipelines = required_pipelines(self.templates, num_nodes, fault_tolerance)
        except NotEnoughNodes:
            return None
        return min(
            self._steps_s(bind(shares, nodes_of(num_nodes)) for shares in self._shapes(num_nodes, num_pipelines))
        )

    def _shapes(self, num_nodes: int, num_pipelines: int) -> tuple[tuple[Share, ...], ...]:
        return candidates(self.templates, num_nodes, num_pipelines)

    def _steps_s(self, plans: Iterable[Plan]) -> list[float]:
        times = forecast_times(list(plans), self.templates.profile, self.templates.costs)
        return [time.step_ns / NS_PER_S for time in times]

    def forecast_all(self, fault_tolerance: int) -> None:
        """Time the plans of all numbers of nodes together, which is many times faster than one by one."""
        plans: list[Plan] = []
        for num_nodes in range(1, self.max_nodes + 1):
            for tolerance in {0, fault_tolerance}:
                try:
                    num_pipelines = required_pipelines(self.templates, num_nodes, tolerance)
                except NotEnoughNodes:
                    continue
                plans += [bind(shares, nodes_of(num_nodes)) for shares in self._shapes(num_nodes, num_pipelines)]
        self._steps_s(plans)


def nodes_of(count: int) -> tuple[NodeId, ...]:
    return tuple(NodeId(node) for node in range(count))


def _grids(templates: Templates, max_nodes: int) -> tuple[Grid, ...]:
    """Return all grids of at most so many nodes, with the best partition for each, timed together."""
    shapes: list[tuple[int, int]] = []
    plans: list[Plan] = []
    for depth, partitions in templates.choices.items():
        for num_pipelines in range(1, min(max_nodes // depth, templates.num_microbatches) + 1):
            shapes.append((num_pipelines, depth))
            plans.append(
                bind(_equal_shares(partitions, num_pipelines, templates.num_microbatches), nodes_of(max_nodes))
            )
    times = forecast_times(plans, templates.profile, templates.costs)
    grids: list[Grid] = []
    for (num_pipelines, depth), plan, time in zip(shapes, plans, times, strict=True):
        stages = _stages(plan, templates)
        busy_s = plan.pipelines[0].num_microbatches * max(stage.work_s for stage in stages)
        grids.append(
            Grid(
                num_pipelines=num_pipelines,
                depth=depth,
                step_s=time.step_ns / NS_PER_S,
                busy_s=busy_s,
                bubble_s=time.compute_ns / NS_PER_S - busy_s,
                stages=stages,
            )
        )
    return tuple(grids)


def _equal_shares(partitions: tuple[Partition, ...], num_pipelines: int, num_microbatches: int) -> tuple[Share, ...]:
    """Return pipelines of one partition, with microbatches that differ by one at most."""
    least, rest = divmod(num_microbatches, num_pipelines)
    most = least + bool(rest)
    partition = min(partitions, key=lambda choice: (choice.step_ns(most), choice.slowest_ns))
    return tuple(Share(partition=partition, num_microbatches=least + (n < rest)) for n in range(num_pipelines))


def _stages(plan: Plan, templates: Templates) -> tuple[StageTime, ...]:
    """Return the times of the nodes of a grid's first pipeline."""
    costs, pipeline = templates.costs, plan.pipelines[0]
    stages = pipeline.template.stages
    times: list[StageTime] = []
    for node in range(pipeline.template.num_nodes):
        own = [(number, stage) for number, stage in enumerate(stages) if stage.node_index == node]
        slots = [(costs.device_counts.index(stage.num_devices), stage.first_layer, stage.end_layer) for _, stage in own]
        times.append(
            StageTime(
                # Stages of one node work at the same time, on devices of their own: the slowest sets the pace.
                forward_s=max(int(costs.forward_ns[slot]) for slot in slots) / NS_PER_S,
                backward_s=max(int(costs.backward_ns[slot]) for slot in slots) / NS_PER_S,
                state_bytes=sum(int(costs.state_bytes[first, end]) for _, first, end in slots),
                memory_bytes=max(
                    costs.memory_bytes(devices, first, end, min(len(stages) - number, pipeline.num_microbatches))
                    for (number, _), (devices, first, end) in zip(own, slots, strict=True)
                ),
            )
        )
    return tuple(times)
