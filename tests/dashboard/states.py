"""Runs as the dashboard sees them, made of records of real membership machines."""

from typing import Any

from oobleck_jax import events
from oobleck_jax.dashboard.run_state import RunFacts, RunState
from oobleck_jax.elastic.effects import Write
from tests.elastic.simulation import Simulation


def facts(**changes: Any) -> RunFacts:
    values: dict[str, Any] = {
        "preset": "gpt-test",
        "run_dir": "/runs/a",
        "steps": 20,
        "tokens_per_step": 1000,
        "fault_tolerance": 1,
        "layer_names": ("embedding", "block 0", "block 1", "head"),
        "smallest_num_nodes": 2,
        "has_actions": True,
    }
    return RunFacts(**{**values, **changes})


def watch(simulation: Simulation, **changes: Any) -> RunState:
    """Return the state of a simulated run at this moment, from its records; a second of time between any two."""
    state = RunState(facts(**changes))
    records = [effect.record for effect in simulation.history if isinstance(effect, Write)]
    state.take_all((1000.0 + number, record) for number, record in enumerate(records))
    return state


def started() -> events.Started:
    return events.Started(
        preset="gpt-test", num_nodes=3, fault_tolerance=1, steps=20, config_digest="digest", versions={}
    )
