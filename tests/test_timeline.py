"""Traces of workers: what they hold, what Perfetto and people are shown of them."""

import json
import threading
import time

import pytest

from oobleck_jax import events
from oobleck_jax.errors import ConfigError
from oobleck_jax.execution.recorder import Activity, FileRecorder, NoRecorder, Stopwatch, make_recorder
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.script import run_script
from oobleck_jax.step_shares import PARTS, shares_table, step_shares
from oobleck_jax.timeline import plot_timeline, read_timeline, write_chrome
from scripts.timeline import Arguments, main
from tests.test_progress import incident


def wait_for_lines(path, count):
    """The file is written by another thread."""
    for _ in range(500):
        if len(events.complete_lines(path)) >= count:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{path} has {path.read_bytes()!r}")


@pytest.fixture
def run_dir(tmp_path):
    """A run of two nodes and two steps, with an incident in the second."""
    now_s = time.monotonic()
    for node in range(2):
        recorder = make_recorder(tmp_path / "trace", NodeId(node), 0)
        for step in range(2):
            began_s = now_s - 1.6 + step + 0.1 * node
            recorder.add(Activity.RECEIVE, began_s, began_s + 0.1, step, 3)
            recorder.add(Activity.FORWARD, began_s + 0.1, began_s + 0.3, step, 3)
            recorder.add(Activity.VOTE, began_s + 0.3, began_s + 0.4, step)
            recorder.add(Activity.REDUCE, began_s + 0.2, began_s + 0.3, step)
            recorder.flush()
        wait_for_lines(tmp_path / "trace" / f"node-{node}-0.jsonl", 3)
    files = events.RunFiles(tmp_path)
    files.write(incident(step=1))
    files.close()
    return tmp_path


def test_what_is_recorded_can_be_read_again(run_dir):
    timeline = read_timeline(run_dir)
    assert timeline.nodes == (0, 1)
    first = timeline.traces[0].records[0]
    assert (first.activity, first.step, first.microbatch) == (Activity.RECEIVE, 0, 3)
    assert first.ended_ns - first.began_ns == pytest.approx(1e8, abs=10)
    # Both have the same clock: what began a tenth of a second later on the other node is shown so.
    assert timeline.traces[1].records[0].began_ns - first.began_ns == pytest.approx(1e8, abs=1e6)


def test_steps_can_be_chosen(run_dir):
    timeline = read_timeline(run_dir, steps=range(1, 2))
    assert {record.step for trace in timeline.traces for record in trace.records} == {1}
    assert len(timeline.incidents) == 1
    assert read_timeline(run_dir, steps=range(1)).incidents == ()  # it was later
    with pytest.raises(ConfigError, match=r"has nothing of steps .*; it may not have come that far"):
        read_timeline(run_dir, steps=range(7, 9))


def test_the_time_of_a_step_is_shared_out(run_dir):
    """Two steps with 0.6 s in between of which nothing is recorded; half of each program has a sum beside it."""
    rows = step_shares(read_timeline(run_dir))
    assert [(row.node, row.incarnation) for row in rows] == [(0, 0), (1, 0)]
    for row in rows:
        assert row.step_s == pytest.approx(0.7, abs=1e-6)
        expected = {"receive": 0.2, "compute": 0.4, "vote": 0.2, "other": 0.6}
        assert row.shares == pytest.approx({name: expected.get(name, 0) / 1.4 for name in PARTS}, abs=1e-6)
        assert row.hidden_sum == pytest.approx(0.2 / 1.4, abs=1e-6)


def test_the_shares_are_shown_for_each_worker_without_parts_that_nobody_has(run_dir, capsys):
    recorder = make_recorder(run_dir / "trace", NodeId(1), 1)
    recorder.add(Activity.BACKWARD, 1.0, 2.0, 2, 0)
    recorder.flush()
    wait_for_lines(run_dir / "trace" / "node-1-1.jsonl", 2)
    table = shares_table(step_shares(read_timeline(run_dir)))
    headings = [column.header for column in table.columns]
    assert headings == ["node", "seconds", "compute", "receive", "vote", "other", "sum beside compute"]
    assert list(table.columns[0].cells) == ["0", "1", "1, worker 1"]
    assert [cells[-1] for cells in (list(column.cells) for column in table.columns)][2:6] == [
        "100.0",
        "0.0",
        "0.0",
        "0.0",
    ]
    main(Arguments(run_dir=run_dir, output=run_dir / "steps.json"))
    assert "per cent of a step" in capsys.readouterr().out


