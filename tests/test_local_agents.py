import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from oobleck_jax.elastic.agent import AgentOptions
from oobleck_jax.local_agents import LocalAgents
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.process_id import ProcessId


pytestmark = pytest.mark.process

NODES = (NodeId(0), NodeId(1))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[LocalAgents]:
    agents = make(tmp_path)
    yield agents
    agents.end(patience_s=0.0)


def make(tmp_path: Path) -> LocalAgents:
    """Agents that try in vain to reach a coordinator."""
    options = {
        node: AgentOptions(coordinator_address="127.0.0.1:1", name="here", versions={}, node=node) for node in NODES
    }
    return LocalAgents(options, log_path=lambda node: tmp_path / f"node-{node}.log")


def test_an_agent_is_started_where_there_is_none(agents: LocalAgents) -> None:
    agents.start([NodeId(0)], os.environ)
    (first,) = agents.process_ids().values()
    agents.start(NODES, os.environ)
    assert agents.alive == frozenset(NODES)
    assert agents.process_ids()[0] == first
    assert agents.add() == 2


def test_the_agents_of_a_coordinator_before_are_ended_like_ones_own(agents: LocalAgents, tmp_path: Path) -> None:
    agents.start(NODES, os.environ)
    processes = agents.process_ids()
    successor = make(tmp_path)
    deadline_s = time.monotonic() + 30.0
    while successor.alive != frozenset(NODES) and time.monotonic() < deadline_s:
        successor.adopt(processes)  # for a moment after `exec` a process has no command line
    assert successor.alive == frozenset(NODES)
    began_s = time.monotonic()
    successor.end(patience_s=0.1)
    assert time.monotonic() - began_s < 5.0
    assert agents.alive == frozenset()


def test_what_is_no_agent_any_more_is_left_alone(agents: LocalAgents) -> None:
    me = psutil.Process()
    agents.start([NodeId(1)], os.environ)
    agent = agents.process_ids()[1]
    agents.adopt(
        {
            0: ProcessId(pid=me.pid, began_s=me.create_time()),  # something else has the number now
            2: ProcessId(pid=agent.pid, began_s=agent.began_s - 10),  # another agent has it
            3: ProcessId(pid=2**22 + 1, began_s=1.0),  # nobody has it
        }
    )
    assert agents.alive == {1}


def test_how_an_agent_ended_is_told_with_its_last_words(agents: LocalAgents, tmp_path: Path) -> None:
    agents.start([NodeId(0)], os.environ)
    pid = agents.process_ids()[0].pid
    with (tmp_path / "node-0.log").open("a") as log:
        log.write("last words\n")
    os.kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + 5.0
    while agents.alive and time.monotonic() < end_s:
        time.sleep(0.01)
    assert agents.why_ended(NodeId(0)) == "the agent of node 0 ended with exit code -9 before it joined: last words"
