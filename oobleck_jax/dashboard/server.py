"""What the coordinator serves to people and to Prometheus, beside the control channel of its nodes.

    GET  /                   the page: one file, nothing of it secret
    GET  /snapshot           the run at this moment (snapshot.py), JSON
    GET  /live               the same again and again, whenever something happens: server-sent events
    GET  /metrics            Prometheus
    POST /actions/ACTION     drain, kill, checkpoint, stop; says what it did

The page reads /live by `fetch`, not by `EventSource`, which cannot send the token.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files

import msgspec
from aiohttp import web

from oobleck_jax import events
from oobleck_jax.dashboard.access import Access
from oobleck_jax.dashboard.metrics import CONTENT_TYPE, Metrics
from oobleck_jax.dashboard.run_state import RunState
from oobleck_jax.errors import ActionRefused
from oobleck_jax.planning.plan import NodeId


logger = logging.getLogger(__name__)

_LEAST_S = 0.15  # between two snapshots: far below what an eye wants, and cheap
_MOST_S = 2.0  # ... even if nothing happens, so that the page knows that somebody is there
_MAX_READERS = 32
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Action(StrEnum):
    """What a person may ask of a run."""

    DRAIN = "drain"  # let a node leave, as SIGTERM does
    KILL = "kill"  # end the worker of a node
    CHECKPOINT = "checkpoint"  # save the state after the step in progress
    STOP = "stop"  # end the run


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a POST says."""

    node: NodeId | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Actions:
    """What the actions do; each returns what it did, or raises ActionRefused."""

    drain: Callable[[NodeId], str]
    kill: Callable[[NodeId], str]
    checkpoint: Callable[[], str]
    stop: Callable[[], str]

    def carry_out(self, action: Action, wanted: Wanted) -> str:
        match action, wanted.node:
            case Action.STOP, _:
                return self.stop()
            case Action.CHECKPOINT, _:
                return self.checkpoint()
            case _, None:
                raise ActionRefused(f'{action} needs a node: {{"node": 0}}')
            case Action.DRAIN, node:
                return self.drain(node)
            case Action.KILL, node:
                return self.kill(node)


class Dashboard:
    """Serves a run's state to any number of readers; belongs to one event loop."""

    def __init__(self, state: RunState, access: Access, *, clock: Callable[[], float] = time.time) -> None:
        self._state, self._access, self._clock = state, access, clock
        self._metrics = Metrics(state, clock)
        self._actions: Actions | None = None
        self._changed = asyncio.Event()
        self._is_closing = False
        self._num_readers = 0
        self._encoder = msgspec.json.Encoder()

    def take(self, record: events.Record) -> None:
        """Take note of a record, and tell the readers."""
        try:
            self._state.take(record, self._clock())
        except Exception:  # a mistake in what is only looked at must not end a run
            logger.exception("the page misses %s", record)
        self._wake()

    def serve(self, app: web.Application, actions: Actions) -> None:
        """Add what is served."""
        self._actions = actions
        app.router.add_get("/", self._page)
        app.router.add_get("/snapshot", self._snapshot)
        app.router.add_get("/live", self._live)
        app.router.add_get("/metrics", self._prometheus)
        app.router.add_post("/actions/{action}", self._act)
        app.on_shutdown.append(self._close)

    async def _page(self, request: web.Request) -> web.Response:
        page = files("oobleck_jax.dashboard").joinpath("page.html").read_text(encoding="utf-8")
        return web.Response(text=page, content_type="text/html", headers=_PAGE_HEADERS)

    async def _snapshot(self, request: web.Request) -> web.Response:
        self._access.check_read(request)
        return web.Response(body=self._encoded(), content_type="application/json")

    async def _prometheus(self, request: web.Request) -> web.Response:
        self._access.check_read(request)
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _live(self, request: web.Request) -> web.StreamResponse:
        self._access.check_read(request)
        if self._num_readers >= _MAX_READERS:
            raise web.HTTPServiceUnavailable(text=f"{_MAX_READERS} pages are open already; close some")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        self._num_readers += 1
        try:
            while True:
                changed, is_last = self._changed, self._is_closing or self._state.is_over
                await response.write(b"data: " + self._encoded() + b"\n\n")
                if is_last:
                    return response
                await asyncio.sleep(_LEAST_S)
                await _wait(changed, limit_s=_MOST_S)
        except ConnectionError:  # the reader is gone
            return response
        finally:
            self._num_readers -= 1

    async def _act(self, request: web.Request) -> web.Response:
        self._access.check_act(request)
        assert self._actions is not None
        try:
            action = Action(request.match_info["action"])
            wanted = msgspec.json.decode(await request.read() or b"{}", type=Wanted)
        except ValueError as error:  # also what msgspec raises
            raise web.HTTPBadRequest(text=f"{error}; there are {', '.join(Action)}") from None
        try:
            return web.json_response({"done": self._actions.carry_out(action, wanted)})
        except ActionRefused as refused:
            return web.json_response({"refused": str(refused)}, status=409)

    async def _close(self, app: web.Application) -> None:
        self._is_closing = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _encoded(self) -> bytes:
        return self._encoder.encode(self._state.snapshot(self._clock()))


async def _wait(event: asyncio.Event, *, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        pass
