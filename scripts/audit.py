"""Prove from the files of a run that every step counts once and every sample was used once in each pass.

python scripts/audit.py runs/gpt-laptop-20250101-120000

Exit code 0: it holds; 1: it does not, and the first violation is named; 2: the files cannot be read.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from oobleck_jax.audit import Audit, audit
from oobleck_jax.script import make_room, run_script


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this script."""

    run_dir: Annotated[Path, tyro.conf.Positional]  # folder of the run, which may still go on
    json: Path | None = None  # write the result into this file, too


def main(arguments: Arguments) -> int:
    """Check, report; return the exit code."""
    make_room(arguments.json, flag="--json")
    found = audit(arguments.run_dir)
    print(report(found))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    return 0 if found.violation is None else 1


def report(found: Audit) -> str:
    """Return the result as text."""
    if found.violation is not None:
        return f"VIOLATION: {found.violation}"
    num_steps = found.end_step - found.first_step
    if not num_steps:
        return "no step is committed yet\nOK"
    return "\n".join(
        (
            f"{num_steps} steps, {found.first_step} to {found.end_step - 1}, each committed once, in "
            f"{found.num_generations} generations",
            f"{found.num_undone_steps} steps undone by {found.num_restores} restores",
            f"{found.num_samples} samples used in {found.num_passes:.3f} passes over {found.num_samples_per_pass}, "
            "none twice in a pass",
            "OK",
        )
    )


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=(__doc__ or "").partition("\n")[0])))
