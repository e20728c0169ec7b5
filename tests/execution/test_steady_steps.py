"""What a step must not do once the run is warm: trace, compile, or wait for the device in the middle."""

import threading
from collections import Counter
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

from models.presets import load_preset
from oobleck_jax.config import Precision, Remat, ScheduleKind
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


CHUNKS = tuple(
    Stage(first_layer=first, end_layer=end, node_index=0, first_device=number % 2)
    for number, (first, end) in enumerate(((0, 1), (1, 3), (3, 5), (5, 6)))
)
WHOLE = (Stage(first_layer=0, end_layer=6, node_index=0, first_device=0, num_devices=2),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is run, and how."""

    precision: Precision = Precision.FLOAT32
    remat: Remat = Remat.LAYER
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    stages: tuple[Stage, ...] = STAGES
    microbatch_size: int = 4
    tensor_parallel: bool = False
    dropout_rate: float = 0.0


CASES = {
    "mixed, stages computed again": Case(precision=Precision.MIXED, remat=Remat.STAGE),
    "float32": Case(),
    "bfloat16, products kept": Case(precision=Precision.BFLOAT16, remat=Remat.DOTS),
    "zb-h1": Case(remat=Remat.NONE, schedule=ScheduleKind.ZB_H1),
    "zb-h1, mixed": Case(remat=Remat.NONE, schedule=ScheduleKind.ZB_H1, precision=Precision.MIXED),
    "interleaved": Case(stages=CHUNKS, schedule=ScheduleKind.INTERLEAVED),
    "a microbatch shared by two devices": Case(stages=WHOLE, microbatch_size=2),
    "tensor parallel": Case(stages=WHOLE, microbatch_size=1, tensor_parallel=True),
    "dropout": Case(dropout_rate=0.2),
}


@pytest.fixture
def trainer(request):
    case = getattr(request, "param", CASES["mixed, stages computed again"])
    config = load_preset("gpt-test")
    config = replace(
        config,
        model=replace(config.model, dropout_rate=case.dropout_rate),
        devices_per_node=2,
        eval_every=1,
        precision=case.precision,
        remat=case.remat,
        microbatch_size=case.microbatch_size,
        tensor_parallel=case.tensor_parallel,
    )
    link = InProcessHub().link()
    pipeline = Pipeline(
        template=Template(stages=case.stages),
        nodes=(NODE,),
        num_microbatches=config.num_microbatches,
        schedule=case.schedule,
    )
    trainer = NodeTrainer(
        config=config,
        model=config.model.build(),
        dataset=TokenDataset.open(config),
        home=shared_home(config.model, 2, tensor_parallel=case.tensor_parallel),
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


@pytest.mark.parametrize("trainer", CASES.values(), ids=CASES.keys(), indirect=True)
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
