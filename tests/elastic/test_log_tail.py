import os
import signal
import subprocess
import sys
from pathlib import Path

from oobleck_jax.elastic.log_tail import headline, read_tail, tail_of
from oobleck_jax.planning.plan import NodeId


ABORT = """
import faulthandler, os, threading

faulthandler.enable()
for _ in range(20):
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def deep(depth):
    return deep(depth - 1) if depth else os.abort()


print("E0000 pool.cc:12] Check failed: size > 0 (0 vs. 0)", flush=True)
frames = [f"    @     0x7f{number:010x}  xla::f()" for number in range(30)]
print("*** Check failure stack trace: ***", *frames, sep="\\n", flush=True)
deep(50)
"""


def test_a_long_log_gives_its_last_lines() -> None:
    assert tail_of("\n".join(map(str, range(100)))).splitlines() == [str(number) for number in range(80, 100)]
    assert tail_of("") == ""


def test_what_an_earlier_worker_wrote_is_left_out() -> None:
    text = f"Fatal Python error: Aborted\n\n{headline(1, NodeId(3))}\nb\n\n{headline(2, NodeId(3))}\nc\nd\n"
    assert tail_of(text) == "c\nd"
    assert tail_of(f"a\n\n{headline(1, NodeId(3))}\n") == ""


def test_of_a_worker_that_aborts_the_reason_and_its_own_thread_are_told(tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    with log.open("wb") as file:
        ended = subprocess.run([sys.executable, "-c", ABORT], stdout=file, stderr=file, timeout=60, check=False)
    assert ended.returncode == -signal.SIGABRT
    assert log.read_text().count("(most recent call first)") > 20
    reason, trace, fatal, thread, first, *others = read_tail(log).splitlines()
    assert reason == "E0000 pool.cc:12] Check failed: size > 0 (0 vs. 0)"
    assert trace == "*** Check failure stack trace: ***"
    assert fatal == "Fatal Python error: Aborted"
    assert thread.startswith("Current thread ")
    assert first.endswith("in deep")
    assert len(others) == 3


def test_a_thread_without_python_may_abort() -> None:
    dump = "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File a, line 1 in wait\n"
    assert tail_of(f"why\n{dump}") == "why\nFatal Python error: Segmentation fault"


def test_only_the_end_of_a_file_is_read(tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    log.write_bytes(os.urandom(2**20) + b"\nthe end\n")
    assert read_tail(log).splitlines()[-1] == "the end"
