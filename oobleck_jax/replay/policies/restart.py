"""Checkpoint and restart of a job of fixed size, with spares: what most clusters do.

The job uses the fastest grid for all nodes but the spares, and never another one. When a node of it is lost, the steps
since the last checkpoint are, too, and the job starts again with a spare in the place of the lost node; without one,
it waits. Costs are those of Varuna (`published.py`), with three spares of thirty nodes. At its best, checkpoints cost
what ours do, and their interval and the number of spares are the best for this very trace, found by trying.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace

from oobleck_jax.planning.plan import NodeId
from oobleck_jax.replay.layouts import Layouts
from oobleck_jax.replay.policies.checkpointing import Checkpointing, cycles
from oobleck_jax.replay.simulator import Action, CannotRun, Course, Lose, Outcome, Spend
from oobleck_jax.replay.timeline import Spending


SPARES_FRACTION = 0.1  # of the nodes at the beginning


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """See the top of this file."""

    layouts: Layouts
    checkpointing: Checkpointing
    num_nodes: int  # of the job, at most
    source: str = "a job of fixed size; checkpoints and restarts as in the simulator of the Oobleck paper"

    @property
    def variant(self) -> str:
        return f"{self.num_nodes} nodes, checkpoint every {self.checkpointing.every} steps"

    def run(self, nodes: tuple[NodeId, ...]) -> Course:
        grid = self.layouts.grid_for(self.num_nodes)
        if grid is None:
            raise CannotRun(f"the model does not fit on the {self.num_nodes} nodes that are left besides spares")
        nodes = yield from self._wait(nodes, grid.num_nodes)
        working = frozenset(nodes[: grid.num_nodes])
        while True:
            training = cycles(self.layouts, grid.step_s, self.checkpointing, on=working)
            outcome = yield replace(training, ignores_joins=True)
            yield Lose(since_s=outcome.step_begin_s)
            while True:
                nodes = yield from self._wait(outcome.nodes, grid.num_nodes)
                working = frozenset(nodes[: grid.num_nodes])
                restart = Spend(spending=Spending.RECOVERY, seconds=self.checkpointing.restart_s, on=working)
                outcome = yield restart
                if not outcome.is_interrupted:
                    break

    def _wait(self, nodes: tuple[NodeId, ...], num_nodes: int) -> Generator[Action, Outcome, tuple[NodeId, ...]]:
        """Wait until there are enough nodes, and return them."""
        while len(nodes) < num_nodes:
            nodes = (yield Spend(spending=Spending.IDLE, awaits_joins=True)).nodes
        return nodes
