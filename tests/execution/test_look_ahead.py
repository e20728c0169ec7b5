"""The samples of the next step are there before it begins, on the nodes that need them."""

import threading

import numpy as np
import pytest

from models.presets import load_preset
from oobleck_jax.data import TokenDataset
from oobleck_jax.execution.in_process import InProcessHub
from oobleck_jax.execution.node import Generation, NodeTrainer
from oobleck_jax.execution.patience import Patience
from oobleck_jax.planning.plan import NodeId
from tests.execution.thread_cluster import LIMIT_S, plan_of, shared_home


CONFIG = load_preset("gpt-test")


class CountingDataset:
    """Counts the samples that it is asked for."""

    def __init__(self) -> None:
        self.dataset = TokenDataset.open(CONFIG)
        self.num_samples = 0
        self.steps: list[int] = []

    def sample_indices(self, step: int) -> np.ndarray:
        self.steps.append(step)
        return self.dataset.sample_indices(step)

    def tokens(self, indices: np.ndarray) -> np.ndarray:
        self.num_samples += len(indices)
        return self.dataset.tokens(indices)


def trainer_of(node: int, stages: list[int], dataset) -> tuple[NodeTrainer, Patience]:
    """A node of one pipeline, ready to run; its neighbours are not there."""
    plan, link = plan_of((stages, CONFIG.num_microbatches)), InProcessHub().link()
    trainer = NodeTrainer(
        config=CONFIG, model=CONFIG.model.build(), dataset=dataset, home=shared_home(CONFIG.model, 1), link=link
    )
    addresses = dict.fromkeys(plan.nodes, link.address)
    ranks = {node: rank for rank, node in enumerate(plan.nodes)}
    generation = Generation(number=1, plan=plan, node=NodeId(node), link_addresses=addresses, ranks=ranks)
    patience = Patience(abandoned=threading.Event(), limit_s=LIMIT_S, on_waiting=lambda node: None)
    trainer.prepare(generation, progress=lambda phase, done, total: None, patience=patience)
    trainer.start()
    return trainer, patience


def test_a_step_that_was_looked_ahead_to_asks_for_no_sample():
    dataset = CountingDataset()
    trainer, patience = trainer_of(0, [6], dataset)
    trainer.look_ahead(0)
    assert (dataset.steps, dataset.num_samples) == ([0], CONFIG.global_batch_size)
    looked_ahead = trainer.compute(0, fabric=None, patience=patience)
    assert (dataset.steps, dataset.num_samples) == ([0], CONFIG.global_batch_size)
    # Another step than that gets its own samples, and the same samples give the same loss.
    other = trainer.compute(1, fabric=None, patience=patience)
    assert dataset.steps == [0, 1]
    again = trainer.compute(0, fabric=None, patience=patience)
    assert looked_ahead.loss_sum == again.loss_sum != other.loss_sum


@pytest.mark.parametrize(("node", "share"), [(0, 1), (1, 0), (2, 1)])
def test_only_first_and_last_stages_read_tokens(node, share):
    dataset = CountingDataset()
    trainer, _ = trainer_of(node, [2, 2, 2], dataset)
    trainer.look_ahead(3)
    assert dataset.steps == [3]
    assert dataset.num_samples == share * CONFIG.global_batch_size
