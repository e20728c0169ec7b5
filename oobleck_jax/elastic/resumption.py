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
        plan: of that generation.
        step: the next one.
        committed: the last commit decision, which some nodes may not have heard of; None: there is none since the run
            went back to a checkpoint.
        num_skipped: so many of the last steps were not finite.
        nodes: whose workers may have lived on.
        evaluated: whether the evaluation after the last committed step, if there was one, is complete.
        restored_generation: the first one since the run went back to a checkpoint; 0: it never did.
        is_restore_due: whether it must go on from a checkpoint, whatever the nodes have.
    """

    generation: int = 0
    plan: Plan | None = None
    step: int = 0
    committed: events.Committed | None = None
    num_skipped: int = 0
    nodes: tuple[NodeId, ...] = ()
    evaluated: bool = True
    restored_generation: int = 0
    is_restore_due: bool = False

    def evaluation_step(self, evaluates_after: Callable[[int], bool]) -> int | None:
        """Return the committed step whose evaluation was cut short, if there is one."""
        if not self.step or self.evaluated or not evaluates_after(self.step - 1):
            return None
        return self.step - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Recalled:
    """What a worker that comes back is good for."""

    holds: tuple[int, ...]  # layers whose state after the last commit it has, once it got `commit`
    commit: Commit | None = None  # the decision that was written, but did not reach it


def recall(held: Held | None, *, step: int, committed: events.Committed | None, valid_since: int) -> Recalled:
    """Return what a worker that comes back has of the state before the next step.

    What it has of a generation before `valid_since` counts no more: the run went back to a checkpoint. A member of the
    generation that committed has voted, since all votes are needed; if it has not applied the step, it waits for the
    decision. Any other worker that is behind is of no use to the others. Before the first commit every node can make
    the state of any layer.
    """
    if held is None or not step or held.generation < valid_since:
        return Recalled(holds=())
    if held.step == step - 1:
        return Recalled(holds=held.layers)
    if committed is not None and held.step == step - 2 and held.generation == committed.generation:
        commit = Commit(generation=committed.generation, step=committed.step, global_norm=committed.grad_norm)
        return Recalled(holds=held.layers, commit=commit)
    return Recalled(holds=())
