"""Plays a policy against a trace.

A policy is a generator: it says what the cluster does next (`Train`, `Spend`, `Lose`), and is told how that went. Time
passes only here, so the policy cannot cheat with it: every moment of the trace goes into exactly one segment.

    outcome = yield Train(step_s=2.0, samples=1024)         # until nodes are lost, or join
    if outcome.is_interrupted:
        yield Lose(since_s=outcome.step_begin_s)            # the step in progress
        outcome = yield Spend(spending=Spending.RECOVERY, seconds=3.0)

Losses interrupt at once, if what goes on depends on these nodes. Nodes that join wait: for the end of the step, or of
what else goes on.
"""

from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from oobleck_jax.planning.plan import NodeId
from oobleck_jax.replay.timeline import Segment, Spending, Timeline
from oobleck_jax.replay.trace import Change, Trace


MAX_ACTIONS_AT_ONCE = 1000  # without time passing; more are an endless loop
ROUNDING = 1e-9  # of a step: what is missing of one that is complete


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Do steps, until something changes or `max_steps` are done."""

    step_s: float
    samples: float  # of a step
    max_steps: int | None = None
    extra: Spending | None = None  # what a part of each step is spent on that a system without losses would not do
    extra_fraction: float = 0.0
    ignores_joins: bool = False  # go on when nodes join; else, end after the step in which they do
    heeds_notice: bool = False  # end after the step in which nodes are told that they will leave
    is_fluid: bool = False  # changes take effect at once, and what is done of a step counts
    on: Collection[NodeId] | None = None  # only losses of these nodes interrupt (default: all)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spend:
    """Do something else for a while, or until nodes are lost."""

    spending: Spending
    seconds: float = float("inf")
    awaits_joins: bool = False  # ends also when nodes join
    on: Collection[NodeId] | None = None  # as of Train


@dataclass(frozen=True, kw_only=True, slots=True)
class Lose:
    """What was trained since a moment, at which an action or a step began, must be done again. Takes no time."""

    since_s: float


Action: TypeAlias = Train | Spend | Lose


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an action went."""

    now_s: float
    nodes: tuple[NodeId, ...]  # that are live, ascending
    joined: Mapping[NodeId, float] = field(default_factory=dict[NodeId, float])  # meanwhile, and when
    left: tuple[NodeId, ...] = ()  # meanwhile
    leaving: tuple[NodeId, ...] = ()  # told meanwhile that they will leave
    is_interrupted: bool = False  # by the loss of nodes that it depended on
    num_steps: int = 0  # of Train: completed
    elapsed_s: float = 0.0
    step_begin_s: float = 0.0  # of Train: when the step began that was interrupted; else: now


Course: TypeAlias = Generator[Action, Outcome, None]


class Policy(Protocol):
    """How a system reacts to nodes that come and go."""

    @property
    def source(self) -> str:
        """Where its assumptions come from, in a sentence."""
        ...

    @property
    def variant(self) -> str:
        """Its settings, for people; empty: there is nothing to set."""
        ...

    def run(self, nodes: tuple[NodeId, ...]) -> Course:
        """Yield what the cluster does, for ever, beginning with these nodes at time 0.

        Raises:
            CannotRun: the model does not fit this policy, on whatever number of nodes.
        """
        ...


class CannotRun(Exception):
    """A policy cannot run a model at all; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What a policy made of a trace."""

    trace: Trace
    segments: tuple[Segment, ...]

    @property
    def samples(self) -> float:
        return sum(segment.samples for segment in self.segments)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.trace.duration_s

    def breakdown(self) -> dict[Spending, float]:
        """Return the seconds of each spending; they add up to the trace."""
        seconds = dict.fromkeys(Spending, 0.0)
        for segment in self.segments:
            for spending, share_s in segment.shares():
                seconds[spending] += share_s
        return seconds


def simulate(policy: Policy, trace: Trace) -> Replay:
    """Return what a policy makes of a trace.

    Raises:
        CannotRun: nothing, because the model does not fit it.
    """
    return _Player(policy, trace).play()


@dataclass(kw_only=True, slots=True)
class _Meanwhile:
    """What happens during an action."""

    on: Collection[NodeId] | None
    joined: dict[NodeId, float] = field(default_factory=dict[NodeId, float])
    left: list[NodeId] = field(default_factory=list[NodeId])
    leaving: list[NodeId] = field(default_factory=list[NodeId])
    is_interrupted: bool = False

    def note(self, change: Change) -> None:
        for node in change.left:
            self.joined.pop(node, None)
        self.left += change.left
        self.leaving += change.leaving
        self.joined |= dict.fromkeys(change.joined, change.time_s)
        self.is_interrupted |= bool(change.left) and (self.on is None or not set(change.left).isdisjoint(self.on))


