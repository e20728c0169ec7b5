import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from oobleck_jax.fabric_host import MODULE, FabricHost, end_fabric_host
from oobleck_jax.process_id import find_process, process_id


pytestmark = [pytest.mark.process, pytest.mark.jax_version]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FabricHost]:
    host = FabricHost(linger_s=60.0, log_path=tmp_path / "log", environment=os.environ)
    yield host
    host.end()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def wait_until(holds, within_s: float = 10.0) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_services_start_and_end_one_by_one(host: FabricHost) -> None:
    addresses = [free_address(), free_address()]
    services = [host.start_service(address, 2) for address in addresses]
    assert all(map(listens, addresses))
    services[0].close()
    wait_until(lambda: not listens(addresses[0]))
    assert listens(addresses[1])


def test_why_a_service_cannot_start_is_told(host: FabricHost) -> None:
    with pytest.raises(RuntimeError, match="OSError"):
        host.start_service("192.0.2.1:7000", 2)
    host.start_service(free_address(), 2)


def test_after_a_crash_there_is_a_new_process(host: FabricHost) -> None:
    first = host.process_id
    os.kill(first.pid, signal.SIGKILL)  # its end may be noticed only while it is asked
    address = free_address()
    host.start_service(address, 2).close()
    second = host.process_id
    assert second != first
    os.kill(second.pid, signal.SIGKILL)
    wait_until(lambda: find_process(second, module=MODULE) is None)
    host.start_service(free_address(), 2)


@pytest.mark.parametrize("linger_s", [0.1, 60.0])
def test_services_outlive_the_coordinator_for_a_while(tmp_path: Path, linger_s: float) -> None:
    address = free_address()
    code = (
        "import os, sys, time; from pathlib import Path; from oobleck_jax.fabric_host import FabricHost\n"
        f"host = FabricHost(linger_s={linger_s}, log_path=Path({str(tmp_path / 'log')!r}), environment=os.environ)\n"
        f"host.start_service({address!r}, 2)\n"
        "print(host.process_id.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stdout is not None
        host = psutil.Process(int(coordinator.stdout.readline()))
        coordinator.kill()
    if linger_s > 1:
        assert listens(address)
        end_fabric_host(process_id(host))  # its successor does so
    wait_until(lambda: not host.is_running() or host.status() == psutil.STATUS_ZOMBIE)