def test_the_trace_has_the_form_that_perfetto_reads(run_dir, tmp_path):
    """The fields that Chrome's description of the format demands of complete ("X") and metadata ("M") events."""
    write_chrome(read_timeline(run_dir), tmp_path / "trace.json")
    told = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in told if event["ph"] == "X"]
    assert len(spans) == 2 * 2 * 4 + 1
    for event in told:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    nodes = [event for event in spans if event["cat"] != "incident"]
    assert all(event["dur"] >= 0 for event in spans)
    assert min(event["ts"] for event in nodes) == 0
    assert {event["args"]["microbatch"] for event in nodes if event["name"] == "forward"} == {3}
    names = {event["pid"]: event["args"]["name"] for event in told if event["name"] == "process_name"}
    assert names == {0: "incidents", 1: "node 0", 2: "node 1"}
    lanes = {event["name"]: event["tid"] for event in nodes}
    assert lanes == {"receive": 1, "forward": 0, "vote": 1, "reduce": 3}


def test_the_picture_names_activities_and_incidents(run_dir, tmp_path):
    plot_timeline(read_timeline(run_dir), tmp_path / "steps.svg", title="a run")
    drawn = (tmp_path / "steps.svg").read_text()
    for text in ("a run", "node 0", "node 1", "forward", "receive", "vote", " loss node 1"):
        assert f"<!-- {text}" in drawn


def test_the_script_writes_by_the_ending_of_the_name(run_dir, tmp_path, capsys):
    assert main(Arguments(run_dir=run_dir, output=tmp_path / "a.JSON", steps="0:1")) == 0
    assert json.loads((tmp_path / "a.JSON").read_text())["traceEvents"]
    assert main(Arguments(run_dir=run_dir, output=tmp_path / "a.png")) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert run_script(main, Arguments(run_dir=run_dir, output=tmp_path / "b.png", steps="5:2")) == 2
    assert "--steps 5:2 is not FIRST:END, such as 10:20" in capsys.readouterr().err
    assert run_script(main, Arguments(run_dir=tmp_path / "trace", output=tmp_path / "b.png")) == 2
    assert "start the run with --trace" in capsys.readouterr().err


def test_half_a_line_of_a_worker_that_was_killed_does_no_harm(run_dir):
    path = run_dir / "trace" / "node-0-0.jsonl"
    path.write_bytes(path.read_bytes() + b'[["forward",1')
    assert len(read_timeline(run_dir).traces[0].records) == 8
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="is damaged"):
        read_timeline(run_dir)


def test_laps_follow_one_another_without_a_gap():
    class Notes(NoRecorder):
        def __init__(self):
            self.told = []

        def add(self, activity, began_s, ended_s, step, microbatch=-1):
            self.told.append((activity, began_s, ended_s, step))

    notes = Notes()
    watch = Stopwatch(notes)
    watch.lap(Activity.SUM, 4)
    watch.lap(Activity.VOTE, 4)
    (_, _, summed_s, _), (activity, began_s, _, step) = notes.told
    assert (activity, step) == (Activity.VOTE, 4)
    assert began_s == summed_s


def test_a_disk_that_refuses_ends_the_trace_and_nothing_else(tmp_path, caplog):
    recorder = FileRecorder(tmp_path, node=NodeId(0), incarnation=0)
    recorder._file.close()
    recorder._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    recorder.add(Activity.SUM, 0.0, 1.0, 0)
    recorder.flush()
    recorder._writer.join(timeout=10)
    assert not recorder._writer.is_alive()
    assert "the trace /dev/full ends here: [Errno 28]" in caplog.text
    recorder.add(Activity.SUM, 0.0, 1.0, 0)
    recorder.flush()  # and goes on
    recorder._file.close()
