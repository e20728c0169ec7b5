"""All policies by name, as users know them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from oobleck_jax.errors import ConfigError
from oobleck_jax.replay.layouts import Layouts
from oobleck_jax.replay.policies.bamboo import Bamboo
from oobleck_jax.replay.policies.checkpointing import best_checkpointings, published_checkpointing
from oobleck_jax.replay.policies.oobleck import Oobleck
from oobleck_jax.replay.policies.oracle import Oracle
from oobleck_jax.replay.policies.ours import Ours
from oobleck_jax.replay.policies.recycle import Recycle
from oobleck_jax.replay.policies.restart import SPARES_FRACTION, Restart
from oobleck_jax.replay.policies.varuna import Varuna
from oobleck_jax.replay.published import OOBLECK_MEASURED_JOIN_S, OOBLECK_MEASURED_LOSS_S, OOBLECK_RECONFIGURE_S
from oobleck_jax.replay.recovery_costs import CheckpointCosts, RecoveryCosts
from oobleck_jax.replay.simulator import Policy


ALL = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What policies are made for."""

    layouts: Layouts
    num_nodes: int  # at the beginning
    fault_tolerance: int
    recovery: RecoveryCosts
    checkpoints: CheckpointCosts


Maker: TypeAlias = Callable[[Conditions], Sequence[Policy]]  # variants, of which the best counts; none: cannot run


def _ours(on: Conditions) -> Sequence[Policy]:
    return (
        Ours(layouts=on.layouts, costs=on.recovery, checkpoints=on.checkpoints, fault_tolerance=on.fault_tolerance),
    )


def _oracle(on: Conditions) -> Sequence[Policy]:
    return (Oracle(layouts=on.layouts, fault_tolerance=on.fault_tolerance),)


def _oobleck(on: Conditions, *, is_best: bool = False, is_measured: bool = False) -> Sequence[Policy]:
    num_parameters = on.layouts.workload.num_parameters
    loss_s = join_s = OOBLECK_RECONFIGURE_S.at(num_parameters)
    if is_measured:
        loss_s, join_s = OOBLECK_MEASURED_LOSS_S.at(num_parameters), OOBLECK_MEASURED_JOIN_S.at(num_parameters)
    return (
        Oobleck(
            layouts=on.layouts,
            fault_tolerance=on.fault_tolerance,
            loss_s=loss_s,
            join_s=join_s,
            takes_joins=is_best or is_measured,
        ),
    )


def _varuna(on: Conditions) -> Sequence[Policy]:
    return (Varuna(layouts=on.layouts, checkpointing=published_checkpointing(on.layouts.workload.num_parameters)),)


def _best_varuna(on: Conditions) -> Sequence[Policy]:
    choices = best_checkpointings(on.layouts.workload.num_parameters, on.checkpoints.steps_per_save)
    return [
        Varuna(layouts=on.layouts, checkpointing=checkpointing, takes_joins=takes_joins)
        for checkpointing in choices
        for takes_joins in (False, True)
    ]


def _bamboo(on: Conditions) -> Sequence[Policy]:
    return (Bamboo(layouts=on.layouts, is_published=True),)


def _best_bamboo(on: Conditions) -> Sequence[Policy]:
    return (Bamboo(layouts=on.layouts, is_published=False),)


def _recycle(on: Conditions) -> Sequence[Policy]:
    grid = on.layouts.grid_for(on.layouts.max_nodes)
    restart_s = published_checkpointing(on.layouts.workload.num_parameters).restart_s
    return () if grid is None else (Recycle(layouts=on.layouts, grid=grid, restart_s=restart_s),)


def _best_recycle(on: Conditions) -> Sequence[Policy]:
    restart_s = published_checkpointing(on.layouts.workload.num_parameters).restart_s
    widest = {grid.depth: grid for grid in on.layouts.grids}  # fewer pipelines of the same depth are never faster
    return [Recycle(layouts=on.layouts, grid=grid, restart_s=restart_s, moves_cost=False) for grid in widest.values()]


def _restart(on: Conditions) -> Sequence[Policy]:
    num_nodes = on.num_nodes - round(SPARES_FRACTION * on.num_nodes)
    checkpointing = published_checkpointing(on.layouts.workload.num_parameters)
    return (Restart(layouts=on.layouts, checkpointing=checkpointing, num_nodes=num_nodes),)


def _best_restart(on: Conditions) -> Sequence[Policy]:
    choices = best_checkpointings(on.layouts.workload.num_parameters, on.checkpoints.steps_per_save)
    grids = [on.layouts.grid_for(num_nodes) for num_nodes in range(1, on.layouts.max_nodes + 1)]
    sizes = sorted({grid.num_nodes for grid in grids if grid is not None})
    return [
        Restart(layouts=on.layouts, checkpointing=checkpointing, num_nodes=num_nodes)
        for checkpointing in choices
        for num_nodes in sizes
    ]


MAKERS: Mapping[str, Maker] = MappingProxyType(
    {
        "oracle": _oracle,
        "ours": _ours,
        "oobleck": _oobleck,
        "oobleck-best": lambda on: _oobleck(on, is_best=True),
        "oobleck-measured": lambda on: _oobleck(on, is_measured=True),
        "recycle": _recycle,
        "recycle-best": _best_recycle,
        "bamboo": _bamboo,
        "bamboo-best": _best_bamboo,
        "varuna": _varuna,
        "varuna-best": _best_varuna,
        "restart": _restart,
        "restart-best": _best_restart,
    }
)


def names_of(text: str) -> tuple[str, ...]:
    """Return the names in a list such as "ours,varuna", or all.

    Raises:
        ConfigError: there is no such policy.
    """
    names = tuple(MAKERS) if text == ALL else tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in MAKERS:
            raise ConfigError(f"--policies {name} is not known; there are {', '.join(MAKERS)}, and {ALL}")
    return names
