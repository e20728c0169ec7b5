"""Programs found on disk: nothing is traced again, and nothing is found that would compute something else."""

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from oobleck_jax.execution import program_store
from oobleck_jax.execution.home import Home, StageDevices
from oobleck_jax.execution.program_store import ProgramStore


def home(folder: Path, num_devices: int = 1, origin: str = "origin") -> Home:
    return Home(jax.devices("cpu")[:num_devices], store=ProgramStore(folder, origin))


def doubled(home: Home, traced: list[str], *, factor: int = 2) -> jax.Array:
    """Return the result of a program that notes when it is traced."""

    def double(x: jax.Array) -> jax.Array:
        traced.append("double")
        return factor * x

    devices = StageDevices(home.devices)
    program = home.compiled(("double", devices.key), double, lambda: (devices.batch_spec((4,), jnp.float32),))
    return program(jax.device_put(jnp.arange(4.0), devices.of_batch((4,))))


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_stored_program_is_not_traced_again(tmp_path: Path, num_devices: int) -> None:
    traced: list[str] = []
    for _ in range(2):
        assert doubled(home(tmp_path, num_devices), traced).tolist() == [0, 2, 4, 6]
    assert len(traced) == 1


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


def test_what_nobody_used_for_a_week_is_removed(tmp_path: Path) -> None:
    doubled(home(tmp_path), [])
    used = set(tmp_path.iterdir())
    for name, days in (("old", 8), ("recent", 6)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - days * 86400,) * 2)
    home(tmp_path)
    assert set(tmp_path.iterdir()) == used | {tmp_path / "recent"}


def test_use_keeps_a_program(tmp_path: Path) -> None:
    doubled(home(tmp_path), [])
    store = home(tmp_path)
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    traced: list[str] = []
    doubled(store, traced)
    doubled(home(tmp_path), traced)
    assert traced == []
