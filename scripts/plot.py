"""Draw a run: loss and throughput over time, with the incidents marked.

python scripts/plot.py runs/gpt-laptop-20250101-120000 --output run.png
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from models.presets import config_from_json
from oobleck_jax.run_plot import plot_history, read_history
from oobleck_jax.script import make_room_for_picture, run_script


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this script."""

    run_dir: Annotated[Path, tyro.conf.Positional]  # folder of the run, which may still go on
    output: Path = Path("run.png")  # where to draw; the ending of the name says how (.png, .pdf, .svg)


def main(arguments: Arguments) -> int:
    """Read, draw; return the exit code."""
    make_room_for_picture(arguments.output, flag="--output")
    try:
        preset, config = config_from_json((arguments.run_dir / "config.json").read_text(encoding="utf-8"))
        history = read_history(arguments.run_dir)
    except OSError as error:
        print(f"{arguments.run_dir} is no folder of a run: {error}", file=sys.stderr)
        return 2
    if not history.committed:
        print(f"{arguments.run_dir} has no committed step yet", file=sys.stderr)
        return 2
    title = f"{preset}, {len(history.committed)} of {config.steps} steps, {len(history.incidents)} incidents"
    plot_history(history, arguments.output, tokens_per_step=config.tokens_per_step, title=title)
    print(f"drawn into {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=(__doc__ or "").partition("\n")[0])))
