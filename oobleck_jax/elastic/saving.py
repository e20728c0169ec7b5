"""The checkpoint that is being written, if there is one: which nodes have their part on disk, and what comes of it."""

from dataclasses import dataclass, field

from oobleck_jax import events
from oobleck_jax.checkpoint.manifest import GroupRecord
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.effects import CheckpointCommitted, CheckpointFailed, CleanCheckpoints, CommitCheckpoint
from oobleck_jax.elastic.generation import Generation
from oobleck_jax.elastic.outbox import Outbox
from oobleck_jax.elastic.roster import Roster
from oobleck_jax.elastic.terms import Terms
from oobleck_jax.planning.plan import NodeId


@dataclass(kw_only=True, slots=True)
class _Save:
    """A checkpoint of which parts are missing."""

    generation: int
    step: int
    began_s: float
    missing: dict[NodeId, int]  # incarnation of each worker that has not said anything yet
    groups: dict[str, GroupRecord] = field(default_factory=dict[str, GroupRecord])
    slowest: dict[str, float] = field(default_factory=dict[str, float])


class Saving:
    """Writes one checkpoint at a time: says when, collects what the workers say, and gives up when one is lost.

    A change of membership that loses no writer does no harm, because a worker writes a copy.
    """

    def __init__(self, terms: Terms, roster: Roster, out: Outbox, now_s: float) -> None:
        self._terms, self._roster, self._out = terms, roster, out
        self._last_s = now_s  # when the last one began
        self._settled_step = -1  # up to which the end of the run needs no other checkpoint
        self._save: _Save | None = None
        self._is_wanted = False  # by a person, as soon as none is being written

    @property
    def deadline_s(self) -> float | None:
        """When the checkpoint in progress has taken too long; None: there is none."""
        return None if self._save is None else self._save.began_s + self._terms.limits.save_s

    def wants_last(self, step: int) -> bool:
        """Whether a run that ends with this step has something left to write."""
        terms = self._terms.checkpoints
        return self._save is not None or (terms is not None and terms.at_end and self._settled_step < step)

    def settle(self, step: int) -> None:
        """There is a checkpoint of this step already."""
        self._settled_step = step

    def want(self) -> None:
        """Save after the next step, or after the first one when nothing is being written any more."""
        self._is_wanted = True

    def after_commit(self, current: Generation, now_s: float) -> None:
        """A step was committed: begin to save if it is time."""
        step = current.step - 1
        if self._is_wanted and self._save is None:
            return self._begin(current, now_s)
        if not self._is_due(step, now_s):
            return
        if self._save is not None:
            reason = f"that of step {self._save.step} is still being written"
            return self._out.write(events.NotCheckpointed(generation=current.number, step=step, reason=reason))
        self._begin(current, now_s)

    def at_end(self, current: Generation, now_s: float) -> bool:
        """All steps are committed: begin to save the last if need be; return whether nothing is left to write."""
        if not self.wants_last(current.step - 1):
            return True
        if self._save is None:
            self._begin(current, now_s)
        return False

    def take(self, message: messages.Saved | messages.NotSaved) -> None:
        """A worker has written its part, or cannot."""
        save = self._save
        if save is None or (message.generation, message.step) != (save.generation, save.step):
            return self._out.ignore(
                f"node {message.node}: its part of the checkpoint of step {message.step} is too late"
            )
        if isinstance(message, messages.NotSaved):
            self._settled_step = save.step
            return self._give_up(f"node {message.node}: {message.reason}")
        if save.missing.pop(message.node, None) is None:
            return self._out.ignore(f"node {message.node} has no part in the checkpoint of step {message.step}")
        save.groups.update(message.groups)
        for phase, seconds in message.seconds.items():
            save.slowest[phase] = max(seconds, save.slowest.get(phase, 0.0))
        if not save.missing:
            self._out.do(CommitCheckpoint(generation=save.generation, step=save.step, groups=save.groups))
        return None

    def conclude(self, given: CheckpointCommitted | CheckpointFailed, now_s: float) -> None:
        """The checkpoint counts, or does not."""
        save = self._save
        if save is None or (given.generation, given.step) != (save.generation, save.step):
            return self._out.ignore(f"the checkpoint of step {given.step} was given up before")
        self._settled_step = save.step
        if isinstance(given, CheckpointFailed):
            return self._give_up(given.reason)
        self._save = None
        terms = self._terms.checkpoints
        assert terms is not None
        return self._out.write(
            events.Checkpointed(
                generation=save.generation,
                step=save.step,
                folder=terms.folder(save.step, save.generation),
                num_bytes=given.num_bytes,
                seconds={**save.slowest, "total": now_s - save.began_s},
                removed=given.removed,
            )
        )

    def look(self) -> bool:
        """Give up if a worker was lost before it had written its part; return whether that is so."""
        save = self._save
        for number, incarnation in () if save is None else save.missing.items():
            node = self._roster.get(number)
            if node is None or node.incarnation != incarnation:
                self._give_up(f"node {number} was lost before it had written its part")
                return True
        return False

    def overdue(self) -> None:
        """It takes too long."""
        assert self._save is not None
        self._settled_step = self._save.step
        waits_for = f"nodes {sorted(self._save.missing)}" if self._save.missing else "the manifest"
        self._give_up(f"it was not written within {self._terms.limits.save_s:.0f} s ({waits_for} missing)")

    def _is_due(self, step: int, now_s: float) -> bool:
        terms = self._terms.checkpoints
        if terms is None:
            return False
        if terms.every_steps is not None and (step + 1) % terms.every_steps == 0:
            return True
        return terms.every_s is not None and now_s - self._last_s >= terms.every_s

    def _begin(self, current: Generation, now_s: float) -> None:
        terms = self._terms.checkpoints
        assert terms is not None
        step, nodes = current.step - 1, [self._roster.get(node) for node in current.workers]
        writers = [node for node in nodes if node is not None]
        self._last_s, self._is_wanted = now_s, False
        self._save = _Save(
            generation=current.number,
            step=step,
            began_s=now_s,
            missing={node.node: node.incarnation for node in writers},
        )
        # A disk that is full of what came to nothing would never have room.
        self._out.do(CleanCheckpoints(generation=current.number, step=step))
        folder = terms.folder(step, current.number)
        for node in writers:
            save = messages.SaveCheckpoint(generation=current.number, step=step, folder=folder)
            self._out.send(node.connection, save)

    def _give_up(self, reason: str) -> None:
        save = self._save
        assert save is not None
        self._save = None
        self._out.write(events.NotCheckpointed(generation=save.generation, step=save.step, reason=reason))
