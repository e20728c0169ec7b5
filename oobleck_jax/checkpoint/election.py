"""Who writes what: one live holder of each group, so that all write about equally much."""

from collections.abc import Collection, Mapping, Sequence

from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.reconfigure import State


def elect_writers(states: Sequence[State], holdings: Mapping[NodeId, Collection[int]]) -> dict[str, NodeId]:
    """Return the node that writes each group.

    The largest group comes first, and each goes to the holder that has least to write so far; of several, to the one
    that could write least, because the others are good for more groups.

    Args:
        states: the groups of the model, with their sizes.
        holdings: layers whose current state each live node has.

    Raises:
        ValueError: nobody holds a group.
    """
    layers_of = {node: frozenset(layers) for node, layers in holdings.items()}
    holders: dict[str, list[NodeId]] = {}
    possible_bytes = dict.fromkeys(holdings, 0)
    for state in states:
        holders[state.name] = [node for node, held in layers_of.items() if not held.isdisjoint(state.layers)]
        if not holders[state.name]:
            raise ValueError(f"no live node holds {state.name}")
        for node in holders[state.name]:
            possible_bytes[node] += state.num_bytes
    written_bytes = dict.fromkeys(holdings, 0)
    writers: dict[str, NodeId] = {}
    for state in sorted(states, key=lambda state: (-state.num_bytes, state.layers, state.name)):
        writer = min(holders[state.name], key=lambda node: (written_bytes[node], possible_bytes[node], node))
        written_bytes[writer] += state.num_bytes
        writers[state.name] = writer
    return {state.name: writers[state.name] for state in states}
