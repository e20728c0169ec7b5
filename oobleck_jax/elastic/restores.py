"""Going back to a checkpoint: to which one, how often, and when not any more."""

from dataclasses import dataclass

from oobleck_jax import events
from oobleck_jax.elastic.effects import CheckpointFound, FindCheckpoint
from oobleck_jax.elastic.messages import RestorePoint
from oobleck_jax.elastic.outbox import Outbox
from oobleck_jax.elastic.terms import Terms


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loss:
    """A time that the run had to go back."""

    step: int  # that was in progress
    cause: str


class Restores:
    """The checkpoints that a run goes back to, or has gone back to without getting further since.

    Attributes:
        point: to go on from; None: the nodes have what they need.
        is_due: whether a checkpoint is needed, and none is decided on.
        is_looking: whether one is being looked for.
        look_until_s: until when.
    """

    def __init__(self, terms: Terms, out: Outbox, *, is_due: bool) -> None:
        self.point: RestorePoint | None = None
        self.is_due = is_due
        self.is_looking = False
        self.look_until_s = 0.0
        self._terms, self._out = terms, out
        self._last: RestorePoint | None = None
        self._reason = ""
        self._losses: list[_Loss] = []
        self._damaged: set[str] = set()  # folders
        self._unread: set[str] = set()  # folders of what may be intact, since the nodes last had what they need
        self._suspected_step: int | None = None  # what came after the checkpoint of this step failed again

    def lose(self, step: int, cause: str) -> str | None:
        """The state of a layer was lost in this step; return why the run must end, or None when it may go back."""
        limits = self._terms.limits
        if all(step > loss.step for loss in self._losses):  # it got further than ever before
            self._losses.clear()
            self._suspected_step = None
        same = [loss for loss in self._losses if loss.step == step]
        if self._last is not None and (same or self.point is not None):
            self._suspected_step = self._last.step
        self._losses.append(_Loss(step=step, cause=cause))
        self.point, self.is_due = None, True
        history = "; ".join(
            f"({number}) in step {loss.step}: {loss.cause}" for number, loss in enumerate(self._losses, 1)
        )
        if len(same) >= limits.max_restores_per_step:
            return f"the run went back to a checkpoint {len(same)} times because of step {step}, in vain: {history}"
        if len(self._losses) > limits.max_restores_in_vain:
            return f"the run went back to a checkpoint {len(self._losses) - 1} times without getting further: {history}"
        return None

    def doubt(self, cause: str) -> str | None:
        """Nodes are lost again and again while they restore, if they do; return why the run must end, or None."""
        return None if self.point is None else self.lose(self.point.next_step, cause)

    def look(self, step: int, reason: str, now_s: float) -> None:
        """Have the checkpoint found to go on from.

        Args:
            step: the next one; later checkpoints are of a course that was given up.
            reason: why the run goes back.
        """
        self._reason = reason
        self.is_looking, self.look_until_s = True, now_s + self._terms.limits.find_s
        ends = [end for end in (step or None, self._suspected_step) if end is not None]
        self._out.do(FindCheckpoint(excluded=frozenset(self._damaged | self._unread), end_step=min(ends, default=None)))

    def take(self, given: CheckpointFound, *, step: int, generation: int) -> str | None:
        """Take the checkpoint that was found; return why the run must end, if there is none.

        Args:
            step: the next one so far.
            generation: that goes on.
        """
        self.is_looking = False
        for what in given.damaged:
            self._out.write(events.Damaged(what=what))
        point = given.point
        if point is None and self._suspected_step is not None:  # rather that one than none
            self._suspected_step = None
            return None
        if given.unread:
            return given.unread
        if point is None and self._unread:
            return (
                "no checkpoint could be read, though some may be intact; give the same command again when they can be"
            )
        if point is None:
            is_any = given.damaged or self._damaged
            return "; ".join(["no intact checkpoint is left" if is_any else "there is no checkpoint", *given.damaged])
        self.point = self._last = point
        self.is_due = False
        self._out.write(
            events.Restored(generation=generation, step=point.next_step, checkpoint=point.folder, reason=self._reason)
        )
        return None

    def fail(self, *, may_be_intact: bool) -> None:
        """The checkpoint cannot be restored.

        One that may be intact is left out until nodes have the states of another: as soon as an older one is taken,
        the journal says that the run goes on from there.
        """
        assert self.point is not None
        (self._unread if may_be_intact else self._damaged).add(self.point.folder)
        self.point, self.is_due = None, True

    def end(self) -> None:
        """The nodes have its states."""
        self.point = None
        self._unread.clear()
