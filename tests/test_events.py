import json
from pathlib import Path

import msgspec
import pytest

from oobleck_jax import events
from oobleck_jax.events import RunFiles, read_events
from oobleck_jax.planning.plan import NodeId
from tests.elastic.plans import plan_of


COMMITTED = events.Committed(generation=1, step=0, loss=5.5, grad_norm=1.0, step_time_s=0.5)
PLANNED = events.Planned(generation=1, step=0, reason="all nodes are ready", plan=plan_of((0, 1)), plan_reason="given")


def test_each_record_goes_to_its_file_with_its_time(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, clock=lambda: 1234.5678)
    files.write(PLANNED)
    files.write(COMMITTED)
    files.write(events.Advanced(node=NodeId(0), generation=1, phase="compile", done=1, total=2))
    files.close()
    assert list(read_events(tmp_path / "events.jsonl")) == [(1234.568, PLANNED)]
    assert list(read_events(tmp_path / "journal.jsonl")) == [(1234.568, COMMITTED)]
    assert json.loads((tmp_path / "events.jsonl").read_text())["event"] == "planned"


def test_a_line_is_complete_as_soon_as_it_is_written(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write(COMMITTED)
    files.write_metrics(
        events.StepMetrics(
            step=0,
            generation=1,
            loss=5.5,
            grad_norm=1.0,
            learning_rate=0.1,
            tokens_per_s=10.0,
            step_time_s=0.5,
            sample_first=0,
            sample_end=8,
        )
    )
    # Not closed: this is what is left when the coordinator is killed here.
    assert len(list(read_events(tmp_path / "journal.jsonl"))) == 1
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["sample_end"] == 8
    files.close()


def test_files_that_go_on_lose_only_what_was_cut_short(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'{"a":1}\n{"b"')
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":0}\n{"step":1}\n{"st')
    (tmp_path / "journal.jsonl").write_bytes(b"x\n")
    files = RunFiles(tmp_path, goes_on_after=1, clock=lambda: 1.0)
    assert files.num_metrics == 1
    files.write(COMMITTED)
    files.close()
    assert (tmp_path / "events.jsonl").read_bytes() == b'{"a":1}\n'
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step":0}\n'  # not more steps than the journal has
    assert (tmp_path / "journal.jsonl").read_bytes().startswith(b'x\n{"time":1.0')


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"time":1.0,"event":"invented"}\n')
    with pytest.raises(msgspec.ValidationError, match="invented"):
        list(read_events(tmp_path / "events.jsonl"))
