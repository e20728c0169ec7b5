"""The report of a run: one file, from what the run has left."""

import re
from pathlib import Path

import msgspec
import pytest

from models.presets import config_to_json, load_preset
from oobleck_jax import events, report
from oobleck_jax.config import RunConfig
from oobleck_jax.elastic.effects import Write
from oobleck_jax.elastic.terms import OnLoss
from oobleck_jax.report import read_report, write_report
from scripts.report import Arguments, main
from tests.dashboard.states import started
from tests.elastic.simulation import committing, kill


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of five steps in which a node was lost; what it is told by is real, but for the time."""
    simulation, nodes = committing(2, num_nodes=4, on_loss=OnLoss.REGROUP, steps=5)
    kill(simulation, nodes[1])
    simulation.pump()
    now_s = iter(range(1000, 2000))
    files = events.RunFiles(tmp_path, clock=lambda: float(next(now_s)))
    files.write(started())
    config = load_preset("gpt-test")
    for effect in simulation.history:
        if isinstance(effect, Write):
            record = effect.record
            if isinstance(record, events.Committed):
                record = msgspec.structs.replace(record, step_time_s=0.5)
                files.write_metrics(metrics(record, config))
            files.write(record)
    files.close()
    (tmp_path / "config.json").write_text(config_to_json("gpt-test", config))
    return tmp_path


def metrics(committed: events.Committed, config: RunConfig) -> events.StepMetrics:
    return events.StepMetrics(
        step=committed.step,
        generation=committed.generation,
        loss=committed.loss,
        grad_norm=committed.grad_norm,
        learning_rate=0.001,
        tokens_per_s=1000.0,
        step_time_s=committed.step_time_s,
        sample_first=committed.step * config.global_batch_size,
        sample_end=(committed.step + 1) * config.global_batch_size,
    )


def test_a_report_has_all_of_a_run_and_needs_nothing_else(run_dir: Path) -> None:
    write_report(read_report(run_dir), run_dir / "report.html")
    html = (run_dir / "report.html").read_text()
    assert html.startswith("<!doctype html>")
    assert not re.search(r'(src|href)="(?!#)', html)  # nothing from elsewhere
    assert html.count("<svg") == 1
    for text in (
        "gpt-test: 5 of",
        "5 steps, each committed once, in ",
        "SIGKILL",
        "because</th>",
        "node 0: embedding, block 0",
        "&quot;global_batch_size&quot;",
    ):
        assert text in html


def test_what_the_files_of_a_run_do_not_prove_is_told(run_dir: Path) -> None:
    journal = run_dir / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:3], *lines[4:]]))
    write_report(read_report(run_dir), run_dir / "report.html")
    assert (
        "VIOLATION: journal.jsonl, line 4: step 4 is committed, but step 3 was not"
        in (run_dir / "report.html").read_text()
    )


def test_a_report_is_written_even_if_files_cannot_be_read(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise OSError(5, "not now")

    monkeypatch.setattr(report, "audit", fail)
    write_report(read_report(run_dir), run_dir / "report.html")
    assert "[Errno 5] not now" in (run_dir / "report.html").read_text()


def test_causes_cannot_smuggle_html_in(run_dir: Path) -> None:
    path = run_dir / "events.jsonl"
    path.write_text(path.read_text().replace("SIGKILL", "<script>alert(1)</script>"))
    write_report(read_report(run_dir), run_dir / "report.html")
    assert "<script" not in (run_dir / "report.html").read_text()


def test_a_run_without_a_step_has_a_report(run_dir: Path) -> None:
    (run_dir / "journal.jsonl").write_bytes(b"")
    write_report(read_report(run_dir), run_dir / "report.html")
    assert "No step is committed yet." in (run_dir / "report.html").read_text()


def test_the_script_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Arguments(run_dir=tmp_path, output=tmp_path / "report.html")) == 2
    assert "is no folder of a run" in capsys.readouterr().err
