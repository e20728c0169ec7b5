"""Pipeline templates: for each number of nodes, the partitions worth having, made before any failure."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from oobleck_jax.config import ScheduleKind
from oobleck_jax.planning.costs import Costs, tabulate
from oobleck_jax.planning.forecast import stage_times
from oobleck_jax.planning.partition import Partition, StageShape, best_partitions
from oobleck_jax.planning.plan import Stage, Template
from oobleck_jax.planning.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Templates:
    """The templates of a model on one kind of node.

    Memory is checked for as many microbatches as the global batch has, so a template stays good when its pipeline is
    given more of them after a loss.
    """

    profile: Profile
    costs: Costs
    num_microbatches: int  # of the global batch
    device_memory_bytes: int
    partitions: tuple[tuple[Partition, ...], ...]  # for 1, 2, ... nodes
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B  # that pipelines made of them are to have

    @property
    def choices(self) -> Mapping[int, tuple[Partition, ...]]:
        """The partitions by number of nodes, of the numbers that fit memory."""
        return {number: partitions for number, partitions in enumerate(self.partitions, 1) if partitions}

    @property
    def smallest(self) -> int | None:
        """The smallest number of nodes that fits memory (n0 in the paper); None where none does."""
        return min(self.choices, default=None)


@lru_cache(maxsize=8)
def make_templates(
    profile: Profile,
    *,
    max_nodes: int,
    devices_per_node: int,
    num_microbatches: int,
    device_memory_bytes: int,
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
) -> Templates:
    """Return the templates for 1 to `max_nodes` nodes. Pure; the last few results are kept.

    Args:
        profile: costs of the layers.
        max_nodes: largest pipeline; no pipeline has more nodes than layers.
        devices_per_node: devices of each node.
        num_microbatches: of the global batch.
        device_memory_bytes: what a stage may use of each device.
        schedule: that pipelines made of them are to have.

    Raises:
        PlanError: the profile lacks costs for a number of devices.
    """
    costs = tabulate(
        profile,
        devices_per_node=devices_per_node,
        num_microbatches=num_microbatches,
        device_memory_bytes=device_memory_bytes,
    )
    largest = min(max_nodes, profile.num_layers)
    return Templates(
        profile=profile,
        costs=costs,
        num_microbatches=num_microbatches,
        device_memory_bytes=device_memory_bytes,
        partitions=best_partitions(costs, max_nodes=largest, num_microbatches=num_microbatches),
        schedule=schedule,
    )


def template_of(partition: Partition) -> Template:
    """Return the partition as a template: stages with their layers, node and devices."""
    stages: list[Stage] = []
    first_layer = 0
    for node_index, shapes in enumerate(partition.nodes):
        first_device = 0
        for shape in shapes:
            stages.append(
                Stage(
                    first_layer=first_layer,
                    end_layer=first_layer + shape.num_layers,
                    node_index=node_index,
                    first_device=first_device,
                    num_devices=shape.num_devices,
                )
            )
            first_layer += shape.num_layers
            first_device += shape.num_devices
    return Template(stages=tuple(stages))


def partition_of(template: Template, costs: Costs) -> Partition:
    """Return a template as a partition, with its times by the cost model.

    Of an interleaved one, the times are those of its schedule, but the shapes say only what its nodes have together.
    """
    stages = template.stages
    times = stage_times(template, costs)
    work_ns = times.forward_ns + times.backward_ns + 2 * times.transfer_ns
    nodes = tuple(
        tuple(
            StageShape(num_layers=len(stage.layers), num_devices=stage.num_devices)
            for stage in stages
            if stage.node_index == node
        )
        for node in range(template.num_nodes)
    )
    sum_ns = int(costs.sum_ns[stages[0].first_layer, stages[0].end_layer])
    num_lanes = template.num_lanes
    slowest_ns = max(int(work_ns[lane::num_lanes].sum()) for lane in range(num_lanes))
    # Of several stages on the same devices the first microbatch does not wait for the work on the others.
    fill_ns = slowest_ns + (int(work_ns.sum()) - slowest_ns) * num_lanes // len(stages)
    return Partition(nodes=nodes, fill_ns=fill_ns + sum_ns, slowest_ns=slowest_ns)
