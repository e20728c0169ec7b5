"""What a plan means for one node: its stages, their spans and neighbours, the order of its actions; and who sums what.

Everything here is derived from (plan, model) alone, so all nodes agree without talking.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from oobleck_jax.config import ScheduleKind
from oobleck_jax.model import LayeredModel
from oobleck_jax.planning.plan import MAX_SPAN_LAYERS, NodeId, Plan, Stage
from oobleck_jax.planning.schedule import Action, StageCost, check_schedule, merge_for_node
from oobleck_jax.planning.schedule_kinds import limits_of, schedule_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpan:
    """A few consecutive layers of one kind within a stage; layers with tied parameters stand alone."""

    kind: str
    first_layer: int
    end_layer: int  # exclusive

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """The stage before or after, and where it runs."""

    node: NodeId
    num_devices: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalStage:
    """One stage of this node."""

    pipeline: int
    index: int
    stage: Stage
    spans: tuple[LayerSpan, ...]
    previous: Neighbour | None = None
    next: Neighbour | None = None
    is_split: bool = False  # its backward: gradients of weights apart from that of the input


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLayout:
    """The part of one node in a plan; a spare node has no stages.

    Attributes:
        microbatches: numbers of its pipeline's microbatches within the global batch.
        actions: the order of its work; microbatches counted from 0 within the pipeline.
        num_lanes: of its pipeline.
    """

    stages: tuple[LocalStage, ...]
    microbatches: range
    actions: tuple[Action, ...]
    num_lanes: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A parameter group: the own parameters of one layer, or a tied parameter. The grain of state.

    Attributes:
        layers: the layers that use it; one, unless it is tied.
        attribute: for a tied group, the attribute of its first layer's module that holds it.
    """

    name: str
    layers: tuple[int, ...]
    attribute: str | None = None


# Parameters of a bucket that is large enough. Larger ones would begin later, smaller ones are more sums.
_BUCKET_SIZE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Groups with the same holders, whose gradients are summed as one vector."""

    groups: tuple[str, ...]
    holders: tuple[NodeId, ...]  # ascending
    size: int  # parameters

    @property
    def is_shared(self) -> bool:
        """Whether there is anything to sum over nodes."""
        return len(self.holders) > 1 and self.size > 0


def own_group(layer: int) -> str:
    """Return the name of the group of a layer's own parameters."""
    return f"layer-{layer:03d}"


def groups_of(model: LayeredModel) -> tuple[Group, ...]:
    """Return all parameter groups: those of the layers in order, then the tied ones by their first layer."""
    tied: dict[str, tuple[str, list[int]]] = {}
    for number, layer in enumerate(model.layers):
        for attribute, name in layer.tied:
            tied.setdefault(name, (attribute, []))[1].append(number)
    own = [Group(name=own_group(number), layers=(number,)) for number in range(len(model.layers))]
    shared = [Group(name=name, layers=tuple(layers), attribute=attribute) for name, (attribute, layers) in tied.items()]
    return (*own, *shared)


def spans_of(model: LayeredModel, layers: Iterable[int]) -> tuple[LayerSpan, ...]:
    """Cut consecutive layers into spans.

    Cuts are at the same layers in every stage (after layer 0, 2, 4, ...), so that most spans of a new plan are spans of
    the old one, too, and keep their state as it is.
    """
    spans: list[LayerSpan] = []
    for number in layers:
        layer = model.layers[number]
        last = number == len(model.layers) - 1
        is_cut = (number - 1) % MAX_SPAN_LAYERS == 0
        joins = spans and spans[-1].kind == layer.kind and not layer.tied and not is_cut and number > 1 and not last
        if joins:
            spans[-1] = LayerSpan(kind=layer.kind, first_layer=spans[-1].first_layer, end_layer=number + 1)
        else:
            spans.append(LayerSpan(kind=layer.kind, first_layer=number, end_layer=number + 1))
    return tuple(spans)


def layout_of(model: LayeredModel, plan: Plan, node: NodeId, costs: Sequence[float] | None = None) -> NodeLayout:
    """Return a node's part of a plan.

    Args:
        costs: forward time of each layer in any unit, used to order the work of a node with several lanes.
    """
    for number, pipeline in enumerate(plan.pipelines):
        if node not in pipeline.nodes:
            continue
        stages = pipeline.template.stages
        places = [
            Neighbour(node=pipeline.node_of(index), num_devices=stage.num_devices) for index, stage in enumerate(stages)
        ]
        local = tuple(
            LocalStage(
                pipeline=number,
                index=index,
                stage=stage,
                spans=spans_of(model, stage.layers),
                previous=places[index - 1] if index else None,
                next=places[index + 1] if index + 1 < len(stages) else None,
                is_split=pipeline.schedule is ScheduleKind.ZB_H1,
            )
            for index, stage in enumerate(stages)
            if places[index].node == node
        )
        schedule = schedule_of(pipeline)
        check_schedule(
            schedule,
            num_stages=len(stages),
            num_microbatches=pipeline.num_microbatches,
            limits=limits_of(pipeline),
        )
        weights = [sum(costs[layer] for layer in stage.layers) if costs else len(stage.layers) for stage in stages]
        stage_costs = tuple(StageCost(forward_s=weight, backward_s=2 * weight) for weight in weights)
        lanes = [lane for lane in range(len(schedule)) if places[lane].node == node]
        actions = merge_for_node(schedule, lanes, stage_costs)
        return NodeLayout(
            stages=local,
            microbatches=plan.microbatches_of(number),
            actions=actions,
            num_lanes=len(schedule),
        )
    return NodeLayout(stages=(), microbatches=range(0), actions=())


def buckets_of(groups: Sequence[Group], sizes: Mapping[str, int], plan: Plan) -> tuple[Bucket, ...]:
    """Return the buckets in the one order in which every node sums them: last layers first, as backward ends.

    A holder counts once, however many of a tied group's layers it has: it adds up its own contributions first.

    Args:
        sizes: number of parameters of each group.
    """
    by_holders: dict[tuple[NodeId, ...], list[Group]] = {}
    for group in sorted(groups, key=lambda group: -group.layers[0]):
        by_holders.setdefault(_holders(group, plan), []).append(group)
    found = [(holders, members) for holders, all_of in by_holders.items() for members in _large(all_of, sizes)]
    # A bucket is complete when backward has come to its first layer.
    found.sort(key=lambda item: (-item[1][-1].layers[0], item[0]))
    return tuple(
        Bucket(groups=tuple(group.name for group in members), holders=holders, size=_size(members, sizes))
        for holders, members in found
    )


def _large(groups: Sequence[Group], sizes: Mapping[str, int]) -> list[list[Group]]:
    """Cut groups into runs that are large enough, the last one with what is left over: a short sum is one program more.

    Programs of a fabric are made when nodes recover (fabric.py).
    """
    runs: list[list[Group]] = [[]]
    for group in groups:
        if _size(runs[-1], sizes) >= _BUCKET_SIZE:
            runs.append([])
        runs[-1].append(group)
    if len(runs) > 1 and _size(runs[-1], sizes) < _BUCKET_SIZE:
        runs[-2:] = [runs[-2] + runs[-1]]
    return runs


def _size(groups: Sequence[Group], sizes: Mapping[str, int]) -> int:
    return sum(sizes[group.name] for group in groups)


def _holders(group: Group, plan: Plan) -> tuple[NodeId, ...]:
    return tuple(sorted({node for layer in group.layers for node in plan.holders_of(layer)}))
