"""The agent of a node: joins the run, starts the worker, relays its messages, and tells when it ends.

    coordinator <--WebSocket--> agent <--socket pair--> worker

The agent is small on purpose (no jax: some 40 MB, idle), so that it answers whatever the worker is busy with.

It ends with the run. Before that:

    Respawn                  it replaces its worker (worker_keeper.py)
    the connection is lost   it keeps its worker, whose state lives on, and joins again, for `orphan_s` at most: the
                             coordinator, or its successor, is told what the worker holds. What the worker says
                             meanwhile is dropped, because the step is done again
    SIGTERM                  it says `Leaving`, and goes on until it gets its `Stop`, for `leave_s` at most
    SIGTERM again, SIGINT    it ends at once, and its worker with it
"""

import asyncio
import os
import secrets
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import msgspec

from oobleck_jax.elastic import messages
from oobleck_jax.elastic.connection import Connection, connect, join
from oobleck_jax.elastic.log_tail import headline
from oobleck_jax.elastic.worker_keeper import WorkerKeeper
from oobleck_jax.elastic.worker_process import WorkerProcess
from oobleck_jax.errors import RunFailed
from oobleck_jax.planning.plan import NodeId, Stage


WORKER_COMMAND = (sys.executable, "-m", "oobleck_jax.worker")


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where to join, as whom, and what to start. Travels to a local agent as JSON on its standard input."""

    coordinator_address: str  # host:port
    name: str  # of this host, for people
    versions: dict[str, str]
    node: NodeId | None = None  # the id to ask for
    num_devices: int = 1
    config_digest: str | None = None
    token: str | None = None
    tls_authority: str | None = None  # file of certificates to trust; None: no TLS
    worker_command: tuple[str, ...] = WORKER_COMMAND
    log_dir: str | None = None  # where node-K.log goes; None: the output of this process
    compilation_cache: str | None = None  # folder of compiled programs that all nodes of this host share
    trace_dir: str | None = None  # where workers write what they did when; None: nowhere
    connect_s: float = 60.0  # keep trying to reach the coordinator
    heartbeat_s: float = 0.5  # between two signs of life
    silence_s: float = 20.0  # a coordinator that answers no ping for so long is gone
    orphan_s: float = 60.0  # wait for a coordinator that is gone to come back, then end
    leave_s: float = 25.0  # wait to be let go after SIGTERM; Slurm and Kubernetes kill after 30 s
    worker_stop_s: float = 1.5  # the worker ends when told to


async def run_agent(options: AgentOptions) -> int:
    """Take part in a run until it is over.

    Returns:
        The exit code of the run, or 128 + the number of the signal that ended this agent.

    Raises:
        RunFailed: the coordinator cannot be reached, does not want this node (any more), or is gone; or the run failed.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    caught: list[int] = []
    async with aiohttp.ClientSession() as session:
        agent = _Agent(options, session)

        def take(number: int) -> None:
            if number == signal.SIGTERM and agent.leave("SIGTERM"):
                loop.call_later(options.leave_s, take, number)  # once more: patience is over
                return
            caught.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, take, number)
        try:
            return await agent.run()
        except asyncio.CancelledError:
            if caught:
                return 128 + caught[0]
            raise
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


