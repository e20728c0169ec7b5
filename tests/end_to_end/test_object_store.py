"""A run whose checkpoints are in an object store, from the first save to what programs make of the model."""

import random
import time
from pathlib import Path

import pytest

from oobleck_jax import events
from oobleck_jax.audit import audit
from oobleck_jax.checkpoint.store import CheckpointStore, checkpoints_of
from oobleck_jax.live_run import LiveRun
from oobleck_jax.saved_model import load_model
from scripts import audit as audit_script, export_hf, generate
from tests.checkpoint.s3_server import S3Server, served
from tests.end_to_end.training_runs import (
    LIMIT_S,
    STEPS,
    assert_equal_holders,
    assert_equal_losses,
    finish,
    started,
    story_of,
)


pytestmark = [pytest.mark.process, pytest.mark.timeout(3 * LIMIT_S)]
pytest.importorskip("s3fs")


def refusals(run: LiveRun) -> list[str]:
    """Return what was said of the checkpoints that the store did not take."""
    failed = [record for _, record in run.records(events.NotCheckpointed)]
    return [f"no checkpoint of step {record.step}: {record.reason}" for record in failed if "Access" in record.reason]


def committed(server: S3Server) -> list[str]:
    """Return the names of the checkpoints that count, oldest first."""
    return sorted(name.split("/")[3] for name in list(server.objects) if name.endswith("/manifest.json"))


def await_nothing_left(run: LiveRun) -> None:
    deadline_s = time.monotonic() + 10.0
    while run.workers or run.agents:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_cluster_that_is_killed_as_a_whole_goes_on_from_an_object_store_T2_T4(
    undisturbed: LiveRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "tmp").mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
        place = f"s3://{server.bucket}/runs/a"
        flags = ("--nodes", "2", "--fault-tolerance", "1", "--checkpoint-every", "10", "--keep", "2")
        server.refused = frozenset({"PUT"})
        with started(tmp_path / "run", *flags, "--checkpoint-dir", place, "--inject", "slow:0@9:0.4") as run:
            run.wait("refusal", lambda: refusals(run), limit_s=LIMIT_S)
            server.refused = frozenset()
            run.wait("checkpoint", lambda: committed(server), limit_s=LIMIT_S)
            time.sleep(random.Random(time.time_ns()).random())  # somewhere in the steps or in a save that follow
            run.kill_all()
            await_nothing_left(run)
        assert not (tmp_path / "run" / "checkpoints").is_dir()
        # The run directory says where its checkpoints are.
        with started(tmp_path / "run", *flags) as run:
            finish(run)

        assert_equal_losses(run, undisturbed)
        assert_equal_holders(run)
        assert f"WARNING: {refusals(run)[0]}" in story_of(run)
        restored = [record.checkpoint for _, record in run.records(events.Restored)]
        assert len(restored) == 1
        assert restored[0].startswith(f"{place}/step-0000"), story_of(run)
        assert committed(server)[-1].startswith(f"step-0000{STEPS - 1}")
        assert len(committed(server)) == 2
        assert list((tmp_path / "tmp").glob("*oobleck*")) == []
        found = audit(run.run_dir)
        assert (found.end_step, found.num_restores, found.violation) == (STEPS, 1, None)

        saved = CheckpointStore(checkpoints_of(run.run_dir)).find().checkpoints[0]
        largest = max(saved.manifest.groups["layer-000"].files.items(), key=lambda item: item[1].num_bytes)[0]
        damaged = f"{saved.folder}/layer-000/{largest}"
        content = server.objects[damaged.removeprefix("s3://")]
        server.objects[damaged.removeprefix("s3://")] = content[:-1] + bytes([content[-1] ^ 1])
        errors: list[str] = []
        older = load_model(run.run_dir, step=None, on_damage=lambda error: errors.append(str(error)))
        assert older.checkpoint.step < saved.step
        assert damaged in errors[0]
        server.objects[damaged.removeprefix("s3://")] = content

        assert audit_script.main(audit_script.Arguments(run_dir=run.run_dir)) == 0
        exported = tmp_path / "exported"
        assert export_hf.main(export_hf.Arguments(run_dir=run.run_dir, output=exported)) == 0
        capsys.readouterr()
        arguments = generate.Arguments(run_dir=run.run_dir, prompt="ab", max_new_tokens=3)
        assert generate.main(arguments) == 0
        out, err = capsys.readouterr()
        assert out.startswith("ab")
        assert err == ""
