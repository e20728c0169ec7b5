"""ReCycle (SOSP '24): the peers of a dead node, of the same stage in other pipelines, do its microbatches.

Pipelines keep their depth. A loss costs no work and no pause, as published, except that nodes move so that the missing
ones are spread over the stages ("failure normalization"), for which they get the state of their new stage over the
link. What the others have more to do goes into bubbles as far as those reach (`Grid.rerouted_step_s`). A node that
joins fills a gap. If all nodes of a stage are lost at once, everything begins anew from a checkpoint, at the cost of a
restart as of Varuna; checkpoints are free. Published: the fastest grid for the most nodes that there will be. At its
best: the grid that turns out to be the best for this very trace, and moves that cost nothing.

The assumptions come from the abstract and from what later papers say of it; its own simulator was not at hand.
"""

from dataclasses import dataclass

from oobleck_jax.planning.plan import NodeId
from oobleck_jax.replay.layouts import Grid, Layouts
from oobleck_jax.replay.simulator import Course, Lose, Outcome, Spend, Train
from oobleck_jax.replay.timeline import Spending


@dataclass(frozen=True, kw_only=True, slots=True)
class Recycle:
    """See the top of this file."""

    layouts: Layouts
    grid: Grid
    restart_s: float
    moves_cost: bool = True
    source: str = "ReCycle, arXiv 2405.14009: no restart, no lost work, bubbles used for the work of the dead"

    @property
    def variant(self) -> str:
        return f"{self.grid.num_pipelines} pipelines of {self.grid.depth}"

    def run(self, nodes: tuple[NodeId, ...]) -> Course:
        stages: list[set[NodeId]] = [set() for _ in range(self.grid.depth)]
        spare = set(nodes)
        while True:
            self._place(stages, spare)
            while not all(stages):
                _note((yield Spend(spending=Spending.IDLE, awaits_joins=True)), stages, spare)
                self._place(stages, spare)
            while True:
                step_s = self.grid.rerouted_step_s([len(stage) for stage in stages], self.layouts.num_microbatches)
                outcome = yield Train(step_s=step_s, samples=self.layouts.samples_per_step, is_fluid=True)
                if _note(outcome, stages, spare):
                    yield Lose(since_s=outcome.step_begin_s)
                    _note((yield Spend(spending=Spending.RECOVERY, seconds=self.restart_s, on=())), stages, spare)
                    break
                if self._place(stages, spare) and self.moves_cost:
                    outcome = yield Spend(spending=Spending.RECOVERY, seconds=self._move_s(), on=())
                    if _note(outcome, stages, spare):
                        break

    def _place(self, stages: list[set[NodeId]], spare: set[NodeId]) -> int:
        """Spread the nodes there are over the stages in the best way; return how many change their stage."""
        num_live = sum(map(len, stages)) + len(spare)
        if num_live < self.grid.depth:
            return 0
        wanted = self.grid.spread(min(num_live, self.grid.num_nodes))
        moving: list[NodeId] = []
        for stage, count in zip(stages, wanted, strict=True):
            for node in sorted(stage)[count:]:
                stage.remove(node)
                moving.append(node)
        arriving = [*sorted(spare), *moving]
        for stage, count in zip(stages, wanted, strict=True):
            while len(stage) < count:
                stage.add(arriving.pop(0))
        num_moved = len(moving) - len(arriving)
        spare.clear()
        spare.update(arriving)
        return max(num_moved, 0)

    def _move_s(self) -> float:
        """Return how long a node needs to get the state of its new stage."""
        return self.layouts.workload.profile.link.seconds(max(stage.state_bytes for stage in self.grid.stages))


def _note(outcome: Outcome, stages: list[set[NodeId]], spare: set[NodeId]) -> bool:
    """Note who came and went; tell whether a stage that had nodes has none any more."""
    spare |= set(outcome.joined)
    spare -= set(outcome.left)
    is_lost = False
    for stage in stages:
        had_some = bool(stage)
        stage -= set(outcome.left)
        is_lost |= had_some and not stage
    return is_lost
