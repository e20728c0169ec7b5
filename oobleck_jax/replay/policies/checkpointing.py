"""Training with checkpoints while it stands still, as Varuna and restarts with spares do."""

from collections.abc import Collection
from dataclasses import dataclass

from oobleck_jax.planning.plan import NodeId
from oobleck_jax.replay.layouts import Layouts
from oobleck_jax.replay.published import (
    VARUNA_CHECKPOINT_EVERY,
    VARUNA_CHECKPOINT_S,
    VARUNA_RENDEZVOUS_S,
    VARUNA_RESTART_S,
)
from oobleck_jax.replay.simulator import Train
from oobleck_jax.replay.timeline import Spending


INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # that are tried for the best


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing:
    """What checkpoints and restarts cost."""

    every: int  # steps
    save_s: float  # a part that does not depend on the step
    save_steps: float  # and one in steps' time
    restart_s: float

    def cost_s(self, step_s: float) -> float:
        """Return how long training stands still for one."""
        return self.save_s + self.save_steps * step_s


def published_checkpointing(num_parameters: int) -> Checkpointing:
    """Return what the simulator of the Oobleck paper assumes of Varuna."""
    return Checkpointing(
        every=VARUNA_CHECKPOINT_EVERY,
        save_s=VARUNA_CHECKPOINT_S.at(num_parameters),
        save_steps=0.0,
        restart_s=VARUNA_RENDEZVOUS_S + VARUNA_RESTART_S.at(num_parameters),
    )


def best_checkpointings(num_parameters: int, save_steps: float) -> tuple[Checkpointing, ...]:
    """Return those to try: checkpoints as cheap as ours, at all intervals; restarts as published."""
    restart_s = published_checkpointing(num_parameters).restart_s
    return tuple(
        Checkpointing(every=every, save_s=0.0, save_steps=save_steps, restart_s=restart_s) for every in INTERVALS
    )


def cycles(
    layouts: Layouts, step_s: float, checkpointing: Checkpointing, *, on: Collection[NodeId] | None = None
) -> Train:
    """Return training in cycles of some steps and a checkpoint: a loss costs the cycle in progress.

    Nodes that join, if they are not ignored, wait for the end of a cycle, too.
    """
    training_s, cost_s = checkpointing.every * step_s, checkpointing.cost_s(step_s)
    return Train(
        step_s=training_s + cost_s,
        samples=checkpointing.every * layouts.samples_per_step,
        extra=Spending.CHECKPOINT,
        extra_fraction=cost_s / (training_s + cost_s),
        on=on,
    )
