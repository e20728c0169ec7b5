"""Interleaved templates: the same nodes and devices, each with several stages that are not neighbours."""

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from oobleck_jax.planning.costs import NEVER, Costs, Ints
from oobleck_jax.planning.plan import Stage, Template


NUM_CHUNKS = (2, 3, 4)  # stages on each set of devices: the more, the smaller the bubble, and the more is on its way


def interleave(template: Template, num_chunks: int, costs: Costs) -> Template | None:
    """Return a template in which each stage's devices have `num_chunks` stages; None where there are too few layers.

    The devices are taken in turn, again and again. The layers are cut so that the longest stage is as short as can be;
    then cuts are moved, one layer at a time, as long as that gives the busiest devices less to do.

    Args:
        template: one stage on each set of devices.
        num_chunks: stages on each of them.
        costs: of the layers.
    """
    lanes = template.stages
    if len(lanes) * num_chunks > costs.num_layers:
        return None
    cuts = _cuts(costs, tuple(costs.device_counts.index(lane.num_devices) for lane in lanes), num_chunks)
    return Template(
        stages=tuple(
            replace(lanes[index % len(lanes)], first_layer=first_layer, end_layer=end_layer)
            for index, (first_layer, end_layer) in enumerate(pairwise(cuts))
        )
    )


@lru_cache(maxsize=1024)
def _cuts(costs: Costs, lanes: tuple[int, ...], num_chunks: int) -> tuple[int, ...]:
    """Return where the stages begin and end, given the device counts (as indices) of the lanes."""
    devices = list(lanes) * num_chunks
    return tuple(_balanced(_equal_cuts(costs.work_ns, devices), costs.work_ns, devices, len(lanes)))


def _equal_cuts(work_ns: Ints, devices: list[int]) -> list[int]:
    """Return the cuts for which the longest stage is the shortest, by dynamic programming over the stages."""
    size = work_ns.shape[1]
    is_run = np.triu(np.ones((size, size), dtype=bool), 1)
    longest_ns = np.full(size, NEVER)  # of the stages so far, by where they end
    longest_ns[0] = 0
    choices: list[Ints] = []
    for index in devices:
        table = np.where(is_run, np.maximum(longest_ns[:, None], work_ns[index]), NEVER)
        choices.append(table.argmin(axis=0))
        longest_ns = table.min(axis=0)
    cuts = [size - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return cuts[::-1]


def _balanced(cuts: list[int], work_ns: Ints, devices: list[int], num_lanes: int) -> list[int]:
    """Move cuts while that makes the busiest lane, or else the longest stage, shorter."""

    tables: dict[int, list[list[int]]] = {index: work_ns[index].tolist() for index in set(devices)}
    work = [tables[index] for index in devices]
    stages_ns = [work[stage][cuts[stage]][cuts[stage + 1]] for stage in range(len(devices))]
    lanes_ns = [sum(stages_ns[lane::num_lanes]) for lane in range(num_lanes)]
    is_better = True
    while is_better:
        is_better = False
        for number in range(1, len(cuts) - 1):
            before, after = number - 1, number  # the stages at the cut
            for place in (cuts[number] - 1, cuts[number] + 1):
                if not cuts[before] < place < cuts[after + 1]:
                    continue
                moved_ns = {before: work[before][cuts[before]][place], after: work[after][place][cuts[after + 1]]}
                changed = dict(enumerate(lanes_ns))
                for stage, time_ns in moved_ns.items():
                    changed[stage % num_lanes] += time_ns - stages_ns[stage]
                others_ns = max(stages_ns[:before] + stages_ns[after + 1 :], default=0)
                found = max(changed.values()), max(others_ns, *moved_ns.values())
                if found < (max(lanes_ns), max(stages_ns)):
                    cuts[number], is_better = place, True
                    stages_ns[before], stages_ns[after] = moved_ns[before], moved_ns[after]
                    lanes_ns = list(changed.values())
    return cuts


def stages_of_interleaved(template: Template, costs: Costs) -> tuple[Stage, ...]:
    """Return the stages of all interleaved forms of a template that pipelines may take."""
    forms = (interleave(template, num_chunks, costs) for num_chunks in NUM_CHUNKS)
    return tuple(stage for form in forms if form is not None for stage in form.stages)
