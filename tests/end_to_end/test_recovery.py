"""Whole runs in which nodes really die, hang, leave and come: the losses stay what they would have been (T2-T4)."""

import os
import signal
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

from oobleck_jax import events
from oobleck_jax.execution.recorder import Activity
from oobleck_jax.inject import Injection, Kind, parse_injections
from oobleck_jax.live_run import LiveRun
from oobleck_jax.timeline import PROGRAMS, Trace, read_timeline
from tests.end_to_end.training_runs import (
    IN_MIXED_PRECISION,
    LIMIT_S,
    assert_equal_bits,
    assert_equal_holders,
    assert_equal_losses,
    await_steps,
    finish,
    incidents_of,
    started,
    story_of,
    train,
)


pytestmark = [pytest.mark.process, pytest.mark.timeout(2 * LIMIT_S)]

# All nodes but one are killed, the later ones in what was made of the first plan; they come back, but perhaps too late.
# The step of a node that is killed after its vote counts, or does not.
KILLS = {
    1: "kill:0@5:commit kill:2@6:recovery raise:1@15:forward kill:3@24:backward kill:4@33:sum kill:5@42:vote",
    2: "kill:0@5:sum kill:2@5:sum kill:1@15:forward kill:3@15:backward kill:4@26:vote kill:5@37:commit "
    "kill:6@38:recovery",
}
PLANS = {1: "0-3,3-6 | 0-3,3-6 | 0-2,2-4,4-6", 2: "0-3,3-6 | 0-3,3-6 | 0-2,2-4,4-6 | 0-6"}


@pytest.mark.parametrize(
    ("fault_tolerance", "remat"), [pytest.param(1, "stage", marks=pytest.mark.jax_version), (2, "dots")]
)
def test_kills_at_any_moment_of_a_step_change_nothing_T2_T3_T4(undisturbed, tmp_path, fault_tolerance, remat):
    """With f = 1 one by one, with f = 2 also two at once; and, each time, one while the others recover.

    What is computed again in the backward changes no bit: the run to compare with need not do it, too.
    """
    kills = parse_injections(KILLS[fault_tolerance].replace(" ", ","))
    run = train(
        tmp_path / "run",
        *("--nodes", str(len(kills) + 1), "--plan", PLANS[fault_tolerance], "--trace"),
        *("--fault-tolerance", str(fault_tolerance), "--remat", remat, "--inject", ",".join(map(str, kills))),
    )
    assert_equal_losses(run, undisturbed)
    assert_equal_holders(run)
    lost = {node: incident for incident in incidents_of(run) if incident.kind == "loss" for node in incident.nodes}
    assert sorted(lost) == list(range(len(kills))), story_of(run)
    for kill in kills:
        incident = lost[kill.node]
        assert ("SIGKILL" if kill.kind is Kind.KILL else f"an error on purpose (--inject {kill})") in incident.cause
        assert incident.step - kill.step in (0, 1), f"{kill} became {incident}"
    assert_traced(run.run_dir, num_nodes=len(kills) + 1)
    assert_ends_of_logs_are_shown(run, [kill for kill in kills if kill.kind is Kind.RAISE])


def test_kills_in_mixed_precision_change_nothing_T1_T2_T3_T4(undisturbed_mixed, tmp_path):
    """To the bit until the batch is split another way; then nearly so."""
    flags = ("--precision", "mixed", "--nodes", "4", "--plan", "0-3,3-6 | 0-3,3-6", "--fault-tolerance", "1")
    run = train(tmp_path / "run", *flags, "--inject", "kill:0@10:backward,kill:3@25:sum")
    assert_equal_bits(run, undisturbed_mixed, steps=10)
    assert_equal_losses(run, undisturbed_mixed, bound=IN_MIXED_PRECISION)
    assert_equal_holders(run)
    assert [incident.nodes for incident in incidents_of(run) if incident.kind == "loss"] == [(0,), (3,)], story_of(run)


def assert_ends_of_logs_are_shown(run: LiveRun, errors: list[Injection]) -> None:
    """The terminal shows what a worker wrote last that failed by an error of its own, and nothing of killed ones."""
    out = run.output.read_text()
    assert out.count("the end of its log") == len(errors)
    for error in errors:
        log = run.run_dir / "logs" / f"node-{error.node}.log"
        _, _, end = out.partition(f"\n  the end of its log ({log}):\n")
        shown = [line.strip() for line in takewhile(lambda line: line.startswith("    "), end.splitlines())]
        assert f"RuntimeError: an error on purpose (--inject {error})" in shown, out
        assert set(shown) < {line.strip() for line in log.read_text().splitlines()}


def assert_traced(run_dir: Path, *, num_nodes: int) -> None:
    """Whoever lived to the end of a step has told what it did in it."""
    timeline = read_timeline(run_dir)
    assert timeline.nodes == tuple(range(num_nodes))
    assert timeline.incidents
    assert {record.activity for trace in timeline.traces for record in trace.records} == set(Activity)
    assert any(map(sums_beside_backward, timeline.traces))
    for trace in timeline.traces:
        programs = [record for record in trace.records if record.activity in PROGRAMS]
        programs.sort(key=lambda record: record.began_ns)
        for one, next_one in pairwise(programs):
            assert one.ended_ns <= next_one.began_ns, (one, next_one)  # a node computes one thing after the other


def sums_beside_backward(trace: Trace) -> bool:
    """Whether some sum of gradients over nodes ran while the node computed others."""
    sums = [record for record in trace.records if record.activity is Activity.REDUCE]
    backwards = [record for record in trace.records if record.activity is Activity.BACKWARD]
    return any(
        one.step == other.step and one.began_ns < other.ended_ns and other.began_ns < one.ended_ns
        for one in sums
        for other in backwards
    )


def test_nodes_that_leave_come_hang_and_are_killed_from_outside_change_nothing_T2_T3_T4(undisturbed, tmp_path):
    """One after the other; the last kill -9 is one that nothing in the program prepared."""
    faults = "term:2@6:backward,join@10,slow:3@10:0.4,stop:1@20:backward"  # slow: time to come
    flags = ("--nodes", "4", "--fault-tolerance", "1", "--remat", "none", "--schedule", "1f1b", "--inject", faults)
    with started(tmp_path / "run", *flags) as run:
        await_steps(run, 35)
        os.kill(run.workers[0], signal.SIGKILL)
        finish(run)
    assert_equal_losses(run, undisturbed)
    assert_equal_holders(run)
    incidents = incidents_of(run)
    (leave,) = [incident for incident in incidents if incident.kind == "leave"]
    assert leave.nodes == (2,)
    assert leave.num_redone_microbatches == 0
    assert [incident.nodes for incident in incidents if incident.kind == "loss"] == [(1,), (0,)], story_of(run)
    assert [record.node for _, record in run.records(events.Respawned)] == [1, 0]
    _, last = run.records(events.Planned)[-1]
    # Another one with the lowest free number, taken in by itself or with what came next; others perhaps come too late.
    assert any(2 in pipeline.nodes for pipeline in last.plan.pipelines), story_of(run)
