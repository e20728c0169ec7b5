"""A run as its records tell it: fed one record after the other, it can be looked at any time.

It knows no clock, socket or file, so the same class serves the page while the run goes on, a coordinator that takes
over (fed with the files first), and reports of runs that are over.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from oobleck_jax import events
from oobleck_jax.dashboard.curve import Curve
from oobleck_jax.dashboard.nodes import Nodes
from oobleck_jax.dashboard.snapshot import (
    CheckpointView,
    IncidentView,
    PipelineView,
    RunPhase,
    Snapshot,
    StageView,
)
from oobleck_jax.planning.plan import Pipeline, Plan
from oobleck_jax.progress import describe_layers


_MAX_INCIDENTS = 100  # that are shown; all are counted
_RECENT_STEPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What is known of a run before it begins.

    Attributes:
        layer_names: for people.
        flops_per_step: of forward and backward, without what is computed again.
        peak_flops_per_s: of a device of a kind; None: not known.
        smallest_num_nodes: with which there is a plan.
        has_actions: there is a token, so that who has it may act.
    """

    preset: str
    run_dir: str
    steps: int
    tokens_per_step: int
    fault_tolerance: int
    layer_names: tuple[str, ...]
    smallest_num_nodes: int = 1
    flops_per_step: float | None = None
    peak_flops_per_s: Callable[[str], float | None] = lambda kind: None
    has_actions: bool = False


