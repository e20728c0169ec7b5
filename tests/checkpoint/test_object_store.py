"""Checkpoints in an object store: a server of this process, and the client that users have."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from oobleck_jax.checkpoint import object_store as object_store_module
from oobleck_jax.checkpoint.named_arrays import named_arrays
from oobleck_jax.checkpoint.object_store import ObjectPath, object_path
from oobleck_jax.checkpoint.reader import read_group, read_params
from oobleck_jax.checkpoint.store import Checkpoint, CheckpointStore
from oobleck_jax.checkpoint.writer import CheckpointWriter, Outcome, Written, write_group
from oobleck_jax.errors import CheckpointDamaged, CheckpointUnwritable, ObjectStoreError
from tests.checkpoint.checkpoints import manifest, save, states
from tests.checkpoint.s3_server import S3Server, served


pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with served() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def server(running: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An empty store, and an empty place for temporary files."""
    running.objects.clear()
    running.refused = frozenset()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return running


@pytest.fixture
def store(server: S3Server) -> CheckpointStore:
    return CheckpointStore(place(server))


def place(server: S3Server) -> ObjectPath:
    path = object_path(f"s3://{server.bucket}/runs/a/")
    assert path is not None
    return path


def objects(server: S3Server, folder: object) -> list[str]:
    """Return the names of the objects in a folder, in the server's words."""
    prefix = f"{folder}/".removeprefix("s3://")
    return sorted(name for name in server.objects if name.startswith(prefix))


def test_states_come_back_to_the_bit_and_nothing_is_left_here(store: CheckpointStore, tmp_path: Path) -> None:
    assert store.newest() == (None, ())
    assert store.last_generation() == 0
    saved = save(store, step=4, seed=5)
    found, damaged = store.newest()
    assert (found, damaged) == (saved, ())
    for group, expected in states(5).items():
        arrays = read_params(saved, group)
        same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), arrays, expected.params)
        assert all(jax.tree.leaves(same))
    assert list(tmp_path.iterdir()) == []


def test_what_others_write_is_seen_at_once(store: CheckpointStore, server: S3Server) -> None:
    """Clients keep listings, in which what other processes have written since is missing."""
    saved = save(store, step=1)
    assert [item.step for item in store.find().checkpoints] == [1]
    copies = {name.replace("step-000001", "step-000002"): content for name, content in server.objects.items()}
    server.objects |= {name: content.replace(b'"step": 1', b'"step": 2') for name, content in copies.items()}
    assert store.find().checkpoints == (saved,)
    (damaged,) = store.find().damaged  # its checksum is that of the other
    assert str(damaged.file) == f"{store.root}/step-000002-generation-1/manifest.json"
    server.objects = {name: content for name, content in server.objects.items() if name not in copies}
    assert store.find().damaged == ()


def test_every_file_with_a_flipped_byte_is_named(store: CheckpointStore, server: S3Server, tmp_path: Path) -> None:
    saved = save(store, step=4)
    for name in objects(server, saved.folder / "layer-000"):
        content = server.objects[name]
        if not content:
            continue
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 0x10
        server.objects[name] = bytes(flipped)
        assert store.newest() == (saved, ())  # only whoever reads it finds out
        with pytest.raises(CheckpointDamaged, match="its checksum differs") as caught:
            read_group(saved, "layer-000")
        assert (caught.value.step, caught.value.group, str(caught.value.file)) == (4, "layer-000", f"s3://{name}")
        server.objects[name] = content
    read_group(saved, "layer-000")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_truncated_file_is_named_and_the_one_before_taken(
    store: CheckpointStore, server: S3Server
) -> None:
    older, saved = save(store, step=3), save(store, step=4)
    name = objects(server, saved.folder / "wte")[-1]
    content = server.objects.pop(name)
    for words in ("is missing", f"has {len(content) - 1} bytes, not the {len(content)} that were saved"):
        found, (damaged,) = store.newest()
        assert found == older
        assert str(damaged) == f"the checkpoint of step 4 is damaged: s3://{name} {words}"
        with pytest.raises(CheckpointDamaged, match=words) as caught:
            read_group(saved, "wte")
        assert (caught.value.group, str(caught.value.file)) == ("wte", f"s3://{name}")
        server.objects[name] = content[:-1]


def test_cleaning_keeps_the_newest_and_what_is_being_written_and_neighbours(
    store: CheckpointStore, server: S3Server
) -> None:
    neighbour = CheckpointStore(ObjectPath(f"{store.root}b"))
    save(neighbour, step=1)
    for step in (1, 2, 3):
        save(store, step=step)
    folders = [store.folder(step=step, generation=1) for step in (4, 5)]
    for folder in folders:
        write_group(folder, "wte", named_arrays(states(0)["wte"]))
    assert store.clean_up(keep=2, saving=folders[1]) == ("step-000001-generation-1", "step-000004-generation-1")
    left = {name.split("/")[3] for name in objects(server, store.root)}
    assert left == {f"step-00000{step}-generation-1" for step in (2, 3, 5)}
    assert [item.step for item in neighbour.find().checkpoints] == [1]


