import json
from pathlib import Path

import pytest

from oobleck_jax import events
from oobleck_jax.elastic.resumption import Resumption
from oobleck_jax.errors import ConfigError
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
    assert past.committed == tuple(map(committed, range(4)))
    assert past.records == (STARTED, *PLANNED, *past.committed)
    assert past.resumption == Resumption(
        generation=2, plan=PLANNED[-1].plan, committed=committed(3), nodes=(NodeId(0), NodeId(2)), evaluated=False
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
        assert past.committed == tuple(map(committed, range(whole[:length].count(b"\n"))))
        files = events.RunFiles(tmp_path, goes_on_after=len(past.committed))
        files.write(committed(len(past.committed)))
        files.close()
        steps = [record.step for _, record in events.read_events(journal)]  # pyright: ignore
        assert steps == list(range(len(past.committed) + 1))


def test_a_finished_run_is_refused(tmp_path: Path) -> None:
    write(tmp_path, events.Finished(steps=4, reason="all 4 steps are done", exit_code=0))
    with pytest.raises(
        ConfigError, match=r"its run is finished after 4 steps \(all 4 steps are done\); choose another"
    ):
        read(tmp_path)


def test_another_run_is_refused_by_what_differs(tmp_path: Path) -> None:
    write(tmp_path, config={**CONFIG, "steps": 8, "model": {"width": 64}})
    with pytest.raises(
        ConfigError, match=r"other settings: steps 8 \(now 9\), model.width 64 \(now 32\); use the same"
    ):
        read(tmp_path)


def test_other_software_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"jax 0.10.2 \(now 0.12.0\)"):
        read_past(tmp_path, config_json=json.dumps(CONFIG), versions={"jax": "0.12.0"})


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(ConfigError, match=r"journal.jsonl is damaged: line 2 is step 2"):
        read(tmp_path)
    journal.write_bytes(b"".join([lines[0], b"nonsense\n", lines[1]]))
    with pytest.raises(ConfigError, match=r"journal.jsonl is damaged"):
        read(tmp_path)
