"""N nodes as N threads of one process: the worker's tensors without its processes."""

import functools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from oobleck_jax.config import RunConfig
from oobleck_jax.data import TokenDataset
from oobleck_jax.execution.home import Home
from oobleck_jax.execution.in_process import InProcessHub, InProcessSums
from oobleck_jax.execution.node import Generation, NodeTrainer
from oobleck_jax.execution.patience import Patience
from oobleck_jax.execution.state import GroupState
from oobleck_jax.model import LayeredModel
from oobleck_jax.model_config import ModelConfig
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan, Stage, Template


LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterRun:
    """What a cluster of threads did.

    Attributes:
        losses: mean loss of each step.
        gradients: summed gradients of the last step, by node and group.
        states: parameters and optimizer state after the last step, by node and group.
        reports: of the last step, by node: (group, squared norm, checksum).
    """

    losses: tuple[float, ...]
    gradients: dict[NodeId, dict[str, np.ndarray]]
    states: dict[NodeId, dict[str, GroupState]]
    reports: dict[NodeId, tuple[tuple[str, float, int], ...]]
    eval_loss: float | None


@functools.cache
def shared_home(model: ModelConfig, num_devices: int) -> Home:
    """Return the home of all nodes that train a model: they share devices, so that every program compiles once."""
    return Home(jax.devices("cpu")[:num_devices])


def plan_of(*pipelines: tuple[list[int], int], devices: int = 1) -> Plan:
    """Return a plan from (layers of each stage, microbatches) of each pipeline, one node a stage."""
    made, next_node = [], 0
    for layers, num_microbatches in pipelines:
        ends = np.cumsum(layers)
        stages = tuple(
            Stage(first_layer=int(end) - count, end_layer=int(end), node_index=index, num_devices=devices)
            for index, (count, end) in enumerate(zip(layers, ends, strict=True))
        )
        nodes = tuple(NodeId(next_node + index) for index in range(len(stages)))
        next_node += len(stages)
        made.append(Pipeline(template=Template(stages=stages), nodes=nodes, num_microbatches=num_microbatches))
    return Plan(pipelines=tuple(made))


def run_cluster(
    config: RunConfig, plan: Plan, *, steps: int, model: LayeredModel | None = None, evaluate: bool = False
) -> ClusterRun:
    """Train `steps` steps of a plan, every node a thread."""
    model = model or config.model.build()
    dataset = TokenDataset.open(config)
    nodes = plan.nodes
    hub, sums = InProcessHub(), InProcessSums(jax.devices("cpu")[: len(nodes)])
    home = shared_home(config.model, config.devices_per_node)
    trainers: dict[NodeId, NodeTrainer] = {}
    barrier = threading.Barrier(len(nodes), timeout=LIMIT_S)
    abandoned = threading.Event()
    results: dict[NodeId, object] = {}
    losses: list[float] = []

    def node_main(rank: int, node: NodeId) -> None:
        try:
            work(rank, node)
        except BaseException:
            abandoned.set()
            barrier.abort()
            raise

    evaluations: dict[NodeId, tuple[float, int]] = {}
    gradients: dict[NodeId, dict[str, np.ndarray]] = {}
    links = {node: hub.link() for node in nodes}

    def work(rank: int, node: NodeId) -> None:
        trainer = NodeTrainer(config=config, model=model, dataset=dataset, home=home, link=links[node])
        trainers[node] = trainer
        generation = Generation(
            number=1,
            plan=plan,
            node=node,
            link_addresses={other: links[other].address for other in nodes},
            ranks={other: index for index, other in enumerate(nodes)},
        )
        patience = Patience(abandoned=abandoned, limit_s=LIMIT_S, on_waiting=lambda node: None)
        trainer.prepare(generation, progress=lambda phase, done, total: None, patience=patience)
        trainer.start()
        fabric = sums.fabric(rank)
        fabric.warm(trainer.fabric_sums(), limit_s=LIMIT_S, abandoned=abandoned)
        for step in range(steps):
            results[node] = trainer.compute(step, fabric=fabric, patience=patience)
            gradients[node] = trainer.summed_gradients()
            barrier.wait()
            loss, norm = _decide(results.values(), config)
            barrier.wait()
            if rank == 0:
                losses.append(loss)
            trainer.commit(step, norm)
        if evaluate:
            total = trainer.evaluate(steps - 1, patience)
            evaluations[node] = (total.loss_sum, total.num_tokens)

    with ThreadPoolExecutor(len(nodes)) as pool:
        for future in [pool.submit(node_main, rank, node) for rank, node in enumerate(nodes)]:
            future.result(timeout=10 * LIMIT_S)
    return ClusterRun(
        losses=tuple(losses),
        gradients=gradients,
        states={node: trainer.states() for node, trainer in trainers.items()},
        reports={
            node: tuple((item.group, item.squared_norm, item.checksum) for item in result.reports)
            for node, result in results.items()
        },
        eval_loss=_mean(evaluations.values()) if evaluate else None,
    )


def _decide(results, config: RunConfig) -> tuple[float, float]:
    """Return mean loss and global norm; fail if holders of a group saw different sums."""
    squared: dict[str, float] = {}
    for result in results:
        for item in result.reports:
            assert squared.setdefault(item.group, item.squared_norm) == item.squared_norm, item.group
    assert sum(result.num_tokens for result in results) == config.tokens_per_step
    loss = math.fsum(result.loss_sum for result in results) / config.tokens_per_step
    return loss, math.sqrt(math.fsum(squared[name] for name in sorted(squared)))


def _mean(sums) -> float:
    sums = list(sums)
    return math.fsum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)


def flat(tree) -> np.ndarray:
    """Return a tree of arrays as one vector."""
    leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves) if leaves else np.zeros(0, np.float32)
