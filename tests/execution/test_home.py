"""What JAX itself keeps on disk for the processes of a host."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ages import age


# Compiles a program, unless JAX finds it on disk.
CODE = """
import sys
from pathlib import Path
import jax
from oobleck_jax.execution.home import use_compilation_cache
use_compilation_cache(Path(sys.argv[1]))
jax.jit(lambda x: 3 * x + 1)(2)
"""


@pytest.mark.process
@pytest.mark.jax_version
def test_programs_of_jax_that_nobody_used_for_months_are_removed(tmp_path: Path) -> None:
    """Each use is by a process of its own, because JAX opens its cache once; the names of the files are its own."""
    folder = tmp_path / "jax"

    def num_made(*, days: float) -> int:
        """Age all files, use them, and return how many were made anew."""
        for path in folder.glob("*"):
            age(path, days=days)
        before = {path: path.stat().st_mtime for path in folder.glob("*")}
        subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], check=True, timeout=60)
        return sum(before.get(path) != path.stat().st_mtime for path in folder.iterdir())

    num_programs = num_made(days=0)
    assert num_programs > 0
    assert [num_made(days=days) for days in (89, 91)] == [0, num_programs]
