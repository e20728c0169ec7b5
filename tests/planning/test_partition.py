import dataclasses
import itertools
from collections.abc import Iterator

from hypothesis import given, settings, strategies as st

from oobleck_jax.planning.costs import Costs, tabulate
from oobleck_jax.planning.partition import StageShape, best_partitions
from oobleck_jax.planning.profile import Profile, StateBytes
from tests.planning.profiles import profiles


NOTHING = StateBytes(parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0)
Nodes = tuple[tuple[StageShape, ...], ...]


def brute_force(costs: Costs, num_nodes: int, num_microbatches: int) -> Iterator[tuple[int, int, Nodes]]:
    """Yield (fill, slowest, nodes) of every partition that fits, straight from the definition."""
    for nodes in _all_partitions(costs, costs.num_layers, num_nodes):
        measured = _measure(costs, nodes, num_microbatches)
        if measured is not None:
            yield (*measured, nodes)


def _all_partitions(costs: Costs, num_layers: int, num_nodes: int) -> Iterator[Nodes]:
    if num_nodes == 0:
        if num_layers == 0:
            yield ()
        return
    for here in range(1, num_layers + 1):
        for stages in _all_splits(costs, here, costs.devices_per_node):
            for others in _all_partitions(costs, num_layers - here, num_nodes - 1):
                yield (stages, *others)


def _all_splits(costs: Costs, num_layers: int, num_devices: int) -> Iterator[tuple[StageShape, ...]]:
    if num_layers == 0:
        yield ()
        return
    for here, count in itertools.product(range(1, num_layers + 1), costs.device_counts):
        if count <= num_devices:
            for others in _all_splits(costs, num_layers - here, num_devices - count):
                yield (StageShape(num_layers=here, num_devices=count), *others)


def _measure(costs: Costs, nodes: Nodes, num_microbatches: int) -> tuple[int, int] | None:
    """Return fill and slowest of a partition, or None where a stage does not fit."""
    num_stages = sum(len(stages) for stages in nodes)
    first, index, times = 0, 0, list[int]()
    for stages in nodes:
        for position, stage in enumerate(stages):
            end, devices = first + stage.num_layers, costs.device_counts.index(stage.num_devices)
            in_flight = min(num_stages - index, num_microbatches)
            if costs.in_flight_limit[devices, first, end] < in_flight:
                return None
            is_last_of_node = position == len(stages) - 1
            link_ns = 2 * costs.link_ns[end] if is_last_of_node else 0
            times.append(int(costs.forward_ns[devices, first, end] + costs.backward_ns[devices, first, end] + link_ns))
            first, index = end, index + 1
    return sum(times) + int(costs.sum_ns[0, nodes[0][0].num_layers]), max(times)


def check_exact(profile: Profile, *, devices_per_node: int, max_nodes: int, num_microbatches: int, memory: int) -> None:
    costs = tabulate(
        profile, devices_per_node=devices_per_node, num_microbatches=num_microbatches, device_memory_bytes=memory
    )
    found = best_partitions(costs, max_nodes=max_nodes, num_microbatches=num_microbatches)
    for num_nodes, partitions in enumerate(found, 1):
        all_values = [value[:2] for value in brute_force(costs, num_nodes, num_microbatches)]
        assert bool(partitions) == bool(all_values)
        for partition in partitions:
            assert _measure(costs, partition.nodes, num_microbatches) == (partition.fill_ns, partition.slowest_ns)
        for number in range(1, num_microbatches + 1 if partitions else 0):
            best = min(fill + (number - 1) * slowest for fill, slowest in all_values)
            assert min(partition.step_ns(number) for partition in partitions) == best


@given(profiles(max_layers=12), st.integers(1, 12), st.integers(5, 200))
@settings(max_examples=60)
def test_one_device_per_node_equals_brute_force(profile: Profile, num_microbatches: int, memory: int) -> None:
    check_exact(profile, devices_per_node=1, max_nodes=5, num_microbatches=num_microbatches, memory=memory)


@given(profiles(max_layers=12, num_counts=2), st.integers(1, 12), st.integers(5, 200))
@settings(max_examples=25)
def test_two_devices_per_node_equal_brute_force(profile: Profile, num_microbatches: int, memory: int) -> None:
    check_exact(profile, devices_per_node=2, max_nodes=2, num_microbatches=num_microbatches, memory=memory)


@given(profiles(max_layers=6, num_counts=3), st.integers(1, 12), st.integers(5, 100), st.sampled_from([3, 4, 5]))
@settings(max_examples=100)
def test_many_devices_per_node_equal_brute_force(
    profile: Profile, num_microbatches: int, memory: int, devices: int
) -> None:
    check_exact(profile, devices_per_node=devices, max_nodes=2, num_microbatches=num_microbatches, memory=memory)


@given(profiles(max_layers=10, num_counts=3), st.integers(1, 12), st.integers(5, 100))
@settings(max_examples=20)
def test_one_node_of_four_devices_equals_brute_force(profile: Profile, num_microbatches: int, memory: int) -> None:
    check_exact(profile, devices_per_node=4, max_nodes=1, num_microbatches=num_microbatches, memory=memory)


@given(profiles(min_layers=4, max_layers=6, num_counts=2), st.integers(3, 25))
@settings(max_examples=120)
def test_where_memory_binds_two_devices_per_node_equal_brute_force(profile: Profile, memory: int) -> None:
    layers = tuple(dataclasses.replace(layer, state=NOTHING) for layer in profile.layers)
    profile = dataclasses.replace(profile, layers=layers, tied_groups=())
    check_exact(profile, devices_per_node=2, max_nodes=3, num_microbatches=8, memory=memory)
