"""The oracle: at each moment the fastest layout for the nodes that are live, and no change costs anything."""

from dataclasses import dataclass

from oobleck_jax.planning.plan import NodeId
from oobleck_jax.replay.layouts import Layouts
from oobleck_jax.replay.simulator import Course, Spend, Train
from oobleck_jax.replay.timeline import Spending


@dataclass(frozen=True, kw_only=True, slots=True)
class Oracle:
    """See the top of this file; `Layouts.ideal_rate` says which layouts are known."""

    layouts: Layouts
    fault_tolerance: int  # of ours, whose plans are among the layouts
    source: str = "an upper limit: the fastest layout of all that are known here, at no cost"

    @property
    def variant(self) -> str:
        return ""

    def run(self, nodes: tuple[NodeId, ...]) -> Course:
        while True:
            rate = self.layouts.ideal_rate(len(nodes), self.fault_tolerance)
            if rate:
                samples = self.layouts.samples_per_step
                outcome = yield Train(step_s=samples / rate, samples=samples, is_fluid=True)
            else:
                outcome = yield Spend(spending=Spending.IDLE, awaits_joins=True)
            nodes = outcome.nodes
