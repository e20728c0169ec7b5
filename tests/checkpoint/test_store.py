import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oobleck_jax.checkpoint import store as store_module
from oobleck_jax.checkpoint.manifest import decode_manifest, encode_manifest
from oobleck_jax.checkpoint.named_arrays import named_arrays
from oobleck_jax.checkpoint.store import CheckpointStore
from oobleck_jax.checkpoint.writer import write_group
from oobleck_jax.errors import CheckpointDamaged, CheckpointUnwritable
from tests.checkpoint.checkpoints import files, manifest, save, states


def write_without_commit(store: CheckpointStore, *, step: int, generation: int) -> Path:
    folder = store.folder(step=step, generation=generation)
    write_group(folder, "layer-000", named_arrays(states(0)["layer-000"]))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_a_folder_that_does_not_exist_has_no_checkpoints(store: CheckpointStore) -> None:
    assert store.newest() == (None, ())
    assert store.clean_up(keep=1) == ()


def test_what_is_not_committed_is_invisible(store: CheckpointStore) -> None:
    write_without_commit(store, step=3, generation=1)
    assert store.newest() == (None, ())


def test_the_newest_is_the_last_step_of_the_last_generation(store: CheckpointStore) -> None:
    for step, generation in ((9, 1), (10, 1), (10, 2), (2, 3)):
        save(store, step=step, generation=generation)
    found = [(item.manifest.step, item.manifest.generation) for item in store.find().checkpoints]
    assert found == [(2, 3), (10, 2), (10, 1), (9, 1)]
    before_10, _ = store.newest(end_step=10)
    assert before_10 is not None
    assert before_10.manifest.next_step == 3
    older, _ = store.newest(end_step=10, excluded=[str(before_10.folder)])
    assert older is not None
    assert older.manifest.next_step == 10
    assert store.last_generation() == 3


@pytest.mark.parametrize("harm", ["truncate", "remove", "extend"])
def test_a_checkpoint_with_incomplete_files_is_passed_over_and_named(store: CheckpointStore, harm: str) -> None:
    save(store, step=1)
    damaged = save(store, step=2)
    path = files(damaged.folder / "layer-001")[-1]
    match harm:
        case "truncate":
            os.truncate(path, path.stat().st_size - 1)
        case "extend":
            path.write_bytes(path.read_bytes() + b"x")
        case _:
            path.unlink()
    newest, errors = store.newest()
    assert newest is not None
    assert newest.step == 1
    assert [(error.step, error.group, error.file) for error in errors] == [(2, "layer-001", path)]
    assert str(path) in str(errors[0])


def test_every_flipped_byte_of_a_manifest_shows(store: CheckpointStore) -> None:
    content = encode_manifest(save(store, step=1).manifest)
    intact = decode_manifest(content)
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1
        try:
            assert decode_manifest(bytes(flipped)) == intact  # white space
            assert content[position : position + 1].isspace()
        except ValueError:
            pass


def test_a_damaged_manifest_is_named_and_kept(store: CheckpointStore) -> None:
    save(store, step=1)
    damaged = save(store, step=2).folder / "manifest.json"
    os.truncate(damaged, 100)
    newest, errors = store.newest()
    assert newest is not None
    assert newest.step == 1
    assert [(error.step, error.file) for error in errors] == [(2, damaged)]
    assert store.clean_up(keep=1) == ()


def test_another_format_is_refused_with_both_versions(store: CheckpointStore) -> None:
    path = save(store, step=1).folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format_version": 1', b'"format_version": 7'))
    _, errors = store.newest()
    assert "format version 7, this program reads 1" in str(errors[0])


def test_cleaning_keeps_the_newest_and_what_is_being_written(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step=step, generation=1)
    write_without_commit(store, step=4, generation=1)
    current = write_without_commit(store, step=5, generation=2)
    (store.root / "notes").mkdir()
    removed = store.clean_up(keep=2, saving=current)
    assert removed == ("step-000001-generation-1", "step-000004-generation-1")
    assert {path.name for path in store.root.iterdir()} == {
        "notes",
        current.name,
        "step-000002-generation-1",
        "step-000003-generation-1",
    }


def test_cleaning_never_takes_the_last_intact_checkpoint(store: CheckpointStore) -> None:
    save(store, step=1)
    path = files(save(store, step=2).folder / "wte")[0]
    os.truncate(path, 1)
    assert store.clean_up(keep=1) == ()
    save(store, step=3)
    assert store.clean_up(keep=1) == ("step-000002-generation-1", "step-000001-generation-1")


def test_a_commit_without_its_files_is_refused(store: CheckpointStore) -> None:
    saved = save(store, step=1).manifest
    elsewhere = CheckpointStore(store.root.parent / "other")
    with pytest.raises(CheckpointDamaged, match="file system that they share"):
        elsewhere.commit(saved)


def test_a_full_disk_at_commit_leaves_no_checkpoint(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.folder(step=1, generation=1)
    record = write_group(folder, "layer-000", named_arrays(states(0)["layer-000"]))

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store_module, "write_durably", full)
    with pytest.raises(CheckpointUnwritable, match="No space left on device"):
        store.commit(manifest({"layer-000": record}, step=1, generation=1))
    assert store.newest() == (None, ())


def test_the_coordinators_part_imports_neither_jax_nor_orbax() -> None:
    modules = ("store", "manifest", "files", "object_store", "scratch", "election", "compatibility")
    code = "import sys, " + ", ".join(f"oobleck_jax.checkpoint.{name}" for name in modules) + "; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert {"jax", "jaxlib", "orbax", "flax"}.isdisjoint(loaded.split())
