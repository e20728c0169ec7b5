"""The lifeline tells that a process ends, however it does."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from oobleck_jax.elastic.lifeline import Lifeline


pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="there is no lifeline elsewhere"),
]

LIMIT_S = 10.0
HOLDER = """
import sys
from oobleck_jax.elastic.lifeline import hold
hold(int(sys.argv[1]))
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, 0], ids=["killed", "crashed", "ended"])
def test_a_process_that_ends_lets_go(number: int) -> None:
    async def play() -> None:
        lifeline = Lifeline()
        descriptor = lifeline.descriptor
        command = [sys.executable, "-c", HOLDER, str(descriptor)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, pass_fds=(descriptor,), stdin=pipe, stdout=pipe, stderr=pipe) as process:
            lifeline.close()
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == b"holds\n"
            waiting = asyncio.create_task(lifeline.wait())
            await asyncio.sleep(0.2)
            assert not waiting.done()
            if number:
                os.kill(process.pid, number)
            else:
                process.stdin.close()
            assert await asyncio.wait_for(waiting, LIMIT_S)

    asyncio.run(play())


def test_a_lifeline_that_nobody_holds_tells_nothing() -> None:
    async def play() -> None:
        lifeline = Lifeline()
        assert not await asyncio.wait_for(lifeline.wait(), LIMIT_S)
        lifeline.close()

    asyncio.run(play())
