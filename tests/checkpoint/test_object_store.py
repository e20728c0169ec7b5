"""Checkpoints in an object store: a server of this process, and the client that users have."""

import asyncio
import errno
import importlib
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
from oobleck_jax.checkpoint.store import CheckpointStore
from oobleck_jax.checkpoint.writer import CheckpointWriter, Outcome, Written, write_group
from oobleck_jax.elastic.messages import RestorePoint
from oobleck_jax.errors import (
    Abandoned,
    CheckpointDamaged,
    CheckpointUnreadable,
    CheckpointUnwritable,
    ConfigError,
    ObjectStoreError,
)
from oobleck_jax.saved_states import reader_of
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
    running.refused, running.num_refused = frozenset(), 0
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(object_store_module, "_PAUSE_S", 0.01)
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
    neighbour = CheckpointStore(ObjectPath(address=f"{store.root}b"))
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


def test_what_makes_a_checkpoint_count_is_removed_first(store: CheckpointStore, server: S3Server) -> None:
    save(store, step=1)
    save(store, step=2)
    server.refused = frozenset({"POST"})  # removes many at once
    assert store.clean_up(keep=1) == ()
    server.refused = frozenset()
    assert [item.step for item in store.find().checkpoints] == [2]
    assert objects(server, store.folder(step=1, generation=1)) != []
    assert store.clean_up(keep=1) == ("step-000001-generation-1",)


def test_cleaning_ends_with_the_first_that_the_store_does_not_let_go(
    store: CheckpointStore, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Others would take as long to fail."""
    for step in (1, 2, 3, 4):
        save(store, step=step)
    server.refused = frozenset({"DELETE"})
    assert store.clean_up(keep=1) == ()
    (record,) = caplog.records
    assert (
        record.getMessage() == f"{store.folder(step=3, generation=1)} cannot be removed: PermissionError: AccessDenied"
    )


class FlatClient:
    """A client that takes a folder for a prefix, and keeps quiet about what it does not remove."""

    def __init__(self, names: list[str], *, kept: str = "") -> None:
        self.names, self.kept = names, kept

    def invalidate_cache(self) -> None:
        pass

    def _strip_protocol(self, address: str) -> str:
        return address.partition("://")[2]

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, int]]:
        return {name: {"size": 1} for name in self.names if name.startswith(path)}

    def rm_file(self, path: str) -> None:
        self.names.remove(path)

    def rm(self, paths: list[str]) -> None:
        self.names = [name for name in self.names if name not in paths or name == self.kept]


def test_a_folder_is_removed_without_those_whose_names_begin_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of generation 10 and generation 1: gcsfs 2025.3.0 removed both."""
    names = [
        f"bucket/step-000001-generation-{number}/{name}" for number in (1, 10) for name in ("manifest.json", "a/b")
    ]
    client = FlatClient([*names])
    monkeypatch.setattr(object_store_module, "_client", lambda path: client)
    folder = ObjectPath(address="gs://bucket/step-000001-generation-1")
    assert folder.sizes() == {"manifest.json": 1, "a/b": 1}
    folder.remove(first="manifest.json")
    assert client.names == names[2:]


def test_what_a_client_leaves_in_silence_is_not_said_to_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store_module, "_PAUSE_S", 0.01)
    client = FlatClient(["bucket/a/b", "bucket/a/c"], kept="bucket/a/c")
    monkeypatch.setattr(object_store_module, "_client", lambda path: client)
    with pytest.raises(ObjectStoreError, match="c is still there"):
        ObjectPath(address="gs://bucket/a").remove(first="manifest.json")


def test_a_commit_without_its_files_is_refused(store: CheckpointStore) -> None:
    saved = save(store, step=1).manifest
    with pytest.raises(CheckpointDamaged, match="all nodes must write to the same folder"):
        CheckpointStore(ObjectPath(address=f"{store.root}b")).commit(saved)


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
    store = CheckpointStore(ObjectPath(address="s3://absent/run"))
    assert store.newest() == (None, ())
    assert store.is_bucket_missing()
    with pytest.raises(CheckpointUnwritable, match=r"there is no such place: .*NoSuchBucket"):
        save(store, step=1)


