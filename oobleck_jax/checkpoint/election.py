"""Who writes what: one live holder of each group, so that all write about equally much."""

from collections.abc import Collection, Mapping, Sequence

from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.reconfigure import State


def elect_writers(states: Sequence[State], holdings: Mapping[NodeId, Collection[int]]) -> dict[str, NodeId]:
    """Return the node that writes each group.

    The largest group comes first, and each goes to the holder that has least to write so far.

    Args:
        states: the groups of the model, with their sizes.
        holdings: layers whose current state each live node has.

    Raises:
        ValueError: nobody holds a group.
    """
    holders_of: dict[int, list[NodeId]] = {}
    for node, layers in holdings.items():
        for layer in layers:
            holders_of.setdefault(layer, []).append(node)
    written_bytes = dict.fromkeys(holdings, 0)
    writers: dict[str, NodeId] = {}
    for state in sorted(states, key=lambda state: (-state.num_bytes, state.layers, state.name)):
        holders = {node for layer in state.layers for node in holders_of.get(layer, ())}
        if not holders:
            raise ValueError(f"no live node holds {state.name}")
        writer = min(holders, key=lambda node: (written_bytes[node], node))
        written_bytes[writer] += state.num_bytes
        writers[state.name] = writer
    return {state.name: writers[state.name] for state in states}
