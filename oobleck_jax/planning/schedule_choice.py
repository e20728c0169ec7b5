"""Which schedule each pipeline of a plan has: the one that is predicted to be the fastest, if it is so by enough.

Partitions and shares are chosen for 1F1B, exactly (planner.py). Then each pipeline that is like no other is played
through with the other schedules that fit memory.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from oobleck_jax.config import Remat, ScheduleKind
from oobleck_jax.planning.forecast import forecast_times, pipeline_end_ns
from oobleck_jax.planning.interleave import NUM_CHUNKS, interleave
from oobleck_jax.planning.lane_memory import lanes_memory_bytes
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan, Template
from oobleck_jax.planning.templates import Templates


MARGIN = 0.05  # of a step: what another schedule must gain; predictions are not better than that
_TOLD = 0.0005  # of a step: a gain that shows in the text
MAX_ACTIONS = 20_000  # of a pipeline that is played through unasked: planning must not take long

_Form = tuple[Template, ScheduleKind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduled:
    """A plan with schedules, and why it has these; nothing to say where there was no choice."""

    plan: Plan
    reason: str


def choose_schedules(plan: Plan, templates: Templates, *, kept: frozenset[NodeId] = frozenset()) -> Scheduled:
    """Return the plan with the schedules that `templates.schedule` asks for, or that are the fastest. Pure.

    Args:
        plan: with 1F1B.
        templates: it is made of.
        kept: nodes of pipelines that stay as they are.
    """
    wanted = templates.schedule
    pipelines = tuple(
        pipeline if kept.issuperset(pipeline.nodes) else _with_form(pipeline, templates) for pipeline in plan.pipelines
    )
    if pipelines == plan.pipelines:
        has_choice = wanted is not ScheduleKind.ONE_F_ONE_B and any(p.template.num_lanes > 1 for p in plan.pipelines)
        return Scheduled(plan=plan, reason="schedule 1f1b, because no other is faster and fits" if has_choice else "")
    other = replace(plan, pipelines=pipelines)
    before, after = forecast_times([plan, other], templates.profile, templates.costs)
    gain = 1 - after.step_ns / max(before.step_ns, 1)
    number = sum(new != old for new, old in zip(pipelines, plan.pipelines, strict=True))
    name = next(new.schedule for new, old in zip(pipelines, plan.pipelines, strict=True) if new != old)
    what = f"{gain:.1%} less time per step predicted"
    if wanted is not ScheduleKind.AUTO:
        where = "" if number == len(pipelines) else f" in {number} of {len(pipelines)} pipelines"
        return Scheduled(plan=other, reason=f"schedule {name}{where}, as asked for: {what} than with 1f1b")
    if gain < MARGIN:
        why = f"{name} has only {what}" if gain > _TOLD else "no other is faster and fits"
        return Scheduled(plan=plan, reason=f"schedule 1f1b, because {why}")
    return Scheduled(plan=other, reason=f"schedule {name}, because it has {what} than 1f1b")


def _with_form(pipeline: Pipeline, templates: Templates) -> Pipeline:
    template, schedule = _best_form(templates, pipeline.template, pipeline.num_microbatches)
    return replace(pipeline, template=template, schedule=schedule)


@lru_cache(maxsize=1024)
def _best_form(templates: Templates, template: Template, num_microbatches: int) -> _Form:
    """Return what a pipeline becomes: the fastest form of those that are allowed."""
    wanted, plain = templates.schedule, (template, ScheduleKind.ONE_F_ONE_B)
    if wanted is ScheduleKind.AUTO and not _may_win(template, num_microbatches):
        return plain
    others = [form for form in _forms(templates, template) if wanted in (form[1], ScheduleKind.AUTO)]
    forms = [plain, *others] if wanted is ScheduleKind.AUTO else others or [plain]
    if len(forms) == 1:
        return forms[0]
    ends_ns = [pipeline_end_ns(form, num_microbatches, kind, templates.costs) for form, kind in forms]
    return forms[min(range(len(forms)), key=lambda number: (ends_ns[number], number))]


def _may_win(template: Template, num_microbatches: int) -> bool:
    """Whether so much of the time is bubble under 1F1B that another schedule can gain enough."""
    num_others = len(template.stages) - 1
    is_short = 2 * NUM_CHUNKS[-1] * len(template.stages) * num_microbatches <= MAX_ACTIONS
    return is_short and num_others / (num_microbatches + num_others) > MARGIN


@lru_cache(maxsize=1024)
def _forms(templates: Templates, template: Template) -> tuple[_Form, ...]:
    """Return the forms besides 1F1B that fit memory; none for one stage, which has no bubble."""
    if len(template.stages) < 2:
        return ()
    cut = [interleave(template, num_chunks, templates.costs) for num_chunks in NUM_CHUNKS]
    forms = [(form, ScheduleKind.INTERLEAVED) for form in cut if form is not None]
    if templates.profile.remat is Remat.NONE:
        forms.append((template, ScheduleKind.ZB_H1))
    return tuple(form for form in forms if _fits(templates, *form))


def _fits(templates: Templates, template: Template, schedule: ScheduleKind) -> bool:
    """Whether a form fits memory with any number of microbatches up to those of the global batch."""
    needed_bytes = lanes_memory_bytes(template, templates.num_microbatches, templates.costs, schedule)
    return max(needed_bytes) <= templates.device_memory_bytes
