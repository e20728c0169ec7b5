"""How long each wait may last, and how often anything is tried again. One number, `patience`, scales all times."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The longest time, in seconds, that anything may take before somebody is held to account for it."""

    gather_s: float = 300.0  # all nodes join
    reattach_s: float = 5.0  # the agents of a coordinator that died find its successor
    ready_s: float = 120.0  # a node that joined has its worker ready (imports jax, finds its devices)
    settle_s: float = 2.0  # a node that is ready waits for others that are about to be, so that one regroup takes all
    fabric_s: float = 20.0  # JAX's coordination service of a generation starts
    prepare_s: float = 180.0  # a node that prepares tells of progress, or is done
    first_step_s: float = 60.0  # the first step, and the first evaluation, of a generation
    step_s: float = 6.0  # any other step may take this, or a multiple of the usual time if that is more
    heartbeat_s: float = 4.0  # an agent says something
    stopped_s: float = 3.0  # a worker stays stopped by a signal
    verdict_s: float = 1.0  # a better explanation of a failure comes in
    stop_s: float = 3.0  # all nodes leave when told to stop
    save_s: float = 600.0  # a checkpoint is written
    last_words_s: float = 20.0  # the step in progress, and its checkpoint, when the run is interrupted
    find_s: float = 60.0  # the newest checkpoint is found
    wait_s: float = 1800.0  # nodes come to a run that has too few
    step_multiple: float = 4.0  # of the usual time, see step_s
    yield_s: float = 0.0  # a new worker that shares cores with others waits for the step that they redo, at most
    backoff_s: float = 2.0  # wait before the second new worker of a node; doubles with each further one
    forgive_s: float = 180.0  # a worker that was well for so long makes up for all failures of its node before
    max_failures: int = 5  # of a node's workers, before the node is excluded
    max_attempts_per_step: int = 10  # generations that are lost in the same step, before the run ends
    max_blameless_attempts: int = 3  # of them in a row, with nobody to blame
    max_restore_attempts: int = (
        3  # generations that are lost while they restore a checkpoint, before an older one is tried
    )
    max_restores_per_step: int = 3  # times that a run goes back because of the same step, before it ends
    max_restores_in_vain: int = 10  # times that it goes back without getting further

    def scaled(self, patience: float) -> "Limits":
        """Return the limits, all times multiplied by `patience`; counts stay as they are."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: patience * value for name, value in values.items() if isinstance(value, float)})

    def step_limit_s(self, recent_steps_s: Sequence[float]) -> float:
        """Return how long the next step may take, given how long the recent steps of this generation took."""
        if not recent_steps_s:
            return self.first_step_s
        return max(self.step_s, self.step_multiple * statistics.median(recent_steps_s))

    def yield_after_s(self, recent_steps_s: Sequence[float]) -> float:
        """Return how long the step that is redone may take, as far as a new worker should leave the cores to it."""
        return min(self.yield_s, 1.5 * statistics.median(recent_steps_s)) if recent_steps_s else 0.0

    def backoff_after_s(self, num_failures: int) -> float:
        """Return how long to wait before a node's worker is started anew: not at all after its first failure."""
        return self.backoff_s * 2 ** (num_failures - 2) if num_failures > 1 else 0.0
