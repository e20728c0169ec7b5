"""The worker process of a node, as its agent sees it: start it, talk to it, watch it, end it."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from oobleck_jax.elastic import messages
from oobleck_jax.elastic.child import child_command
from oobleck_jax.elastic.lifeline import Lifeline
from oobleck_jax.elastic.log_tail import read_tail


MAX_MESSAGE_BYTES = 16 * 2**20  # far above the largest vote
# A sum whose fabric was dropped while it waited ends then, with its thread and its sockets (XLA: after half an hour).
# Nobody waits longer for one that is still wanted.
_COLLECTIVE_LIMIT_S = 600


# For glibc. XLA allocates its temporaries anew in each program: what is freed must stay, or every page of it is faulted
# in again (a tenth of the CPU time of gpt-laptop). In one arena: those of other threads are made of pieces of 64 MB
# that go back when they are empty (with two, a step of four nodes of a model of 45 million parameters took 1.3 times as
# long, and gpt-laptop peaked at 570 MB instead of 505). In huge pages: the kernel gives the memory of a killed worker
# back before anybody can notice its death (processes of 600 MB on busy cores were gone 18-54 ms after a kill -9,
# instead of 124-737).
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


class WorkerProcess:
    """A running worker.

    Its messages are lines of JSON on a socket pair whose other end it inherits as `--control-fd`. What it prints goes
    straight into the log file, so nothing is lost when the agent dies. The worker has its own session, is killed by the
    kernel when the agent dies (Linux), and sees the end of its control socket anywhere. It inherits a lifeline as
    `--lifeline-fd`, by which the agent learns at once that it is killed (Linux).

    Attributes:
        peak_memory_bytes: largest resident size, known once it has ended.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        control: socket.socket,
        log_path: Path | None,
        lifeline: Lifeline | None,
    ) -> None:
        self.peak_memory_bytes = 0
        self._process = process
        self._control = control
        self._log_path = log_path
        self._lifeline = lifeline
        self._has_spoken = asyncio.Event()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._exit = asyncio.ensure_future(asyncio.to_thread(self._reap))

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(
        cls, command: Sequence[str], welcome: messages.Welcome, *, num_devices: int, log_path: Path | None
    ) -> "WorkerProcess":
        """Start a worker and send it its first line.

        Args:
            command: the program; `--control-fd N --lifeline-fd N` is appended.
            welcome: its configuration, cores and threads.
            num_devices: virtual devices of its CPU platform.
            log_path: file its output is appended to; None: the output of this process.
        """
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as stack:
            log = stack.enter_context(log_path.open("ab")) if log_path else None
            inherited = {"--control-fd": theirs.fileno()}
            lifeline = None
            with contextlib.suppress(OSError):
                lifeline = Lifeline()
                stack.callback(lifeline.close)
                inherited["--lifeline-fd"] = lifeline.descriptor
            options = [word for name, number in inherited.items() for word in (name, str(number))]
            process = subprocess.Popen(
                child_command([*command, *options], cores=welcome.cores),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                pass_fds=tuple(inherited.values()),
                env=worker_environment(os.environ, num_threads=welcome.num_threads, num_devices=num_devices),
                start_new_session=True,
            )
        worker = cls(process, ours, log_path, lifeline)
        worker._reader, worker._writer = await asyncio.open_connection(sock=ours, limit=MAX_MESSAGE_BYTES)
        worker.send(messages.encode(welcome))
        return worker

    def send(self, message: bytes) -> None:
        """Send a message. Never waits: a worker that does not read must not keep its agent from killing it."""
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(message + b"\n")

    async def receive(self) -> bytes | None:
        """Return the next message of the worker, or None when it has closed its end."""
        assert self._reader is not None
        with contextlib.suppress(ConnectionError):
            if line := await self._reader.readline():
                self._has_spoken.set()
                return line
        return None

    async def wait(self) -> int:
        """Return the exit code once the worker has ended; negative: the signal that killed it."""
        return await asyncio.shield(self._exit)

    async def killed(self) -> int | None:
        """Return the exit code of a worker that is being killed, long before `wait` does; None: only `wait` knows."""
        await self._has_spoken.wait()  # it holds its lifeline from then on
        if self._lifeline is None or not await self._lifeline.wait():
            return None
        try:
            status = int(self._stat()[-1])
        except OSError:
            return None  # it is gone already
        return os.waitstatus_to_exitcode(status) if os.WIFSIGNALED(status) else None

    async def end(self, *, patience_s: float) -> int:
        """Wait for the worker to end, and kill it and its children when it does not. Return the exit code."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # also what it may have left behind
        exit_code = await self.wait()
        if self._writer is not None:
            self._writer.close()
        return exit_code

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the worker (Linux; elsewhere False)."""
        try:
            return self._stat()[0] == "T"
        except OSError:
            return False

    def log_tail(self) -> str:
        """Return what the worker wrote last of why it ends; empty if it has no log file."""
        return "" if self._log_path is None else read_tail(self._log_path)

    def _stat(self) -> list[str]:
        """Return what the kernel says of the process, from its state to its exit status (proc(5))."""
        stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()

    def _reap(self) -> int:
        # wait4 instead of Popen.wait: it tells the peak memory of exactly this child.
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self.peak_memory_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return self._process.returncode


def worker_environment(environment: Mapping[str, str], *, num_threads: int, num_devices: int) -> dict[str, str]:
    """Return the environment of a worker: the given one, with XLA told about threads and devices.

    What the user has put into XLA_FLAGS stays. Ours come last, so they win where both speak of the same thing; but how
    long collectives may take is the user's choice.
    """
    flags = [f"--xla_cpu_collective_timeout_seconds={_COLLECTIVE_LIMIT_S}"]
    if environment.get("XLA_FLAGS"):
        flags.append(environment["XLA_FLAGS"])
    if num_threads == 1:
        # One compute thread: the pool's second would only fight for the core with the workers beside this one.
        flags.append("--xla_cpu_multi_thread_eigen=false")
    if num_devices > 1:
        flags.append(f"--xla_force_host_platform_device_count={num_devices}")
    ours = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **MALLOC}
    return {**ours, **environment, "XLA_FLAGS": " ".join(flags)}
