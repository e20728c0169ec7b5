"""Which cores of this machine its nodes run on, and what they are."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from oobleck_jax.planning.plan import NodeId, Pipeline, Plan


def available_cores() -> tuple[int, ...]:
    """Return the cores this process may run on, ascending; empty where processes cannot be pinned."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def about_cores(*names: str) -> str:
    """Return the first thing that the kernel says of the cores under one of these names; empty: nothing (not Linux)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return ""


def place_at_start(node: NodeId, *, num_nodes: int, cores: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the cores and the number of compute threads of a node's worker, before there is a plan.

    Nodes take turns when there are at least as many as cores; else each gets its share of them. One that comes later
    shares with an earlier one until there is a plan.
    """
    if not cores:
        return (), 0
    if num_nodes >= len(cores):
        return (cores[node % len(cores)],), 1
    turn = node % num_nodes
    share = tuple(cores[turn * len(cores) // num_nodes : (turn + 1) * len(cores) // num_nodes])
    return share, len(share)


def place(plan: Plan, *, cores: Sequence[int]) -> dict[NodeId, tuple[int, ...]]:
    """Return the cores of each working node of a plan whose nodes all run on this machine.

    The stages of one pipeline rarely compute at the same time when they share a core with nobody else's, so a pipeline
    stays on cores of its own wherever there are enough (two pipelines of two stages on two cores: 1.03 times the speed
    of one process, against 0.65 when each core has a stage of each pipeline).

    - at least as many pipelines as cores: each pipeline on one core, the longest first on the least loaded one;
    - fewer: the cores are divided among the pipelines, and the nodes of a pipeline spread over its cores in order.
    """
    if not cores:
        return {}
    if len(plan.pipelines) >= len(cores):
        return _one_core_each(plan, cores)
    placed: dict[NodeId, tuple[int, ...]] = {}
    first = 0
    for pipeline, count in zip(plan.pipelines, _divide(len(cores), plan), strict=True):
        placed |= _spread(pipeline, cores[first : first + count])
        first += count
    return placed


def _work(pipeline: Pipeline) -> int:
    return pipeline.num_microbatches * pipeline.template.num_layers


def _one_core_each(plan: Plan, cores: Sequence[int]) -> dict[NodeId, tuple[int, ...]]:
    loads = dict.fromkeys(cores, 0)
    placed: dict[NodeId, tuple[int, ...]] = {}
    for pipeline in sorted(plan.pipelines, key=_work, reverse=True):
        core = min(loads, key=lambda core: (loads[core], core))
        loads[core] += _work(pipeline)
        placed |= dict.fromkeys(pipeline.nodes, (core,))
    return placed


def _divide(num_cores: int, plan: Plan) -> list[int]:
    """Give each pipeline one core, and the others, one by one, to whom has the most work for each of its cores."""
    counts = [1] * len(plan.pipelines)
    for _ in range(num_cores - len(counts)):
        index = max(range(len(counts)), key=lambda i: (_work(plan.pipelines[i]) / counts[i], -i))
        counts[index] += 1
    return counts


def _spread(pipeline: Pipeline, cores: Sequence[int]) -> dict[NodeId, tuple[int, ...]]:
    num_nodes, num_cores = len(pipeline.nodes), len(cores)
    if num_nodes >= num_cores:
        return {node: (cores[index * num_cores // num_nodes],) for index, node in enumerate(pipeline.nodes)}
    return {
        node: tuple(cores[index * num_cores // num_nodes : (index + 1) * num_cores // num_nodes])
        for index, node in enumerate(pipeline.nodes)
    }


def pin(cores: tuple[int, ...]) -> None:
    """Let every thread of this process run on these cores only; empty: leave them where they are."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(int(thread), cores)
