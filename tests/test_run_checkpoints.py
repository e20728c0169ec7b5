import logging
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from models.presets import config_to_json, load_preset
from oobleck_jax import run_checkpoints as run_checkpoints_module
from oobleck_jax.checkpoint.named_arrays import named_arrays
from oobleck_jax.checkpoint.object_store import ObjectPath
from oobleck_jax.checkpoint.store import CheckpointStore, checkpoints_of
from oobleck_jax.checkpoint.writer import write_group
from oobleck_jax.elastic.effects import CheckpointCommitted, CheckpointFailed, CheckpointFound
from oobleck_jax.elastic.messages import RestorePoint
from oobleck_jax.errors import ConfigError, ObjectStoreError
from oobleck_jax.run_checkpoints import RunCheckpoints, checkpoint_folder, link_checkpoints
from tests.checkpoint.checkpoints import save, states
from tests.checkpoint.s3_server import served


pytest.importorskip("s3fs")
ADDRESS = "s3://bucket/runs/a"


def linked(run_dir: Path, given: str | None) -> object:
    """Do what a run does when it starts; return where its checkpoints are."""
    run_dir.mkdir(exist_ok=True)
    store = CheckpointStore(checkpoint_folder(given, run_dir))
    link_checkpoints(run_dir, store)
    return store.root


def test_checkpoints_are_found_from_the_run_directory_wherever_they_are(tmp_path: Path) -> None:
    assert linked(tmp_path / "a", None) == tmp_path / "a" / "checkpoints"
    assert linked(tmp_path / "b", str(tmp_path / "elsewhere")) == tmp_path / "elsewhere"
    assert linked(tmp_path / "c", f"{ADDRESS}/") == ObjectPath(address=ADDRESS)
    (tmp_path / "elsewhere").mkdir()
    for name, root in (("b", tmp_path / "elsewhere"), ("c", ObjectPath(address=ADDRESS))):
        run_dir = tmp_path / name
        assert linked(run_dir, None) == linked(run_dir, str(root)) == root
        found = checkpoints_of(run_dir)
        assert (found.resolve() if isinstance(found, Path) else found) == root


@pytest.mark.parametrize("first", ["elsewhere", ADDRESS])
@pytest.mark.parametrize("second", ["other", "s3://bucket/runs/b"])
def test_a_run_keeps_its_checkpoints_in_one_place(
    first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = linked(tmp_path / "run", first)
    with pytest.raises(ConfigError, match=f"has its checkpoints in {root}; leave it out, or choose another --run-dir"):
        linked(tmp_path / "run", second)


def run_checkpoints(store: CheckpointStore) -> RunCheckpoints:
    config = load_preset("gpt-test")
    return RunCheckpoints(
        store, config=config, config_json=config_to_json("gpt-test", config), versions={"jax": "1"}, keep=1, find_s=9.0
    )


def refuse(path: ObjectPath, *_: object) -> NoReturn:
    raise ObjectStoreError(path, "not now")


@pytest.mark.parametrize("question", ["newest", "last_generation"])
def test_a_run_does_not_begin_anew_where_nobody_can_tell_what_there_is(
    question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(store, question, partial(refuse, ObjectPath(address=ADDRESS)))
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be read: not now; so nobody knows"):
        run_checkpoints(store).start()


def test_a_bucket_that_is_not_there_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be found out when the last step is to be saved."""
    with served() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        assert run_checkpoints(CheckpointStore(ObjectPath(address=f"s3://{server.bucket}/a"))).start() == (None, 0)
        with pytest.raises(ConfigError, match="s3://bukcet/a: there is no such bucket; make it, or give another"):
            run_checkpoints(CheckpointStore(ObjectPath(address="s3://bukcet/a"))).start()


def test_a_store_that_cannot_be_read_for_a_while_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_checkpoints_module, "_AGAIN_S", 0.01)
    store = CheckpointStore(tmp_path)
    saved, newest, failures = save(store, step=1), store.newest, [1, 2, 3]

    def sometimes(**wanted: Any) -> object:
        if failures:
            failures.pop()
            refuse(ObjectPath(address=ADDRESS))
        return newest(**wanted)

    monkeypatch.setattr(store, "newest", sometimes)
    assert run_checkpoints(store).find((), None).point == RestorePoint(folder=str(saved.folder), step=1)
    assert failures == []


def test_a_store_that_cannot_be_read_is_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_checkpoints_module, "_AGAIN_S", 9.0)  # too late
    monkeypatch.setattr(ObjectPath, "folders", refuse)
    found = run_checkpoints(CheckpointStore(ObjectPath(address=ADDRESS))).find((), None)
    assert found == CheckpointFound(point=None, unread=f"{ADDRESS} cannot be read: not now")


def test_a_store_that_fails_costs_no_more_than_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectPath, "sizes", refuse)
    checkpoints = run_checkpoints(CheckpointStore(ObjectPath(address=ADDRESS)))
    outcome = checkpoints.commit(3, 1, {}, before=lambda: None)
    reason = f"{ADDRESS}/step-000003-generation-1: not now"
    assert outcome == CheckpointFailed(generation=1, step=3, reason=reason)


def test_a_checkpoint_counts_even_if_older_ones_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, step=1)
    folder = store.folder(step=2, generation=1)
    group = {"wte": write_group(folder, "wte", named_arrays(states(0)["wte"]))}

    def fail(_: CheckpointStore, **__: object) -> None:
        raise OSError(5, "not now")

    monkeypatch.setattr(CheckpointStore, "clean_up", fail)
    with caplog.at_level(logging.WARNING):
        outcome = run_checkpoints(store).commit(2, 1, group, before=lambda: None)
        run_checkpoints(store).clean(3, 1)
    assert isinstance(outcome, CheckpointCommitted)
    assert outcome.removed == ()
    assert [record.getMessage() for record in caplog.records] == [f"{store.root} cannot be cleaned up: not now"] * 2
    assert [msgspec.structs.asdict(item.manifest)["step"] for item in store.find().checkpoints] == [2, 1]
