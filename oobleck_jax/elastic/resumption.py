"""What the successor of a coordinator that died knows of the run, and what returning workers have of it."""

from collections.abc import Callable
from dataclasses import dataclass

from oobleck_jax import events
from oobleck_jax.elastic.messages import Commit, Held
from oobleck_jax.planning.plan import NodeId, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """Where a run stands.

    Attributes:
        generation: the last one; 0 before the first.
        committed: the last commit decision, which some nodes may not have heard of.
        plan: of that generation.
        nodes: whose workers may have lived on.
        evaluated: whether the evaluation after the last commit, if there was one, is complete.
    """

    generation: int = 0
    plan: Plan | None = None
    committed: events.Committed | None = None
    nodes: tuple[NodeId, ...] = ()
    evaluated: bool = True

    @property
    def step(self) -> int:
        """The next step."""
        return self.committed.step + 1 if self.committed else 0

    def evaluation_step(self, evaluates_after: Callable[[int], bool]) -> int | None:
        """Return the committed step whose evaluation was cut short, if there is one."""
        if self.committed is None or self.evaluated or not evaluates_after(self.committed.step):
            return None
        return self.committed.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Recalled:
    """What a worker that comes back is good for."""

    holds: tuple[int, ...]  # layers whose state after the last commit it has, once it got `commit`
    commit: Commit | None = None  # the decision that was written, but did not reach it


def recall(held: Held | None, committed: events.Committed | None) -> Recalled:
    """Return what a worker that comes back has of the state after the last commit.

    A member of the generation that committed has voted, since all votes are needed; if it has not applied the step, it
    waits for the decision. Any other worker that is behind is of no use to the others. Before the first commit every
    node can make the state of any layer.
    """
    if held is None or committed is None:
        return Recalled(holds=())
    if held.step == committed.step:
        return Recalled(holds=held.layers)
    if held.step == committed.step - 1 and held.generation == committed.generation:
        commit = Commit(generation=committed.generation, step=committed.step, global_norm=committed.grad_norm)
        return Recalled(holds=held.layers, commit=commit)
    return Recalled(holds=())
