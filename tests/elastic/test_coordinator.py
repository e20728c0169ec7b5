"""Coordinator, agents and (invented) workers as real processes; signals from outside are in tests/test_train.py."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from oobleck_jax import events
from oobleck_jax.elastic.agent import AgentOptions
from oobleck_jax.elastic.coordinator import Coordinator, Services, bind, check_exposure
from oobleck_jax.elastic.effects import Finish
from oobleck_jax.elastic.limits import Limits
from oobleck_jax.elastic.membership import Membership
from oobleck_jax.errors import ConfigError
from oobleck_jax.planning.plan import NodeId
from tests.elastic.fake_worker import loss_of
from tests.elastic.plans import terms


pytestmark = pytest.mark.process

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


class NoFabric:
    """Invented workers do not meet."""

    def close(self) -> None:
        pass


@dataclass
class Cluster:
    """A run with real agents; `run` returns when it is over."""

    run_dir: Path
    num_nodes: int = 3
    fault: str | None = None
    step_s: float = 0.005
    token: str | None = None
    agent_token: str | None = None
    records: list[events.Record] = field(default_factory=list[events.Record])
    agents: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    on_record: Callable[[events.Record], None] = lambda record: None

    def run(self, **changes: Any) -> Finish:
        return asyncio.run(asyncio.wait_for(self._run(**changes), 60))

    async def _run(self, **changes: Any) -> Finish:
        listener = bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        changes.setdefault("limits", Limits(step_s=1.0, first_step_s=2.0, verdict_s=0.5))
        membership = Membership(terms(num_nodes=self.num_nodes, **changes), asyncio.get_running_loop().time())
        services = Services(
            start_fabric=lambda address, num_nodes: NoFabric(),
            fabric_host="127.0.0.1",
            listen_host="127.0.0.1",
            record=self._record,
        )
        self.coordinator = Coordinator(membership, services, token=self.token)
        for node in range(self.num_nodes):
            self.start_agent(port, NodeId(node))
        return await self.coordinator.run(listener)

    def _record(self, record: events.Record) -> None:
        self.records.append(record)
        self.on_record(record)

    def start_agent(self, port: int, node: NodeId) -> None:
        worker = [*FAKE_WORKER, "--step-s", str(self.step_s), *(["--fault", self.fault] if self.fault else [])]
        options = AgentOptions(
            coordinator_address=f"127.0.0.1:{port}",
            name=f"host-{node}",
            versions={"jax": "0.10"},
            node=node,
            token=self.agent_token or self.token,
            worker_command=tuple(worker),
            log_dir=str(self.run_dir),
            connect_s=5.0,
            orphan_s=1.0,
            worker_stop_s=0.5,
        )
        agent = subprocess.Popen(
            [sys.executable, "-m", "oobleck_jax.elastic.agent"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "TEST_CLUSTER": str(self.run_dir)},
        )
        assert agent.stdin is not None
        agent.stdin.write(msgspec.json.encode(options))
        agent.stdin.close()
        self.agents.append(agent)

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def leftovers(self) -> list[int]:
        """Processes of this cluster that live on."""
        found: list[int] = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TEST_CLUSTER") == str(self.run_dir) and process.status() != "zombie":
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
            if agent.stderr is not None:
                agent.stderr.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(run_dir=tmp_path)
    yield cluster
    cluster.close()


def assert_clean(cluster: Cluster, *, within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    while cluster.leftovers() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert cluster.leftovers() == []


def test_a_run_without_trouble_commits_every_step_once_and_leaves_nothing_behind(cluster: Cluster) -> None:
    end = cluster.run(steps=5, evaluates_after=lambda step: step == 4)

    assert (end.exit_code, end.node) == (0, None)
    committed = cluster.of_kind(events.Committed)
    assert [record.step for record in committed] == [0, 1, 2, 3, 4]
    assert [record.loss for record in committed] == pytest.approx([loss_of(step) for step in range(5)], rel=1e-12)
    assert committed[0].grad_norm == pytest.approx((0.25 * (1 + 1 / 2 + 1 / 3 + 1 / 4)) ** 0.5)
    assert [record.loss for record in cluster.of_kind(events.Evaluated)] == pytest.approx([2.0])
    assert_clean(cluster)
    assert [agent.wait() for agent in cluster.agents] == [0, 0, 0]
    left = cluster.of_kind(events.Left)
    assert sorted(record.node for record in left) == [0, 1, 2]
    assert all(record.exit_code == 0 for record in left)
    assert all(0 < record.agent_peak_memory_bytes < 60e6 for record in left)
    assert all(record.peak_memory_bytes > 0 for record in left)
    assert "node 1, worker 0 is up" in (cluster.run_dir / "node-1.log").read_text()


@pytest.mark.parametrize(
    ("fault", "node", "words"),
    [
        ("raise@1:2", 1, "worker of node 1 failed: ValueError: invented trouble"),
        ("exit@2:1", 2, "worker of node 2 ended with exit code 3"),
        ("kill@0:2", 0, r"worker of node 0 was killed by SIGKILL \(kill -9, or out of memory\)"),
        ("hang@1:2", 1, "no progress for .* in step 2: node 1 holds it up"),
        ("nan@2:3", 2, "step 3 diverged: a gradient on node 2 is not finite"),
        ("discord@1:1", None, "step 1: the summed gradient of layer 0 is not the same everywhere"),
    ],
)
def test_a_failure_ends_the_run_with_its_first_cause(
    cluster: Cluster, fault: str, node: int | None, words: str
) -> None:
    cluster.fault = fault
    end = cluster.run(steps=50)

    assert (end.exit_code, end.node) == (1, node)
    assert re.search(words, end.reason), end.reason
    first, *others = [record for record in cluster.of_kind(events.Failed) if not record.is_collateral]
    assert not others
    assert first.cause == end.reason
    assert_clean(cluster)


def test_an_interrupt_ends_all(cluster: Cluster) -> None:
    def interrupt(record: events.Record) -> None:
        if isinstance(record, events.Committed) and record.step == 2:
            asyncio.get_running_loop().call_soon(cluster.coordinator.interrupt, "interrupted", 130)

    cluster.on_record = interrupt
    end = cluster.run(steps=10_000)
    assert (end.exit_code, end.reason) == (130, "interrupted")
    assert_clean(cluster)
    assert [agent.wait() for agent in cluster.agents] == [130, 130, 130]


def test_agents_end_when_the_coordinator_is_gone(cluster: Cluster) -> None:
    class DiskFullError(OSError):
        pass

    def fail(record: events.Record) -> None:
        if isinstance(record, events.Committed) and record.step == 2:
            raise DiskFullError

    cluster.on_record = fail
    with pytest.raises(DiskFullError):
        cluster.run(steps=10_000)
    assert_clean(cluster)


def test_no_node_is_late_when_the_coordinator_stood_still(cluster: Cluster) -> None:
    def stand_still(record: events.Record) -> None:
        if isinstance(record, events.Committed) and record.step == 2:
            time.sleep(2.5)  # longer than any limit

    cluster.on_record = stand_still
    end = cluster.run(steps=20, limits=Limits(heartbeat_s=1.2, step_s=1.0, first_step_s=2.0))
    assert (end.exit_code, end.reason) == (0, "all 20 steps are done")


def test_a_wrong_token_is_refused(cluster: Cluster) -> None:
    cluster.num_nodes, cluster.token, cluster.agent_token = 1, "right", "wrong"
    end = cluster.run(limits=Limits(gather_s=4.0))
    assert end.exit_code == 1
    assert "only 0 of 1 nodes were ready" in end.reason
    for agent in cluster.agents:
        assert agent.wait() == 1
        assert agent.stderr is not None
        assert b"give the same --token to all" in agent.stderr.read()


def test_the_right_token_is_accepted(cluster: Cluster) -> None:
    cluster.token = "right"
    assert cluster.run(steps=2).exit_code == 0


def test_a_port_in_use_is_refused() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port} .*; choose another --port"):
            bind("127.0.0.1", port)


def test_listening_beyond_loopback_needs_a_token() -> None:
    check_exposure("127.0.0.1", None)
    check_exposure("0.0.0.0", "secret")
    with pytest.raises(ConfigError, match="needs a token"):
        check_exposure("0.0.0.0", None)
