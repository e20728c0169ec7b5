"""Whole runs in which nodes really die, hang, leave and come: the losses stay what they would have been (T2-T4)."""

import os
import signal

import pytest

from oobleck_jax import events
from tests.end_to_end.training_runs import LIMIT_S, Run, assert_equal_holders, assert_equal_losses, started, train


pytestmark = [pytest.mark.process, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    """A run to which nothing happens."""
    return train(tmp_path_factory.mktemp("recovery") / "undisturbed", "--nodes", "2", "--fault-tolerance", "1")


def test_a_kill_at_any_moment_of_a_step_changes_nothing_T2(undisturbed):
    """Four nodes of six die one after the other, each at another moment; two pipelines are left at any time."""
    moments = ["0@5:forward", "1@15:backward", "2@25:sum", "3@35:vote"]  # after its vote, the step counts or does not
    run = train(
        undisturbed.run_dir.parent / "moments",
        *("--nodes", "6", "--fault-tolerance", "1", "--inject", ",".join(f"kill:{moment}" for moment in moments)),
    )
    assert_equal_losses(run, undisturbed)
    assert_equal_holders(run)
    losses = [incident for incident in run.records(events.Incident) if incident.kind == "loss"]
    assert [incident.nodes for incident in losses] == [(0,), (1,), (2,), (3,)]
    assert [incident.step for incident in losses] in ([5, 15, 25, 35], [5, 15, 25, 36])
    assert all("SIGKILL" in incident.cause for incident in losses)


def test_two_at_once_and_one_during_the_recovery_change_nothing_T2(undisturbed):
    """With f = 2: two nodes die in the same step, two others when one is dead and the next generation prepares."""
    faults = "kill:1@10:backward,kill:2@10:backward,kill:3@40:commit,kill:4@41:recovery"
    run = train(undisturbed.run_dir.parent / "at-once", "--nodes", "6", "--fault-tolerance", "2", "--inject", faults)
    assert_equal_losses(run, undisturbed)
    assert_equal_holders(run)
    lost = [node for incident in run.records(events.Incident) if incident.kind == "loss" for node in incident.nodes]
    assert sorted(lost) == [1, 2, 3, 4]


def test_a_stopped_worker_is_named_and_replaced_T2(undisturbed):
    run = train(
        undisturbed.run_dir.parent / "stopped",
        *("--nodes", "3", "--fault-tolerance", "1", "--inject", "stop:1@20:backward"),
    )
    assert_equal_losses(run, undisturbed)
    assert_equal_holders(run)
    (incident,) = [incident for incident in run.records(events.Incident) if incident.kind == "loss"]
    assert incident.nodes == (1,)
    assert [record.node for record in run.records(events.Respawned)] == [1]


def test_a_node_that_must_leave_finishes_its_step_and_another_joins_T2(undisturbed):
    """No microbatch is done twice, and the node that leaves says it went well."""
    run = train(
        undisturbed.run_dir.parent / "leave-and-join",
        *("--nodes", "3", "--fault-tolerance", "1", "--max-nodes", "4", "--inject", "term:2@10:backward,join@12"),
    )
    assert_equal_losses(run, undisturbed)
    assert_equal_holders(run)
    incidents = {incident.kind: incident for incident in run.records(events.Incident)}
    assert incidents["leave"].nodes == (2,)
    assert incidents["leave"].num_redone_microbatches == 0
    assert "loss" not in incidents


def test_a_worker_killed_from_outside_comes_back_T2(undisturbed):
    """A kill -9 that nothing in the program prepared."""
    flags = ("--nodes", "3", "--fault-tolerance", "1", "--inject", "slow:0@15:0.2")  # time to come back
    with started(undisturbed.run_dir.parent / "outside", *flags) as run:
        run.await_steps(12)
        os.kill(run.workers[1], signal.SIGKILL)
        out = run.finish()
    assert_equal_losses(run, undisturbed)
    assert_equal_holders(run)
    kinds = [incident.kind for incident in run.records(events.Incident)]
    assert kinds == ["loss", "join"], out
