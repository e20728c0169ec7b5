from collections.abc import Callable, Generator
from dataclasses import dataclass

import pytest

from oobleck_jax.planning.plan import NodeId
from oobleck_jax.replay.simulator import Action, Course, Lose, Outcome, Spend, Train, simulate
from oobleck_jax.replay.timeline import Segment, Spending, Timeline
from oobleck_jax.replay.trace import Trace
from tests.replay.workloads import STAYS, trace_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A policy that is a function."""

    course: Callable[[tuple[NodeId, ...]], Course]
    source: str = "invented"
    variant: str = ""

    def run(self, nodes: tuple[NodeId, ...]) -> Course:
        return self.course(nodes)


def play(course: Callable[[tuple[NodeId, ...]], Course], trace: Trace) -> list[tuple[float, float, str, float]]:
    """Return (begin, end, spending, samples) of the segments."""
    segments = simulate(Script(course=course), trace).segments
    return [(one.begin_s, one.end_s, str(one.spending), one.samples) for one in segments]


ONE_LOSS = trace_of(100, (0, STAYS), (0, 25))


def test_a_loss_interrupts_a_step_which_may_then_be_lost() -> None:
    def course(nodes: tuple[NodeId, ...]) -> Course:
        assert nodes == (0, 1)
        outcome = yield Train(step_s=10, samples=5)
        assert (outcome.left, outcome.is_interrupted, outcome.num_steps) == ((1,), True, 2)
        assert (outcome.now_s, outcome.step_begin_s, outcome.nodes) == (25, 20, (0,))
        yield Lose(since_s=outcome.step_begin_s)
        yield Spend(spending=Spending.RECOVERY, seconds=3)
        yield Train(step_s=12, samples=5)

    assert play(course, ONE_LOSS) == [
        (0, 20, "useful", 10),
        (20, 25, "redone", 0),
        (25, 28, "recovery", 0),
        (28, 100, "useful", 30),
    ]


def test_a_checkpoint_decides_how_much_is_lost() -> None:
    def course(nodes: tuple[NodeId, ...]) -> Course:
        outcome = yield Train(step_s=10, samples=5, max_steps=1)
        saved_s = outcome.now_s
        yield Spend(spending=Spending.CHECKPOINT, seconds=1)
        outcome = yield Train(step_s=10, samples=5)
        yield Lose(since_s=saved_s)
        yield Spend(spending=Spending.IDLE)

    assert play(course, ONE_LOSS) == [
        (0, 10, "useful", 5),
        (10, 11, "checkpoint", 0),
        (11, 21, "redone", 0),
        (21, 25, "redone", 0),
        (25, 100, "idle", 0),
    ]


def test_nodes_that_join_wait_for_the_end_of_the_step() -> None:
    def course(nodes: tuple[NodeId, ...]) -> Course:
        outcome = yield Train(step_s=10, samples=5)
        assert (outcome.now_s, outcome.joined, outcome.num_steps) == (40, {1: 33.0}, 4)
        assert not outcome.is_interrupted
        yield Spend(spending=Spending.RECOVERY)

    assert sum(samples for _, _, _, samples in play(course, trace_of(50, (0, STAYS), (33, STAYS)))) == 20


def test_a_step_into_which_a_join_falls_is_lost_with_a_node() -> None:
    def course(nodes: tuple[NodeId, ...]) -> Course:
        outcome = yield Train(step_s=10, samples=5)
        assert (outcome.now_s, outcome.step_begin_s, outcome.joined) == (38, 30, {2: 33.0})
        yield Lose(since_s=outcome.step_begin_s)
        yield Spend(spending=Spending.IDLE)

    assert play(course, trace_of(50, (0, STAYS), (0, 38), (33, STAYS))) == [
        (0, 30, "useful", 15),
        (30, 33, "redone", 0),
        (33, 38, "redone", 0),
        (38, 50, "idle", 0),
    ]


def test_losses_of_others_do_not_interrupt() -> None:
    def course(nodes: tuple[NodeId, ...]) -> Course:
        outcome = yield Train(step_s=10, samples=5, on=(0,), max_steps=5)
        assert (outcome.now_s, outcome.left, outcome.is_interrupted) == (50, (1,), False)
        yield Spend(spending=Spending.IDLE)

    assert play(course, ONE_LOSS)[-1] == (50, 100, "idle", 0)


def test_notice_ends_training_after_the_step_if_it_is_heeded() -> None:
    def heeding(nodes: tuple[NodeId, ...]) -> Course:
        outcome = yield Train(step_s=10, samples=5, heeds_notice=True)
        assert (outcome.now_s, outcome.leaving, outcome.left) == (10, (1,), ())
        yield Spend(spending=Spending.IDLE, on=())

    def deaf(nodes: tuple[NodeId, ...]) -> Course:
        outcome = yield Train(step_s=10, samples=5)
        assert (outcome.now_s, outcome.left) == (25, (1,))
        yield Spend(spending=Spending.IDLE)

    told = trace_of(100, (0, STAYS), (0, 25), notice_s=20)
    assert play(heeding, told)[0] == (0, 5, "useful", 2.5)
    assert play(deaf, told)[-1] == (25, 100, "idle", 0)


def test_the_step_at_the_end_of_the_trace_counts_by_its_part() -> None:
    def course(nodes: tuple[NodeId, ...]) -> Course:
        yield Train(step_s=10, samples=5)

    assert sum(samples for _, _, _, samples in play(course, trace_of(37, (0, STAYS)))) == pytest.approx(18.5)


def test_fluid_training_keeps_what_is_done_of_a_step() -> None:
    def course(nodes: tuple[NodeId, ...]) -> Course:
        yield Train(step_s=10, samples=5, is_fluid=True)
        yield Train(step_s=20, samples=5, is_fluid=True)

    assert play(course, ONE_LOSS) == [
        (0, 20, "useful", 10),
        (20, 25, "useful", 2.5),
        (25, 85, "useful", 15),
        (85, 100, "useful", 3.75),
    ]


def test_waiting_ends_with_a_join() -> None:
    def course(nodes: tuple[NodeId, ...]) -> Course:
        outcome = yield Spend(spending=Spending.IDLE, awaits_joins=True)
        assert (outcome.now_s, outcome.nodes) == (33, (0, 1))
        yield Spend(spending=Spending.RECOVERY)

    assert play(course, trace_of(50, (0, STAYS), (33, STAYS)))[-1] == (33, 50, "recovery", 0)


def test_a_policy_that_lets_no_time_pass_is_found_out() -> None:
    def course(nodes: tuple[NodeId, ...]) -> Generator[Action, Outcome, None]:
        while True:
            yield Spend(spending=Spending.IDLE, seconds=0)

    with pytest.raises(AssertionError, match="does nothing at 0"):
        play(course, ONE_LOSS)


def test_a_timeline_has_no_gaps_and_loses_only_whole_segments() -> None:
    timeline = Timeline()
    timeline.append(Segment(begin_s=0, end_s=10, spending=Spending.USEFUL, samples=3))
    with pytest.raises(AssertionError, match="does not begin at 10"):
        timeline.append(Segment(begin_s=11, end_s=12, spending=Spending.USEFUL))
    with pytest.raises(AssertionError, match="was begun before"):
        timeline.lose(5)


def test_extra_time_is_a_part_of_the_segment() -> None:
    segment = Segment(begin_s=0, end_s=10, spending=Spending.USEFUL, extra=Spending.REDUNDANT, extra_fraction=0.2)
    assert list(segment.shares()) == [(Spending.USEFUL, 8), (Spending.REDUNDANT, 2)]
