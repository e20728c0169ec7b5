"""The coordinator: gives the membership machine its sockets, its clock and its files.

All that is decided is decided in membership.py; here inputs are fed to it one after the other, on one event loop, and
its effects are carried out in order.
"""

import asyncio
import contextlib
import hmac
import itertools
import logging
import math
import socket
import ssl
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

import msgspec
from aiohttp import WSMsgType, web

from oobleck_jax import events
from oobleck_jax.checkpoint.manifest import GroupRecord
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.effects import (
    Asked,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointFound,
    CleanCheckpoints,
    Close,
    CommitCheckpoint,
    ConnectionId,
    Disconnected,
    FabricFailed,
    FabricStarted,
    FindCheckpoint,
    Finish,
    Ignored,
    Input,
    Interrupted,
    Received,
    Send,
    StartFabric,
    Tick,
    Write,
)
from oobleck_jax.elastic.membership import Membership
from oobleck_jax.elastic.worker_process import MAX_MESSAGE_BYTES
from oobleck_jax.errors import ActionRefused, ConfigError


logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_JOIN_S = 10.0  # a connection that has not asked to join by then is closed
_LOOK_S = 0.5  # the machine is fed at least so often
_STANDSTILL_S = 1.5  # if nothing is fed for so long, this process was stopped (Ctrl-Z) or starved


class FabricService(Protocol):
    """JAX's coordination service of a generation."""

    def close(self) -> None:
        """Stop it; may block for some seconds. Kills every node that has not left it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """What the coordinator is given by the rest of the program.

    Attributes:
        start_fabric: starts JAX's coordination service on "host:port" for a number of nodes; may block.
        fabric_host: the address of this machine as the nodes reach it.
        listen_host: the address to listen on for them: this one, or all of this machine.
        record: takes every record, in order; a commit decision must be on its way to disk when it returns.
        commit_checkpoint: given step, generation and groups; may block. None: the terms of the run have none.
        clean_checkpoints: given step and generation of the one that is being written; may block.
        find_checkpoint: given what `FindCheckpoint` has; may block.
    """

    start_fabric: Callable[[str, int], FabricService]
    fabric_host: str
    listen_host: str
    record: Callable[[events.Record], None]
    commit_checkpoint: Callable[[int, int, dict[str, GroupRecord]], CheckpointCommitted | CheckpointFailed] | None = (
        None
    )
    clean_checkpoints: Callable[[int, int], object] | None = None
    find_checkpoint: Callable[[frozenset[str], int | None], CheckpointFound] | None = None


def bind(host: str, port: int) -> socket.socket:
    """Take the port of the coordinator, before anything else starts; port 0 takes any that is free.

    Raises:
        ConfigError: the port is in use, or is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from None
    return listener


def check_exposure(host: str, token: str | None) -> None:
    """Refuse to listen where others can reach us unless they must know a token.

    Raises:
        ConfigError: not a loopback address, and no token.
    """
    if host not in LOOPBACK and not token:
        raise ConfigError(f"listening on {host} needs a token that all nodes know: give --token-file (or --token)")


