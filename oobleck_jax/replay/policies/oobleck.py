"""Oobleck as published (SOSP '23), in its own simulator's terms.

A loss costs the step in progress and a pause of 2 to 10 seconds (`published.py`): no detection, no planning, no copies.
Pipelines shrink to the template of their new size; those with too few nodes borrow from the largest, or merge (section
5.1), and microbatches are shared out again. Nodes that join wait for the next loss, after which all live nodes get the
best plan. With fewer than (f + 1) n0 nodes training waits. States of layers are never lost.

Settings: *published*; *best*, where the best plan is taken after every loss and nodes that join are taken in at once,
for the same pause; *measured*, the same with the pauses that others measured of its second version (TrainMover).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from oobleck_jax.planning.allocate import best_shares
from oobleck_jax.planning.costs import NS_PER_S
from oobleck_jax.planning.forecast import forecast_times
from oobleck_jax.planning.partition import Partition
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.planner import bind, plan_from
from oobleck_jax.replay.layouts import Layouts
from oobleck_jax.replay.simulator import Course, Lose, Spend, Train
from oobleck_jax.replay.timeline import Spending


MICROBATCHES_PER_STAGE = 4  # that templates are made for (section 4.1.2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Oobleck:
    """See the top of this file."""

    layouts: Layouts
    fault_tolerance: int
    loss_s: float  # pauses
    join_s: float
    takes_joins: bool = False  # at once, and the best plan after each loss
    source: str = "simulator of the Oobleck paper (SOSP '23 artifact)"

    @property
    def variant(self) -> str:
        return f"pauses of {self.loss_s:.3g} s (loss) and {self.join_s:.3g} s (join)"

    def run(self, nodes: tuple[NodeId, ...]) -> Course:
        while True:
            while len(nodes) < self.least:
                nodes = (yield Spend(spending=Spending.IDLE, awaits_joins=True)).nodes
            pipelines, step_s = self._best(nodes)
            while True:
                working = [node for pipeline in pipelines for node in pipeline]
                outcome = yield Train(
                    step_s=step_s,
                    samples=self.layouts.samples_per_step,
                    ignores_joins=not self.takes_joins,
                    on=working,
                )
                if outcome.is_interrupted:
                    yield Lose(since_s=outcome.step_begin_s)
                pause_s = self.loss_s if outcome.is_interrupted else self.join_s
                while True:
                    outcome = yield Spend(spending=Spending.RECOVERY, seconds=pause_s)
                    if not outcome.is_interrupted:
                        break
                nodes = outcome.nodes
                has_joined = not set(nodes) <= set(working)
                if self.takes_joins or has_joined or len(nodes) < self.least:
                    break
                pipelines = regroup(
                    [[node for node in pipeline if node in nodes] for pipeline in pipelines], self.smallest
                )
                step_s = self._step_s([len(pipeline) for pipeline in pipelines])

    @property
    def smallest(self) -> int:
        """n0."""
        smallest = self.layouts.templates.smallest
        assert smallest is not None, "Layouts refuses models that fit on no number of nodes"
        return smallest

    @property
    def least(self) -> int:
        """Nodes below which the guarantee ends, and training with it."""
        return (self.fault_tolerance + 1) * self.smallest

    def _best(self, nodes: tuple[NodeId, ...]) -> tuple[list[list[NodeId]], float]:
        """Return the pipelines of the best plan, and its step."""
        planning = plan_from(self.layouts.templates, nodes=nodes, fault_tolerance=self.fault_tolerance)
        return [list(pipeline.nodes) for pipeline in planning.plan.pipelines], planning.step_s

    def _step_s(self, sizes: Sequence[int]) -> float:
        """Return the step of pipelines of these sizes."""
        templates = self.layouts.templates
        shares = best_shares(
            {},
            num_nodes=0,
            min_pipelines=0,
            num_microbatches=templates.num_microbatches,
            kept=[self._template(size) for size in sizes],
        )
        plan = bind(shares, tuple(NodeId(node) for node in range(sum(sizes))))
        step_s = forecast_times([plan], templates.profile, templates.costs)[0].step_ns / NS_PER_S
        # Its pipelines may be a shape that our planner has not looked at, and faster by a trifle.
        return max(step_s, self.layouts.ideal_step_s(sum(sizes), self.fault_tolerance) or 0.0)

    def _template(self, size: int) -> Partition:
        """Return the template of a size, or of the largest one below it: its other nodes are idle."""
        choices = self.layouts.templates.choices
        usable = max(number for number in choices if number <= size)
        return min(choices[usable], key=lambda choice: choice.step_ns(MICROBATCHES_PER_STAGE * usable))


def regroup(pipelines: Sequence[Sequence[NodeId]], smallest: int) -> list[list[NodeId]]:
    """Return pipelines of at least so many nodes each: short ones borrow, or merge.

    Args:
        pipelines: with the nodes that are left to each; together they are enough for one.
        smallest: n0.
    """
    groups = [list(pipeline) for pipeline in pipelines if pipeline]
    for group in groups:
        while len(group) < smallest:
            donor = max((other for other in reversed(groups) if other is not group), key=len, default=group)
            if donor is group or len(donor) <= smallest:
                break
            group.append(donor.pop())
    whole = [group for group in groups if len(group) >= smallest]
    short = [group for group in groups if len(group) < smallest]
    merged: list[NodeId] = []
    for group in short:
        merged += group
        if len(merged) >= smallest:
            whole.append(merged)
            merged = []
    if merged:
        whole[0] += merged
    return whole
