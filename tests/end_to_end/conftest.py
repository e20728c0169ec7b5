"""What all tests of whole runs compare with."""

import fcntl
import os

import pytest

from oobleck_jax.live_run import LiveRun
from tests.end_to_end.training_runs import train


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """A run of two pipelines of two nodes to which nothing happens, with a checkpoint of its last step."""
    return made_once("undisturbed", tmp_path_factory)


@pytest.fixture(scope="session")
def undisturbed_mixed(tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """The same in mixed precision."""
    return made_once("undisturbed-mixed", tmp_path_factory, "--precision", "mixed")


def made_once(name: str, tmp_path_factory: pytest.TempPathFactory, *flags: str) -> LiveRun:
    """Return a run that is made once for all processes of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    run_dir, finished = folder / name, folder / f"{name}.finished"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            train(run_dir, "--nodes", "4", "--plan", "0-3,3-6 | 0-3,3-6", "--checkpoint-every", "1000", *flags)
            finished.touch()
    return LiveRun(run_dir)
