"""Bamboo (NSDI '23): every node also keeps the state of the next stage of its pipeline, and computes its forward pass.

A loss is covered if the node before the lost one lives (the last node is before the first): that one does the work of
both until the pipelines are rebalanced. Two neighbours lost at once are not covered: everything begins anew, and the
step in progress is lost. As in the simulator of the Oobleck paper (`published.py`), every change that is not covered or
overloads a node leads to a rebalancing, with a step in between that takes 1.5 times as long, nodes that join are taken
in when they make another pipeline, 72 % of the time is redundant computation, and GPT-3 models are out of memory.

At its best, only the forward passes that do not fit into bubbles cost time, rebalancing only the copying of a stage's
state, and any model runs whose stages fit in memory twice.
"""

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from math import ceil

from oobleck_jax.planning.plan import NodeId
from oobleck_jax.replay.layouts import FILLABLE, Grid, Layouts
from oobleck_jax.replay.published import (
    BAMBOO_DEGRADED,
    BAMBOO_LONGEST_SEQUENCE,
    BAMBOO_REBALANCE_S,
    BAMBOO_RENDEZVOUS_S,
    BAMBOO_USEFUL,
)
from oobleck_jax.replay.simulator import Action, CannotRun, Course, Lose, Outcome, Spend, Train
from oobleck_jax.replay.timeline import Spending


@dataclass(frozen=True, kw_only=True, slots=True)
class Bamboo:
    """See the top of this file."""

    layouts: Layouts
    is_published: bool
    source: str = "simulator of the Oobleck paper (SOSP '23 artifact); Bamboo, arXiv 2204.12013"

    @property
    def variant(self) -> str:
        return ""

    def run(self, nodes: tuple[NodeId, ...]) -> Course:
        grids = self._grids()
        while True:
            while (grid := self._grid_for(grids, len(nodes))) is None:
                nodes = (yield Spend(spending=Spending.IDLE, awaits_joins=True)).nodes
            working = nodes[: grid.num_nodes]
            nodes = yield from self._train(grids, grid, working)
            while True:
                pause = Spend(spending=Spending.RECOVERY, seconds=self._rebalance_s(grid), on=nodes)
                outcome = yield pause
                nodes = outcome.nodes
                if not outcome.is_interrupted:
                    break

    def _train(
        self, grids: Sequence[Grid], grid: Grid, working: tuple[NodeId, ...]
    ) -> Generator[Action, Outcome, tuple[NodeId, ...]]:
        """Train until pipelines must be rebalanced; return the nodes there are then."""
        redundant_s = self._redundant_s(grid)
        step_s = grid.step_s + redundant_s
        samples = self.layouts.samples_per_step
        extra, fraction = Spending.REDUNDANT, redundant_s / step_s
        while True:
            outcome = yield Train(step_s=step_s, samples=samples, extra=extra, extra_fraction=fraction, on=working)
            larger = self._grid_for(grids, len(outcome.nodes))
            if outcome.is_interrupted:
                break
            if larger is not None and larger.num_pipelines > grid.num_pipelines:
                return outcome.nodes
        if not _are_neighbours(working, grid.depth, outcome.left):
            rest_s = (outcome.step_begin_s + step_s - outcome.now_s) * BAMBOO_DEGRADED
            begin_s = outcome.step_begin_s
            rest = Train(step_s=rest_s, samples=samples, extra=extra, extra_fraction=fraction, on=working, max_steps=1)
            outcome = yield rest
            if not outcome.is_interrupted:
                return outcome.nodes
            yield Lose(since_s=begin_s)
        else:
            yield Lose(since_s=outcome.step_begin_s)
        if self.is_published:
            outcome = yield Spend(spending=Spending.RECOVERY, seconds=BAMBOO_RENDEZVOUS_S, on=())
        return outcome.nodes

    def _grids(self) -> tuple[Grid, ...]:
        """Return the grids that fit.

        Raises:
            CannotRun: there are none.
        """
        workload = self.layouts.workload
        if self.is_published and workload.sequence_length > BAMBOO_LONGEST_SEQUENCE:
            raise CannotRun(f"out of memory, as published for samples of {workload.sequence_length} tokens")
        room = workload.device_memory_bytes * workload.devices_per_node
        grids = tuple(
            grid
            for grid in self.layouts.grids
            if grid.depth > 1
            and all(
                own.memory_bytes * workload.devices_per_node + following.state_bytes <= room
                for own, following in zip(grid.stages, (*grid.stages[1:], grid.stages[0]), strict=True)
            )
        )
        if not grids:
            raise CannotRun(
                f"out of memory: no pipeline of up to {self.layouts.max_nodes} nodes holds every stage's state twice"
            )
        return grids

    def _grid_for(self, grids: Sequence[Grid], num_nodes: int) -> Grid | None:
        fitting = [grid for grid in grids if grid.num_nodes <= num_nodes]
        return min(fitting, key=lambda grid: (grid.step_s + self._redundant_s(grid), grid.num_nodes), default=None)

    def _redundant_s(self, grid: Grid) -> float:
        """Return by how much redundant computation makes a step longer."""
        if self.is_published:
            return grid.step_s * (1 / BAMBOO_USEFUL - 1)
        num_microbatches = ceil(self.layouts.num_microbatches / grid.num_pipelines)
        slowest_s = max(
            own.work_s + following.forward_s
            for own, following in zip(grid.stages, (*grid.stages[1:], grid.stages[0]), strict=True)
        )
        return max(num_microbatches * slowest_s - grid.busy_s - FILLABLE * grid.bubble_s, 0.0)

    def _rebalance_s(self, grid: Grid) -> float:
        if self.is_published:
            return BAMBOO_REBALANCE_S.at(self.layouts.workload.num_parameters)
        return self.layouts.workload.profile.link.seconds(max(stage.state_bytes for stage in grid.stages))


def _are_neighbours(working: Sequence[NodeId], depth: int, lost: Collection[NodeId]) -> bool:
    """Tell whether two lost nodes are neighbours in a pipeline, the last and the first included."""
    for first in range(0, len(working), depth):
        is_lost = [node in lost for node in working[first : first + depth]]
        if any(one and other for one, other in zip(is_lost, (*is_lost[1:], is_lost[0]), strict=True)):
            return True
    return False