class _Player:
    def __init__(self, policy: Policy, trace: Trace) -> None:
        first, *rest = trace.changes
        self._policy, self._trace = policy, trace
        self._changes = rest[::-1]  # the next one last
        self._live = set(first.joined)
        self._timeline = Timeline()
        self._now_s = 0.0

    def play(self) -> Replay:
        course = self._policy.run(tuple(sorted(self._live)))
        action = next(course)
        num_at_once = 0
        while self._now_s < self._trace.duration_s:
            before_s = self._now_s
            match action:
                case Train():
                    outcome = self._train(action)
                case Spend():
                    outcome = self._spend(action)
                case Lose(since_s=since_s):
                    self._timeline.lose(since_s)
                    outcome = Outcome(now_s=before_s, nodes=self._nodes(), step_begin_s=before_s)
            num_at_once = num_at_once + 1 if self._now_s == before_s else 0
            assert num_at_once < MAX_ACTIONS_AT_ONCE, f"{self._policy} does nothing at {self._now_s} s: {action}"
            if self._now_s < self._trace.duration_s:
                action = course.send(outcome)
        course.close()
        return Replay(trace=self._trace, segments=self._timeline.segments)

    def _spend(self, action: Spend) -> Outcome:
        begin_s = self._now_s
        end_s = begin_s + action.seconds
        meanwhile = _Meanwhile(on=action.on)
        while not meanwhile.is_interrupted and self._now_s < min(end_s, self._trace.duration_s):
            until_s = min(end_s, self._next_s())
            self._pass(until_s, action.spending)
            self._change(meanwhile)
            if meanwhile.joined and action.awaits_joins:
                break
        return self._outcome(begin_s, meanwhile, step_begin_s=self._now_s)

    def _train(self, action: Train) -> Outcome:
        begin_s = self._now_s
        meanwhile = _Meanwhile(on=action.on)
        most = float("inf") if action.max_steps is None else action.max_steps
        num_steps, step_begin_s = 0, begin_s
        while num_steps < most and self._now_s < self._trace.duration_s:
            whole = int(min((self._next_s() - self._now_s) / action.step_s + ROUNDING, most - num_steps))
            end_s = min(self._now_s + whole * action.step_s, self._next_s())
            self._append(self._now_s, end_s, len(self._live), whole * action.samples, action)
            self._now_s = step_begin_s = end_s
            num_steps += whole
            if num_steps < most:
                is_done = self._last_step(action, step_begin_s, meanwhile)
                num_steps += is_done
                step_begin_s = self._now_s if is_done else step_begin_s
                must_tell = (meanwhile.joined and not action.ignores_joins) or (
                    meanwhile.leaving and action.heeds_notice
                )
                if must_tell or not is_done:
                    break
        return self._outcome(begin_s, meanwhile, step_begin_s=step_begin_s, num_steps=num_steps)

    def _last_step(self, action: Train, begin_s: float, meanwhile: "_Meanwhile") -> bool:
        """Do the step that a change falls into, to its end unless it is interrupted; return whether it was done."""
        end_s = begin_s + action.step_s
        pieces: list[tuple[float, float, int]] = []
        while not meanwhile.is_interrupted and self._now_s < min(end_s, self._trace.duration_s):
            until_s = min(end_s, self._next_s())
            pieces.append((self._now_s, until_s, len(self._live)))
            self._now_s = until_s
            self._change(meanwhile)
            if action.is_fluid:
                break
        is_done = self._now_s >= end_s
        # At the end of the trace, the step in progress counts by its part: that it ends there is nobody's failure.
        counts = is_done or action.is_fluid or self._now_s >= self._trace.duration_s
        for piece_begin_s, piece_end_s, num_live in pieces:
            part = (piece_end_s - piece_begin_s) / action.step_s
            self._append(piece_begin_s, piece_end_s, num_live, part * action.samples if counts else 0.0, action)
        return is_done

    def _change(self, meanwhile: "_Meanwhile") -> None:
        """Let the change happen that is due, if one is."""
        if not self._changes or self._now_s < self._changes[-1].time_s:
            return
        change = self._changes.pop()
        self._live = (self._live - set(change.left)) | set(change.joined)
        meanwhile.note(change)

    def _outcome(self, begin_s: float, meanwhile: "_Meanwhile", *, step_begin_s: float, num_steps: int = 0) -> Outcome:
        return Outcome(
            now_s=self._now_s,
            nodes=self._nodes(),
            joined=meanwhile.joined,
            left=tuple(meanwhile.left),
            leaving=tuple(meanwhile.leaving),
            is_interrupted=meanwhile.is_interrupted,
            num_steps=num_steps,
            elapsed_s=self._now_s - begin_s,
            step_begin_s=step_begin_s,
        )

    def _next_s(self) -> float:
        return self._changes[-1].time_s if self._changes else self._trace.duration_s

    def _nodes(self) -> tuple[NodeId, ...]:
        return tuple(sorted(self._live))

    def _pass(self, end_s: float, spending: Spending) -> None:
        segment = Segment(begin_s=self._now_s, end_s=end_s, spending=spending, num_live=len(self._live))
        self._timeline.append(segment)
        self._now_s = end_s

    def _append(self, begin_s: float, end_s: float, num_live: int, samples: float, action: Train) -> None:
        self._timeline.append(
            Segment(
                begin_s=begin_s,
                end_s=end_s,
                spending=Spending.USEFUL,
                samples=samples,
                extra=action.extra,
                extra_fraction=action.extra_fraction,
                num_live=num_live,
            )
        )
