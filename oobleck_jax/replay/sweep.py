"""Sweeps: `f=0..4`, `mtbf=600,1800,3600`."""

import re
from dataclasses import dataclass

from oobleck_jax.errors import ConfigError
from oobleck_jax.replay.generate import parse_recipe


NAMES = ("f", "mtbf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """One thing takes several values."""

    name: str
    values: tuple[float, ...]

    def in_recipe(self, trace: str, value: float) -> str:
        """Return the recipe of a trace with this value.

        Raises:
            ConfigError: the trace is a file.
        """
        if parse_recipe(trace) is None:
            raise ConfigError(f"--sweep {self.name} needs a recipe as --trace, such as poisson:mtbf=1800, not {trace}")
        return re.sub(rf"{self.name}=[^,]*", f"{self.name}={value:g}", trace)


def parse_sweep(text: str) -> Sweep:
    """Return the sweep that a text is.

    Raises:
        ConfigError: it is none.
    """
    name, _, values = text.partition("=")
    if name not in NAMES:
        raise ConfigError(f"--sweep {text}: give f=0..4, or mtbf=SECONDS,SECONDS,...")
    try:
        if match := re.fullmatch(r"(\d+)\.\.(\d+)", values):
            found = tuple(float(value) for value in range(int(match[1]), int(match[2]) + 1))
        else:
            found = tuple(float(value) for value in values.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 0 or (name == "f" and any(value % 1 for value in found)):
        raise ConfigError(f"--sweep {text}: {values!r} are no values; give {name}=0..4, or {name}=1,2,3")
    return Sweep(name=name, values=found)
