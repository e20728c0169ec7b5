"""The coordinator is killed and started again: the same processes go on, and the losses stay the same (M2, T2)."""

import json
import random
import time

import pytest

from oobleck_jax import events
from tests.end_to_end.training_runs import LIMIT_S, Run, assert_equal_holders, assert_equal_losses, started, train


pytestmark = [pytest.mark.process, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    """A run to which nothing happens."""
    return train(tmp_path_factory.mktemp("restart") / "undisturbed", "--nodes", "2", "--fault-tolerance", "1")


def test_a_coordinator_may_die_at_any_moment_M2_T2(undisturbed, tmp_path):
    """Once between a decision and its announcement, once at a random moment."""
    flags = ("--nodes", "3", "--fault-tolerance", "1", "--orphan-minutes", "2", "--summary-json")
    flags += (str(tmp_path / "summary.json"), "--inject", "coordinator@15,slow:1@16:0.1")
    with started(tmp_path / "run", *flags) as run:
        run.await_steps(10)
        workers = run.workers
        run.finish(exit_code=-9)
    # The decision of step 15 is in the journal; its metrics were written, too, or are made up for.
    assert len(workers) == 3
    assert run.workers == workers
    with started(tmp_path / "run", *flags) as run:
        run.await_steps(25)
        time.sleep(random.Random(time.time_ns()).uniform(0.0, 0.5))
        run.process.kill()
        run.process.wait()
        assert run.workers == workers
    with started(tmp_path / "run", *flags) as run:
        run.await_steps(40)
        assert run.workers == workers
        out = run.finish()

    assert_equal_losses(run, undisturbed)
    assert_equal_holders(run)
    assert [json.loads(line)["step"] for line in (run.run_dir / "journal.jsonl").read_text().splitlines()] == list(
        range(60)
    )
    assert next(record.step for record in run.records(events.Resumed)) == 16
    assert [incident.kind for incident in run.records(events.Incident)] == ["coordinator", "coordinator"], out
    assert run.records(events.Respawned) == []
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 60
    assert run.agents == {}
    assert run.workers == {}


def test_a_coordinator_may_die_while_nodes_prepare_M2_T2(undisturbed, tmp_path):
    """All workers meet in a fabric at this moment, whose service must not die with the coordinator."""
    flags = ("--nodes", "3", "--fault-tolerance", "1", "--orphan-minutes", "2", "--inject", "kill:0@20,slow:1@21:0.1")
    with started(tmp_path / "run", *flags) as run:
        run.await_steps(10)
        survivors = {node: pid for node, pid in run.workers.items() if node != 0}
        run.wait_for(lambda: len(run.records(events.Planned)) == 2, "second plan")
        time.sleep(random.Random(time.time_ns()).uniform(0.0, 0.3))
        run.process.kill()
        run.process.wait()
    with started(tmp_path / "run", *flags) as run:
        run.await_steps(25)
        workers = run.workers
        run.finish()
    assert {node: workers[node] for node in survivors} == survivors
    assert_equal_losses(run, undisturbed)
    assert_equal_holders(run)
