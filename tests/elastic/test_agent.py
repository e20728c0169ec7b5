"""An agent as a real process, with invented workers, against a coordinator that does what the test says."""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
from aiohttp import WSMsgType, web

from oobleck_jax.elastic import messages
from oobleck_jax.elastic.agent import AgentOptions
from oobleck_jax.planning.plan import NodeId
from tests.elastic.plans import plan_of


pytestmark = pytest.mark.process

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))
NODE = NodeId(1)
WELCOME = messages.Welcome(node=NODE, run_id=messages.RunId("run"), config_json="{}", cores=(), num_threads=1)
PLAN = plan_of((0, 1))  # node 1 has layers 2 and 3

_AT_WORK = messages.Heartbeat | messages.Progress | messages.Prepared | messages.Vote | messages.Evaluated

T = TypeVar("T", bound=messages.Message)


@dataclass
class Peer:
    """One connection of the agent."""

    websocket: web.WebSocketResponse
    inbox: "asyncio.Queue[messages.ToCoordinator | None]" = field(default_factory=asyncio.Queue)

    async def send(self, *sent: messages.ToNode) -> None:
        for message in sent:
            await self.websocket.send_str(messages.encode(message).decode())

    async def expect(self, kind: type[T]) -> T:
        """Return the next message of this kind; only what a worker at work says may come before it."""
        async with asyncio.timeout(10):
            while True:
                message = await self.inbox.get()
                if isinstance(message, kind):
                    return message
                assert isinstance(message, _AT_WORK), message

    async def closed(self) -> list[messages.ToCoordinator]:
        """Return all that comes until the connection ends."""
        found: list[messages.ToCoordinator] = []
        async with asyncio.timeout(10):
            while (message := await self.inbox.get()) is not None:
                found.append(message)
        return found


@dataclass
class Scene:
    """A coordinator's port, and an agent that comes to it."""

    options: AgentOptions
    runner: web.AppRunner
    peers: "asyncio.Queue[Peer]"
    agent: asyncio.subprocess.Process

    async def peer(self) -> Peer:
        async with asyncio.timeout(10):
            return await self.peers.get()

    async def enter(self, welcome: messages.Welcome = WELCOME) -> tuple[Peer, messages.WorkerReady]:
        """Let the agent in, and wait for its worker."""
        peer = await self.peer()
        await peer.expect(messages.Join)
        await peer.send(welcome)
        return peer, await peer.expect(messages.WorkerReady)

    async def end(self) -> tuple[int, str]:
        """Return the agent's exit code and what it said."""
        async with asyncio.timeout(10):
            _, error = await self.agent.communicate()
        assert self.agent.returncode is not None
        return self.agent.returncode, error.decode()

    def worker(self) -> psutil.Process:
        (worker,) = psutil.Process(self.agent.pid).children()
        return worker

    def log(self) -> str:
        assert self.options.log_dir is not None
        return (Path(self.options.log_dir) / f"node-{NODE}.log").read_text()


@asynccontextmanager
async def scene(tmp_path: Path, **changes: Any) -> AsyncIterator[Scene]:
    peers: asyncio.Queue[Peer] = asyncio.Queue()

    async def serve(request: web.Request) -> web.WebSocketResponse:
        peer = Peer(web.WebSocketResponse(timeout=0.2))
        await peer.websocket.prepare(request)
        peers.put_nowait(peer)
        async for frame in peer.websocket:
            if frame.type is WSMsgType.TEXT:
                peer.inbox.put_nowait(messages.decode_to_coordinator(frame.data))
        peer.inbox.put_nowait(None)
        return peer.websocket

    app = web.Application()
    app.router.add_get("/control", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (address,) = runner.addresses
    values: dict[str, Any] = {
        "coordinator_address": f"127.0.0.1:{address[1]}",
        "name": "host",
        "versions": {"jax": "0.10"},
        "node": NODE,
        "worker_command": FAKE_WORKER,
        "log_dir": str(tmp_path),
        "connect_s": 5.0,
        "heartbeat_s": 0.1,
        "worker_stop_s": 0.5,
    }
    options = AgentOptions(**{**values, **changes})
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "oobleck_jax.elastic.agent"),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert agent.stdin is not None
    agent.stdin.write(msgspec.json.encode(options))
    agent.stdin.close()
    try:
        yield Scene(options=options, runner=runner, peers=peers, agent=agent)
    finally:
        if agent.returncode is None:
            agent.kill()
            await agent.communicate()
        await runner.cleanup()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 40))


def begin(generation: int, step: int = 0) -> messages.Begin:
    members = (messages.Member(node=NodeId(0), link_address="a:1"), messages.Member(node=NODE, link_address="b:1"))
    return messages.Begin(generation=generation, plan=PLAN, members=members, fabric_address="c:1", step=step)


def commit(generation: int, step: int) -> messages.Commit:
    return messages.Commit(generation=generation, step=step, global_norm=1.0)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def await_gone(process: psutil.Process, within_s: float = 5.0) -> None:
    end_s = time.monotonic() + within_s
    while not is_gone(process):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)


