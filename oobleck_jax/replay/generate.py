"""Traces that are made up, from a seed.

    periodic:mtbf=600                    a node leaves every 600 s and does not come back: the paper's experiments
    poisson:mtbf=600,return=900          losses with exponential gaps of 600 s on the mean, of the whole cluster; each
                                         node comes back after an exponential time of 900 s on the mean
    bursts:mtbf=1800,size=4,return=900   the same, but 1 to `size` nodes are lost at once

With `least=N`, nobody leaves when only N are left; without, half of the nodes stay.
"""

import random
from dataclasses import dataclass, fields, replace

from oobleck_jax.errors import ConfigError
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.replay.trace import Life, Trace, make_trace


KINDS = ("periodic", "poisson", "bursts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How to make a trace."""

    kind: str
    mtbf: float  # seconds between losses, of the whole cluster
    size: int = 1  # the most nodes that are lost at once
    back: float = 0.0  # seconds until a lost node comes back; 0: never
    least: int | None = None  # nodes that stay

    @property
    def name(self) -> str:
        parts = [f"mtbf={self.mtbf:g}"]
        parts += [f"size={self.size}"] if self.size > 1 else []
        parts += [f"return={self.back:g}"] if self.back else []
        parts += [f"least={self.least}"] if self.least is not None else []
        return f"{self.kind}:{','.join(parts)}"


def parse_recipe(text: str) -> Recipe | None:
    """Return the recipe that a text is; None: it is none, so it may be the name of a file.

    Raises:
        ConfigError: it begins like a recipe, but is wrong.
    """
    kind, colon, rest = text.partition(":")
    if not colon or kind not in KINDS:
        return None
    recipe = Recipe(kind=kind, mtbf=3600.0)
    names = {"return": "back", **{item.name: item.name for item in fields(Recipe) if item.name not in ("kind", "back")}}
    for item in rest.split(","):
        name, _, value = item.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise ConfigError(f"--trace {text}: {item!r} is not NAME=NUMBER") from None
        if name not in names or number < 0 or (name in ("mtbf", "size") and number < 1):
            raise ConfigError(
                f"--trace {text}: {item} is none of mtbf=SECONDS, size=NODES, return=SECONDS, least=NODES"
            )
        recipe = replace(recipe, **{names[name]: int(number) if name in ("size", "least") else number})
    if kind != "bursts" and recipe.size > 1:
        raise ConfigError(f"--trace {text}: only bursts have a size; give bursts:{rest}")
    return recipe


def generate_trace(recipe: Recipe, *, num_nodes: int, duration_s: float | None = None, seed: int = 0) -> Trace:
    """Return the trace of a recipe. Pure.

    Args:
        recipe: how to make it.
        num_nodes: at the beginning, and the most there are.
        duration_s: of the trace (default: until no more may leave, or 12 hours if nodes come back).
        seed: decides who leaves, and when.
    """
    draw = random.Random(f"{seed} {recipe}")
    least = num_nodes // 2 if recipe.least is None else recipe.least
    if duration_s is None:
        duration_s = 12 * 3600.0 if recipe.back else recipe.mtbf * max(num_nodes - least, 1)
    begun = dict.fromkeys((NodeId(node) for node in range(num_nodes)), 0.0)
    away: dict[NodeId, float] = {}  # and when they come back
    lives: list[Life] = []
    time_s = 0.0
    while True:
        time_s += recipe.mtbf if recipe.kind == "periodic" else draw.expovariate(1 / recipe.mtbf)
        if time_s > duration_s:
            break
        for node in [node for node, back_s in away.items() if back_s <= time_s]:
            begun[node] = away.pop(node)
        for _ in range(min(draw.randint(1, recipe.size), len(begun) - least)):
            node = draw.choice(sorted(begun))
            lives.append(Life(node=node, begin_s=begun.pop(node), end_s=time_s))
            if recipe.back:
                away[node] = time_s + (recipe.back if recipe.kind == "periodic" else draw.expovariate(1 / recipe.back))
    begun |= {node: back_s for node, back_s in away.items() if back_s < duration_s}
    lives += [Life(node=node, begin_s=begin_s, end_s=float("inf")) for node, begin_s in begun.items()]
    return make_trace(recipe.name, duration_s, [life for life in lives if life.end_s > life.begin_s])
