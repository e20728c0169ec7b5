"""N nodes as N threads of one process: the worker's tensors without its processes."""

import functools
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from oobleck_jax.config import RunConfig
from oobleck_jax.data import TokenDataset
from oobleck_jax.errors import Abandoned
from oobleck_jax.execution.home import Home
from oobleck_jax.execution.in_process import InProcessHub, InProcessSums
from oobleck_jax.execution.node import Generation, NodeTrainer, ReadState, StepResult
from oobleck_jax.execution.patience import Patience
from oobleck_jax.execution.state import GroupState
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
    """

    losses: tuple[float, ...]
    gradients: dict[NodeId, dict[str, np.ndarray]]
    states: dict[NodeId, dict[str, GroupState]]
    eval_loss: float | None


# In place of what tests/conftest.py chooses: with the older generator of code, bits depend on how a model is cut.
CODE_AS_FOR_USERS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 12) else {}


@functools.cache
def shared_home(model: ModelConfig, num_devices: int, *, tensor_parallel: bool = False) -> Home:
    """Return the home of all nodes that train a model: they share devices, so that every program compiles once."""
    tensor_dims = model.build().tensor_dims if tensor_parallel else None
    return Home(jax.devices("cpu")[:num_devices], compiler_options=CODE_AS_FOR_USERS, tensor_dims=tensor_dims)


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
    config: RunConfig, plan: Plan, *, steps: int, evaluate: bool = False, skipped: Sequence[int] = ()
) -> ClusterRun:
    """Train `steps` steps of a plan, every node a thread; the `skipped` ones without an update."""
    return run_generations(config, [(plan, steps)], evaluate=evaluate, skipped=skipped)


def run_generations(
    config: RunConfig,
    plans: Sequence[tuple[Plan, int]],
    *,
    evaluate: bool = False,
    wasted_step: bool = False,
    restored: tuple[ReadState, int] | None = None,
    skipped: Sequence[int] = (),
) -> ClusterRun:
    """Train with one plan after the other, each for so many steps; nodes that are not in the next plan are lost.

    Args:
        evaluate: evaluate at the end.
        wasted_step: each generation but the last also computes a step that is never committed.
        restored: where the first generation takes its states from, and its first step.
    """
    cluster = _Cluster(config, plans, restored, skipped)
    with ThreadPoolExecutor(len(cluster.nodes)) as pool:
        futures = [pool.submit(cluster.run_node, node, evaluate, wasted_step) for node in cluster.nodes]
        errors = [error for future in futures if (error := future.exception(timeout=10 * LIMIT_S))]
    for error in sorted(errors, key=lambda error: isinstance(error, Abandoned | threading.BrokenBarrierError)):
        raise error  # the first cause, not what the others made of it
    last = plans[-1][0].nodes
    return ClusterRun(
        losses=tuple(cluster.losses),
        gradients={node: cluster.gradients[node] for node in last},
        states={node: cluster.trainers[node].states() for node in last},
        eval_loss=_mean(cluster.evaluations.values()) if evaluate else None,
    )


class _Cluster:
    def __init__(
        self,
        config: RunConfig,
        plans: Sequence[tuple[Plan, int]],
        restored: tuple[ReadState, int] | None,
        skipped: Sequence[int],
    ) -> None:
        self._restored, self._skipped = restored, skipped
        self.nodes = sorted({node for plan, _ in plans for node in plan.nodes})
        self.trainers: dict[NodeId, NodeTrainer] = {}
        self.gradients: dict[NodeId, dict[str, np.ndarray]] = {}
        self.evaluations: dict[NodeId, tuple[float, int]] = {}
        self.losses: list[float] = []
        self._config, self._plans = config, plans
        self._hub = InProcessHub()
        self._links = {node: self._hub.link() for node in self.nodes}
        self._sums = [InProcessSums(jax.devices("cpu")[: len(plan.nodes)]) for plan, _ in plans]
        self._barriers = [threading.Barrier(len(plan.nodes), timeout=LIMIT_S) for plan, _ in plans]
        self._abandoned = threading.Event()
        self._results: dict[NodeId, StepResult] = {}

    def run_node(self, node: NodeId, evaluate: bool, wasted_step: bool) -> None:
        try:
            trainer = self.trainers[node] = NodeTrainer(
                config=self._config,
                model=self._config.model.build(),
                dataset=TokenDataset.open(self._config),
                home=shared_home(
                    self._config.model,
                    self._config.devices_per_node,
                    tensor_parallel=self._config.tensor_parallel,
                ),
                link=self._links[node],
            )
            first_step = 0 if self._restored is None else self._restored[1]
            for number, (plan, steps) in enumerate(self._plans):
                if node in plan.nodes:
                    self._run_generation(trainer, number, node, first_step, evaluate, wasted_step)
                first_step += steps
        except BaseException:
            self._abandoned.set()
            for barrier in self._barriers:
                barrier.abort()
            raise

    def _run_generation(
        self, trainer: NodeTrainer, number: int, node: NodeId, first_step: int, evaluate: bool, wasted_step: bool
    ) -> None:
        plan, steps = self._plans[number]
        before = self._plans[number - 1][0] if number else None
        survivors = set(before.nodes).intersection(plan.nodes) if before else set()
        generation = Generation(
            number=number + 1,
            plan=plan,
            node=node,
            link_addresses={other: self._links[other].address for other in plan.nodes},
            ranks={other: rank for rank, other in enumerate(plan.nodes)},
            step=first_step,
            holdings={other: before.layers_of(other) if before and other in survivors else () for other in plan.nodes},
        )
        patience = Patience(abandoned=self._abandoned, limit_s=LIMIT_S, on_waiting=lambda node: None)
        restore = self._restored[0] if self._restored is not None and not number else None
        trainer.prepare(generation, progress=lambda phase, done, total: None, patience=patience, restore=restore)
        rank = generation.ranks[node]
        fabric = self._sums[number].fabric(rank)
        fabric.warm(trainer.fabric_sums(generation), limit_s=LIMIT_S, abandoned=self._abandoned)
        barrier = self._barriers[number]
        barrier.wait()
        trainer.start()
        is_last = number + 1 == len(self._plans)
        for step in range(first_step, first_step + steps):
            self._results[node] = trainer.compute(step, fabric=fabric, patience=patience)
            self.gradients[node] = trainer.summed_gradients()
            barrier.wait()
            loss, norm = _decide([self._results[other] for other in plan.nodes], self._config)
            barrier.wait()
            if rank == 0:
                self.losses.append(loss)
            trainer.commit(step, None if step in self._skipped else norm)
        if evaluate and is_last:
            total = trainer.evaluate(first_step + steps - 1, patience)
            self.evaluations[node] = (total.loss_sum, total.num_tokens)
        if wasted_step and not is_last:
            trainer.compute(first_step + steps, fabric=fabric, patience=patience)
        if not is_last:
            barrier.wait()
            trainer.abandon()


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
