"""What is read of a run while it goes on."""

import sys
from pathlib import Path

import pytest

from oobleck_jax import events
from oobleck_jax.live_run import LiveRun, LiveRunError
from tests.test_progress import committed


def test_records_are_read_as_they_come_and_only_when_they_are_complete(tmp_path: Path):
    run = LiveRun(tmp_path)
    assert (run.num_steps, run.records(events.Committed), run.metrics) == (0, [], [])
    files = events.RunFiles(tmp_path, clock=lambda: 5.0)
    files.write(committed(0))
    assert (run.num_steps, run.records(events.Committed)) == (1, [(5.0, committed(0))])
    files.write(committed(1))
    files.close()
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-5])
    assert run.num_steps == 1
    journal.write_bytes(whole)
    assert run.num_steps == 2
    assert run.records(events.Committed, since_s=5.5) == []


def test_steps_after_the_checkpoint_that_a_run_went_back_to_do_not_count(tmp_path: Path):
    files = events.RunFiles(tmp_path)
    for record in (
        *map(committed, range(4)),
        events.Restored(generation=2, step=2, checkpoint="step-000001", reason="layer 3 was lost"),
    ):
        files.write(record)
    files.close()
    assert LiveRun(tmp_path).num_steps == 2


def run_of(tmp_path: Path, code: str) -> LiveRun:
    return LiveRun(tmp_path / "run", [sys.executable, "-c", code])


def test_waiting_for_a_run_that_has_ended_fails_at_once(tmp_path: Path):
    run = run_of(tmp_path, "print('trouble'); raise SystemExit(3)")
    run.start()
    with pytest.raises(LiveRunError, match="ended with exit code 3 before there was step 5"):
        run.wait("step 5", lambda: run.num_steps > 5, limit_s=60.0)
    assert run.output.read_text() == "trouble\n"


def test_a_run_that_does_not_end_is_killed(tmp_path: Path):
    run = run_of(
        tmp_path, "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); signal.pause()"
    )
    run.start()
    with pytest.raises(LiveRunError, match="no step 5 within 0 s"):
        run.wait("step 5", lambda: run.num_steps > 5, limit_s=0.1)
    run.wait("output", lambda: run.output.read_text(), limit_s=60.0)
    with pytest.raises(LiveRunError, match="the run did not end within 0 s"):
        run.interrupt(limit_s=0.1)
    assert run.process is not None
    assert run.process.poll() == -9
