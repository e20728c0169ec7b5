from collections import Counter

import pytest
from hypothesis import given, strategies as st

from oobleck_jax.checkpoint.election import elect_writers
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.reconfigure import State


def states_of(*sizes: int) -> list[State]:
    return [State(name=f"layer-{i:03d}", layers=(i,), num_bytes=size) for i, size in enumerate(sizes)]


def holdings(*layers: tuple[int, ...]) -> dict[NodeId, tuple[int, ...]]:
    return {NodeId(node): held for node, held in enumerate(layers)}


def test_each_group_is_written_once_by_a_holder_and_the_load_is_spread() -> None:
    states = [*states_of(10, 10, 10, 10, 10, 10), State(name="wte", layers=(0, 5), num_bytes=40)]
    writers = elect_writers(states, holdings((0, 1, 2), (3, 4, 5), (0, 1, 2, 3, 4, 5)))
    load = Counter[NodeId]()
    for state in states:
        load[writers[state.name]] += state.num_bytes
    assert list(writers) == [state.name for state in states]
    assert sorted(load.values()) == [30, 30, 40]


def test_a_group_without_holder_is_named() -> None:
    with pytest.raises(ValueError, match="no live node holds layer-001"):
        elect_writers(states_of(1, 1), holdings((0,)))


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=8),
    held=st.lists(st.sets(st.integers(0, 7)), min_size=0, max_size=4),
)
def test_writers_are_holders_and_do_not_depend_on_the_order_of_nodes(sizes: list[int], held: list[set[int]]) -> None:
    by_node = holdings(tuple(range(8)), *(tuple(sorted(layers)) for layers in held))
    writers = elect_writers(states_of(*sizes), by_node)
    for layer in range(len(sizes)):
        assert layer in by_node[writers[f"layer-{layer:03d}"]]
    assert writers == elect_writers(states_of(*sizes), dict(reversed(by_node.items())))
    load = Counter[NodeId]()
    for layer, size in enumerate(sizes):
        load[writers[f"layer-{layer:03d}"]] += size
    # Node 0 holds all, so whoever writes most took its last group when it had no more than node 0 has now.
    assert max(load.values()) <= load[NodeId(0)] + max(sizes)