# ------------------------------------------------------------------------------------------------------ respawn


def test_a_stopped_worker_is_killed_and_replaced(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as it:
            peer, ready = await it.enter()
            assert ready.incarnation == 0
            worker = it.worker()
            worker.suspend()
            while not (await peer.expect(messages.Heartbeat)).is_worker_stopped:
                pass
            began_s = time.monotonic()
            await peer.send(messages.Respawn(incarnation=1, delay_s=0.3, reason="it was stopped"))
            exited = await peer.expect(messages.WorkerExited)
            assert (exited.incarnation, exited.exit_code) == (0, -signal.SIGKILL)
            assert time.monotonic() - began_s < 0.3
            assert (await peer.expect(messages.WorkerReady)).incarnation == 1
            assert time.monotonic() - began_s > 0.3
            assert is_gone(worker)
            assert re.search("worker 0 is up.*\n\n---- worker 1 of node 1\nnode 1, worker 1 is up", it.log())
            # The new one works like the old one.
            await peer.send(begin(3), messages.Run(generation=3, step=4))
            assert (await peer.expect(messages.Prepared)).generation == 3
            assert (await peer.expect(messages.Vote)).step == 4
            await peer.send(messages.Stop(reason="enough"))
            assert (await peer.expect(messages.WorkerExited)).incarnation == 1
            assert await it.end() == (0, "")

    run(play())


def test_a_killed_worker_is_told_of_at_once_and_again_when_its_memory_is_free(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as it:
            peer, _ = await it.enter()
            kinds: set[bool] = set()  # the memory of this small worker may be free as soon as it is dead
            for incarnation in range(1, 6):
                it.worker().kill()
                exits = [await peer.expect(messages.WorkerExited)]
                if not exits[0].is_gone:
                    exits.append(await peer.expect(messages.WorkerExited))
                assert exits[-1].is_gone
                assert {message.exit_code for message in exits} == {-signal.SIGKILL}
                assert exits[-1].peak_memory_bytes > 0
                kinds.add(exits[0].is_gone)
                await peer.send(messages.Respawn(incarnation=incarnation, delay_s=0.0, reason="killed"))
                assert (await peer.expect(messages.WorkerReady)).incarnation == incarnation
            assert (False in kinds) == (sys.platform == "linux")

    run(play())


def test_the_last_request_for_a_worker_counts(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as it:
            peer, _ = await it.enter()
            await peer.send(messages.Respawn(incarnation=1, delay_s=30.0, reason="later"))
            await peer.expect(messages.WorkerExited)
            await peer.send(messages.Respawn(incarnation=2, delay_s=0.0, reason="now"))
            assert (await peer.expect(messages.WorkerReady)).incarnation == 2
            assert "worker 1" not in it.log()

    run(play())


def test_a_run_may_end_while_no_worker_runs(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as it:
            peer, _ = await it.enter()
            await peer.send(messages.Respawn(incarnation=1, delay_s=30.0, reason="later"))
            await peer.expect(messages.WorkerExited)
            await peer.send(messages.Stop(reason="over", exit_code=3))
            assert await it.end() == (3, "")

    run(play())


def test_a_worker_that_cannot_start_has_ended(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path, log_dir=str(tmp_path / "absent")) as it:
            peer = await it.peer()
            await peer.expect(messages.Join)
            await peer.send(WELCOME)
            exited = await peer.expect(messages.WorkerExited)
            assert (exited.incarnation, exited.exit_code, exited.is_started) == (0, 127, False)
            assert "No such file or directory" in exited.log_tail
            await peer.send(messages.Respawn(incarnation=1, delay_s=0.0, reason="again"))
            assert (await peer.expect(messages.WorkerExited)).incarnation == 1

    run(play())


# ------------------------------------------------------------------------------------------------------ leaving


def test_a_node_asks_to_leave_at_once_and_goes_when_it_is_let_go(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as it:
            peer, _ = await it.enter()
            worker = it.worker()
            worker.suspend()  # as busy as can be
            began_s = time.monotonic()
            it.agent.send_signal(signal.SIGTERM)
            assert await peer.expect(messages.Leaving) == messages.Leaving(node=NODE, reason="SIGTERM")
            assert time.monotonic() - began_s < 0.5
            worker.resume()
            await peer.send(begin(1), messages.Run(generation=1, step=0))  # the step in progress goes on
            assert (await peer.expect(messages.Vote)).step == 0
            await peer.send(messages.Stop(reason="the others do without it"))
            assert (await peer.expect(messages.WorkerExited)).exit_code == 0
            assert await it.end() == (0, "")

    run(play())


@pytest.mark.parametrize("leave_s", [0.3, 30.0], ids=["time-is-up", "asked-twice"])
def test_a_node_that_is_not_let_go_leaves(tmp_path: Path, leave_s: float) -> None:
    async def play() -> None:
        async with scene(tmp_path, leave_s=leave_s) as it:
            peer, _ = await it.enter()
            worker = it.worker()
            it.agent.send_signal(signal.SIGTERM)
            await peer.expect(messages.Leaving)
            if leave_s > 1:
                it.agent.send_signal(signal.SIGTERM)
            assert (await it.end())[0] == 143
            assert is_gone(worker)

    run(play())


# ----------------------------------------------------------------------------------------- without a coordinator


def test_a_worker_outlives_the_connection_and_its_state_is_told(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as it:
            peer, ready = await it.enter()
            worker = it.worker()

            async def rejoin(peer: Peer) -> tuple[Peer, messages.Join]:
                await peer.websocket.close()
                peer = await it.peer()
                join = await peer.expect(messages.Join)
                await peer.send(WELCOME)
                return peer, join

            peer, join = await rejoin(peer)
            assert (join.node, join.incarnation, join.worker, join.held) == (NODE, 0, ready, None)

            await peer.send(begin(1), messages.Run(generation=1, step=0), commit(1, 0), commit(1, 1))
            while (await peer.expect(messages.Vote)).step < 2:
                pass
            peer, join = await rejoin(peer)
            assert (join.worker, join.held) == (ready, messages.Held(generation=1, step=1, layers=(2, 3)))

            # What its worker says meanwhile is of no use to a successor; a decision that it had missed is.
            await peer.send(commit(1, 2), messages.Abandon(generation=1, reason="new coordinator"), begin(2, 3))
            await peer.expect(messages.Prepared)
            peer, join = await rejoin(peer)
            # What is prepared changes nothing before `Run`.
            assert join.held == messages.Held(generation=1, step=2, layers=(2, 3))

            await peer.send(begin(3, 3), messages.Run(generation=3, step=3))
            assert (await peer.expect(messages.Vote)).step == 3
            peer, join = await rejoin(peer)
            assert join.held == messages.Held(generation=3, step=2, layers=(2, 3))
            assert it.worker() == worker
            await peer.send(messages.Stop(reason="enough"))
            assert await it.end() == (0, "")

    run(play())


def test_a_worker_that_died_meanwhile_comes_back_as_the_next(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as it:
            peer, _ = await it.enter()
            await peer.send(begin(1), messages.Run(generation=1, step=0))
            await peer.expect(messages.Vote)
            worker = it.worker()
            it.agent.send_signal(signal.SIGSTOP)
            await peer.websocket.close()
            worker.kill()
            await await_gone(worker)
            it.agent.send_signal(signal.SIGCONT)
            peer = await it.peer()
            join = await peer.expect(messages.Join)
            # Whether it has noticed by now or not, the coordinator hears the truth.
            await peer.send(WELCOME)
            if join.worker is None and join.incarnation == 1:
                assert join.held is None
            else:
                assert (await peer.expect(messages.WorkerExited)).incarnation == 0
                await peer.send(messages.Respawn(incarnation=1, delay_s=0.0, reason="killed"))
            assert (await peer.expect(messages.WorkerReady)).incarnation == 1

    run(play())


def test_an_agent_asks_again_to_leave(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as it:
            peer, _ = await it.enter()
            it.agent.send_signal(signal.SIGTERM)
            await peer.expect(messages.Leaving)
            await peer.websocket.close()
            peer = await it.peer()
            await peer.expect(messages.Join)
            await peer.send(WELCOME)
            await peer.expect(messages.Leaving)
            await peer.send(messages.Stop(reason="let go"))
            assert await it.end() == (0, "")

    run(play())


def test_an_agent_ends_when_no_coordinator_comes_back(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path, orphan_s=0.5) as it:
            await it.enter()
            worker = it.worker()
            await it.runner.cleanup()
            code, error = await it.end()
            assert code == 1
            assert f"node 1 ends: no coordinator at {it.options.coordinator_address} for 0 s" in error
            assert is_gone(worker)

    run(play())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (messages.Refused(reason="the run is over"), "the coordinator refused host: the run is over"),
        (
            messages.Welcome(node=NODE, run_id=messages.RunId("run"), config_json="{1}", cores=(), num_threads=1),
            "coordinates another run now",
        ),
    ],
)
def test_an_agent_that_is_not_wanted_back_ends(tmp_path: Path, answer: messages.ToNode, words: str) -> None:
    async def play() -> None:
        async with scene(tmp_path) as it:
            peer, _ = await it.enter()
            worker = it.worker()
            await peer.websocket.close()
            peer = await it.peer()
            await peer.expect(messages.Join)
            await peer.send(answer)
            code, error = await it.end()
            assert code == 1
            assert words in error
            assert is_gone(worker)

    run(play())


def test_a_killed_agent_takes_its_worker_with_it(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as it:
            await it.enter()
            worker = it.worker()
            os.kill(it.agent.pid, signal.SIGKILL)
            await await_gone(worker)

    run(play())
