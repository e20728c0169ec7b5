"""A whole run with other schedules than 1F1B, in which nodes die: the losses stay what they would have been (T2-T4)."""

import os
import signal

import pytest

from oobleck_jax import events
from oobleck_jax.config import ScheduleKind
from oobleck_jax.live_run import LiveRun
from tests.end_to_end.training_runs import (
    LIMIT_S,
    assert_equal_holders,
    assert_equal_losses,
    finish,
    incidents_of,
    started,
    story_of,
)


pytestmark = [pytest.mark.process, pytest.mark.timeout(2 * LIMIT_S)]


def kinds_planned(run: LiveRun) -> list[set[ScheduleKind]]:
    """Return the schedules of each plan so far."""
    return [{pipeline.schedule for pipeline in record.plan.pipelines} for _, record in run.records(events.Planned)]


def test_kills_under_other_schedules_change_nothing_T2_T3_T4(undisturbed, tmp_path):
    """A pipeline is interleaved, the other one splits its backward; each loses a node, the one after the other."""
    plan, given = "0-1@0,1-3@1,3-5@0,5-6@1 | 0-3,3-6", {ScheduleKind.INTERLEAVED, ScheduleKind.ZB_H1}
    flags = ("--nodes", "4", "--plan", plan, "--schedule", "zb-h1", "--remat", "none", "--fault-tolerance", "1")
    faults = "kill:1@10:backward,slow:3@10:1.0"  # slow: time to come back
    with started(tmp_path / "run", *flags, "--inject", faults) as run:
        run.wait("the first plan again", lambda: given in kinds_planned(run)[1:], limit_s=LIMIT_S)
        os.kill(run.workers[3], signal.SIGKILL)
        finish(run)
    assert_equal_losses(run, undisturbed)
    assert_equal_holders(run)
    assert [incident.nodes for incident in incidents_of(run) if incident.kind == "loss"] == [(1,), (3,)], story_of(run)
    assert kinds_planned(run)[0] == given
