"""Runs that lose everything but their disk: they go on from a checkpoint, and the losses stay the same (T2, T4)."""

import os
import random
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oobleck_jax import events
from oobleck_jax.audit import audit
from oobleck_jax.checkpoint.store import MANIFEST
from oobleck_jax.data import TokenDataset
from oobleck_jax.errors import CheckpointDamaged
from oobleck_jax.live_run import LiveRun
from oobleck_jax.sampling import WholeModel
from oobleck_jax.saved_model import load_model
from scripts import export_hf
from tests.end_to_end.training_runs import (
    IN_MIXED_PRECISION,
    LIMIT_S,
    STEPS,
    assert_equal_holders,
    assert_equal_losses,
    await_steps,
    finish,
    incidents_of,
    started,
    story_of,
    train,
)


pytestmark = [pytest.mark.process, pytest.mark.timeout(3 * LIMIT_S)]


def committed(run: LiveRun) -> list[Path]:
    """Return the folders of the checkpoints that count, oldest first."""
    return sorted(path.parent for path in (run.run_dir / "checkpoints").glob(f"*/{MANIFEST}"))


def is_saving(run: LiveRun) -> bool:
    return any(not (path / MANIFEST).exists() for path in (run.run_dir / "checkpoints").glob("step-*"))


def kill_everything(run: LiveRun) -> None:
    """Kill coordinator, agents and workers while a checkpoint is written."""
    run.wait("checkpoint that is being written", lambda: is_saving(run), limit_s=LIMIT_S)
    run.kill_all()
    deadline_s = time.monotonic() + 10.0
    while run.workers or run.agents:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_cluster_may_be_killed_as_a_whole_at_any_time_T2_T4(undisturbed, tmp_path):
    """Twice every process is killed while a checkpoint is written; the second time the newest one is damaged, too.

    Each time the run goes on with another --remat, which changes nothing, either.
    """
    flags = ("--fault-tolerance", "1", "--checkpoint-every", "4")
    with started(tmp_path / "run", "--nodes", "4", "--remat", "stage", *flags) as run:
        await_steps(run, random.Random(time.time_ns()).randint(9, 16))
        run.wait("checkpoint", lambda: committed(run), limit_s=LIMIT_S)
        kill_everything(run)
    with started(tmp_path / "run", "--nodes", "4", "--remat", "dots", *flags) as run:
        await_steps(run, 30)
        run.wait("two checkpoints", lambda: len(committed(run)) > 1, limit_s=LIMIT_S)
        kill_everything(run)
    damaged = max(
        (path for path in committed(run)[-1].rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    flags += ("--remat", "none")
    run = train(tmp_path / "run", "--nodes", "3", *flags)

    assert_equal_losses(run, undisturbed)
    assert_equal_holders(run)
    assert any(str(damaged) in record.what for _, record in run.records(events.Damaged)), story_of(run)
    found = audit(run.run_dir)
    assert (found.end_step, found.violation) == (STEPS, None)
    assert found.num_restores == 3
    assert sum(incident.num_redone_steps for incident in incidents_of(run)) == found.num_undone_steps > 0
    assert not is_saving(run)  # what was half written is gone

    with started(tmp_path / "run", "--nodes", "3", *flags) as again:
        finish(again)
        assert f"this run is complete: all {STEPS} steps are done" in story_of(again)


def test_nodes_that_die_at_once_are_waited_for_and_the_run_goes_back_T2(undisturbed_mixed, tmp_path):
    """All workers die at once: no node holds any layer any more, and only the agents and the disk are left."""
    flags = ("--nodes", "3", "--fault-tolerance", "1", "--checkpoint-every", "10", "--inject", "slow:0@20:0.2")
    flags += ("--precision", "mixed")
    with started(tmp_path / "run", *flags) as run:
        run.wait("checkpoint", lambda: committed(run), limit_s=LIMIT_S)
        for worker in run.workers.values():
            os.kill(worker, signal.SIGKILL)
        finish(run)
    assert_equal_losses(run, undisturbed_mixed, bound=IN_MIXED_PRECISION)
    assert_equal_holders(run)
    loss = next(incident for incident in incidents_of(run) if incident.kind == "loss")
    assert loss.nodes == (0, 1, 2)
    found = audit(run.run_dir)
    assert (found.num_restores, found.num_undone_steps, found.violation) == (1, loss.num_redone_steps, None)


def test_a_model_goes_to_hugging_face_and_back_and_a_disk_that_refuses_stops_no_training(undisturbed, tmp_path):
    exported = tmp_path / "exported"
    assert export_hf.main(export_hf.Arguments(run_dir=undisturbed.run_dir, output=exported)) == 0
    (tmp_path / "file").touch()
    with started(
        tmp_path / "run",
        *("--init-from", str(exported), "--checkpoint-every", "20", "--checkpoint-dir", str(tmp_path / "file" / "x")),
    ) as run:
        finish(run)
    out = story_of(run)
    assert len(run.metrics) == STEPS
    warnings = [line for line in out.splitlines() if line.startswith("WARNING: no checkpoint of step ")]
    assert warnings[0].startswith("WARNING: no checkpoint of step 19: "), out
    assert warnings[-1].startswith("WARNING: no checkpoint of step 59: "), out
    assert all("Not a directory" in warning or "still being written" in warning for warning in warnings), out
    assert "Not a directory" in warnings[-1]

    def refuse(error: CheckpointDamaged) -> None:
        raise error

    saved = load_model(undisturbed.run_dir, step=None, on_damage=refuse)
    dataset = TokenDataset.open(saved.config)
    tokens = dataset.tokens(dataset.sample_indices(0))
    logits = WholeModel(saved.config.model.build(), saved.params).logits(tokens[:, :-1])
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    assert run.metrics[0]["loss"] == pytest.approx(-float(np.mean(picked)), rel=1e-5)
