"""How the state of a group comes back from disk, checked: a reader never gets other bits than were saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from oobleck_jax.checkpoint.manifest import GroupRecord
from oobleck_jax.checkpoint.named_arrays import NamedArrays, named_arrays, nested, records_of
from oobleck_jax.checkpoint.store import Checkpoint
from oobleck_jax.errors import CheckpointDamaged, ConfigError
from oobleck_jax.execution.state_transfer import checksum_of


def read_group(checkpoint: Checkpoint, group: str, *, tell: Callable[[], None] = lambda: None) -> NamedArrays:
    """Return the arrays of one group.

    Args:
        tell: called every few seconds while files are fetched; may raise to end it.

    Raises:
        CheckpointDamaged: they are not what was saved; names the file where it can.
        OSError: they cannot be fetched.
    """
    with checkpoint.intact_files(group, tell=tell) as files:
        try:
            stored = named_arrays(_restore(files))
        # The files are as they were written, so this is rare; but what Orbax makes of them is beyond us.
        except Exception as error:
            what = f"cannot be restored by Orbax: {type(error).__name__}: {error}"
            raise CheckpointDamaged(what, step=checkpoint.step, group=group, file=None) from error
    record = checkpoint.manifest.groups[group]
    if stored.keys() != record.arrays.keys():
        what = f"has the arrays {sorted(stored)}, not {sorted(record.arrays)}"
        raise CheckpointDamaged(what, step=checkpoint.step, group=group, file=None)
    arrays = {name: np.asarray(stored[name]) for name in record.arrays}
    if _differs(arrays, record):
        what = "has other numbers than were saved: their checksum differs"
        raise CheckpointDamaged(what, step=checkpoint.step, group=group, file=None)
    return arrays


def read_state(checkpoint: Checkpoint, group: str, shapes: Any, *, tell: Callable[[], None] = lambda: None) -> Any:
    """Return the state of one group, as a tree like `shapes`.

    Args:
        shapes: what the state looks like now, as `StateBuilder.state_shapes` tells.
        tell: see `read_group`.

    Raises:
        CheckpointDamaged, OSError: see `read_group`.
        ConfigError: what was saved has another form; names the arrays.
    """
    arrays = read_group(checkpoint, group, tell=tell)
    wanted, found = records_of(named_arrays(shapes)), records_of(arrays)
    different = [
        f"{name} is {found.get(name, 'absent')} (needed: {wanted.get(name, 'absent')})"
        for name in dict.fromkeys([*found, *wanted])
        if found.get(name) != wanted.get(name)
    ]
    if different:
        raise ConfigError(
            f"the state of {group} at step {checkpoint.step} does not fit this model and optimizer: "
            f"{'; '.join(different)}"
        )
    return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[name] for name in wanted])


def read_params(checkpoint: Checkpoint, group: str) -> Any:
    """Return the parameters of one group: a nested dict, or the array itself if it is a tied one.

    Raises:
        CheckpointDamaged, OSError: see `read_group`.
    """
    arrays = read_group(checkpoint, group)
    return nested({name: array for name, array in arrays.items() if name.split("/")[0] == "params"}).get("params", {})


def _restore(folder: Path) -> Any:
    import orbax.checkpoint as ocp  # late: it costs 0.3 s and 25 MB, and most runs never restore

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(folder.absolute())


def _differs(arrays: NamedArrays, record: GroupRecord) -> bool:
    return records_of(arrays) != record.arrays or checksum_of(list(arrays.values())) != record.checksum
