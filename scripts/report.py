"""Write a run as one HTML file: curves, incidents, plans, and what its files prove.

python scripts/report.py runs/gpt-laptop-20250101-120000 --output report.html
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from oobleck_jax.errors import ConfigError
from oobleck_jax.report import read_report, write_report
from oobleck_jax.script import make_room, run_script


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this script."""

    run_dir: Annotated[Path, tyro.conf.Positional]  # folder of the run, which may still go on
    output: Annotated[Path, tyro.conf.arg(aliases=["--out"])] = Path("report.html")  # where to write


def main(arguments: Arguments) -> int:
    """Read, write; return the exit code."""
    make_room(arguments.output, flag="--output")
    try:
        report = read_report(arguments.run_dir)
        write_report(report, arguments.output)
    except (ConfigError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    print(f"written to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=(__doc__ or "").partition("\n")[0])))
