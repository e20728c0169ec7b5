"""What the programs of a run are made of, so that they are found on disk where nothing of it has changed."""

import os
import platform
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import models
import oobleck_jax
from models.presets import source_digest
from oobleck_jax.config import RunConfig
from oobleck_jax.elastic.messages import RunId
from oobleck_jax.execution.program_store import ProgramStore, digest_of
from oobleck_jax.launch import about_cores


_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "optax")
_VARIABLES = ("JAX_", "XLA_", "LIBTPU_")
_CACHES = ("jax_compilation_cache", "jax_persistent_cache")  # settings that change no program


def store_of(preset: str, config: RunConfig, cache: Path | None, *, run_id: RunId) -> ProgramStore | None:
    """Return the store of a worker's programs.

    Args:
        preset: of the run. Nobody can list what a file of the user's own imports, so what it makes holds for one run.
        config: of the run.
        cache: folder that the processes of this host share; None: they do not.
        run_id: of the run.
    """
    if cache is None:
        return None
    environment = _environment()
    own_source = source_digest(preset)  # empty: the preset is ours
    origin = digest_of(environment, _SOURCES, _without_order_of_work(config), own_source, own_source and run_id)
    return ProgramStore(cache / "programs", origin, environment)


def digest_of_sources(packages: Iterable[ModuleType]) -> str:
    """Return a digest of all Python files of some packages."""
    parts: list[Any] = []
    for package in packages:
        folder = Path(*package.__path__)
        for path in sorted(folder.rglob("*.py")):
            parts += [path.relative_to(folder), path.read_bytes()]
    return digest_of(*parts)


_SOURCES = digest_of_sources((oobleck_jax, models))  # as they are imported: they may change while this process runs


def _without_order_of_work(config: RunConfig) -> RunConfig:
    """Return a configuration that is the same for all runs with the same programs."""
    return replace(
        config,
        steps=1,
        global_batch_size=config.microbatch_size,
        skip_steps=0,
        init_from=None,
        seed=0,
        data="",
        eval_every=0,
        eval_batches=1,
        nodes=1,
        fault_tolerance=0,
    )


def _environment() -> str:
    """Return the digest of what the code of a program depends on, besides its text."""
    device = jax.local_devices()[0]
    return digest_of(
        *((name, version(name)) for name in _LIBRARIES),
        platform.python_version(),
        (device.platform, device.device_kind, device.client.platform_version),
        about_cores("flags", "Features") or platform.processor(),  # what XLA makes programs of
        sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES)),
        sorted((name, str(value)) for name, value in jax.config.values.items() if not name.startswith(_CACHES)),
    )
