"""What programs are made of: all that changes them, and nothing else."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from models.presets import load_preset
from oobleck_jax.config import RunConfig
from oobleck_jax.elastic.messages import RunId
from oobleck_jax.program_origin import digest_of_sources, store_of


CONFIG = load_preset("gpt-test")


def origin_of(config: RunConfig, *, preset: str = "gpt-test", run: str = "run") -> str:
    with tempfile.TemporaryDirectory() as folder:
        store = store_of(preset, config, Path(folder), run_id=RunId(run))
        assert store is not None
        return store.origin


@pytest.mark.parametrize(
    "change", [{"steps": 7}, {"seed": 3}, {"nodes": 4, "fault_tolerance": 1}, {"global_batch_size": 64}]
)
def test_what_only_work_depends_on_leaves_the_origin(change: dict[str, Any]) -> None:
    assert origin_of(replace(CONFIG, **change)) == origin_of(CONFIG)


@pytest.mark.parametrize(
    "change",
    [
        {"model": replace(CONFIG.model, width=64)},
        {"optimizer": replace(CONFIG.optimizer, beta1=0.8)},
        {"sequence_length": 8},
        {"tensor_parallel": True},
        {"devices_per_node": 2},
    ],
)
def test_what_programs_depend_on_changes_the_origin(change: dict[str, Any]) -> None:
    assert origin_of(replace(CONFIG, **change)) != origin_of(CONFIG)


def test_flags_of_xla_change_the_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    before = origin_of(CONFIG)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert origin_of(CONFIG) != before


def test_settings_of_jax_change_the_origin() -> None:
    before = origin_of(CONFIG)
    with settings(jax_default_matmul_precision="highest"):
        assert origin_of(CONFIG) != before
    with settings(jax_compilation_cache_dir="elsewhere"):
        assert origin_of(CONFIG) == before


@contextlib.contextmanager
def settings(**values: Any) -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_change_of_sources_changes_their_digest(tmp_path: Path) -> None:
    package: Any = SimpleNamespace(__path__=[str(tmp_path)])
    digests: set[str] = set()
    for name, content in (("layer", "a = 1"), ("layer", "a = 2"), ("other", "a = 2")):
        (tmp_path / f"{name}.py").write_text(content)
        digests.add(digest_of_sources([package]))
    assert len(digests) == 3


def test_the_run_and_the_file_count_for_presets_of_ones_own(tmp_path: Path) -> None:
    assert origin_of(CONFIG, run="one") == origin_of(CONFIG, run="two")
    preset = tmp_path / "own.py"
    origins: set[str] = set()
    for content, run in (("1", "one"), ("1", "two"), ("2", "two")):
        preset.write_text(content)
        origins.add(origin_of(CONFIG, preset=f"{preset}:run", run=run))
    assert len(origins) == 3
