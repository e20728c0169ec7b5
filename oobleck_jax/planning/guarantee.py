"""How many template sizes are enough to use every node after any losses (Oobleck, section 4.1.1).

With template sizes n0, n0 + 1, ..., n0 + p - 1, x pipelines cover exactly the node counts from x n0 to
x (n0 + p - 1). From f + 1 pipelines on there is no gap between x and x + 1 pipelines, and so for every count from
(f + 1) n0 on, if and only if p >= 1 + (n0 - 1) / x for the least x, which is f + 1. The paper asks for p >= n0, which
is what one pipeline would need.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateBounds:
    """How many consecutive sizes guarantee that all nodes can be used."""

    in_paper: int
    enough: int


def template_bounds(smallest: int, fault_tolerance: int) -> TemplateBounds:
    """Return both bounds for a smallest template of so many nodes."""
    return TemplateBounds(in_paper=smallest, enough=1 + -(-(smallest - 1) // (fault_tolerance + 1)))


def uses_all_nodes(sizes: Collection[int], num_nodes: int, min_pipelines: int) -> bool:
    """Tell whether some pipelines of these sizes, at least so many, use exactly so many nodes."""
    most = [-1] * (num_nodes + 1)  # pipelines, by nodes used
    most[0] = 0
    for used in range(num_nodes):
        if most[used] >= 0:
            for size in sizes:
                if used + size <= num_nodes:
                    most[used + size] = max(most[used + size], most[used] + 1)
    return most[num_nodes] >= min_pipelines