def test_a_bucket_of_which_nothing_is_known_is_not_said_to_be_missing(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = ObjectPath(address=f"s3://{server.bucket}")
    assert not bucket.is_missing()
    server.refused = frozenset({"HEAD", "GET"})
    assert not bucket.is_missing()
    server.refused = frozenset()

    def fail(*_: object) -> None:
        raise FileNotFoundError(server.bucket)

    assert not bucket.is_missing()
    client = object_store_module._clients[str(bucket)]  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(client, "info", fail)
    assert not bucket.is_missing()


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
    with pytest.raises(ObjectStoreError, match=f"{saved.folder}/wte: .*AccessDenied"):
        read_group(saved, "wte")
    server.refused = frozenset()
    assert store.newest() == (saved, ())


def test_a_manifest_that_the_store_does_not_give_away_is_not_damaged(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older checkpoint would be taken, or none."""
    save(store, step=1)

    def refuse(path: ObjectPath) -> None:
        raise ObjectStoreError(path, "not now")

    monkeypatch.setattr(ObjectPath, "read_bytes", refuse)
    with pytest.raises(ObjectStoreError, match="not now"):
        store.newest()


def test_what_fails_once_is_tried_again_by_a_new_client(store: CheckpointStore, server: S3Server) -> None:
    """Credentials may have been renewed; and some clients go on without any, once they have found none."""
    saved = save(store, step=1)
    clients = object_store_module._clients  # pyright: ignore[reportPrivateUsage]
    before = clients[f"s3://{server.bucket}"]
    server.num_refused = 1
    read_group(saved, "wte")
    assert server.num_refused == 0
    assert clients[f"s3://{server.bucket}"] is not before


def test_a_checkpoint_that_cannot_be_fetched_is_not_said_to_be_damaged(
    store: CheckpointStore, server: S3Server
) -> None:
    saved = save(store, step=1)
    read = reader_of(RestorePoint(folder=str(saved.folder), step=1), lambda: None)
    assert read is not None
    shapes = states(0)["wte"]
    read("wte", shapes)
    server.refused = frozenset({"GET"})
    words = (
        f"the checkpoint of step 1 cannot be read here, which may be intact: wte: {saved.folder}/wte: .*AccessDenied"
    )
    with pytest.raises(CheckpointUnreadable, match=words):
        read("wte", shapes)


def test_a_place_for_temporary_files_that_is_full_is_named(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = save(store, step=1)
    s3fs = importlib.import_module("s3fs")

    async def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(s3fs.S3FileSystem, "_get_file", fill)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/oobleck-scratch"):
        read_group(saved, "wte")
    assert list(tmp_path.iterdir()) == []


def test_who_waits_for_files_tells_so_and_may_end_it(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = save(store, step=1)
    s3fs = importlib.import_module("s3fs")

    async def wait(*_: object, **__: object) -> None:
        await asyncio.sleep(1.0)

    monkeypatch.setattr(s3fs.S3FileSystem, "_get_file", wait)
    monkeypatch.setattr(object_store_module, "_TELL_S", 0.01)
    told: list[int] = []

    def tell() -> None:
        told.append(len(told))
        if len(told) == 3:
            raise Abandoned("it is over")

    with pytest.raises(Abandoned):
        read_group(saved, "wte", tell=tell)
    for thread in threading.enumerate():
        if thread.name == "object-store":
            thread.join(10)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_does_not_answer_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    client = SimpleNamespace(
        invalidate_cache=lambda: None,
        _strip_protocol=lambda address: address,
        cat_file=lambda path: answers.wait(60),
    )
    monkeypatch.setattr(object_store_module, "_client", lambda path: client)
    monkeypatch.setattr(object_store_module, "_CALL_S", 0.05)
    with pytest.raises(ObjectStoreError, match="no answer within"):
        ObjectPath(address="s3://bucket/file").read_bytes()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "object-store"]
    assert thread.daemon  # the process may end
    answers.set()
    thread.join(10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("s3://user:se/cret@bucket/run", "s3://...@bucket/run has a password: leave it out, clients look for"),
        ("s3:/user:secret@bucket/run?secret", "s3://...@bucket/run has a password"),
        ("az://container/run?sig=secret", "az://container/run?... is no address of an object store: write it as"),
        ("ftp://user@host/secret-run", None),
        ("http://host/run", None),
        ("memory://run", None),
        ("local:///run", None),
        ("simplecache::s3://bucket/run", None),
        ("gs://", None),
    ],
)
def test_an_address_that_is_unsuitable_is_refused_and_its_secrets_are_not_repeated(
    given: str, message: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        object_path(given)
    assert str(caught.value).startswith(message or f"{given} is no address of an object store: write it as gs://")
    assert ("secret" in str(caught.value)) == (message is None and "secret" in given)


def test_paths_of_a_file_system_are_no_addresses() -> None:
    for given in ("runs/a", "/tmp/a:b/c@d", "a@b", "C"):
        assert object_path(given) is None
    assert object_path("s3://bucket/a@b/") == ObjectPath(address="s3://bucket/a@b")


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