def test_what_makes_a_checkpoint_count_is_removed_first(
    store: CheckpointStore, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, step=1)
    save(store, step=2)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectPath, "remove", refuse)
        assert store.clean_up(keep=1) == ()
    assert [item.step for item in store.find().checkpoints] == [2]
    assert objects(server, store.folder(step=1, generation=1)) != []
    assert store.clean_up(keep=1) == ("step-000001-generation-1",)


def refuse(path: ObjectPath) -> None:
    raise ObjectStoreError(path, "not now")


def test_a_commit_without_its_files_is_refused(store: CheckpointStore) -> None:
    saved = save(store, step=1).manifest
    with pytest.raises(CheckpointDamaged, match="all nodes must write to the same folder"):
        CheckpointStore(ObjectPath(f"{store.root}b")).commit(saved)


def test_a_store_that_refuses_ends_the_save_and_nothing_else(
    store: CheckpointStore, server: S3Server, tmp_path: Path
) -> None:
    folder = store.folder(step=1, generation=1)
    record = write_group(folder, "wte", named_arrays(states(0)["wte"]))
    server.refused = frozenset({"PUT"})
    with pytest.raises(CheckpointUnwritable, match=r"manifest\.json cannot be written: .*AccessDenied"):
        store.commit(manifest({"wte": record}, step=1, generation=1))
    outcomes: list[Outcome] = []
    writer = CheckpointWriter()
    assert writer.begin(folder, states(1), outcomes.append)
    assert writer.wait(30)
    assert isinstance(outcomes[0], CheckpointUnwritable)
    assert str(outcomes[0]).startswith(f"{folder}/layer-000 cannot be written: PermissionError: AccessDenied; see ")
    assert store.newest() == (None, ())
    assert list(tmp_path.iterdir()) == []
    server.refused = frozenset()
    assert writer.begin(folder, states(1), outcomes.append)
    assert writer.wait(30)
    assert isinstance(outcomes[1], Written)


def test_a_bucket_that_is_not_there_has_no_checkpoints_and_takes_none(server: S3Server) -> None:
    store = CheckpointStore(ObjectPath("s3://absent/run"))
    assert store.newest() == (None, ())
    with pytest.raises(CheckpointUnwritable, match=r"there is no such place: .*NoSuchBucket"):
        save(store, step=1)


def test_a_full_disk_where_files_are_made_is_named(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(CheckpointUnwritable, match=f"No such file or directory \\(in {tmp_path}/absent, where"):
        save(store, step=1)


def test_a_store_that_cannot_be_read_is_no_store_without_checkpoints(store: CheckpointStore, server: S3Server) -> None:
    saved = save(store, step=1)
    server.refused = frozenset({"GET"})
    for ask in (store.find, store.newest, store.last_generation, lambda: store.clean_up(keep=1)):
        with pytest.raises(ObjectStoreError, match="AccessDenied"):
            ask()
    with pytest.raises(CheckpointDamaged, match=f"{saved.folder}/wte cannot be read: .*AccessDenied"):
        read_group(saved, "wte")
    server.refused = frozenset()
    assert store.newest() == (saved, ())


def test_a_manifest_that_the_store_does_not_give_away_is_not_damaged(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older checkpoint would be taken, or none."""
    save(store, step=1)
    monkeypatch.setattr(ObjectPath, "read_bytes", refuse)
    with pytest.raises(ObjectStoreError, match="not now"):
        store.newest()


def test_a_file_that_cannot_be_fetched_is_named(
    store: CheckpointStore, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: Checkpoint = save(store, step=1)
    name = objects(server, saved.folder / "wte")[0]
    sizes = (saved.folder / "wte").sizes()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(ObjectPath, "sizes", lambda path: sizes)
    del server.objects[name]  # after it was looked for
    with pytest.raises(CheckpointDamaged, match="cannot be read: No such file") as caught:
        read_group(saved, "wte")
    assert str(caught.value.file) == f"s3://{name}"


def test_a_store_that_does_not_answer_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    client = SimpleNamespace(
        invalidate_cache=lambda: None,
        _strip_protocol=lambda address: address,
        cat_file=lambda path: answers.wait(60),
    )
    monkeypatch.setattr(object_store_module, "_client", lambda root: client)
    monkeypatch.setattr(object_store_module, "_CALL_S", 0.05)
    with pytest.raises(ObjectStoreError, match="no answer within"):
        ObjectPath("s3://bucket/file").read_bytes()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "object-store"]
    assert thread.daemon  # the process may end
    answers.set()
    thread.join(10)


def test_neither_an_address_nor_its_client_brings_what_is_big(running: S3Server) -> None:
    """The coordinator asks the store, too."""
    code = (
        "import json, sys; from oobleck_jax.checkpoint.store import CheckpointStore;"
        "from oobleck_jax.checkpoint.object_store import object_path;"
        f"CheckpointStore(object_path('s3://{running.bucket}/x')).find(); print(json.dumps(list(sys.modules)))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=os.environ.copy())
    assert {"jax", "jaxlib", "orbax", "flax", "tensorflow", "etils"}.isdisjoint(json.loads(done.stdout))
    assert done.stderr == ""
