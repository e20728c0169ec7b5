"""The agents of this machine, as processes: those started here, and those that a coordinator before has started."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import psutil

from oobleck_jax.elastic.agent import AgentOptions
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.process_id import ProcessId, find_process, has_ended, process_id


_AGENT = "oobleck_jax.elastic.agent"


class LocalAgents:
    """Agents in sessions of their own, so that Ctrl-C reaches only the coordinator."""

    def __init__(self, options: Mapping[NodeId, AgentOptions], *, log_path: Callable[[int], Path]) -> None:
        """Start nothing yet.

        Args:
            options: of each node of this machine.
            log_path: where an agent and its workers print.
        """
        self._options = dict(options)
        self._log_path = log_path
        self._agents: dict[NodeId, psutil.Process] = {}

    def adopt(self, processes: Mapping[int, ProcessId]) -> None:
        """Take over the agents that another coordinator has started, as far as they live."""
        for node, process in processes.items():
            if agent := find_process(process, module=_AGENT):
                self._agents[NodeId(node)] = agent

    def start(self, nodes: Iterable[NodeId], environment: Mapping[str, str]) -> None:
        """Start the agents of nodes that have none; what they print goes into their logs, after what is there."""
        for node in sorted(set(nodes) - self.alive):
            with self._log_path(node).open("ab") as log:
                agent = psutil.Popen(
                    [sys.executable, "-m", _AGENT],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            self._agents[node] = agent
            with contextlib.suppress(BrokenPipeError):  # it ended already: the coordinator will miss it
                agent.stdin.write(msgspec.json.encode(self._options[node]))
                agent.stdin.close()

    def add(self) -> NodeId:
        """Provide for one more node, the lowest without a process; return it."""
        node = next(node for node in map(NodeId, itertools.count()) if node not in self.alive)
        pattern = next(iter(self._options.values()))
        self._options[node] = msgspec.structs.replace(pattern, node=node)
        return node

    @property
    def alive(self) -> frozenset[NodeId]:
        return frozenset(node for node, agent in self._agents.items() if not has_ended(agent))

    def process_ids(self) -> dict[int, ProcessId]:
        """Return the processes there are, by node."""
        found: dict[int, ProcessId] = {}
        for node in self.alive:
            with contextlib.suppress(psutil.Error):
                found[node] = process_id(self._agents[node])
        return found

    def why_ended(self, node: NodeId) -> str:
        """Return how an agent that lives no more has ended, with the last words of its log."""
        agent = self._agents[node]
        how = f"with exit code {agent.poll()} " if isinstance(agent, psutil.Popen) else ""
        tail = self._log_path(node).read_text(encoding="utf-8", errors="replace")[-500:].strip()
        return f"the agent of node {node} ended {how}before it joined: {tail}"

    def end(self, *, patience_s: float) -> None:
        """Wait for the agents to end, and kill those that do not; each takes its worker with it."""
        deadline_s = time.monotonic() + patience_s
        while not all(map(has_ended, self._agents.values())) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        for agent in self._agents.values():
            if not has_ended(agent):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGKILL)
        for agent in self._agents.values():
            with contextlib.suppress(psutil.TimeoutExpired):
                agent.wait(timeout=5.0)
        self._agents.clear()
