"""Measure what control costs per step: a coordinator, and hundreds of invented agents in one other process.

    python scripts/bench_control.py --json control.json

The coordinator is the real one, with its state machine, its WebSockets and its journal; the agents are sockets that
vote. In one half of the steps all votes come at once; the step then takes what the coordinator needs for all of them.
In the other half the last vote comes when all others have been digested, and what counts is the time from that vote to
the arrival of the last commit: what training waits for where one stage is the last to end, as it always is.
"""

import asyncio
import json
import multiprocessing
import multiprocessing.connection
import resource
import socket
import statistics
import struct
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.coordinator import Coordinator, Services, bind
from oobleck_jax.elastic.limits import Limits
from oobleck_jax.elastic.membership import Membership
from oobleck_jax.elastic.terms import Proposal, Terms
from oobleck_jax.errors import ConfigError
from oobleck_jax.planning.plan import NodeId, Pipeline, Plan, Stage, Template
from oobleck_jax.script import make_room, run_script


VERSIONS = {"bench": "1"}
TOKENS_PER_MICROBATCH = 1024
MICROBATCHES = 4  # of each pipeline
DEPTH = 4  # nodes of a pipeline
LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this script."""

    agents: tuple[int, ...] = (4, 16, 64, 256)  # how many, one measurement each
    layers: int = 26  # of the model; each is a group of parameters, and the two ends share one more
    steps: int = 40  # of each measurement; the median counts
    json: Path | None = None  # write the figures into this file


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What control costs with so many agents."""

    agents: int
    commit_ms: float  # from the last vote, when all others are digested, to the last commit
    step_ms: float  # the same when all votes come at once
    slowest_commit_ms: float
    coordinator_cpu_ms: float  # per step
    vote_bytes: int  # the longest


def main(arguments: Arguments) -> int:
    """Measure, print, and write the JSON."""
    make_room(arguments.json, flag="--json")
    if min(arguments.agents) < 1:
        raise ConfigError(f"--agents is {min(arguments.agents)}; it must be at least 1")
    costs = [measure(number, arguments) for number in arguments.agents]
    print("agents  commit ms  (slowest)  all at once ms  coordinator CPU ms per step")
    for cost in costs:
        print(
            f"{cost.agents:6}  {cost.commit_ms:9.2f}  {cost.slowest_commit_ms:9.2f}  {cost.step_ms:14.2f}  "
            f"{cost.coordinator_cpu_ms:10.2f}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n", encoding="utf-8")
    return 0


def measure(num_agents: int, arguments: Arguments) -> Cost:
    """Run one coordinator, and its agents in this process."""
    plan = plan_for(num_agents, arguments.layers)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=coordinate, args=(theirs, plan, num_agents, arguments.steps), daemon=True)
    process.start()
    port: int = ours.recv()
    agents: list[Agent] = []
    try:
        for node in range(num_agents):
            agents.append(Agent(port, NodeId(node), plan, arguments.layers))
            agents[-1].join()
        for kind in ("Begin", "Run"):
            for agent in agents:
                agent.await_message(kind)
                if kind == "Begin":
                    agent.prepare()
        latencies_s: dict[bool, list[float]] = {False: [], True: []}
        for step in range(arguments.steps):
            at_once = bool(step % 2)
            votes = [agent.vote(step) for agent in agents]
            began_s = time.perf_counter()
            for agent, vote in zip(agents[:-1], votes[:-1], strict=True):
                agent.send(vote)
            if not at_once:
                time.sleep(0.02 + 5e-4 * num_agents)
                began_s = time.perf_counter()
            agents[-1].send(votes[-1])
            for agent in agents:
                agent.await_message("Commit")
            latencies_s[at_once].append(time.perf_counter() - began_s)
        cpu_s: list[float] = ours.recv()
    finally:
        for agent in agents:
            agent.close()
        process.join(5)
        process.kill()
    # The first steps still warm up.
    commit_s, step_s = (values[2:] or values for values in (latencies_s[False], latencies_s[True]))
    return Cost(
        agents=num_agents,
        commit_ms=1e3 * statistics.median(commit_s),
        step_ms=1e3 * statistics.median(step_s),
        slowest_commit_ms=1e3 * max(commit_s),
        coordinator_cpu_ms=1e3 * statistics.median(cpu_s),
        vote_bytes=max(len(messages.encode(agent.vote(0))) for agent in agents),
    )


