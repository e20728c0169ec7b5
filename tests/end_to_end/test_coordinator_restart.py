"""The coordinator is killed and started again: the same processes go on, and the losses stay the same (M2, T2)."""

import json
import random
import signal
import time

import pytest

from oobleck_jax import events
from tests.end_to_end.training_runs import (
    LIMIT_S,
    STEPS,
    assert_equal_bits,
    assert_equal_holders,
    assert_equal_losses,
    await_steps,
    finish,
    incidents_of,
    started,
    story_of,
)


pytestmark = [pytest.mark.process, pytest.mark.timeout(2 * LIMIT_S)]
AT_DECISION, AT_RANDOM, AT_LOSS = 12, 20, 40  # steps


def test_a_coordinator_may_die_at_any_moment_M2_T2_T1(undisturbed, tmp_path):
    """Between a decision and its announcement; at a random moment; and while nodes prepare after a loss.

    In the last case all workers meet in a fabric, whose service must not die with the coordinator. Up to that loss the
    plan is always that of the undisturbed run, and so is every bit.
    """
    flags = ("--nodes", "4", "--fault-tolerance", "1", "--plan", "0-3,3-6 | 0-3,3-6", "--orphan-minutes", "2")
    flags += ("--remat", "dots")  # not that of the other run: what is computed again changes no bit
    flags += ("--summary-json", str(tmp_path / "summary.json"))
    flags += ("--inject", f"coordinator@{AT_DECISION},kill:0@{AT_LOSS},slow:1@{AT_DECISION}:0.1")
    with started(tmp_path / "run", *flags) as run:
        await_steps(run, 5)
        workers = run.workers
        assert len(workers) == 4
        finish(run, exit_code=-signal.SIGKILL)
        # The decision of that step is in the journal; its metrics were written, too, or are made up for.
        assert run.workers == workers

        run.start()
        await_steps(run, AT_RANDOM)
        time.sleep(random.Random(time.time_ns()).uniform(0.0, 0.5))
        run.kill()
        assert run.workers == workers

        run.start()
        run.wait("loss of node 0", lambda: run.records(events.Respawned), limit_s=LIMIT_S)
        run.wait("plan after it", lambda: run.records(events.Planned)[-1][1].step == AT_LOSS, limit_s=LIMIT_S)
        time.sleep(random.Random(time.time_ns()).uniform(0.0, 0.3))
        run.kill()

        run.start()
        await_steps(run, AT_LOSS + 5)
        survivors = {node: process for node, process in workers.items() if node != 0}
        assert {node: process for node, process in run.workers.items() if node != 0} == survivors
        finish(run)
    assert_equal_bits(run, undisturbed, steps=AT_LOSS)
    assert_equal_losses(run, undisturbed)
    assert_equal_holders(run)
    journal = (run.run_dir / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in journal] == list(range(STEPS))
    assert next(record.step for _, record in run.records(events.Resumed)) == AT_DECISION + 1
    kinds = [incident.kind for incident in incidents_of(run)]
    assert kinds[:2] == ["coordinator", "coordinator"], story_of(run)
    assert [record.node for _, record in run.records(events.Respawned)] == [0]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == STEPS
    assert run.agents == {}
    assert run.workers == {}
