"""Varuna (EuroSys '22): checkpoints, and a restart with another split of the model whenever nodes are lost.

As in the simulator of the Oobleck paper (`published.py`): training stands still while a checkpoint is written, every
10 steps; a loss of any node costs all steps since the last checkpoint, a rendezvous and a restart; a loss during the
restart begins it anew. The fastest grid is chosen for the nodes that are left; nodes that join wait for the next
restart. At its best, checkpoints cost what ours do, their interval is the best for this very trace, found by trying,
and nodes that join may be taken in by a restart after a checkpoint, if that turns out to be better.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace

from oobleck_jax.planning.plan import NodeId
from oobleck_jax.replay.layouts import Grid, Layouts
from oobleck_jax.replay.policies.checkpointing import Checkpointing, cycles
from oobleck_jax.replay.simulator import Action, Course, Lose, Outcome, Spend
from oobleck_jax.replay.timeline import Spending


@dataclass(frozen=True, kw_only=True, slots=True)
class Varuna:
    """See the top of this file."""

    layouts: Layouts
    checkpointing: Checkpointing
    takes_joins: bool = False  # restarts after a checkpoint if the nodes there are make a faster grid
    source: str = "simulator of the Oobleck paper (SOSP '23 artifact)"

    @property
    def variant(self) -> str:
        return f"checkpoint every {self.checkpointing.every} steps" + (
            ", restarts for joins" if self.takes_joins else ""
        )

    def run(self, nodes: tuple[NodeId, ...]) -> Course:
        grid = yield from self._wait(nodes)
        while True:
            training = cycles(self.layouts, grid.step_s, self.checkpointing)
            outcome = yield replace(training, ignores_joins=not self.takes_joins)
            if outcome.is_interrupted:
                yield Lose(since_s=outcome.step_begin_s)
            else:
                faster = self.layouts.grid_for(len(outcome.nodes))
                if faster is None or faster.step_s >= grid.step_s:
                    continue
            while True:
                grid = yield from self._wait(outcome.nodes)
                outcome = yield Spend(spending=Spending.RECOVERY, seconds=self.checkpointing.restart_s)
                if not outcome.is_interrupted:
                    break
            grid = self.layouts.grid_for(len(outcome.nodes)) or grid

    def _wait(self, nodes: tuple[NodeId, ...]) -> Generator[Action, Outcome, Grid]:
        """Wait until there are enough nodes for a grid, and return it."""
        while (grid := self.layouts.grid_for(len(nodes))) is None:
            nodes = (yield Spend(spending=Spending.IDLE, awaits_joins=True)).nodes
        return grid
