"""Programs found on disk: nothing is traced again, and nothing is found that would compute something else."""

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from oobleck_jax.execution import program_store
from oobleck_jax.execution.compilations import compiled_since, num_compilations
from oobleck_jax.execution.home import Home, StageDevices
from oobleck_jax.execution.program_store import ProgramStore
from tests.ages import age


pytestmark = pytest.mark.jax_version


def home(folder: Path, devices: slice = slice(1), origin: str = "origin", **options: bool) -> Home:
    return Home(jax.devices("cpu")[devices], store=ProgramStore(folder, origin), compiler_options=options)


def doubled(home: Home, traced: list[str], *, factor: int = 2) -> jax.Array:
    """Return the result of a program that notes when it is traced."""

    def double(x: jax.Array) -> jax.Array:
        traced.append("double")
        return factor * x

    devices = StageDevices(home.devices)
    program = home.compiled(("double", devices.key), double, lambda: (devices.batch_spec((4,), jnp.float32),))
    return program(jax.device_put(jnp.arange(4.0), devices.of_batch((4,))))


def test_a_stored_program_is_not_traced_again(tmp_path: Path) -> None:
    """Each of these is the same text, for other devices."""
    traced: list[str] = []
    for number, devices in enumerate([slice(0, 1), slice(1, 2), slice(0, 2), slice(2, 4)]):
        for _ in range(2):
            result = doubled(home(tmp_path, devices), traced)
            assert result.tolist() == [0, 2, 4, 6]
            assert result.sharding.device_set == set(jax.devices("cpu")[devices])
        assert len(traced) == number + 1


def test_a_program_of_other_compiler_options_is_not_taken(tmp_path: Path) -> None:
    traced: list[str] = []
    for options in ({}, {"xla_cpu_enable_fast_math": True}):
        doubled(home(tmp_path, **options), traced)
    assert len(traced) == 2


def test_loading_counts_like_compiling(tmp_path: Path) -> None:
    doubled(home(tmp_path), [])
    before = num_compilations()
    there = home(tmp_path)
    for _ in range(2):
        doubled(there, [])
    assert compiled_since(before) == ("double",)


def test_a_fact_is_found_out_once(tmp_path: Path) -> None:
    found: list[str] = []
    for _ in range(2):
        assert home(tmp_path).fact("which", lambda: found.append("asked") or (1, "two")) == (1, "two")
    assert len(found) == 1


def test_programs_of_another_origin_are_not_found(tmp_path: Path) -> None:
    traced: list[str] = []
    for origin in ("one", "two"):
        doubled(home(tmp_path, origin=origin), traced)
    assert len(traced) == 2


def test_of_several_that_need_a_program_one_compiles_it(tmp_path: Path) -> None:
    traced: list[str] = []
    threads = [threading.Thread(target=doubled, args=(home(tmp_path), traced)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(traced) == 1


def stored_file(folder: Path) -> Path:
    """Return the file of the only program: the largest."""
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [flip_a_bit, lambda content: content[:100], lambda content: b""])
def test_a_damaged_program_is_compiled_again(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    traced: list[str] = []
    doubled(home(tmp_path), traced)
    path = stored_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    for _ in range(2):
        assert doubled(home(tmp_path), traced).tolist() == [0, 2, 4, 6]
    assert len(traced) == 2
    assert "damaged" in caplog.text


def test_what_xla_cannot_load_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    traced: list[str] = []
    monkeypatch.setattr(program_store, "serialized", lambda program: ({0}, (b"nothing", None, None)))
    for _ in range(2):
        assert doubled(home(tmp_path), traced).tolist() == [0, 2, 4, 6]
    assert len(traced) == 2
    assert "cannot be loaded" in caplog.text


def test_a_full_disk_stores_nothing_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(program_store.tempfile, "NamedTemporaryFile", no_space)
    traced: list[str] = []
    assert doubled(home(tmp_path), traced).tolist() == [0, 2, 4, 6]
    assert "No space left" in caplog.text


def test_a_disk_that_is_full_in_the_middle_keeps_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(draft: Path, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", no_space)
    doubled(home(tmp_path), [])
    assert [path.suffix for path in tmp_path.iterdir()] == [".turn"]


def test_a_program_of_another_origin_is_found_by_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[str] = []
    save = ProgramStore._save_program
    monkeypatch.setattr(ProgramStore, "_save_program", lambda *given: saved.append(given[1]) or save(*given))
    traced: list[str] = []
    for origin in ("one", "two", "two"):
        assert doubled(home(tmp_path, origin=origin), traced).tolist() == [0, 2, 4, 6]
    assert len(traced) == 2
    assert len(saved) == 1


def test_what_came_out_of_the_cache_of_jax_is_not_stored(tmp_path: Path) -> None:
    """XLA for CPUs cannot serialize it again: it would be found, and fail when it runs."""
    traced: list[str] = []
    for folder, store in ((tmp_path, None), (tmp_path / "one", True), (tmp_path / "one", True)):
        there = home(folder) if store else Home(jax.devices("cpu")[:1])
        assert doubled(there, traced, factor=3).tolist() == [0, 3, 6, 9]
    assert len(traced) == 3


@pytest.mark.parametrize("spoil", [shutil.rmtree, lambda folder: shutil.rmtree(folder) or folder.touch()])
def test_without_a_folder_programs_are_compiled(
    tmp_path: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """It is deleted under way, or a file is in its place."""
    folder = tmp_path / "programs"
    there = home(folder)
    spoil(folder)
    assert doubled(there, []).tolist() == [0, 2, 4, 6]
    assert "cannot be stored" in caplog.text


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "programs").touch()
    assert doubled(home(tmp_path / "programs"), []).tolist() == [0, 2, 4, 6]
    assert "programs cannot be kept" in caplog.text


def test_what_nobody_used_for_months_is_removed(tmp_path: Path) -> None:
    doubled(home(tmp_path), [])
    for path in tmp_path.iterdir():  # a program, the fact that names it, and a lock
        age(path, days=91)
    (tmp_path / "notes").touch()  # of a user, who gave us a folder that has others
    age(tmp_path / "notes", days=91)
    doubled(home(tmp_path, origin="another"), [])
    used = {path.name for path in tmp_path.iterdir()}
    home(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == used
    assert len(used) == 4
    assert "notes" in used


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(draft: Path, path: Path) -> None:
        raise KeyboardInterrupt

    store = ProgramStore(tmp_path, "origin")
    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        store.keep_fact("which", 1)
    (draft,) = tmp_path.iterdir()
    home(tmp_path)
    assert draft.exists()
    age(draft, days=91)
    home(tmp_path)
    assert not draft.exists()


def test_use_keeps_a_program(tmp_path: Path) -> None:
    doubled(home(tmp_path), [])
    store = home(tmp_path)
    for path in tmp_path.iterdir():
        age(path, days=91)
    traced: list[str] = []
    doubled(store, traced)
    doubled(home(tmp_path), traced)
    assert traced == []
