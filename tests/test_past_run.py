import json
import re
from pathlib import Path

import pytest

from oobleck_jax import events
from oobleck_jax.elastic.resumption import Resumption
from oobleck_jax.errors import ConfigError
from oobleck_jax.journal import read_journal
from oobleck_jax.past_run import PastRun, read_past
from oobleck_jax.planning.plan import NodeId
from tests.elastic.plans import plan_of


CONFIG = {"preset": "gpt-test", "steps": 9, "model": {"width": 32}}
VERSIONS = {"jax": "0.10.2"}
STARTED = events.Started(
    preset="gpt-test", num_nodes=3, fault_tolerance=1, steps=9, config_digest="d", versions=VERSIONS
)
PLANNED = [
    events.Planned(generation=1, step=0, reason="all are ready", plan=plan_of((0, 1), (2,)), plan_reason="given"),
    events.Planned(generation=2, step=2, reason="node 1 is lost", plan=plan_of((0,), (2,)), plan_reason="best"),
]
EVALUATED = events.Evaluated(generation=2, step=2, loss=3.0, num_tokens=8)


def committed(step: int) -> events.Committed:
    return events.Committed(
        generation=1 + step // 2, step=step, loss=5.0 - step, grad_norm=1.0, step_time_s=0.5, seconds={}
    )


def write(run_dir: Path, *records: events.Record, num_steps: int = 4, config: object = CONFIG) -> None:
    (run_dir / "config.json").write_text(json.dumps(config))
    times = iter(range(100))
    files = events.RunFiles(run_dir, clock=lambda: float(next(times)))
    for record in (STARTED, *records):
        files.write(record)
    for step in range(num_steps):
        files.write(committed(step))
    files.close()


def read(run_dir: Path) -> PastRun | None:
    return read_past(run_dir, config_json=json.dumps(CONFIG), versions=VERSIONS)


def test_a_new_directory_has_no_past(tmp_path: Path) -> None:
    assert read(tmp_path) is None


def test_the_journal_says_where_the_run_stands(tmp_path: Path) -> None:
    write(tmp_path, *PLANNED)
    past = read(tmp_path)
    assert past is not None
    assert [record for _, record in past.journal.committed] == list(map(committed, range(4)))
    assert past.records == (STARTED, *PLANNED, *map(committed, range(4)))
    assert past.is_open
    assert past.resumption == Resumption(
        generation=2,
        plan=PLANNED[-1].plan,
        step=4,
        committed=committed(3),
        nodes=(NodeId(0), NodeId(2)),
        evaluated=False,
    )


@pytest.mark.parametrize("num_steps", [3, 4], ids=["last-step", "step-before"])
def test_an_evaluation_counts_for_its_step(tmp_path: Path, num_steps: int) -> None:
    write(tmp_path, *PLANNED, EVALUATED, num_steps=num_steps)
    past = read(tmp_path)
    assert past is not None
    assert past.resumption.evaluated == (num_steps == 3)


def test_a_coordinator_may_die_before_there_is_a_plan(tmp_path: Path) -> None:
    write(tmp_path, num_steps=0)
    past = read(tmp_path)
    assert past is not None
    assert past.resumption == Resumption()


def test_every_prefix_of_the_journal_is_accepted_M2(tmp_path: Path) -> None:
    write(tmp_path, *PLANNED)
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    for length in range(len(whole) + 1):
        journal.write_bytes(whole[:length])
        past = read(tmp_path)
        assert past is not None
        # A line that was not written to its end is a decision that nobody has heard of.
        steps = [record.step for _, record in past.journal.committed]
        assert steps == list(range(whole[:length].count(b"\n")))
        files = events.RunFiles(tmp_path, goes_on_after=len(steps))
        files.write(committed(len(steps)))
        files.close()
        assert [record.step for _, record in read_journal(journal).committed] == [*steps, len(steps)]


def test_steps_that_were_given_up_count_no_more_T4(tmp_path: Path) -> None:
    write(tmp_path, *PLANNED, EVALUATED, num_steps=0)
    restored = events.Restored(generation=3, step=2, checkpoint="step-000001-generation-1", reason="no holder is left")
    files = events.RunFiles(tmp_path, goes_on_after=0)
    for record in (*map(committed, range(4)), restored, committed(2)):
        files.write(record)
    files.close()
    past = read(tmp_path)
    assert past is not None
    assert [record.step for _, record in past.journal.decided] == [0, 1, 2, 3, 2]
    assert [record.step for _, record in past.journal.committed] == [0, 1, 2]
    resumption = past.resumption
    assert (resumption.step, resumption.restored_generation, resumption.evaluated) == (3, 3, True)
    # What was decided before it went back must not be sent to a worker that comes back.
    assert resumption.committed is None


def test_a_run_may_begin_with_the_checkpoint_of_another(tmp_path: Path) -> None:
    write(tmp_path, num_steps=0)
    files = events.RunFiles(tmp_path, goes_on_after=0)
    files.write(events.Restored(generation=1, step=40, checkpoint="elsewhere", reason="begins there"))
    files.write(committed(40))
    files.close()
    past = read(tmp_path)
    assert past is not None
    assert (past.journal.first_step, past.resumption.step) == (40, 41)


def test_a_finished_run_says_how_it_ended(tmp_path: Path) -> None:
    write(tmp_path, events.Finished(steps=4, reason="all 4 steps are done", exit_code=0))
    past = read(tmp_path)
    assert past is not None
    assert not past.is_open
    assert past.resumption.nodes == ()
    assert re.match(
        r"its run is finished after 4 steps \(all 4 steps are done\); choose another", past.why_not(tmp_path)
    )


def test_what_differs_is_named(tmp_path: Path) -> None:
    write(tmp_path, config={**CONFIG, "steps": 8, "model": {"width": 64}})
    past = read(tmp_path)
    assert past is not None
    assert not past.is_open
    assert re.match(
        r"its run has other settings: steps 8 \(now 9\), model.width 64 \(now 32\); use the same",
        past.why_not(tmp_path),
    )


def test_other_software_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    past = read_past(tmp_path, config_json=json.dumps(CONFIG), versions={"jax": "0.12.0"})
    assert past is not None
    assert past.differences == ("jax 0.10.2 (now 0.12.0)",)


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(
        ConfigError, match=r"journal.jsonl is damaged: line 2 is step 2, not step 1.*; choose another --run-dir"
    ):
        read(tmp_path)
    journal.write_bytes(b"".join([lines[0], b"nonsense\n", lines[1]]))
    with pytest.raises(ConfigError, match=r"journal.jsonl is damaged"):
        read(tmp_path)
