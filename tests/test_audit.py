"""What the files of a run prove, and that each thing that must not be is found."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from models.presets import config_to_json, load_preset
from oobleck_jax import audit as audit_module, events
from oobleck_jax.audit import Audit, audit
from oobleck_jax.checkpoint.object_store import ObjectPath
from oobleck_jax.checkpoint.store import CheckpointStore
from oobleck_jax.data import TokenDataset
from oobleck_jax.errors import ConfigError, DataError, ObjectStoreError
from oobleck_jax.journal import read_journal
from oobleck_jax.script import run_script
from scripts.audit import Arguments, main
from tests.checkpoint.checkpoints import save
from tests.elastic.plans import plan_of


CONFIG = load_preset("gpt-test")
BATCH = CONFIG.global_batch_size

Decision: TypeAlias = tuple[int, int] | events.Restored
"""(generation, step) of a commit, or a restore."""


def restored(generation: int, step: int) -> events.Restored:
    return events.Restored(generation=generation, step=step, checkpoint="step", reason="no holder is left")


def write(run_dir: Path, decisions: Sequence[Decision], *, more: Sequence[events.Record] = ()) -> None:
    """Write the files of a run that decided this."""
    (run_dir / "config.json").write_text(config_to_json("gpt-test", CONFIG))
    files = events.RunFiles(run_dir)
    generation = 0
    for decision in decisions:
        if isinstance(decision, events.Restored):
            files.write(decision)
            continue
        if decision[0] > generation:
            generation, step = decision
            files.write(
                events.Planned(generation=generation, step=step, reason="x", plan=plan_of((0,)), plan_reason="x")
            )
        files.write(
            events.Committed(generation=decision[0], step=decision[1], loss=1.0, grad_norm=1.0, step_time_s=1.0)
        )
        files.write_metrics(metrics(decision[0], decision[1]))
    for record in more:
        files.write(record)
    files.close()


def metrics(generation: int, step: int) -> events.StepMetrics:
    return events.StepMetrics(
        step=step,
        generation=generation,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens_per_s=1.0,
        step_time_s=1.0,
        sample_first=step * BATCH,
        sample_end=(step + 1) * BATCH,
    )


def commits(generation: int, first: int, end: int) -> list[Decision]:
    return [(generation, step) for step in range(first, end)]


def test_a_run_with_incidents_and_restores_uses_each_sample_once_T4(tmp_path: Path) -> None:
    write(tmp_path, [*commits(1, 0, 7), *commits(2, 7, 12), restored(4, 5), *commits(4, 5, 9), *commits(5, 9, 20)])
    assert audit(tmp_path) == Audit(
        first_step=0,
        end_step=20,
        num_generations=4,
        num_restores=1,
        num_undone_steps=7,
        num_samples=20 * BATCH,
        num_samples_per_pass=TokenDataset.open(CONFIG).num_train_samples,
        violation=None,
    )


def test_a_run_may_begin_with_the_checkpoint_of_another(tmp_path: Path) -> None:
    write(tmp_path, [restored(1, 40), *commits(1, 40, 44), restored(2, 41), *commits(2, 41, 43)])
    found = audit(tmp_path)
    assert (found.first_step, found.end_step, found.num_undone_steps, found.violation) == (40, 43, 3, None)


def test_a_run_may_go_back_to_a_checkpoint_before_its_own_beginning(tmp_path: Path) -> None:
    write(tmp_path, [restored(1, 40), restored(2, 30), *commits(2, 30, 34), restored(3, 20), *commits(3, 20, 23)])
    found = audit(tmp_path)
    assert (found.first_step, found.end_step, found.num_undone_steps, found.violation) == (20, 23, 4, None)
    assert read_journal(tmp_path / "journal.jsonl").next_step == 23


def test_a_run_that_has_just_begun_has_no_violation(tmp_path: Path) -> None:
    write(tmp_path, [])
    assert audit(tmp_path).violation is None


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ([*commits(1, 0, 3), (1, 2)], "journal.jsonl, line 4: step 2 is committed again; step 3 was next"),
        ([*commits(1, 0, 3), (1, 4)], "journal.jsonl, line 4: step 4 is committed, but step 3 was not"),
        ([(1, 1)], "journal.jsonl, line 1: step 1 is committed, but step 0 was not"),
        ([(2, 0), (1, 1)], "journal.jsonl, line 2: generation 1 committed after generation 2"),
        ([(1, 0), restored(2, 5)], "journal.jsonl, line 2: goes on with step 5, but the run has 0 to 0"),
    ],
)
def test_a_decision_out_of_order_is_named_M1_M2(decisions: list[Decision], message: str, tmp_path: Path) -> None:
    write(tmp_path, decisions)
    assert audit(tmp_path).violation == message


def test_a_generation_that_skips_its_first_step_is_named(tmp_path: Path) -> None:
    write(tmp_path, commits(1, 0, 3))
    content = (tmp_path / "events.jsonl").read_text()
    (tmp_path / "events.jsonl").write_text(content.replace('"step":0', '"step":1'))
    assert audit(tmp_path).violation == "generation 1 began with step 1, but its first commit is step 0"
    (tmp_path / "events.jsonl").write_text("")
    assert "does not say it began" in str(audit(tmp_path).violation)


def test_a_wrong_number_of_steps_at_the_end_is_named(tmp_path: Path) -> None:
    write(tmp_path, commits(1, 0, 3), more=[events.Finished(steps=4, reason="done", exit_code=0)])
    assert audit(tmp_path).violation == "the run says it has 4 steps, but its journal has 3"


def test_recorded_samples_that_differ_or_lack_are_named(tmp_path: Path) -> None:
    write(tmp_path, commits(1, 0, 4))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert audit(tmp_path).violation is None  # a coordinator may die between journal and metrics
    path.write_text("".join(lines[:1] + lines[2:]))
    assert audit(tmp_path).violation == "metrics.jsonl does not say which samples step 1 used"
    path.write_text("".join(lines).replace('"sample_first":16', '"sample_first":15'))
    assert audit(tmp_path).violation == (
        "metrics.jsonl: step 2 used the samples 15 to 23 of the sequence, it should have used 16 to 23"
    )


def test_a_sample_that_comes_twice_in_a_pass_is_named_T4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(positions: np.ndarray, num_samples: int, *, seed: int, passes: np.ndarray) -> np.ndarray:
        return np.where(positions == 21, 3, positions)

    write(tmp_path, commits(1, 0, 6))
    monkeypatch.setattr(audit_module, "shuffled", broken)
    assert audit(tmp_path).violation == "step 2 used sample 3 again within pass 0"


def test_checkpoints_tell_the_size_of_a_pass(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path / "checkpoints"), step=1)
    write(tmp_path, commits(1, 0, 300))
    found = audit(tmp_path)
    assert (found.num_samples_per_pass, found.violation) == (1000, None)
    assert found.num_passes == pytest.approx(2.4)


def test_a_run_over_many_passes_uses_each_sample_once_in_each_T4(tmp_path: Path) -> None:
    write(tmp_path, commits(1, 0, 20_000))
    found = audit(tmp_path)
    assert found.violation is None
    assert found.num_passes > 5


def test_the_script_reports_in_words_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, commits(1, 0, 3))
    assert main(Arguments(run_dir=tmp_path, json=tmp_path / "audit.json")) == 0
    assert "3 steps, 0 to 2, each committed once" in capsys.readouterr().out
    assert json.loads((tmp_path / "audit.json").read_text())["violation"] is None
    write(tmp_path, [(1, 0), (1, 2)])
    (tmp_path / "config.json").write_text(config_to_json("gpt-test", CONFIG))
    assert main(Arguments(run_dir=tmp_path)) == 1
    assert "VIOLATION" in capsys.readouterr().out
    assert run_script(main, Arguments(run_dir=tmp_path / "absent")) == 2


def test_texts_of_another_python_are_not_compared(tmp_path: Path) -> None:
    started = events.Started(
        preset="gpt-test", num_nodes=1, fault_tolerance=0, steps=3, config_digest="", versions={"python": "2.7"}
    )
    write(tmp_path, commits(1, 0, 3), more=[started])
    with pytest.raises(
        DataError, match=r"took its data from Python 2\.7, this is Python .*; audit it with that version"
    ):
        audit(tmp_path)


def test_data_that_is_too_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, commits(1, 0, 3))
    monkeypatch.setattr(TokenDataset, "num_train_samples", 0)
    with pytest.raises(DataError, match="builtin has no training sample of 16 tokens; is it the file of this run"):
        audit(tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, commits(1, 0, 3))
    (tmp_path / "journal.jsonl").write_text("nonsense\n")
    with pytest.raises(ConfigError, match=r"journal\.jsonl is damaged"):
        audit(tmp_path)


def test_a_store_that_cannot_be_read_leaves_the_data_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: ObjectPath) -> None:
        raise ObjectStoreError(path, "not now")

    pytest.importorskip("s3fs")
    write(tmp_path, commits(1, 0, 3))
    (tmp_path / "checkpoints").write_text("s3://bucket/a\n")
    monkeypatch.setattr(ObjectPath, "folders", refuse)
    assert audit(tmp_path).num_samples_per_pass == TokenDataset.open(CONFIG).num_train_samples
    (record,) = caplog.records
    assert "the checkpoints cannot be read, so the data tells" in record.getMessage()
    assert "s3://bucket/a: not now" in record.getMessage()
