"""Small checkpoints to test with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import optax

from models.presets import config_to_json, load_preset
from oobleck_jax.checkpoint.manifest import GroupRecord, Manifest
from oobleck_jax.checkpoint.named_arrays import named_arrays
from oobleck_jax.checkpoint.store import Checkpoint, CheckpointStore
from oobleck_jax.checkpoint.writer import write_group
from oobleck_jax.execution.state import GroupState


def state(seed: int) -> GroupState:
    """A state with nested parameters, moments, and a scalar."""
    rng = np.random.default_rng(seed)
    params = {"mlp": {"kernel": rng.normal(size=(4, 8)), "bias": rng.normal(size=8)}, "scale": rng.normal(size=4)}
    return _trained(jax.tree.map(lambda leaf: leaf.astype(np.float32), params), seed)


def tied_state(seed: int) -> GroupState:
    """The state of a tied parameter: an array without a name of its own."""
    return _trained(np.random.default_rng(seed).normal(size=(16, 4)).astype(np.float32), seed)


def states(seed: int) -> dict[str, GroupState]:
    return {"layer-000": state(seed), "layer-001": state(seed + 1), "wte": tied_state(seed + 2)}


def _trained(params: Any, seed: int) -> GroupState:
    filled = jax.tree.map(lambda leaf: np.full(leaf.shape, seed + 0.5, leaf.dtype), optax.adamw(1e-3).init(params))
    filled = jax.tree.map(lambda leaf: leaf.astype(np.int32) if leaf.shape == () else leaf, filled)
    return GroupState(params=params, optimizer_state=filled)


def manifest(groups: Mapping[str, GroupRecord], *, step: int, generation: int) -> Manifest:
    config = load_preset("gpt-test")
    return Manifest(
        step=step,
        generation=generation,
        seed=config.seed,
        samples_used=(step + 1) * config.global_batch_size,
        num_train_samples=1000,
        data_fingerprint="abc",
        config=msgspec.json.decode(config_to_json("gpt-test", config)),
        versions={"jax": jax.__version__},
        groups=dict(groups),
    )


def save(store: CheckpointStore, *, step: int, generation: int = 1, seed: int = 0) -> Checkpoint:
    """Write a whole checkpoint."""
    folder = store.folder(step=step, generation=generation)
    records = {group: write_group(folder, group, named_arrays(saved)) for group, saved in states(seed).items()}
    return store.commit(manifest(records, step=step, generation=generation))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
