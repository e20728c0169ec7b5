"""The agent of a node: joins the run, starts the worker, relays its messages, and tells when it ends.

    coordinator <--WebSocket--> agent <--socket pair--> worker

The agent is small on purpose (no jax: some 40 MB, idle), so that it answers whatever the worker is busy with. It never
outlives its reason to be: without coordinator it ends after `orphan_s`, and the worker ends with it.
"""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
from pathlib import Path

import aiohttp
import msgspec

from oobleck_jax.elastic import messages
from oobleck_jax.elastic.worker_process import MAX_MESSAGE_BYTES, WorkerProcess
from oobleck_jax.errors import RunFailed
from oobleck_jax.memory import peak_memory_bytes
from oobleck_jax.planning.plan import NodeId


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
    connect_s: float = 60.0  # keep trying to reach the coordinator
    heartbeat_s: float = 0.5  # between two signs of life
    silence_s: float = 20.0  # a coordinator that answers no ping for so long is gone
    orphan_s: float = 0.0  # go on without a coordinator
    worker_stop_s: float = 1.5  # the worker ends when told to


async def run_agent(options: AgentOptions) -> int:
    """Take part in a run until it is over.

    Returns:
        The exit code of the run, or 128 + the number of the signal that ended this agent.

    Raises:
        RunFailed: the coordinator cannot be reached, does not want this node, or is gone.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    caught: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda number=number: (caught.append(number), task.cancel()))
    try:
        async with aiohttp.ClientSession() as session:
            websocket = await _connect(session, options)
            async with websocket:
                welcome = await _join(websocket, options)
                return await _Agent(options, websocket, welcome).run()
    except asyncio.CancelledError:
        if caught:
            return 128 + caught[0]
        raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _connect(session: aiohttp.ClientSession, options: AgentOptions) -> aiohttp.ClientWebSocketResponse:
    """Connect to the coordinator, which may not be up yet."""
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + options.connect_s
    context = ssl.create_default_context(cafile=options.tls_authority) if options.tls_authority else None
    url = f"{'wss' if context else 'ws'}://{options.coordinator_address}/control"
    while True:
        try:
            async with asyncio.timeout(10):
                return await session.ws_connect(
                    url,
                    headers={"Authorization": f"Bearer {options.token}"} if options.token else None,
                    heartbeat=options.silence_s,
                    max_msg_size=MAX_MESSAGE_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),  # pyright: ignore[reportCallIssue] (attrs)
                    ssl=context or True,
                )
        except aiohttp.WSServerHandshakeError as error:
            hint = "; give the same --token to all" if error.status == 401 else ""
            raise RunFailed(f"{options.coordinator_address} answered {error.status} {error.message}{hint}") from None
        except aiohttp.ClientSSLError as error:
            raise RunFailed(f"no TLS connection with {options.coordinator_address}: {error}") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            if loop.time() >= give_up_s:
                raise RunFailed(
                    f"no coordinator at {options.coordinator_address} for {options.connect_s:.0f} s ({error})"
                ) from None
        await asyncio.sleep(0.2)


async def _join(websocket: aiohttp.ClientWebSocketResponse, options: AgentOptions) -> messages.Welcome:
    join = messages.Join(
        name=options.name,
        incarnation=0,
        num_devices=options.num_devices,
        versions=options.versions,
        node=options.node,
        config_digest=options.config_digest,
    )
    await websocket.send_str(messages.encode(join).decode())
    frame = await websocket.receive(timeout=options.connect_s)
    answer = messages.decode_to_node(frame.data) if frame.type is aiohttp.WSMsgType.TEXT else None
    match answer:
        case messages.Welcome():
            return answer
        case messages.Refused():
            raise RunFailed(f"the coordinator refused {options.name}: {answer.reason}")
        case _:
            raise RunFailed(f"the coordinator at {options.coordinator_address} did not answer the request to join")


class _Agent:
    """An agent that is in: one worker, one connection."""

    def __init__(
        self, options: AgentOptions, websocket: aiohttp.ClientWebSocketResponse, welcome: messages.Welcome
    ) -> None:
        self._options = options
        self._websocket = websocket
        self._welcome = welcome
        self._node = welcome.node
        self._incarnation = 0

    async def run(self) -> int:
        log_path = Path(self._options.log_dir) / f"node-{self._node}.log" if self._options.log_dir else None
        host = _reachable_host(self._websocket.get_extra_info("sockname")[0], self._options.coordinator_address)
        command = [*self._options.worker_command, "--host", host, "--incarnation", str(self._incarnation)]
        if self._options.compilation_cache:
            command += ["--compilation-cache", self._options.compilation_cache]
        worker = await WorkerProcess.start(
            command, self._welcome, num_devices=self._options.num_devices, log_path=log_path
        )
        tasks = [
            asyncio.create_task(self._heartbeats(worker)),
            asyncio.create_task(self._watch(worker)),
            down := asyncio.create_task(self._relay_down(worker)),
        ]
        try:
            # It ends with the run, or with the connection; a worker that ends by itself is only reported.
            stop = await down
            if stop is None:
                await asyncio.sleep(self._options.orphan_s)
                raise RunFailed(f"node {self._node} lost its coordinator at {self._options.coordinator_address}")
            await worker.end(patience_s=self._options.worker_stop_s)
            await tasks[1]  # the coordinator hears of the end, too
            return stop.exit_code
        finally:
            await asyncio.shield(worker.end(patience_s=0.0))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _relay_down(self, worker: WorkerProcess) -> messages.Stop | None:
        """Pass messages on to the worker until the run is over; None: the connection ended before."""
        async for frame in self._websocket:
            if frame.type is not aiohttp.WSMsgType.TEXT:
                return None
            data: str = frame.data
            message = messages.decode_to_node(data)
            worker.send(data.encode())
            if isinstance(message, messages.Stop):
                return message
        return None

    async def _watch(self, worker: WorkerProcess) -> None:
        """Pass the worker's messages on, and tell of its end, at once."""
        relay = asyncio.create_task(self._relay_up(worker))
        exit_code = await worker.wait()
        # All that it said comes before the news of its end. A child of its own may still hold the socket: do not wait.
        await asyncio.wait([relay], timeout=0.5)
        relay.cancel()
        await self._send(
            messages.WorkerExited(
                node=self._node,
                incarnation=self._incarnation,
                exit_code=exit_code,
                log_tail=worker.log_tail(),
                peak_memory_bytes=worker.peak_memory_bytes,
                agent_peak_memory_bytes=peak_memory_bytes(),
            )
        )

    async def _relay_up(self, worker: WorkerProcess) -> None:
        while (line := await worker.receive()) is not None:
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await self._websocket.send_str(line.decode())

    async def _heartbeats(self, worker: WorkerProcess) -> None:
        while True:
            await self._send(messages.Heartbeat(node=self._node, is_worker_stopped=worker.is_stopped()))
            await asyncio.sleep(self._options.heartbeat_s)

    async def _send(self, message: messages.ToCoordinator) -> None:
        # A lost connection is noticed where messages are received.
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            await self._websocket.send_str(messages.encode(message).decode())


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
