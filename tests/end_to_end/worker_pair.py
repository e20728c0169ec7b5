"""Two real workers under a coordinator made by hand: generation after generation without kills, so that it is quick."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from models.presets import config_to_json, load_preset
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.worker_process import worker_environment
from oobleck_jax.execution.jaxlib_private import CoordinationService, start_coordination_service
from oobleck_jax.planning.plan import NodeId, Plan
from tests.end_to_end.training_runs import PROGRAMS, ROOT, environment


LIMIT_S = 120.0


@dataclass(kw_only=True)
class Worker:
    """A worker process, and what it has said of its preparations."""

    node: NodeId
    process: "subprocess.Popen[bytes]"
    control: socket.socket
    link_address: str = ""
    holds: tuple[int, ...] = ()
    prepared: list[messages.Prepared] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.control.settimeout(LIMIT_S)
        self._lines = self.control.makefile("rb")

    def send(self, message: messages.Message) -> None:
        self.control.sendall(messages.encode(message) + b"\n")

    def expect(self, kind: type) -> messages.ToCoordinator:
        """Return the next message of a kind.

        What comes before is news of progress, a late vote, or that the other one was told sooner to abandon.
        """
        while True:
            message = messages.decode_to_coordinator(self._lines.readline())
            if isinstance(message, kind):
                return message
            assert not isinstance(message, messages.Failed) or message.is_collateral, message

    def usage(self) -> dict[str, int]:
        """Return its resident bytes, threads and open files."""
        process = psutil.Process(self.process.pid)
        return {
            "bytes": process.memory_info().rss,
            "threads": process.num_threads(),
            "files": process.num_fds(),
        }

    def close(self) -> None:
        self._lines.close()
        self.control.close()  # its end is the worker's end
        try:
            self.process.wait(timeout=20)
        finally:
            self.process.kill()
            self.process.wait()


class Pair:
    """Two workers and the generations that they go through."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.workers: list[Worker] = []
        self.generation = 0
        self.step = 0
        self._service: CoordinationService | None = None

    def run(self, plan: Plan, *, steps: int = 1, ahead: tuple = (), abandon: bool = True) -> None:
        """Do some steps of a plan, and then abandon the next one in its middle."""
        self.generation += 1
        service, self._service = self._service, start_coordination_service("127.0.0.1:0", 2)
        begin = messages.Begin(
            generation=self.generation,
            plan=plan,
            members=tuple(
                messages.Member(node=worker.node, link_address=worker.link_address, holds=worker.holds)
                for worker in self.workers
            ),
            fabric_address=self._service.address,
            step=self.step,
            ahead=ahead,
        )
        self._send(begin)
        for worker in self.workers:
            worker.prepared.append(worker.expect(messages.Prepared))
        if service is not None:
            service.close()  # everybody has left it
        self._send(messages.Run(generation=self.generation, step=self.step))
        for worker in self.workers:
            worker.holds = plan.layers_of(worker.node)
        for _ in range(steps):
            for worker in self.workers:
                assert worker.expect(messages.Vote).step == self.step
            self._send(messages.Commit(generation=self.generation, step=self.step, global_norm=1.0))
            self.step += 1
        if abandon:
            self.abandon()

    def abandon(self) -> None:
        """End the generation, wherever the workers are in it."""
        self._send(messages.Abandon(generation=self.generation, reason="for the test"))

    def start(self, node: NodeId, *, ahead: tuple = ()) -> None:
        """Start a worker; it compiles these stages before it is ready."""
        PROGRAMS.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "oobleck_jax.worker", "--control-fd", str(theirs.fileno())]
        with (self._folder / f"node-{node}.log").open("ab") as log, theirs:
            process = subprocess.Popen(
                [*command, "--compilation-cache", str(PROGRAMS)],
                pass_fds=(theirs.fileno(),),
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=worker_environment(environment(), num_threads=1, num_devices=1),
            )
        worker = Worker(node=node, process=process, control=ours)
        self.workers.insert(node, worker)
        config_json = config_to_json("gpt-test", load_preset("gpt-test"))
        worker.send(
            messages.Welcome(
                node=node, run_id=messages.RunId("pair"), config_json=config_json, cores=(), num_threads=1, ahead=ahead
            )
        )

    def await_ready(self) -> None:
        """Wait until workers that were started are ready."""
        for worker in self.workers:
            if not worker.link_address:
                worker.link_address = worker.expect(messages.WorkerReady).link_address

    def _send(self, message: messages.Message) -> None:
        for worker in self.workers:
            worker.send(message)


@contextmanager
def worker_pair(folder: Path) -> Iterator[Pair]:
    """Start two workers of gpt-test that write their logs into `folder`."""
    pair = Pair(folder)
    try:
        for node in map(NodeId, range(2)):
            pair.start(node)
        pair.await_ready()
        yield pair
    finally:
        for worker in pair.workers:
            worker.close()
