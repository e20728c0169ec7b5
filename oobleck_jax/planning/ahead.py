"""The stages that plans to come may need, so that their programs can be compiled before anything fails.

Plans after a loss or a join are made of templates (planner.py) and of pipelines that stay as they are (reconfigure.py),
which came from templates once, or from the user's plan. So the stages of all templates and of that plan are all there
can be, and those that need other programs than the rest are few: most differ only in how many layers of the same kind
they hold.
"""

from collections.abc import Hashable, Iterator
from functools import lru_cache

from oobleck_jax.config import ScheduleKind
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.interleave import stages_of_interleaved
from oobleck_jax.planning.plan import MAX_SPAN_LAYERS, NodeId, Plan, Stage
from oobleck_jax.planning.planner import plan_from
from oobleck_jax.planning.profile import Profile
from oobleck_jax.planning.templates import Templates, template_of


MAX_CHANGES = 8  # losses, and joins, up to which plans are looked at; others come from the same templates, unordered


@lru_cache(maxsize=8)
def stages_ahead(
    templates: Templates, *, num_nodes: int, max_nodes: int, fault_tolerance: int, given: Plan | None = None
) -> tuple[Stage, ...]:
    """Return the stages that plans for any number of nodes may need, those that will most likely be needed first.

    Of stages that need the same programs there is one. Pure; the last few results are kept.

    Args:
        templates: of the model, for up to `max_nodes` nodes.
        num_nodes: nodes there are now.
        max_nodes: the most there can be.
        fault_tolerance: f, as for plans.
        given: the user's plan for `num_nodes` nodes, in place of the planner's.
    """
    found: dict[Hashable, Stage] = {}
    for stage in _likely_first(templates, num_nodes, max_nodes, fault_tolerance, given):
        found.setdefault(programs_of(stage, templates.profile), stage)
    return tuple(found.values())


def programs_of(stage: Stage, profile: Profile) -> Hashable:
    """Return what the programs of a stage depend on: equal values, equal programs."""
    kinds = tuple(profile.layers[layer].kind for layer in stage.layers)
    is_first, is_last = stage.first_layer == 0, stage.end_layer == profile.num_layers
    return is_first, is_last, kinds, stage.devices, stage.first_layer % MAX_SPAN_LAYERS


def _likely_first(
    templates: Templates, num_nodes: int, max_nodes: int, fault_tolerance: int, given: Plan | None
) -> Iterator[Stage]:
    """Yield stages of the plans after one loss; of all nodes; after more losses, and joins; of all other templates."""
    fewer = range(num_nodes - 1, max(num_nodes - 1 - MAX_CHANGES, 0), -1)
    more = range(num_nodes + 1, min(num_nodes + MAX_CHANGES, max_nodes) + 1)
    for number in (*fewer[:1], num_nodes, *fewer[1:], *more):
        if number == num_nodes and given is not None:
            plan = given
        else:
            nodes = tuple(NodeId(node) for node in range(number))
            try:
                plan = plan_from(templates, nodes=nodes, fault_tolerance=fault_tolerance).plan
            except PlanError:  # too few nodes: there is no plan to compile for
                continue
        for pipeline in plan.pipelines:
            yield from pipeline.template.stages
    for size in sorted(templates.choices, key=lambda size: (abs(size - num_nodes), size)):
        if size <= max_nodes:
            for partition in templates.choices[size]:
                template = template_of(partition)
                yield from template.stages
                if templates.schedule in (ScheduleKind.AUTO, ScheduleKind.INTERLEAVED):
                    yield from stages_of_interleaved(template, templates.costs)