class Coordinator:
    """Runs a membership machine until it finishes."""

    def __init__(self, membership: Membership, services: Services, *, token: str | None = None) -> None:
        self._membership = membership
        self._services = services
        self._authorization = f"Bearer {token}".encode() if token else None
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[Finish] = self._loop.create_future()
        self._connections = itertools.count()
        self._peers: dict[ConnectionId, _Peer] = {}
        self._encoded: tuple[messages.ToNode, bytes] | None = None  # the last message: it often goes to all members
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._seen_s = self._loop.time()
        self._lost_s = 0.0  # time while this process stood still
        self._fabrics: dict[int, FabricService] = {}  # by generation
        self._disk = asyncio.Lock()

    async def run(
        self,
        listener: socket.socket,
        *,
        tls: ssl.SSLContext | None = None,
        serve: Callable[[web.Application], None] = lambda app: None,
    ) -> Finish:
        """Serve nodes until the run is over; return how it ended.

        Args:
            listener: where; bound already.
            tls: what to serve TLS with.
            serve: adds what else is served there.

        Raises:
            Exception: whatever `Services.record` raised; the nodes are left without a coordinator then, and end.
        """
        app = web.Application()
        app.router.add_get("/control", self._control)
        serve(app)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.SockSite(runner, listener, ssl_context=tls).start()
            self._feed(Tick())
            return await self._finished
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for peer in self._peers.values():
                self._spawn(peer.close())
            await runner.cleanup()
            for task in self._tasks:
                task.cancel()

    def interrupt(self, reason: str, exit_code: int) -> None:
        """End the run early, in good order."""
        self._feed(Interrupted(reason=reason, exit_code=exit_code))

    def ask(self, asked: Asked) -> None:
        """Let a person have something done.

        Raises:
            ActionRefused: it cannot be done.
        """
        if why := self._membership.why_not(asked):
            raise ActionRefused(why)
        self._feed(asked)

    # ------------------------------------------------------------------------------------------------ the machine

    def _feed(self, given: Input) -> None:
        if self._finished.done():
            return
        try:
            effects = self._membership.handle(given, self._now_s())
            for effect in effects:
                match effect:
                    case Send():
                        if effect.connection in self._peers:
                            self._peers[effect.connection].send(self._frame(effect.message))
                    case Close():
                        if effect.connection in self._peers:
                            self._spawn(self._peers[effect.connection].close())
                    case StartFabric():
                        self._spawn(self._start_fabric(effect))
                    case CommitCheckpoint() | CleanCheckpoints() | FindCheckpoint():
                        self._spawn(self._use_checkpoints(effect))
                    case Write():
                        self._services.record(effect.record)
                        if isinstance(effect.record, events.Prepared):
                            self._spawn(self._close_fabrics(before=effect.record.generation))
                    case Ignored():
                        logger.info("ignored: %s", effect.reason)
                    case Finish():
                        self._finished.set_result(effect)
        except Exception as error:  # a full disk, or our own mistake: whoever awaits `run` must hear of it
            if not self._finished.done():
                self._finished.set_exception(error)
            return
        if effects or not isinstance(given, Received):  # else there is a timer, and it is early enough
            self._schedule()

    def _now_s(self) -> float:
        """Return the time for the machine. It stands still while this process does: no node is late then.

        Their signs of life wait in the sockets meanwhile, and are read one after the other.
        """
        now_s = self._loop.time()
        gap_s, self._seen_s = now_s - self._seen_s, now_s
        if gap_s > _STANDSTILL_S:
            self._lost_s += gap_s
            logger.warning("this process stood still for %.1f s", gap_s)
        return now_s - self._lost_s

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wake_s = self._membership.wake_s
        if wake_s < math.inf:
            look_s = min(wake_s + self._lost_s, self._loop.time() + _LOOK_S)
            self._timer = self._loop.call_at(look_s, self._feed, Tick())

    async def _start_fabric(self, wanted: StartFabric) -> None:
        host = self._services.listen_host
        given: Input = FabricFailed(generation=wanted.generation, error="not tried")
        for _ in range(3):  # somebody else may take the port in between
            port = _free_port(host)
            try:
                fabric = await asyncio.to_thread(self._services.start_fabric, f"{host}:{port}", wanted.num_nodes)
            except (OSError, RuntimeError) as error:
                given = FabricFailed(generation=wanted.generation, error=f"{type(error).__name__}: {error}")
                continue
            self._fabrics[wanted.generation] = fabric
            address = f"{self._services.fabric_host}:{port}"
            given = FabricStarted(generation=wanted.generation, address=address)
            break
        self._feed(given)

    async def _use_checkpoints(self, wanted: CommitCheckpoint | CleanCheckpoints | FindCheckpoint) -> None:
        """Do what is asked for, one thing after the other."""
        services = self._services
        async with self._disk:
            match wanted:
                case CommitCheckpoint():
                    assert services.commit_checkpoint is not None
                    commit = services.commit_checkpoint
                    self._feed(await asyncio.to_thread(commit, wanted.step, wanted.generation, wanted.groups))
                case CleanCheckpoints():
                    assert services.clean_checkpoints is not None
                    await asyncio.to_thread(services.clean_checkpoints, wanted.step, wanted.generation)
                case FindCheckpoint():
                    assert services.find_checkpoint is not None
                    find = services.find_checkpoint
                    self._feed(await asyncio.to_thread(find, wanted.excluded, wanted.end_step))

    async def _close_fabrics(self, before: int) -> None:
        """Close the services of earlier generations: whoever is alive has left them once a later one runs."""
        for generation in [number for number in self._fabrics if number < before]:
            await asyncio.to_thread(self._fabrics.pop(generation).close)

    # ------------------------------------------------------------------------------------------------ connections

    async def _control(self, request: web.Request) -> web.StreamResponse:
        """Serve one agent for as long as its connection lasts."""
        if self._authorization is not None:
            given = request.headers.get("Authorization", "").encode(errors="replace")
            if not hmac.compare_digest(given, self._authorization):
                raise web.HTTPUnauthorized(text="wrong or no token")
        websocket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, timeout=1.0)
        await websocket.prepare(request)
        connection = ConnectionId(next(self._connections))
        assert request.transport is not None
        peer = self._peers[connection] = _Peer(websocket=websocket, transport=request.transport)
        reason = "connection lost"
        try:
            reason = await self._receive_all(websocket, connection)
        finally:
            del self._peers[connection]
            self._feed(Disconnected(connection=connection, reason=reason))
        await peer.close()
        return websocket

    async def _receive_all(self, websocket: web.WebSocketResponse, connection: ConnectionId) -> str:
        """Feed what comes in; return why it ended."""
        timeout_s: float | None = _JOIN_S
        while True:
            try:
                frame = await websocket.receive(timeout=timeout_s)
            except TimeoutError:
                return f"it did not ask to join within {_JOIN_S:.0f} s"
            if frame.type is not WSMsgType.TEXT:
                return "connection lost" if frame.type is not WSMsgType.BINARY else "it sent binary data"
            try:
                message = messages.decode_to_coordinator(frame.data)
            except msgspec.MsgspecError as error:
                return f"it sent an invalid message: {error}"
            timeout_s = None  # from here on the machine watches over it
            self._feed(Received(connection=connection, message=message))

    def _frame(self, message: messages.ToNode) -> bytes:
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = message, _text_frame(messages.encode(message))
        return self._encoded[1]

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@dataclass(frozen=True, kw_only=True, slots=True)
class _Peer:
    """The other end of a connection.

    What is sent goes to the transport at once, which keeps what the other end does not read: nobody is waited for. A
    task and a call of aiohttp for each of hundreds of nodes would take longer than all the rest of a commit.
    """

    websocket: web.WebSocketResponse
    transport: asyncio.Transport

    def send(self, frame: bytes) -> None:
        """Send a whole frame; quietly drop it when the connection is ending."""
        if not self.websocket.closed and not self.transport.is_closing():
            self.transport.write(frame)

    async def close(self) -> None:
        """Close the connection when all that was sent is out."""
        with contextlib.suppress(ConnectionError):
            await self.websocket.close()


def _text_frame(payload: bytes) -> bytes:
    """Return an unmasked WebSocket frame of text, as servers send it (RFC 6455, section 5.2)."""
    size = len(payload)
    if size < 126:
        header = struct.pack("!BB", 0x81, size)
    elif size < 1 << 16:
        header = struct.pack("!BBH", 0x81, 126, size)
    else:
        header = struct.pack("!BBQ", 0x81, 127, size)
    return header + payload


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
