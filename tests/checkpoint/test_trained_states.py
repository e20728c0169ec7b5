"""Checkpoints of a real model: every group, with the optimizer state as optax makes it."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from models.presets import load_preset
from oobleck_jax.checkpoint.election import elect_writers
from oobleck_jax.checkpoint.named_arrays import named_arrays
from oobleck_jax.checkpoint.reader import read_state
from oobleck_jax.checkpoint.store import CheckpointStore
from oobleck_jax.checkpoint.writer import CheckpointWriter, Outcome, Written, write_group
from oobleck_jax.config import Precision
from oobleck_jax.execution.home import Home
from oobleck_jax.execution.layer_functions import functions_of
from oobleck_jax.execution.layout import groups_of
from oobleck_jax.execution.state import GroupState, StateBuilder
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.reconfigure import State
from tests.checkpoint.checkpoints import manifest
from tests.execution.thread_cluster import plan_of, run_cluster, run_generations


CONFIG = load_preset("gpt-test")


@pytest.fixture(scope="module", params=Precision)
def builder(request: pytest.FixtureRequest) -> StateBuilder:
    model = CONFIG.model.build()
    functions = functions_of(model, request.param)
    return StateBuilder(model, functions, groups_of(model), CONFIG.optimizer, Home(jax.devices("cpu")[:1]))


def test_what_several_nodes_write_any_node_reads_T3(builder: StateBuilder, tmp_path: Path) -> None:
    groups = groups_of(CONFIG.model.build())
    trained = {group.name: _moved(builder.initial(group.name, CONFIG.seed)) for group in groups}
    plan = plan_of(([2, 4], 4), ([1, 2, 3], 4))
    sizes = [State(name=group.name, layers=group.layers, num_bytes=builder.sizes[group.name]) for group in groups]
    writers = elect_writers(sizes, {node: plan.layers_of(node) for node in plan.nodes})
    assert set(writers.values()) == set(map(NodeId, range(5)))

    store = CheckpointStore(tmp_path / "checkpoints")
    folder = store.folder(step=9, generation=2)
    outcomes: list[Outcome] = []
    for node in plan.nodes:
        writer = CheckpointWriter()
        writer.begin(folder, {group: trained[group] for group in writers if writers[group] == node}, outcomes.append)
        assert writer.wait(60)
    records = {group: record for part in outcomes if isinstance(part, Written) for group, record in part.groups.items()}
    assert records.keys() == trained.keys()
    checkpoint = store.commit(manifest(records, step=9, generation=2))
    assert store.newest()[0] == checkpoint
    assert checkpoint.manifest.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(trained))

    for group, expected in trained.items():
        restored = read_state(checkpoint, group, builder.state_shapes(group))
        assert jax.tree.structure(restored) == jax.tree.structure(expected)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, restored, expected)))


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.MIXED])
def test_a_checkpoint_of_four_nodes_goes_on_on_any_number_T2(tmp_path: Path, precision: Precision) -> None:
    """Three steps on four nodes, a checkpoint, and two more steps elsewhere: the same losses as in one go."""
    four = plan_of(([2, 4], 4), ([3, 3], 4))
    config = replace(CONFIG, eval_every=0, precision=precision)
    undisturbed = run_cluster(config, four, steps=5)
    store = CheckpointStore(tmp_path / "checkpoints")
    saved = run_cluster(config, four, steps=3)
    folder = store.folder(step=2, generation=1)
    states = {name: state for node in four.nodes for name, state in saved.states[node].items()}
    records = {name: write_group(folder, name, named_arrays(state)) for name, state in states.items()}
    checkpoint = store.commit(manifest(records, step=2, generation=1))

    def read(group: str, shapes: GroupState) -> GroupState:
        return read_state(checkpoint, group, shapes)

    plans = [
        plan_of(([6], 8)),
        plan_of(([3, 3], 8)),
        plan_of(([2, 2, 2], 8)),
        plan_of(([2, 4], 4), ([3, 3], 4)),
        plan_of(([2, 2, 2], 5), ([3, 3], 3)),
    ]
    for plan in plans:
        run = run_generations(config, [(plan, 2)], restored=(read, 3))
        assert run.losses == pytest.approx(undisturbed.losses[3:], rel=1e-6)
        if plan == four:
            assert run.losses == undisturbed.losses[3:]


def _moved(state: GroupState) -> GroupState:
    """Give every array values of its own, as training would."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(scale=9, size=leaf.shape).astype(leaf.dtype), state)
