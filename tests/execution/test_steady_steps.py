"""What a step must not do once the run is warm: trace, compile, or wait for the device in the middle."""

import threading
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from models.presets import load_preset
from oobleck_jax.config import Precision, Remat
from oobleck_jax.data import TokenDataset
from oobleck_jax.execution import executor
from oobleck_jax.execution.in_process import InProcessHub
from oobleck_jax.execution.node import Generation, NodeTrainer
from oobleck_jax.execution.patience import Patience
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan, Stage, Template
from tests.execution.thread_cluster import LIMIT_S, shared_home


NODE = NodeId(0)
# Two stages on one node, so that activations go from one to the other.
STAGES = (
    Stage(first_layer=0, end_layer=3, node_index=0, first_device=0),
    Stage(first_layer=3, end_layer=6, node_index=0, first_device=1),
)


@pytest.fixture
def trainer():
    config = replace(
        load_preset("gpt-test"), devices_per_node=2, eval_every=1, precision=Precision.MIXED, remat=Remat.STAGE
    )
    link = InProcessHub().link()
    pipeline = Pipeline(template=Template(stages=STAGES), nodes=(NODE,), num_microbatches=config.num_microbatches)
    trainer = NodeTrainer(
        config=config,
        model=config.model.build(),
        dataset=TokenDataset.open(config),
        home=shared_home(config.model, 2),
        link=link,
    )
    generation = Generation(
        number=1, plan=Plan(pipelines=(pipeline,)), node=NODE, link_addresses={NODE: link.address}, ranks={NODE: 0}
    )
    trainer.prepare(generation, progress=lambda phase, done, total: None, patience=patience())
    trainer.start()
    return trainer


def patience() -> Patience:
    return Patience(abandoned=threading.Event(), limit_s=LIMIT_S, on_waiting=lambda node: None)


def run_step(trainer: NodeTrainer, step: int) -> None:
    trainer.compute(step, fabric=None, patience=patience())
    trainer.commit(step, 1.0)
    trainer.evaluate(step, patience())


def test_a_warm_step_traces_and_compiles_nothing(trainer):
    seen: Counter[str] = Counter()

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        seen[event.rpartition("/")[2]] += 1

    run_step(trainer, 0)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 1).lower(1.0).compile()
        assert {"jaxpr_trace_duration", "backend_compile_duration"} <= seen.keys(), "nothing would be seen"
        seen.clear()
        for step in range(1, 4):
            run_step(trainer, step)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not seen


def test_a_step_reads_no_result_before_all_of_it_is_started(trainer, monkeypatch):
    order: list[str] = []
    array, pace = type(jnp.zeros(1)), executor.Pace
    value, run = array._value, pace.run
    monkeypatch.setattr(array, "_value", property(lambda self: (order.append("read"), value.fget(self))[1]))
    monkeypatch.setattr(
        pace, "run", lambda self, *given, **named: (order.append("start"), run(self, *given, **named))[1]
    )
    trainer.compute(0, fabric=None, patience=patience())
    assert order.count("start") > 4 * trainer._config.num_microbatches
    assert order[: order.index("read")].count("start") == order.count("start")
