"""JAX's coordination services in a process of their own, so that they outlive a coordinator that dies.

While a generation prepares, its workers are attached to its service, and the end of the service aborts them: if the
services died with the coordinator, all copies of a layer could be lost at once. This process lingers instead, long
enough for the workers to be told what follows by the next coordinator.

    coordinator --(stdin)-->  {"start": "host:port", "num_nodes": 3}   answered by {"error": null} or a message
                              {"close": "host:port"}                   not answered; nobody is attached any more

The end of stdin means that the coordinator is gone.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from oobleck_jax.execution.jaxlib_private import CoordinationService, start_coordination_service
from oobleck_jax.process_id import ProcessId, find_process, process_id


MODULE = "oobleck_jax.fabric_host"


class FabricHost:
    """The process, as the coordinator sees it: it is started when it is needed, and again if it has crashed."""

    def __init__(self, *, linger_s: float, log_path: Path, environment: Mapping[str, str]) -> None:
        """Start the process.

        Args:
            linger_s: how long it outlives this process.
            log_path: where it prints.
            environment: of the process.
        """
        self._linger_s = linger_s
        self._log_path = log_path
        self._environment = environment
        self._lock = threading.Lock()
        self._process = self._spawn()

    @property
    def process_id(self) -> ProcessId:
        return process_id(psutil.Process(self._process.pid))

    def start_service(self, bind_address: str, num_nodes: int) -> "HostedService":
        """Start the service of a generation; blocks until it listens.

        Args:
            bind_address: host:port to listen on.
            num_nodes: members of the generation.

        Raises:
            RuntimeError: it cannot start.
        """
        with self._lock:
            try:
                answer = self._ask_to_start(bind_address, num_nodes)
            except (OSError, ValueError):  # it has crashed, now or earlier
                self.end()
                self._process = self._spawn()
                try:
                    answer = self._ask_to_start(bind_address, num_nodes)
                except (OSError, ValueError):
                    raise RuntimeError(f"the process that hosts it ends at once; see {self._log_path}") from None
        if answer["error"] is not None:
            raise RuntimeError(answer["error"])
        return HostedService(host=self, address=bind_address)

    def tell(self, message: Mapping[str, str | int]) -> None:
        """Send a message.

        Raises:
            OSError: the process has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """End the process; nobody is attached any more, or will miss it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _ask_to_start(self, bind_address: str, num_nodes: int) -> dict[str, str | None]:
        self.tell({"start": bind_address, "num_nodes": num_nodes})
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def _spawn(self) -> "subprocess.Popen[bytes]":
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", MODULE, str(self._linger_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )


def end_fabric_host(process: ProcessId) -> None:
    """End the process that a coordinator before has left, if it lingers still."""
    if host := find_process(process, module=MODULE):
        host.kill()


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedService:
    """The coordination service of one generation."""

    host: FabricHost
    address: str

    def close(self) -> None:
        """Stop it; kills every node that has not left it."""
        with contextlib.suppress(OSError):  # gone with its host
            self.host.tell({"close": self.address})


def main() -> None:
    """Serve a coordinator: `python -m oobleck_jax.fabric_host LINGER_S`."""
    services: dict[str, CoordinationService] = {}
    for line in sys.stdin:
        message = json.loads(line)
        if address := message.get("close"):
            # Blocks for some seconds if a client is left.
            if service := services.pop(address, None):
                threading.Thread(target=service.close, daemon=True).start()
            continue
        error = None
        try:
            services[message["start"]] = start_coordination_service(message["start"], message["num_nodes"])
        except (OSError, RuntimeError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        print(json.dumps({"error": error}), flush=True)  # noqa: T201
    time.sleep(float(sys.argv[1]))
    os._exit(0)


if __name__ == "__main__":
    main()
