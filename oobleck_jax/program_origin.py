"""What the programs of a run are made of, so that they are found on disk where nothing of it has changed."""

import contextlib
import os
import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import models
import oobleck_jax
from oobleck_jax.config import RunConfig
from oobleck_jax.execution.program_store import ProgramStore, digest_of


_PACKAGES = (oobleck_jax, models)
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "optax")


def store_of(config: RunConfig, cache: Path | None, *, run: str) -> ProgramStore | None:
    """Return the store of a worker's programs.

    Args:
        config: of the run.
        cache: folder that the processes of this host share; None: they do not.
        run: differs from run to run; only counts where the model is not one of ours.
    """
    if cache is None:
        return None
    environment = _environment()
    return ProgramStore(cache / "programs", _origin_of(config, run, environment), environment)


def _origin_of(config: RunConfig, run: str, environment: str) -> str:
    """Return the digest of all that decides what programs a run has, but for their keys."""
    without_order_of_work = replace(
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
    is_ours = type(config.model).__module__.partition(".")[0] == models.__name__
    parts: list[Any] = [environment, without_order_of_work, "" if is_ours else run]
    for package in _PACKAGES:
        folder = Path(*package.__path__)
        for path in sorted(folder.rglob("*.py")):
            parts += [path.relative_to(folder), path.read_bytes()]
    return digest_of(*parts)


def _environment() -> str:
    """Return the digest of what the code of a program depends on, besides its text."""
    device = jax.local_devices()[0]
    return digest_of(
        *((name, version(name)) for name in _LIBRARIES),
        platform.python_version(),
        (device.platform, device.device_kind, device.client.platform_version, _processor()),
        sorted(item for item in os.environ.items() if item[0].startswith(("JAX_", "XLA_"))),
    )


def _processor() -> str:
    """Return what the processor can do (Linux): XLA's programs for it are made of that."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()
