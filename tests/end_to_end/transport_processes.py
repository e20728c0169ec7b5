"""Processes of the transport tests, seen from the test: members that are told what to do, and coordination services."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


ANSWER_LIMIT_S = 40.0

_SERVE = """
import sys, time
from oobleck_jax.execution.jaxlib_private import start_coordination_service
service = start_coordination_service(sys.argv[1], int(sys.argv[2]))
assert "jax" not in sys.modules
print("up", flush=True)
time.sleep(300)
"""


class Member:
    """A process that is one node."""

    def __init__(self) -> None:
        self.process = _start([str(Path(__file__).with_name("transport_member.py"))])
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, do: str, **arguments: Any) -> None:
        """Send a command; `answer` brings what comes of it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
        self.process.stdin.flush()

    def answer(self, limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any]:
        """Return the answer to the oldest command without one."""
        return self._answers.get(timeout=limit_s)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Do a command that must succeed, and return its value."""
        self.tell(do, **arguments)
        return value(self.answer())

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # Gloo writes to stdout too
                self._answers.put(json.loads(line))


def value(answer: dict[str, Any]) -> Any:
    assert "value" in answer, answer
    return answer["value"]


class Members:
    """Processes for one test after the other: starting one takes seconds, and a survivor must be as good as new."""

    def __init__(self) -> None:
        self._idle: list[Member] = []

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[list[Member]]:
        """Yield so many nodes. Those that are alive and answer afterwards are kept for the next test."""
        taken, self._idle = self._idle[:count], self._idle[count:]
        started = [Member() for _ in range(count - len(taken))]
        taken += started
        try:
            for member in started:
                assert value(member.answer()) == "up"
            yield list(taken)
            self._idle += [member for member in taken if member.process.poll() is None and member.ask("reset") is None]
        finally:
            _end([member.process for member in taken if member not in self._idle])

    def end(self) -> None:
        _end([member.process for member in self._idle])


@contextlib.contextmanager
def coordination_service(num_nodes: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a coordination service in a process of its own; yield its address and the process."""
    address = free_address()
    process = _start(["-c", _SERVE, address, str(num_nodes)])
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield address, process
    finally:
        _end([process])


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def all_tell(group: Sequence[Member], do: str, **arguments: Any) -> list[dict[str, Any]]:
    """Let all members do the same at the same time, and return their answers."""
    for member in group:
        member.tell(do, **arguments)
    return [member.answer() for member in group]


def meet(group: Sequence[Member], address: str, sums: Sequence[tuple[Sequence[int], int]]) -> list[dict[str, Any]]:
    """Let the members, in the order of their ranks, make and warm a fabric; return their answers."""
    for rank, member in enumerate(group):
        member.tell("connect", address=address, rank=rank, num_nodes=len(group), sums=sums, limit_s=20.0)
    return [member.answer() for member in group]


def _start(arguments: list[str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=20",
    }
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(timeout=10)  # SIGKILL also ends a stopped process
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
