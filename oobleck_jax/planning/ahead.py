"""The stages that plans to come may need, so that their programs can be compiled before anything fails.

Plans after a loss or a join are made of templates (planner.py) and of pipelines that stay as they are (reconfigure.py),
which came from templates once. So the stages of all templates together are all there can be, and they are few: most
differ only in how many layers of the same kind they hold.
"""

from collections.abc import Hashable, Iterator
from functools import lru_cache

from oobleck_jax.errors import PlanError
from oobleck_jax.planning.plan import NodeId, Stage
from oobleck_jax.planning.planner import plan_from
from oobleck_jax.planning.profile import Profile
from oobleck_jax.planning.templates import Templates, template_of


MAX_FEWER = 8  # losses up to which plans are looked at; the others come from the same templates, in no special order


@lru_cache(maxsize=8)
def stages_ahead(templates: Templates, *, num_nodes: int, max_nodes: int, fault_tolerance: int) -> tuple[Stage, ...]:
    """Return the stages that plans for any number of nodes may need, those that will most likely be needed first.

    Of stages that need the same programs there is one. Pure; the last few results are kept.

    Args:
        templates: of the model, for up to `max_nodes` nodes.
        num_nodes: nodes there are now.
        max_nodes: the most there can be.
        fault_tolerance: f, as for plans.
    """
    found: dict[Hashable, Stage] = {}
    for stage in _likely_first(templates, num_nodes, max_nodes, fault_tolerance):
        found.setdefault(programs_of(stage, templates.profile), stage)
    return tuple(found.values())


def programs_of(stage: Stage, profile: Profile) -> Hashable:
    """Return what the programs of a stage depend on: equal values, equal programs."""
    kinds = tuple(profile.layers[layer].kind for layer in stage.layers)
    return stage.first_layer == 0, stage.end_layer == profile.num_layers, kinds, stage.devices


def _likely_first(templates: Templates, num_nodes: int, max_nodes: int, fault_tolerance: int) -> Iterator[Stage]:
    """Yield stages of the plans after one loss, two, ...; of all nodes; of whatever else there are templates."""
    fewer = range(num_nodes - 1, max(num_nodes - 1 - MAX_FEWER, 0), -1)
    for number in (*fewer, num_nodes, max_nodes):
        try:
            plan = plan_from(
                templates, nodes=tuple(NodeId(node) for node in range(number)), fault_tolerance=fault_tolerance
            ).plan
        except PlanError:  # too few nodes: there is no plan to compile for
            continue
        for pipeline in plan.pipelines:
            yield from pipeline.template.stages
    for size in sorted(templates.choices, key=lambda size: (abs(size - num_nodes), size)):
        if size <= max_nodes:
            for partition in templates.choices[size]:
                yield from template_of(partition).stages
