"""Show what every node did when: a picture, or a trace for https://ui.perfetto.dev and chrome://tracing.

Prints where the time of a step goes, too: per cent of it, for each node.

python scripts/timeline.py runs/a --steps 24:28 --output steps.png
python scripts/timeline.py runs/a --output trace.json

The run must have been started with --trace.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from oobleck_jax.errors import ConfigError
from oobleck_jax.script import make_room_for_picture, run_script
from oobleck_jax.step_shares import shares_table, step_shares
from oobleck_jax.timeline import plot_timeline, read_timeline, write_chrome


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this script."""

    run_dir: Annotated[Path, tyro.conf.Positional]  # folder of the run, which may still go on
    output: Annotated[Path, tyro.conf.arg(aliases=["--out"])] = Path("timeline.png")  # .json: a trace; else a picture
    steps: str | None = None  # FIRST:END, END exclusive (default: all)


def main(arguments: Arguments) -> int:
    """Read, write; return the exit code."""
    make_room_for_picture(arguments.output, flag="--output", besides=(".json",))
    steps = _range(arguments.steps)
    timeline = read_timeline(arguments.run_dir, steps=steps)
    if arguments.output.suffix.lower() == ".json":
        write_chrome(timeline, arguments.output)
    else:
        what = "all steps" if steps is None else f"steps {steps.start} to {steps.stop - 1}"
        plot_timeline(timeline, arguments.output, title=f"{arguments.run_dir.resolve().name}, {what}")
    Console().print(shares_table(step_shares(timeline)))
    print(f"written to {arguments.output}")
    return 0


def _range(text: str | None) -> range | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--steps {text} is not FIRST:END, such as 10:20 for the steps 10 to 19")
    return range(int(match[1]), int(match[2]))


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=(__doc__ or "").partition("\n")[0])))
