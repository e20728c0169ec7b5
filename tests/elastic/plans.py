"""Plans and terms for tests of the control plane."""

from collections.abc import Mapping
from typing import Any

from oobleck_jax.elastic.messages import RunId
from oobleck_jax.elastic.terms import Proposal, Terms
from oobleck_jax.errors import NotEnoughNodes
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan, Stage, Template


NUM_LAYERS = 4
TOKENS_PER_MICROBATCH = 4 * 128
NUM_MICROBATCHES = 8


def template(num_nodes: int) -> Template:
    """Four layers over up to four nodes."""
    edges = [round(NUM_LAYERS * index / num_nodes) for index in range(num_nodes + 1)]
    return Template(
        stages=tuple(
            Stage(first_layer=edges[index], end_layer=edges[index + 1], node_index=index) for index in range(num_nodes)
        )
    )


def plan_of(*pipelines: tuple[int, ...], spare: tuple[int, ...] = ()) -> Plan:
    """A plan with these nodes in each pipeline; the microbatches are shared equally, the first takes the rest."""
    each = NUM_MICROBATCHES // len(pipelines)
    first = NUM_MICROBATCHES - each * (len(pipelines) - 1)
    return Plan(
        pipelines=tuple(
            Pipeline(
                template=template(len(nodes)),
                nodes=tuple(map(NodeId, nodes)),
                num_microbatches=first if number == 0 else each,
            )
            for number, nodes in enumerate(pipelines)
        ),
        spare_nodes=tuple(map(NodeId, spare)),
    )


def replan(nodes: tuple[NodeId, ...], holdings: Mapping[NodeId, tuple[int, ...]], old: Plan | None = None) -> Proposal:
    """Two pipelines when there are nodes enough; at least two nodes; a fifth and later node is spare."""
    if len(nodes) < 2:
        raise NotEnoughNodes(f"{len(nodes)} nodes, but 2 are needed", num_nodes=len(nodes), num_needed=2)
    working, spare = nodes[:4], nodes[4:]
    half = len(working) // 2
    pipelines = (working[:half], working[half:]) if len(working) > 2 else (working,)
    return Proposal(plan=plan_of(*pipelines, spare=spare), reason=f"{len(pipelines)} pipelines")


def terms(**changes: Any) -> Terms:
    values: dict[str, Any] = {
        "config_json": "{}",
        "run_id": RunId("run"),
        "config_digest": "digest",
        "versions": {"jax": "0.10"},
        "num_nodes": 3,
        "num_devices": 1,
        "num_layers": NUM_LAYERS,
        "steps": 5,
        "tokens_per_step": NUM_MICROBATCHES * TOKENS_PER_MICROBATCH,
        "evaluates_after": lambda step: False,
        "replan": replan,
        "place": lambda plan: {},
        "place_at_start": lambda node: ((), 1),
    }
    return Terms(**{**values, **changes})
