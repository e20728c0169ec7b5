"""The parameters of a run's checkpoint, in one process: to sample from, or to take elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from models.presets import config_from_json
from oobleck_jax.checkpoint.reader import read_params
from oobleck_jax.checkpoint.store import Checkpoint, CheckpointStore, checkpoints_of
from oobleck_jax.config import RunConfig
from oobleck_jax.errors import CheckpointDamaged, ConfigError
from oobleck_jax.execution.precision import widened


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """A model as it was after a step.

    Attributes:
        config: of the run that trained it.
        params: of all groups, in float32 even if they were kept with less precision.
    """

    checkpoint: Checkpoint
    config: RunConfig
    params: dict[str, Any]


def load_model(run_dir: Path, *, step: int | None, on_damage: Callable[[CheckpointDamaged], None]) -> SavedModel:
    """Read the newest checkpoint of a run that is intact, or the one of a step.

    Args:
        on_damage: told of each checkpoint that was passed over.

    Raises:
        ConfigError: there is none.
        OSError: they cannot be read.
    """
    root = checkpoints_of(run_dir)
    found = CheckpointStore(root).find()
    for damaged in found.damaged:
        on_damage(damaged)
    for checkpoint in found.checkpoints:
        if step not in (None, checkpoint.step):
            continue
        _, config = config_from_json(msgspec.json.encode(checkpoint.manifest.config).decode())
        try:
            params = {group: widened(read_params(checkpoint, group)) for group in checkpoint.manifest.groups}
        except CheckpointDamaged as damaged:
            on_damage(damaged)
            continue
        return SavedModel(checkpoint=checkpoint, config=config, params=params)
    steps = sorted({checkpoint.step for checkpoint in found.checkpoints})
    there = f"there are those of the steps {', '.join(map(str, steps))}" if steps else "there is none"
    wanted = "an intact checkpoint" if step is None else f"an intact checkpoint of step {step}"
    raise ConfigError(f"{root} does not have {wanted}; {there}")