class _Agent:
    """One node: one worker at a time, one connection at a time."""

    def __init__(self, options: AgentOptions, session: aiohttp.ClientSession) -> None:
        self._options = options
        self._session = session
        self._connection: Connection | None = None  # None: not in, or not any more
        self._welcome: messages.Welcome | None = None  # the first one; None: never been in
        self._ahead: tuple[Stage, ...] = ()  # what the next worker is to get ready, by the last word on it
        self._keeper: WorkerKeeper | None = None
        self._host = ""  # of the worker, as other nodes reach it
        self._leaving: messages.Leaving | None = None
        self._identity = secrets.token_hex(8)

    async def run(self) -> int:
        options = self._options
        connection = await self._enter(options.connect_s)
        assert self._keeper is not None
        heartbeats = asyncio.create_task(self._heartbeats(self._keeper))
        try:
            while (stop := await self._relay_down(connection, self._keeper)) is None:
                self._connection = None
                await connection.close()
                connection = await self._enter(options.orphan_s)
            await self._keeper.end(patience_s=options.worker_stop_s)  # the coordinator hears of it, too
            if stop.exit_code == 1:
                raise RunFailed(f"node {self._node} ends: {stop.reason}")
            return stop.exit_code
        finally:
            heartbeats.cancel()
            await asyncio.shield(self._keeper.end(patience_s=0.0))
            if self._connection is not None:
                await self._connection.close()

    @property
    def _node(self) -> NodeId:
        assert self._welcome is not None
        return self._welcome.node

    def leave(self, reason: str) -> bool:
        """Ask to be let go; return False if this node is not in, or has asked before."""
        if self._welcome is None or self._leaving is not None:
            return False
        self._leaving = messages.Leaving(node=self._node, reason=reason)
        self._tell(messages.encode(self._leaving))
        return True

    async def _enter(self, patience_s: float) -> Connection:
        """Connect and join, for the first time or again.

        Raises:
            RunFailed: nobody answers, or this node is refused.
        """
        options, loop = self._options, asyncio.get_running_loop()
        give_up_s = loop.time() + patience_s
        while True:
            connection = await connect(
                self._session,
                options.coordinator_address,
                token=options.token,
                tls_authority=options.tls_authority,
                silence_s=options.silence_s,
            )
            if connection is not None:
                request = self._request()
                try:
                    welcome = await join(connection, request, within_s=options.silence_s)
                except BaseException:
                    await connection.close()
                    raise
                if welcome is not None:
                    self._take_in(connection, welcome, request)
                    return connection
                await connection.close()
            if loop.time() >= give_up_s:
                again = "" if self._welcome is None else f"node {self._node} ends: "
                raise RunFailed(f"{again}no coordinator at {options.coordinator_address} for {patience_s:.0f} s")

    def _request(self) -> messages.Join:
        options, keeper = self._options, self._keeper
        incarnation = 0
        if keeper is not None:
            incarnation = keeper.incarnation if keeper.has_worker else keeper.incarnation + 1
        return messages.Join(
            name=options.name,
            incarnation=incarnation,
            num_devices=options.num_devices,
            versions=options.versions,
            node=options.node if self._welcome is None else self._node,
            config_digest=options.config_digest,
            worker=None if keeper is None else keeper.ready,
            held=None if keeper is None else keeper.held,
            agent=self._identity,
            log_dir=options.log_dir,
        )

    def _take_in(self, connection: Connection, welcome: messages.Welcome, request: messages.Join) -> None:
        """Go on with a connection on which this node is in."""
        if self._welcome is None:
            self._welcome = welcome
            self._host = _reachable_host(connection.own_address, self._options.coordinator_address)
            self._keeper = WorkerKeeper(welcome.node, start=self._start_worker, tell=self._tell)
        elif (welcome.node, welcome.config_json) != (self._welcome.node, self._welcome.config_json):
            raise RunFailed(f"{self._options.coordinator_address} coordinates another run now")
        self._ahead = welcome.ahead
        keeper = self._keeper
        assert keeper is not None
        self._connection = connection
        if self._leaving is not None:
            self._tell(messages.encode(self._leaving))
        if not keeper.has_worker and request.worker is not None:
            assert keeper.exited is not None  # while we asked
            self._tell(messages.encode(keeper.exited))
        elif not keeper.has_worker:
            keeper.spawn(request.incarnation)
        elif request.worker is None and keeper.ready is not None:
            self._tell(messages.encode(keeper.ready))

    async def _relay_down(self, connection: Connection, keeper: WorkerKeeper) -> messages.Stop | None:
        """Pass messages on to the worker until the run is over; None: the connection ended before."""
        while (received := await connection.receive()) is not None:
            data, message = received
            match message:
                case messages.Respawn():
                    self._ahead = message.ahead
                    keeper.spawn(message.incarnation, delay_s=message.delay_s)
                case messages.Stop():
                    keeper.send(data, message)
                    return message
                case _:
                    keeper.send(data, message)
        return None

    async def _heartbeats(self, keeper: WorkerKeeper) -> None:
        while True:
            beat = messages.Heartbeat(node=self._node, is_worker_stopped=keeper.is_stopped)
            self._tell(messages.encode(beat))
            await asyncio.sleep(self._options.heartbeat_s)

    def _tell(self, message: bytes) -> None:
        if self._connection is not None:
            self._connection.send(message)

    async def _start_worker(self, incarnation: int) -> WorkerProcess:
        options, welcome = self._options, self._welcome
        assert welcome is not None
        log_path = Path(options.log_dir) / f"node-{welcome.node}.log" if options.log_dir else None
        if log_path is not None and incarnation:
            with log_path.open("ab") as log:
                log.write(f"\n{headline(incarnation, welcome.node)}\n".encode())
        command = [*options.worker_command, "--host", self._host, "--incarnation", str(incarnation)]
        if options.compilation_cache:
            command += ["--compilation-cache", options.compilation_cache]
        if options.trace_dir:
            command += ["--trace", options.trace_dir]
        welcome = msgspec.structs.replace(welcome, ahead=self._ahead)
        return await WorkerProcess.start(command, welcome, num_devices=options.num_devices, log_path=log_path)


def _reachable_host(own_address: str, coordinator_address: str) -> str:
    """Return the address under which the other nodes reach this host: the one it uses towards the coordinator."""
    if not own_address.startswith("127.") or coordinator_address.startswith(("127.", "localhost")):
        return own_address
    # The coordinator's host often knows its own name as a loopback address; take that of the way out instead.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737); connecting sends nothing
        except OSError:
            return own_address
        return probe.getsockname()[0]


def main() -> None:
    """Run a local agent; its options come as JSON on standard input."""
    options = msgspec.json.decode(sys.stdin.buffer.read(), type=AgentOptions)
    try:
        sys.exit(asyncio.run(run_agent(options)))
    except RunFailed as error:
        sys.exit(f"agent {os.getpid()}: {error}")


if __name__ == "__main__":
    main()
