"""Plans as people write them (`--plan`): a JSON file, or one line.

    0-5,5-10 | 0-10         two pipelines: layers 0-4 and 5-9 on two nodes, layers 0-9 on a third
    0-5,5-10:6 | 0-10:2     ... with 6 and 2 microbatches; without numbers they are shared by number of nodes
    0-5/2,5-10/2            stages of two devices each
    0-3@0,3-5@1,5-8@0,8-10@1    interleaved: the first node has layers 0-2 and 5-7, the second one the others

Nodes are numbered in order of appearance; `@` counts within the pipeline. The JSON form is that of `Plan` and can say
everything; a file of `plan.py --json` is as good.
"""

import contextlib
import re
from pathlib import Path

import msgspec

from oobleck_jax.config import ScheduleKind
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan, Stage, Template


class _Planning(msgspec.Struct):
    plan: Plan


class _Report(msgspec.Struct):
    """What there must be of the JSON file of `plan.py`."""

    planning: _Planning


_STAGE = re.compile(r"(\d+)-(\d+)(?:/(\d+))?(?:@(\d+))?")


def read_plan(text: str, *, num_microbatches: int) -> Plan:
    """Return the plan that `--plan` names: a file, or the plan itself.

    Only the form is checked here; whether the plan fits the model is the business of `check_plan`.

    Raises:
        PlanError: neither a file with a plan, nor a plan.
    """
    path = Path(text)
    if path.suffix == ".json" or path.is_file():
        try:
            content = path.read_bytes()
        except OSError as error:
            raise PlanError(f"--plan {text}: {error.strerror}") from None
        try:
            return msgspec.json.decode(content, type=Plan)
        except msgspec.MsgspecError as error:
            with contextlib.suppress(msgspec.MsgspecError):
                return msgspec.json.decode(content, type=_Report).planning.plan
            raise PlanError(f"--plan {text} is not a plan: {error}") from None
    return parse_plan(text, num_microbatches=num_microbatches)


def parse_plan(text: str, *, num_microbatches: int) -> Plan:
    """Return the plan of one line such as `0-5,5-10 | 0-10`.

    Raises:
        PlanError: the line does not have this form.
    """
    templates: list[Template] = []
    shares: list[int | None] = []
    for part in text.split("|"):
        stages, colon, share = part.strip().partition(":")
        templates.append(
            Template(stages=tuple(_stage(word, text, index) for index, word in enumerate(stages.split(","))))
        )
        if colon and not share.strip().isdecimal():
            raise PlanError(f"--plan {text!r}: {share!r} is not a number of microbatches")
        shares.append(int(share) if colon else None)
    microbatches = _shares(templates, shares, num_microbatches, text)
    pipelines: list[Pipeline] = []
    first = 0
    for template, count in zip(templates, microbatches, strict=True):
        nodes = tuple(NodeId(node) for node in range(first, first + template.num_nodes))
        is_interleaved = template.num_lanes < len(template.stages)
        schedule = ScheduleKind.INTERLEAVED if is_interleaved else ScheduleKind.ONE_F_ONE_B
        pipelines.append(Pipeline(template=template, nodes=nodes, num_microbatches=count, schedule=schedule))
        first += template.num_nodes
    return Plan(pipelines=tuple(pipelines))


def _stage(word: str, text: str, index: int) -> Stage:
    match = _STAGE.fullmatch(word.strip())
    if match is None:
        raise PlanError(
            f"--plan {text!r}: {word.strip()!r} is not a stage; write FIRST-END (END is exclusive), as in "
            "0-5,5-10 | 0-10, or give a JSON file"
        )
    return Stage(
        first_layer=int(match[1]),
        end_layer=int(match[2]),
        node_index=index if match[4] is None else int(match[4]),
        num_devices=int(match[3] or 1),
    )


def _shares(templates: list[Template], shares: list[int | None], num_microbatches: int, text: str) -> list[int]:
    """Give the pipelines without a number a share of the rest, by their nodes; what is left over goes to the first."""
    given = [share for share in shares if share is not None]
    open_nodes = [template.num_nodes for template, share in zip(templates, shares, strict=True) if share is None]
    rest = num_microbatches - sum(given)
    if rest < len(open_nodes):
        raise PlanError(f"--plan {text!r}: {num_microbatches} microbatches are not enough; each pipeline needs one")
    # Each gets one; the others go, one by one, to whom has the fewest for its nodes.
    counts = [1] * len(open_nodes)
    for _ in range(rest - len(open_nodes) if open_nodes else 0):
        index = min(range(len(counts)), key=lambda i: ((counts[i] + 1) / open_nodes[i], i))
        counts[index] += 1
    remaining = iter(counts)
    return [next(remaining) if share is None else share for share in shares]
