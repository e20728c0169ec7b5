"""What programs are made of: all that changes them, and nothing else."""

import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.presets import load_preset
from oobleck_jax import program_origin
from oobleck_jax.config import RunConfig
from oobleck_jax.program_origin import store_of
from tests.models.toy_model import ToyConfig


CONFIG = load_preset("gpt-test")


def origin_of(config: RunConfig, run: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        store = store_of(config, Path(folder), run=run)
        assert store is not None
        return store.origin


@pytest.mark.parametrize(
    "change", [{"steps": 7}, {"seed": 3}, {"nodes": 4, "fault_tolerance": 1}, {"global_batch_size": 64}]
)
def test_what_only_work_depends_on_leaves_the_origin(change: dict[str, Any]) -> None:
    assert origin_of(replace(CONFIG, **change), "run") == origin_of(CONFIG, "run")


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
    assert origin_of(replace(CONFIG, **change), "run") != origin_of(CONFIG, "run")


def test_flags_of_xla_change_the_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    before = origin_of(CONFIG, "run")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert origin_of(CONFIG, "run") != before


def test_a_change_of_our_sources_changes_the_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_origin, "_PACKAGES", [SimpleNamespace(__path__=[str(tmp_path)])])
    origins = set[str]()
    for content in ("a = 1", "a = 2"):
        (tmp_path / "layer.py").write_text(content)
        origins.add(origin_of(CONFIG, "run"))
    assert len(origins) == 2


def test_the_run_counts_for_models_of_ones_own() -> None:
    assert origin_of(CONFIG, "one") == origin_of(CONFIG, "two")
    own = RunConfig(model=ToyConfig())
    assert origin_of(own, "one") != origin_of(own, "two")
