"""How policies do on a trace: what they reach, of what is possible, and what the rest is lost to."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from oobleck_jax.replay.layouts import Layouts
from oobleck_jax.replay.policies.entries import MAKERS, Conditions
from oobleck_jax.replay.policies.oracle import Oracle
from oobleck_jax.replay.recovery_costs import CheckpointCosts, RecoveryCosts
from oobleck_jax.replay.simulator import CannotRun, Replay, simulate
from oobleck_jax.replay.timeline import Spending
from oobleck_jax.replay.trace import Trace
from oobleck_jax.replay.workload import Workload


SLOWER = "slower"  # a layout that is slower than the fastest for the nodes that live, or without some of them


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy made of a trace.

    Attributes:
        share_of_oracle: samples, as a part of the oracle's.
        share_of_plans: the same, of an oracle that knows only the layouts of our own planner without fault tolerance.
        effective_time: part of the time that went into steps that count.
        breakdown: seconds of each spending; they add up to the trace.
        lost: parts of the oracle's samples, by what they were lost to; with the share they add up to 1.
        losses_survived: nodes lost, after which training went on.
        variant: which of several settings was the best.
        note: why the policy cannot run the model; empty: it can.
    """

    samples_per_s: float
    samples: float
    share_of_oracle: float
    share_of_plans: float
    effective_time: float
    breakdown: dict[str, float]
    lost: dict[str, float]
    losses_survived: int
    source: str
    variant: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """A trace, a workload, and what all policies made of it."""

    trace: Trace
    workload: Workload
    scores: dict[str, Score]
    replays: dict[str, Replay]  # of those that can run


def hold(
    trace: Trace,
    layouts: Layouts,
    *,
    policies: Sequence[str],
    fault_tolerance: int,
    recovery: RecoveryCosts,
    checkpoints: CheckpointCosts,
) -> Contest:
    """Play policies against a trace.

    Args:
        trace: of nodes that are live.
        layouts: of the workload, for as many nodes as the trace has.
        policies: names in `MAKERS`; each is played alone, so their order means nothing.
        fault_tolerance: f of the systems that have one.
        recovery: our own costs.
        checkpoints: likewise.
    """
    layouts.forecast_all(fault_tolerance)
    on = Conditions(
        layouts=layouts,
        num_nodes=len(trace.changes[0].joined),
        fault_tolerance=fault_tolerance,
        recovery=recovery,
        checkpoints=checkpoints,
    )
    oracle = simulate(Oracle(layouts=layouts, fault_tolerance=fault_tolerance), trace)
    scores: dict[str, Score] = {}
    replays: dict[str, Replay] = {}
    for name in policies:
        variants = MAKERS[name](on)
        played: list[tuple[Replay, str]] = []
        note = f"the model does not fit on {on.num_nodes} nodes"
        for policy in variants:
            try:
                played.append((simulate(policy, trace), policy.variant))
            except CannotRun as error:
                note = str(error)
        if not played:
            scores[name] = _absent(trace, note, variants[0].source if variants else "")
            continue
        replays[name], variant = max(played, key=lambda item: item[0].samples)
        scores[name] = _score(replays[name], oracle, layouts, fault_tolerance, variants[0].source, variant)
    return Contest(trace=trace, workload=layouts.workload, scores=scores, replays=replays)


def _score(replay: Replay, oracle: Replay, layouts: Layouts, fault_tolerance: int, source: str, variant: str) -> Score:
    breakdown = replay.breakdown()
    possible = dict.fromkeys(Spending, 0.0)  # samples of the oracle while the policy did this
    for segment in replay.segments:
        rate = layouts.ideal_rate(segment.num_live, fault_tolerance)
        for spending, seconds in segment.shares():
            possible[spending] += rate * seconds
    share = _part(replay.samples, oracle.samples)
    lost = {str(spending): _part(samples, oracle.samples) for spending, samples in possible.items()}
    lost[SLOWER] = lost.pop(str(Spending.USEFUL)) - share
    return Score(
        samples_per_s=replay.samples_per_s,
        samples=replay.samples,
        share_of_oracle=share,
        share_of_plans=_part(replay.samples, _samples_of_plans(replay, layouts)),
        effective_time=breakdown[Spending.USEFUL] / replay.trace.duration_s,
        breakdown={str(spending): seconds for spending, seconds in breakdown.items()},
        lost=lost,
        losses_survived=_losses_survived(replay),
        source=source,
        variant=variant,
    )


def _part(samples: float, whole: float) -> float:
    """Return a part of a whole; of nothing, it is none."""
    return samples / whole if whole else 0.0


def _samples_of_plans(replay: Replay, layouts: Layouts) -> float:
    """Return the samples of an oracle that knows only our planner's layouts, without fault tolerance."""
    samples = 0.0
    for segment in replay.segments:
        step_s = layouts.plan_step_s(segment.num_live, 0)
        samples += segment.seconds / step_s * layouts.samples_per_step if step_s else 0.0
    return samples


def _losses_survived(replay: Replay) -> int:
    last_s = max((segment.end_s for segment in replay.segments if segment.samples), default=0.0)
    return sum(len(change.left) for change in replay.trace.changes if change.time_s < last_s)


def _absent(trace: Trace, note: str, source: str) -> Score:
    breakdown = dict.fromkeys(map(str, Spending), 0.0) | {str(Spending.IDLE): trace.duration_s}
    return Score(
        samples_per_s=0.0,
        samples=0.0,
        share_of_oracle=0.0,
        share_of_plans=0.0,
        effective_time=0.0,
        breakdown=breakdown,
        lost={str(Spending.IDLE): 1.0},
        losses_survived=0,
        source=source,
        note=note,
    )
