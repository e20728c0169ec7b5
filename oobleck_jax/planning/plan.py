"""Plans: pipelines bound to nodes, and their share of the global batch.

A `Template` is a partition of all layers into stages for a number of nodes, bound to no particular node. A `Pipeline`
is a template bound to nodes; a `Plan` is a set of pipelines with their microbatches, and the nodes that are spare.
All are plain values: equal inputs give equal plans, and a plan travels as JSON.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NewType, TypeVar

from oobleck_jax.config import ScheduleKind
from oobleck_jax.errors import PlanError


NodeId = NewType("NodeId", int)

# Layers that a program runs at most; stages are cut into such spans behind layer 0, 2, 4, ... The fewer, the sooner an
# abandoned step ends (a program cannot be stopped), and the fewer programs there are for all stages together; the more,
# the less often programs must be started.
MAX_SPAN_LAYERS = 2

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A run of consecutive layers on some devices of one node of the template."""

    first_layer: int
    end_layer: int  # exclusive
    node_index: int = 0  # which of the template's nodes, from 0
    first_device: int = 0  # which of the node's devices, from 0
    num_devices: int = 1

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    @property
    def devices(self) -> range:
        return range(self.first_device, self.first_device + self.num_devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A partition of all layers into stages, in order, for `num_nodes` nodes.

    Stages on the same devices make up a lane. Each stage has a lane of its own, unless its pipeline is interleaved:
    then stage i is in lane i modulo the number of lanes.
    """

    stages: tuple[Stage, ...]

    @property
    def num_lanes(self) -> int:
        return len({(stage.node_index, stage.first_device) for stage in self.stages})

    @property
    def num_nodes(self) -> int:
        return 1 + max(stage.node_index for stage in self.stages)

    @property
    def num_layers(self) -> int:
        return self.stages[-1].end_layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """A template bound to nodes: stage i runs on `nodes[template.stages[i].node_index]`."""

    template: Template
    nodes: tuple[NodeId, ...]
    num_microbatches: int
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B  # never AUTO

    def node_of(self, stage_index: int) -> NodeId:
        return self.nodes[self.template.stages[stage_index].node_index]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Who runs which layers and how many microbatches.

    The microbatches of a step are numbered 0..num_microbatches-1; pipelines take consecutive runs of them in order.
    """

    pipelines: tuple[Pipeline, ...]
    spare_nodes: tuple[NodeId, ...] = ()

    @property
    def num_layers(self) -> int:
        return self.pipelines[0].template.num_layers

    @property
    def num_microbatches(self) -> int:
        return sum(pipeline.num_microbatches for pipeline in self.pipelines)

    @property
    def working_nodes(self) -> tuple[NodeId, ...]:
        """The nodes of the pipelines, ascending."""
        return tuple(sorted(node for pipeline in self.pipelines for node in pipeline.nodes))

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """All nodes of the plan, working and spare, ascending."""
        return tuple(sorted([*self.working_nodes, *self.spare_nodes]))

    def microbatches_of(self, pipeline_index: int) -> range:
        first = sum(pipeline.num_microbatches for pipeline in self.pipelines[:pipeline_index])
        return range(first, first + self.pipelines[pipeline_index].num_microbatches)

    def layers_of(self, node: NodeId) -> tuple[int, ...]:
        """Return the layers that a node holds, ascending; empty for a spare node."""
        return tuple(
            layer
            for pipeline in self.pipelines
            for index, stage in enumerate(pipeline.template.stages)
            if pipeline.node_of(index) == node
            for layer in stage.layers
        )

    def holders_of(self, layer: int) -> tuple[NodeId, ...]:
        """Return the nodes that hold a layer, in the order of the pipelines."""
        return tuple(
            pipeline.node_of(index)
            for pipeline in self.pipelines
            for index, stage in enumerate(pipeline.template.stages)
            if layer in stage.layers
        )


def check_plan(plan: Plan, *, num_layers: int, num_microbatches: int, devices_per_node: int = 1) -> None:
    """Check the structural rules of a plan (properties P1, P3 and P4 of ARCHITECTURE.md).

    Raises:
        PlanError: a rule is broken; the message names the pipeline and the numbers.
    """
    if not plan.pipelines:
        raise PlanError("the plan has no pipeline; give at least one")
    for number, pipeline in enumerate(plan.pipelines):
        _check_template(pipeline.template, f"pipeline {number}", num_layers, devices_per_node)
        _check_lanes(pipeline, f"pipeline {number}")
        if len(pipeline.nodes) != pipeline.template.num_nodes:
            raise PlanError(
                f"pipeline {number} is bound to {len(pipeline.nodes)} nodes, its template needs "
                f"{pipeline.template.num_nodes}; list one node for each"
            )
        if pipeline.num_microbatches < 1:
            raise PlanError(f"pipeline {number} has {pipeline.num_microbatches} microbatches; each needs at least 1")
    repeated = _repeated(plan.nodes)
    if repeated:
        raise PlanError(f"node {repeated[0]} is used more than once; every node has one place in the plan")
    if plan.num_microbatches != num_microbatches:
        raise PlanError(
            f"the pipelines have {plan.num_microbatches} microbatches in all, the global batch has {num_microbatches}; "
            "change num_microbatches of the pipelines so that they add up"
        )


def _check_template(template: Template, name: str, num_layers: int, devices_per_node: int) -> None:
    expected = 0
    if not template.stages:
        raise PlanError(f"{name} has no stage; give at least one, with all layers")
    for index, stage in enumerate(template.stages):
        if stage.first_layer != expected or stage.end_layer <= stage.first_layer:
            raise PlanError(
                f"{name}, stage {index} has layers {stage.first_layer}..{stage.end_layer}, but must begin at layer "
                f"{expected} and hold at least one (end_layer is exclusive)"
            )
        expected = stage.end_layer
        if stage.num_devices < 1 or stage.first_device < 0 or stage.devices.stop > devices_per_node:
            raise PlanError(
                f"{name}, stage {index} uses devices {stage.first_device}..{stage.devices.stop - 1} of a node that has "
                f"{devices_per_node}"
            )
    if expected != num_layers:
        raise PlanError(f"{name} covers {expected} layers, the model has {num_layers}")
    if {stage.node_index for stage in template.stages} != set(range(template.num_nodes)):
        raise PlanError(f"{name} must use the node indices 0..{template.num_nodes - 1}, each at least once")


def _check_lanes(pipeline: Pipeline, name: str) -> None:
    stages = pipeline.template.stages
    if pipeline.schedule is ScheduleKind.AUTO:
        raise PlanError(f"{name} has schedule auto, which is not one; name one, or leave it out for 1f1b")
    if pipeline.schedule is ScheduleKind.INTERLEAVED:
        num_lanes = pipeline.template.num_lanes
        lanes = stages[:num_lanes]
        if len(stages) % num_lanes or any(
            (stage.node_index, stage.devices) != (lanes[index % num_lanes].node_index, lanes[index % num_lanes].devices)
            for index, stage in enumerate(stages)
        ):
            raise PlanError(
                f"{name} is interleaved, but its {len(stages)} stages do not take the {num_lanes} sets of devices in "
                "turn; give as many stages to each, in the same order again and again"
            )
        stages = lanes
    used = [(stage.node_index, device) for stage in stages for device in stage.devices]
    if _repeated(used):
        node_index, device = _repeated(used)[0]
        where = f"device {device} of its node {node_index}"
        raise PlanError(f"{name} uses {where} in two stages; give each its own, or make the pipeline interleaved")


def _repeated(items: Iterable[T]) -> list[T]:
    seen: set[T] = set()
    return [item for item in items if item in seen or seen.add(item)]
