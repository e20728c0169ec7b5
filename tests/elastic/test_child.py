import os
import subprocess
import sys
import time

import psutil
import pytest

from oobleck_jax.elastic.child import child_command


pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="Linux only")]


def test_a_child_runs_on_its_cores() -> None:
    core = min(os.sched_getaffinity(0))
    command = (sys.executable, "-S", "-c", "import os; print(sorted(os.sched_getaffinity(0)))")
    result = subprocess.run(child_command(command, cores=(core,)), capture_output=True, text=True, timeout=20)
    assert result.stdout == f"[{core}]\n"


def test_a_child_is_killed_with_its_parent() -> None:
    code = (
        "import subprocess, sys, time\n"
        "from oobleck_jax.elastic.child import child_command\n"
        "child = subprocess.Popen(child_command(('sleep', '60'), cores=()), start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        end_s = time.monotonic() + 10
        while psutil.Process(child).name() != "sleep" and time.monotonic() < end_s:
            time.sleep(0.01)
        parent.kill()
    while psutil.pid_exists(child) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not psutil.pid_exists(child)


def test_a_child_leaves_the_end_of_the_job_to_its_parent() -> None:
    command = (sys.executable, "-S", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM); print('alive')")
    result = subprocess.run(child_command(command, cores=()), capture_output=True, text=True, timeout=20)
    assert result.stdout == "alive\n"
