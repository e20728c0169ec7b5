"""How long each wait may last. One number, `patience`, scales all of them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The longest time, in seconds, that anything may take before somebody is held to account for it."""

    gather_s: float = 300.0  # all nodes join
    ready_s: float = 120.0  # a node that joined has its worker ready (imports jax, finds its devices)
    fabric_s: float = 20.0  # JAX's coordination service of a generation starts
    prepare_s: float = 180.0  # a node that prepares tells of progress, or is done
    first_step_s: float = 60.0  # the first step, and the first evaluation, of a generation
    step_s: float = 6.0  # any other step may take this, or a multiple of the usual time if that is more
    heartbeat_s: float = 4.0  # an agent says something
    stopped_s: float = 3.0  # a worker stays stopped by a signal
    verdict_s: float = 1.0  # a better explanation of a failure comes in
    stop_s: float = 3.0  # all nodes leave when told to stop
    step_multiple: float = 4.0  # of the usual time, see step_s

    def scaled(self, patience: float) -> "Limits":
        """Return the limits, all of them multiplied by `patience`."""
        return replace(self, **{field.name: patience * getattr(self, field.name) for field in fields(self)})

    def step_limit_s(self, recent_steps_s: Sequence[float]) -> float:
        """Return how long the next step may take, given how long the recent steps of this generation took."""
        if not recent_steps_s:
            return self.first_step_s
        return max(self.step_s, self.step_multiple * statistics.median(recent_steps_s))
