"""Nodes whose connection ended, and that may come back and bring their workers along."""

from collections.abc import Iterable

from oobleck_jax.planning.plan import NodeId


class Absences:
    """Who is away, and how long it is waited for."""

    def __init__(self) -> None:
        self._until_s: dict[NodeId, float] = {}

    def add(self, nodes: Iterable[NodeId], until_s: float) -> None:
        """Nodes are away; they may come back until then."""
        self._until_s.update(dict.fromkeys(nodes, until_s))

    def remove(self, node: NodeId) -> bool:
        """A node has joined; return whether it was away."""
        return self._until_s.pop(node, None) is not None

    def take_late(self, now_s: float) -> list[NodeId]:
        """Forget the nodes that did not come back in time, and return them."""
        late = [node for node, until_s in self._until_s.items() if until_s <= now_s]
        for node in late:
            del self._until_s[node]
        return late

    def at(self, now_s: float) -> list[NodeId]:
        """Return the nodes that may still come back, ascending."""
        return sorted(node for node, until_s in self._until_s.items() if until_s > now_s)

    @property
    def next_s(self) -> float | None:
        """When the first of them has had its time; None: nobody is away."""
        return min(self._until_s.values(), default=None)