class RunState:
    """See the top of this file.

    Attributes:
        recoveries_s: seconds from the first notice to the first commit after it, of every incident, with its kind.
        plans: every generation that began, with the time.
    """

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self.recoveries_s: list[tuple[str, float]] = []
        self.plans: list[tuple[float, events.Planned]] = []
        self._nodes = Nodes()
        self._curve = Curve()
        self._loss: float = math.nan  # the last that was finite
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._phase, self._reason = RunPhase.STARTING, "nodes start"
        self._started: float | None = None
        self._trains_since: float | None = None  # when the first step began
        self._generation = 0
        self._step = 0
        self._last: events.Committed | None = None
        self._eval_loss: float | None = None
        self._plan: Plan | None = None
        self._plan_reason = ""
        self._incidents: deque[IncidentView] = deque(maxlen=_MAX_INCIDENTS)
        self._num_incidents: dict[str, int] = {}
        self._num_redone = 0
        self._checkpoint: CheckpointView | None = None
        self._finished: float | None = None

    @property
    def is_over(self) -> bool:
        return self._finished is not None

    def take_all(self, told: Iterable[tuple[float, events.Record]]) -> None:
        """Take records with their times, in order."""
        for now, record in told:
            self.take(record, now)

    def take(self, record: events.Record, now: float) -> None:
        """Take a record; `now` is its time, in seconds since 1970."""
        self._nodes.take(record, now)
        match record:
            case events.Started():
                self._started = self._started or now
            case events.Planned():
                self._plan, self._plan_reason, self._generation = record.plan, record.plan_reason, record.generation
                self.plans.append((now, record))
                if self._trains_since is not None:
                    self._enter(RunPhase.REGROUPING, record.reason)
            case events.Gathering():
                self._enter(RunPhase.WAITING, record.reason)
            case events.Prepared():
                self._trains_since = self._trains_since or now
                if self._phase is RunPhase.STARTING:
                    self._enter(RunPhase.TRAINING, "")
            case events.Failed() if not record.is_collateral and self._trains_since is not None:
                self._enter(RunPhase.REGROUPING, record.cause)
            case events.Resumed():
                self._enter(RunPhase.REGROUPING, "the coordinator was restarted")
            case events.Committed():
                self._commit(record)
            case events.Restored():
                self._curve.take_back(record.step)
                self._step = record.step
                self._enter(RunPhase.REGROUPING, record.reason)
            case events.Checkpointed():
                self._checkpoint = CheckpointView(step=record.step, time=now)
            case events.Evaluated():
                self._eval_loss = record.loss
            case events.Incident():
                self._add_incident(record, now)
            case events.Finished():
                self._finished = now
                is_done = record.exit_code == 0
                is_asked = record.exit_code > 128
                self._phase = RunPhase.FINISHED if is_done else RunPhase.STOPPED if is_asked else RunPhase.FAILED
                self._reason = record.reason
            case _:
                pass

    def snapshot(self, now: float) -> Snapshot:
        """Return what the run looks like at a time, in seconds since 1970."""
        facts, last = self.facts, self._last
        return Snapshot(
            time=now,
            preset=facts.preset,
            run_dir=facts.run_dir,
            phase=self._phase,
            reason=self._reason,
            started=self._started,
            generation=self._generation,
            step=self._step,
            steps=facts.steps,
            loss=None if last is None else last.loss,
            eval_loss=self._eval_loss,
            grad_norm=None if last is None else last.grad_norm,
            tokens_per_s=None if self._step_s is None else facts.tokens_per_step / self._step_s,
            mfu=self._mfu,
            seconds_left=None if self._step_s is None else (facts.steps - self._step) * self._step_s,
            goodput=self._goodput(now),
            fault_tolerance=facts.fault_tolerance,
            survivable=self._survivable,
            nodes=self._nodes.views(),
            pipelines=() if self._plan is None else tuple(map(self._pipeline, self._plan.pipelines)),
            plan_reason=self._plan_reason,
            incidents=tuple(reversed(self._incidents)),
            num_incidents=dict(self._num_incidents),
            num_redone_microbatches=self._num_redone,
            checkpoint=self._checkpoint,
            has_actions=facts.has_actions and not self.is_over,
            curve=self._curve.view(facts.tokens_per_step),
        )

    def _enter(self, phase: RunPhase, reason: str) -> None:
        self._phase, self._reason = phase, reason

    def _commit(self, committed: events.Committed) -> None:
        self._step, self._last = committed.step + 1, committed
        self._loss = self._loss if committed.loss is None else committed.loss
        self._recent_s.append(committed.step_time_s)
        self._curve.add(committed.step, self._loss, committed.step_time_s)
        self._enter(RunPhase.TRAINING, "")

    def _add_incident(self, record: events.Incident, now: float) -> None:
        self._num_incidents[record.kind] = self._num_incidents.get(record.kind, 0) + 1
        self._num_redone += record.num_redone_microbatches
        self.recoveries_s.append((record.kind, record.seconds.get("total", 0.0)))
        self._incidents.append(
            IncidentView(
                time=now,
                kind=record.kind,
                cause=record.cause,
                nodes=record.nodes,
                collateral=record.collateral,
                step=record.step,
                num_generations=record.num_generations,
                seconds=record.seconds,
                received_bytes=record.received_bytes,
                num_redone_microbatches=record.num_redone_microbatches,
                num_compilations=record.num_compilations,
            )
        )

    @property
    def _step_s(self) -> float | None:
        return sum(self._recent_s) / len(self._recent_s) if self._recent_s else None

    @property
    def _mfu(self) -> float | None:
        peaks = [self.facts.peak_flops_per_s(kind) for kind in self._nodes.working_devices]
        known = [peak for peak in peaks if peak is not None]
        if self._step_s is None or self.facts.flops_per_step is None or not peaks or len(known) < len(peaks):
            return None
        return self.facts.flops_per_step / self._step_s / sum(known)

    def _goodput(self, now: float) -> float | None:
        if self._trains_since is None:
            return None
        until = now if self._finished is None else self._finished
        return min(self._curve.seconds / max(until - self._trains_since, 1e-9), 1.0)

    @property
    def _survivable(self) -> int | None:
        """Nodes that may be lost at once, whichever they are: every layer has a holder then, and there is a plan."""
        if self._trains_since is None or self._plan is None or self.is_over:
            return None
        if not self.facts.fault_tolerance:
            return 0  # the first loss ends the run
        holders = [0] * self._plan.num_layers
        for layers in self._nodes.holdings.values():
            for layer in layers:
                holders[layer] += 1
        return max(min(min(holders) - 1, self._nodes.num_there - self.facts.smallest_num_nodes), 0)

    def _pipeline(self, pipeline: Pipeline) -> PipelineView:
        return PipelineView(
            num_microbatches=pipeline.num_microbatches,
            stages=tuple(
                StageView(
                    node=pipeline.node_of(index),
                    layers=describe_layers(stage.layers, self.facts.layer_names),
                    first_layer=stage.first_layer,
                    end_layer=stage.end_layer,
                    num_devices=stage.num_devices,
                )
                for index, stage in enumerate(pipeline.template.stages)
            ),
        )
