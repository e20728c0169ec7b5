"""From the layers that nodes hold to the next plan: who takes which place, and what is copied from whom.

Losses, joins and departures are one case: these nodes are alive, they hold these layers, make the best of it. Shrinking
a pipeline, borrowing a node from another one and merging two (Oobleck, section 5.1) come out as consequences.

1. Shapes: the fastest ones (planner.py), and, where the old plan is known, those that leave the pipelines alone that
   lost nobody: all of them, or all but the one or two largest.
2. Nodes take their places in each shape so that the fewest bytes are missing: an assignment problem.
3. Every missing layer is copied once, from the live holder that sends least so far, largest layers first.
4. The plan is taken that does most steps within a horizon that begins with its copying.
"""

import heapq
import importlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from oobleck_jax.planning.allocate import Share, best_shares
from oobleck_jax.planning.costs import Ints
from oobleck_jax.planning.forecast import forecast_times
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan
from oobleck_jax.planning.planner import Planning, bind, candidates, planning_of, required_pipelines
from oobleck_jax.planning.profile import Profile
from oobleck_jax.planning.schedule_choice import choose_schedules
from oobleck_jax.planning.templates import Templates, partition_of


HORIZON_S = 600.0  # how long a plan is expected to last, if nothing better is known
MAX_FRESH = 3  # shapes that do not regard the old plan
MAX_BROKEN = 2  # pipelines without losses that are broken up at most, where the old plan is kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """The state of a layer, or of a tied group, goes from one node to another."""

    name: str  # of the state
    layers: tuple[int, ...]  # one layer; or the owners of the tied group
    source: NodeId
    destination: NodeId
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconfiguration:
    """The next plan, and how to get there."""

    planning: Planning
    copies: tuple[Copy, ...]
    copy_s: float  # predicted, of the busiest node

    @property
    def num_bytes(self) -> int:
        """Bytes moved."""
        return sum(copy.num_bytes for copy in self.copies)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Something that is copied as a whole."""

    name: str
    layers: tuple[int, ...]
    num_bytes: int


def reconfigure(
    templates: Templates,
    *,
    nodes: tuple[NodeId, ...],
    holdings: Mapping[NodeId, Sequence[int]],
    fault_tolerance: int,
    old: Plan | None = None,
    horizon_s: float = HORIZON_S,
) -> Reconfiguration:
    """Return the best next plan for the nodes that are alive, and its copies.

    Args:
        templates: of the model.
        nodes: the nodes that are alive, ascending; those that join hold nothing.
        holdings: layers whose current state each node has; nodes that are not alive are ignored.
        fault_tolerance: f; at least f + 1 pipelines wherever the nodes suffice.
        old: the plan so far, if pipelines without losses may stay as they are.
        horizon_s: how long the plan is expected to last; the shorter, the less is moved.

    Raises:
        NotEnoughNodes: not even one pipeline fits on the nodes.
        PlanError: see `planner.best_plan`.
    """
    num_pipelines = required_pipelines(templates, len(nodes), fault_tolerance)
    states = states_of(templates.profile)
    held = {node: frozenset(holdings.get(node, ())) for node in nodes}
    fresh = [bind(shares, nodes) for shares in candidates(templates, len(nodes), num_pipelines)]
    fresh_times = forecast_times(fresh, templates.profile, templates.costs)
    fastest = sorted(range(len(fresh)), key=lambda number: fresh_times[number].step_ns)[:MAX_FRESH]
    scheduled = [choose_schedules(fresh[number], templates) for number in fastest]
    plans = [_assign(item.plan, frozenset(), held, states) for item in scheduled]
    for kept, shares in _shapes_that_keep(templates, old, nodes, num_pipelines) if old is not None else ():
        fixed = [node for pipeline in kept for node in pipeline.nodes]
        free = sorted(set(nodes) - set(fixed))
        scheduled.append(choose_schedules(_bind_with(kept, shares, free), templates, kept=frozenset(fixed)))
        plans.append(_assign(scheduled[-1].plan, frozenset(fixed), held, states))
    times = forecast_times(plans, templates.profile, templates.costs)
    copies = [copies_of(plan, held, states) for plan in plans]

    def merit(number: int) -> tuple[float, float, int, int]:
        copy_s = _copy_s(copies[number], templates.profile)
        num_steps = max(horizon_s - copy_s, 0) / max(times[number].step_ns, 1)
        return num_steps, -copy_s, -sum(copy.num_bytes for copy in copies[number]), -number

    best = max(range(len(plans)), key=merit)
    return Reconfiguration(
        planning=planning_of(replace(scheduled[best], plan=plans[best]), templates, fault_tolerance),
        copies=copies[best],
        copy_s=_copy_s(copies[best], templates.profile),
    )


def copies_of(plan: Plan, held: Mapping[NodeId, frozenset[int]], states: Sequence[State]) -> tuple[Copy, ...]:
    """Return the copies that bring every state to all nodes that need it and lack it (property P8).

    States that nobody holds are left out: they come from a checkpoint, or are made anew.
    """
    copies: list[Copy] = []
    holders_of = _nodes_by_layer(held)
    needed_by = _nodes_by_layer(_layers_of(plan))
    sent_bytes = dict.fromkeys(held, 0)
    for state in sorted(states, key=lambda state: (-state.num_bytes, state.layers, state.name)):
        holders = {node for layer in state.layers for node in holders_of[layer]}
        lacking = {node for layer in state.layers for node in needed_by[layer]} - holders
        queue = [(sent_bytes[node], node) for node in holders]
        heapq.heapify(queue)
        for node in sorted(lacking) if holders else ():
            source = queue[0][1]
            sent_bytes[source] += state.num_bytes
            heapq.heapreplace(queue, (sent_bytes[source], source))
            copies.append(
                Copy(
                    name=state.name,
                    layers=state.layers,
                    source=source,
                    destination=node,
                    num_bytes=state.num_bytes,
                )
            )
    return tuple(copies)


def _nodes_by_layer(layers_of: Mapping[NodeId, frozenset[int]]) -> defaultdict[int, list[NodeId]]:
    nodes: defaultdict[int, list[NodeId]] = defaultdict(list)
    for node, layers in layers_of.items():
        for layer in layers:
            nodes[layer].append(node)
    return nodes


def states_of(profile: Profile) -> tuple[State, ...]:
    """Return what is copied as a whole: the own state of each layer, and each tied group."""
    own = [
        State(name=f"layer-{number:03d}", layers=(number,), num_bytes=layer.state.copied_bytes)
        for number, layer in enumerate(profile.layers)
    ]
    tied = [
        State(name=group.name, layers=group.layers, num_bytes=group.state.copied_bytes) for group in profile.tied_groups
    ]
    return (*own, *tied)


def _shapes_that_keep(
    templates: Templates, old: Plan, nodes: tuple[NodeId, ...], num_pipelines: int
) -> Iterator[tuple[list[Pipeline], tuple[Share, ...]]]:
    """Yield pipelines of the old plan that stay as they are, and the shares of all."""
    whole = [pipeline for pipeline in old.pipelines if set(pipeline.nodes) <= set(nodes)]
    for num_broken in range(min(MAX_BROKEN + 1, len(whole))):
        broken = sorted(range(len(whole)), key=lambda number: -len(whole[number].nodes))[:num_broken]
        kept = [pipeline for number, pipeline in enumerate(whole) if number not in broken]
        shares = best_shares(
            templates.choices,
            num_nodes=len(nodes) - sum(len(pipeline.nodes) for pipeline in kept),
            min_pipelines=num_pipelines,
            num_microbatches=templates.num_microbatches,
            kept=[partition_of(pipeline.template, templates.costs) for pipeline in kept],
        )
        if shares:
            yield kept, shares


def _bind_with(kept: Sequence[Pipeline], shares: Sequence[Share], free: Sequence[NodeId]) -> Plan:
    """Return the plan of pipelines that stay as they are but for their share, and of others on the free nodes."""
    others = bind(shares[len(kept) :], tuple(free))
    first = tuple(
        replace(pipeline, num_microbatches=share.num_microbatches)
        for pipeline, share in zip(kept, shares, strict=False)
    )
    return replace(others, pipelines=(*first, *others.pipelines))


def _assign(
    plan: Plan, fixed: frozenset[NodeId], held: Mapping[NodeId, frozenset[int]], states: Sequence[State]
) -> Plan:
    """Let all nodes but the fixed ones change places, so that the fewest bytes are missing."""
    layers_of = _layers_of(plan)
    places = [node for node in layers_of if node not in fixed]
    nodes = sorted([*places, *plan.spare_nodes])
    missing_bytes = _missing_bytes([layers_of[place] for place in places], [held[node] for node in nodes], states)
    takes = {places[place]: nodes[node] for place, node in _cheapest(missing_bytes)}
    pipelines = tuple(
        replace(pipeline, nodes=tuple(takes.get(node, node) for node in pipeline.nodes)) for pipeline in plan.pipelines
    )
    return Plan(pipelines=pipelines, spare_nodes=tuple(sorted(set(nodes) - set(takes.values()))))


def _missing_bytes(
    needed: Sequence[frozenset[int]], held: Sequence[frozenset[int]], states: Sequence[State]
) -> NDArray[np.float64]:
    """Return a table [place, node] of the bytes that the node lacks to take the place."""
    kinds = [list(dict.fromkeys(sets)) for sets in (needed, held)]
    has = [
        np.array([not layers.isdisjoint(state.layers) for layers in kind for state in states], dtype=np.float64)
        for kind in kinds
    ]
    num_bytes = np.array([state.num_bytes for state in states], dtype=np.float64)  # sums are exact below 2**53
    needs, has = (flags.reshape(-1, len(states)) for flags in has)
    table = (needs * num_bytes) @ (1 - has).T
    number = [{layers: index for index, layers in enumerate(kind)} for kind in kinds]
    return table[np.ix_([number[0][layers] for layers in needed], [number[1][layers] for layers in held])]


def get_ready() -> None:
    """Import what takes half a second, so that the first `reconfigure`, which is waited for, need not.

    It is not imported with this module, because most processes that import this never reconfigure.
    """
    importlib.import_module("scipy.optimize")


def _cheapest(table: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Return the pairs (row, column), each used once, with the least sum."""
    from scipy.optimize import (  # pyright: ignore[reportMissingTypeStubs]
        linear_sum_assignment,  # pyright: ignore[reportUnknownVariableType]
    )

    rows, columns = cast("tuple[Ints, Ints]", linear_sum_assignment(table))
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def _layers_of(plan: Plan) -> dict[NodeId, frozenset[int]]:
    """Return the layers of each working node."""
    layers_of: dict[NodeId, frozenset[int]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.template.stages:
            node = pipeline.nodes[stage.node_index]
            layers_of[node] = layers_of.get(node, frozenset()).union(stage.layers)
    return layers_of


def _copy_s(copies: Sequence[Copy], profile: Profile) -> float:
    """Return the time until the node that sends or gets most is done."""
    busy_s: defaultdict[tuple[str, NodeId], float] = defaultdict(float)
    for copy in copies:
        seconds = profile.link.seconds(copy.num_bytes)
        busy_s["source", copy.source] += seconds
        busy_s["destination", copy.destination] += seconds
    return max(busy_s.values(), default=0.0)