def plan_for(num_nodes: int, num_layers: int) -> Plan:
    """Return pipelines of four nodes; of what is left of the nodes there is a shorter one."""
    sizes = [DEPTH] * (num_nodes // DEPTH) + ([num_nodes % DEPTH] if num_nodes % DEPTH else [])
    pipelines: list[Pipeline] = []
    first = 0
    for size in sizes:
        cuts = [round(index * num_layers / size) for index in range(size + 1)]
        stages = tuple(
            Stage(first_layer=cuts[index], end_layer=cuts[index + 1], node_index=index) for index in range(size)
        )
        nodes = tuple(NodeId(first + index) for index in range(size))
        pipelines.append(Pipeline(template=Template(stages=stages), nodes=nodes, num_microbatches=MICROBATCHES))
        first += size
    return Plan(pipelines=tuple(pipelines))


# ---------------------------------------------------------------------------------------------------- coordinator


class NoFabric:
    """Invented agents do not meet."""

    def close(self) -> None:
        pass


def coordinate(pipe: "multiprocessing.connection.Connection[Any, Any]", plan: Plan, num_nodes: int, steps: int) -> None:
    """Run the coordinator; send its port, and in the end the CPU seconds of each step."""
    asyncio.run(_coordinate(pipe, plan, num_nodes, steps))


async def _coordinate(
    pipe: "multiprocessing.connection.Connection[Any, Any]", plan: Plan, num_nodes: int, steps: int
) -> None:
    cpu_s: list[float] = []
    last_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        files = events.RunFiles(Path(folder))

        def record(item: events.Record) -> None:
            nonlocal last_s
            files.write(item)
            if isinstance(item, events.Committed):
                now_s = time.process_time()
                cpu_s.append(now_s - last_s)
                last_s = now_s
                if item.step + 1 == steps:
                    pipe.send(cpu_s[1:])

        terms = Terms(
            config_json="{}",
            run_id=messages.RunId("bench"),
            config_digest="bench",
            versions=VERSIONS,
            num_nodes=num_nodes,
            num_devices=1,
            num_layers=plan.num_layers,
            steps=steps,
            tokens_per_step=len(plan.pipelines) * MICROBATCHES * TOKENS_PER_MICROBATCH,
            evaluates_after=lambda step: False,
            replan=lambda nodes, holdings, old: Proposal(plan=plan, reason="given"),
            place=lambda plan: {},
            place_at_start=lambda node: ((), 0),
            limits=Limits().scaled(100.0),
        )
        membership = Membership(terms, asyncio.get_running_loop().time())
        services = Services(
            start_fabric=lambda address, num_nodes: NoFabric(),
            fabric_host="127.0.0.1",
            listen_host="127.0.0.1",
            record=record,
        )
        coordinator = Coordinator(membership, services)
        listener = bind("127.0.0.1", 0)
        pipe.send(listener.getsockname()[1])
        await asyncio.wait_for(coordinator.run(listener), LIMIT_S)


# --------------------------------------------------------------------------------------------------------- agents


class Agent:
    """A socket that speaks just enough WebSocket: what it costs must not be taken for the coordinator's cost."""

    def __init__(self, port: int, node: NodeId, plan: Plan, num_layers: int) -> None:
        self._node, self._buffer = node, bytearray()
        layers = plan.layers_of(node)
        self._groups = [f"layer-{layer:03d}" for layer in layers]
        self._groups += ["wte"] if {0, num_layers - 1}.intersection(layers) else []
        self._num_tokens = sum(
            pipeline.num_microbatches * TOKENS_PER_MICROBATCH
            for pipeline in plan.pipelines
            if pipeline.nodes[-1] == node
        )
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        key = "AAAAAAAAAAAAAAAAAAAAAA=="
        self._socket.sendall(
            f"GET /control HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        while b"\r\n\r\n" not in self._buffer:
            self._read()
        del self._buffer[: self._buffer.index(b"\r\n\r\n") + 4]

    def join(self) -> None:
        """Join, and have a worker that is ready."""
        self.send(messages.Join(name="x", incarnation=0, num_devices=1, versions=VERSIONS, node=self._node))
        self.await_message("Welcome")
        self.send(
            messages.WorkerReady(node=self._node, incarnation=0, link_address="x", num_devices=1, device_kind="none")
        )

    def prepare(self) -> None:
        self.send(messages.Prepared(node=self._node, generation=1, num_compilations=0, seconds={}))

    def vote(self, step: int) -> messages.Vote:
        reports = tuple(
            messages.GroupReport(group=group, squared_norm=0.1234567890123456 + step, checksum=(step + 1) << 40)
            for group in self._groups
        )
        return messages.Vote(
            node=self._node,
            generation=1,
            step=step,
            loss_sum=1.2345678901234567 * self._num_tokens,
            num_tokens=self._num_tokens,
            is_finite=True,
            groups=reports,
            seconds={"compute": 0.1234567890123456, "receive": 0.1234567890123456, "sum": 0.1234567890123456},
        )

    def send(self, message: messages.ToCoordinator) -> None:
        """Send a frame, with a mask that changes nothing."""
        data = messages.encode(message)
        size = len(data)
        header = struct.pack("!BB", 0x81, 0x80 | size) if size < 126 else struct.pack("!BBH", 0x81, 0x80 | 126, size)
        self._socket.sendall(header + b"\0\0\0\0" + data)

    def await_message(self, kind: str) -> None:
        """Read until a message of a kind has come."""
        while not self._next_frame().startswith(b'{"type":"' + kind.encode() + b'"'):
            pass

    def close(self) -> None:
        self._socket.close()

    def _next_frame(self) -> bytes:
        size, start = self._frame_size()
        while size is None or len(self._buffer) < start + size:
            self._read()
            size, start = self._frame_size()
        frame = bytes(self._buffer[start : start + size])
        del self._buffer[: start + size]
        return frame

    def _frame_size(self) -> tuple[int | None, int]:
        """Return the size of the first frame's payload, and where it starts; None while that is not known."""
        if len(self._buffer) < 10 and (len(self._buffer) < 2 or self._buffer[1] + 2 > len(self._buffer)):
            return None, 0
        match self._buffer[1]:
            case 126:
                return struct.unpack_from("!H", self._buffer, 2)[0], 4
            case 127:
                return struct.unpack_from("!Q", self._buffer, 2)[0], 10
            case size:
                return size, 2

    def _read(self) -> None:
        data = self._socket.recv(1 << 16)  # no more: what a large buffer costs would be taken for the coordinator
        if not data:
            raise SystemExit(f"the coordinator closed the connection of agent {self._node}")
        self._buffer += data


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    sys.exit(run_script(main, tyro.cli(Arguments, description=__doc__)))
