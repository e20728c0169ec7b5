"""Keeps the worker of a node: one after the other, never two at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from oobleck_jax.elastic import messages
from oobleck_jax.elastic.worker_process import WorkerProcess
from oobleck_jax.memory import peak_memory_bytes
from oobleck_jax.planning.plan import NodeId


StartWorker: TypeAlias = Callable[[int], Awaitable[WorkerProcess]]
"""Starts the worker of an incarnation; OSError if it cannot."""

_LAST_WORDS_S = 0.5  # a child of the worker may hold its socket open: do not wait for more
_NOT_STARTED = 127  # exit code of a worker that could not be started, as shells have it


class WorkerKeeper:
    """Starts a worker when asked to, relays what it says, tells of its end at once, and remembers what it holds.

    Everything runs in one task, so that an incarnation is over, and its end is told, before the next one begins.

    Attributes:
        incarnation: of the worker there is, or that starts next; of the last one if there is none. -1: none yet.
        ready: what the worker said when it was ready; None: it is not ready, or there is none.
        held: the state that the worker has, counting what was passed on to it; None: none.
        exited: the end of the last worker that ended.
    """

    def __init__(self, node: NodeId, *, start: StartWorker, tell: Callable[[bytes], None]) -> None:
        """Keep no worker yet.

        Args:
            node: that the workers serve.
            start: starts one.
            tell: passes a message on to the coordinator; must not wait.
        """
        self.incarnation = -1
        self.ready: messages.WorkerReady | None = None
        self.held: messages.Held | None = None
        self.exited: messages.WorkerExited | None = None
        self._node = node
        self._start = start
        self._tell = tell
        self._worker: WorkerProcess | None = None
        self._begin: messages.Begin | None = None
        self._delay_s = 0.0
        self._is_wanted = False  # another worker is to start, after the one there is
        self._is_living = False  # there is a worker, if only just about to start
        self._is_over = False
        self._change = asyncio.Event()
        self._task = asyncio.create_task(self._keep())

    @property
    def has_worker(self) -> bool:
        """Whether there is a worker, or will be one without being asked for."""
        return self._is_living or self._is_wanted

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the worker."""
        return self._worker is not None and self._worker.is_stopped()

    def spawn(self, incarnation: int, *, delay_s: float = 0.0) -> None:
        """Kill the worker there is, wait, and start this one; replaces what was asked for before. Never waits."""
        self.incarnation, self._delay_s = incarnation, delay_s
        self._is_wanted = True
        self.ready = self.held = self._begin = None
        self._change.set()

    def send(self, data: bytes, message: messages.ToNode) -> None:
        """Pass a message on to the worker if there is one. Never waits.

        Args:
            data: the message as it came.
            message: the same, decoded.
        """
        if self._worker is None or self._is_wanted:
            return
        self._worker.send(data)
        match message:
            case messages.Begin():
                self._begin = message  # changes nothing that the worker holds until `Run`
            case messages.Run() if self._begin is not None and self._begin.generation == message.generation:
                layers = self._begin.plan.layers_of(self._node)
                self.held = messages.Held(generation=message.generation, step=message.step - 1, layers=layers)
            case messages.Commit() if self.held is not None and self.held.generation == message.generation:
                self.held = messages.Held(generation=message.generation, step=message.step, layers=self.held.layers)
            case _:
                pass

    async def end(self, *, patience_s: float) -> None:
        """End for good: give the worker, which has been told, some time, then kill it; tell of its end."""
        self._is_over = True
        if self._worker is not None:
            await self._worker.end(patience_s=0.0 if self._is_wanted else patience_s)
        self._change.set()
        await self._task

    async def _keep(self) -> None:
        while not self._is_over:
            await self._change.wait()
            self._change.clear()
            if self._is_wanted and not self._is_over and not await self._changes_within(self._delay_s):
                self._is_wanted, self._is_living = False, True
                await self._live(self.incarnation)
                self._is_living = False

    async def _changes_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._change.wait()
        except TimeoutError:
            return False
        return True

    async def _live(self, incarnation: int) -> None:
        """Start a worker and stay with it until it ends, or is to be replaced."""
        try:
            worker = self._worker = await self._start(incarnation)
        except OSError as error:
            return self._tell_exit(incarnation, _NOT_STARTED, str(error), is_started=False)
        relay = asyncio.create_task(self._relay(worker))
        watch = asyncio.create_task(self._watch(incarnation, worker))
        exited, changed = asyncio.ensure_future(worker.wait()), asyncio.create_task(self._change.wait())
        await asyncio.wait([exited, changed], return_when=asyncio.FIRST_COMPLETED)
        if exited.done():
            # All that it said comes before the news of its end.
            await asyncio.wait([relay], timeout=_LAST_WORDS_S)
        exit_code = await worker.end(patience_s=0.0)
        for task in (relay, watch, exited, changed):
            task.cancel()
        self._worker = self.ready = self.held = self._begin = None
        return self._tell_exit(incarnation, exit_code, worker.log_tail(), peak_bytes=worker.peak_memory_bytes)

    async def _watch(self, incarnation: int, worker: WorkerProcess) -> None:
        """Tell at once of a worker that is killed by somebody else."""
        exit_code = await worker.killed()
        if exit_code is not None and not (self._is_wanted or self._is_over):
            self.ready = self.held = self._begin = None
            self._tell_exit(incarnation, exit_code, worker.log_tail(), is_gone=False)

    async def _relay(self, worker: WorkerProcess) -> None:
        while (line := await worker.receive()) is not None and not self._is_wanted:
            if self.ready is None:
                message = messages.decode_to_coordinator(line)
                self.ready = message if isinstance(message, messages.WorkerReady) else None
            self._tell(line)

    def _tell_exit(
        self,
        incarnation: int,
        exit_code: int,
        log_tail: str,
        *,
        peak_bytes: int = 0,
        is_gone: bool = True,
        is_started: bool = True,
    ) -> None:
        self.exited = messages.WorkerExited(
            node=self._node,
            incarnation=incarnation,
            exit_code=exit_code,
            is_gone=is_gone,
            is_started=is_started,
            log_tail=log_tail,
            peak_memory_bytes=peak_bytes,
            agent_peak_memory_bytes=peak_memory_bytes(),
        )
        self._tell(messages.encode(self.exited))
