"""How often the workers of a node failed of late, and what follows: back-off, then exclusion."""

from oobleck_jax.elastic.limits import Limits
from oobleck_jax.planning.plan import NodeId


class Failures:
    """The recent failures of one node's workers.

    They are counted by the id of the node, over all of its incarnations. A worker that was well for `forgive_s` makes
    up for all that came before.
    """

    def __init__(self) -> None:
        self._times_s: list[float] = []

    def add(self, *, ready_s: float | None, limits: Limits, now_s: float) -> None:
        """Take note of a failure.

        Args:
            ready_s: when the worker that failed became ready, if it ever was.
        """
        if ready_s is not None and now_s - ready_s >= limits.forgive_s:
            self._times_s.clear()
        self._times_s.append(now_s)

    def delay_s(self, limits: Limits) -> float:
        """Return how long to wait before the next worker starts."""
        return limits.backoff_after_s(len(self._times_s))

    def why_exclude(self, node: NodeId, limits: Limits) -> str | None:
        """Return why the node must not go on, or None when it may."""
        if len(self._times_s) < limits.max_failures:
            return None
        seconds = self._times_s[-1] - self._times_s[0]
        return f"node {node} was excluded after {len(self._times_s)} failures in {seconds:.0f} s"
