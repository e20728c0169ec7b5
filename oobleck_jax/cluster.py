"""Which part of a job on several hosts this process is: given by flags, or asked of Slurm, Open MPI or Kubernetes.

The words are those of `jax.distributed.initialize`, and so is the detection: it is JAX's own, in a process that lives
for a second, because importing jax would triple the size of the coordinator.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from oobleck_jax.errors import ConfigError


_FLAGS = "--coordinator-address HOST:PORT, --num-processes and --process-id"
_DETECTION_S = 120.0
_DETECT = """
import json, sys
from jax._src.clusters import ClusterEnv
print(json.dumps(ClusterEnv.auto_detect_unset_distributed_params(*json.loads(sys.argv[1]), None, None, 60)[:3]))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessPlace:
    """The place of this process among those of a job."""

    host: str  # of the coordinator, as all hosts reach it
    port: int
    num_processes: int
    process_id: int


def find_place(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    environment: Mapping[str, str],
) -> ProcessPlace | None:
    """Return the place of this process in a job on several hosts; None: the whole run is on this machine.

    What is given counts. What is not is detected if the address is "auto", if anything is given, or if the environment
    is that of one process of several.

    Raises:
        ConfigError: something is missing and cannot be detected, or does not fit together.
    """
    is_asked = (coordinator_address, num_processes, process_id) != (None, None, None)
    if not is_asked and not _is_one_of_several(environment):
        return None
    given = (None if coordinator_address == "auto" else coordinator_address, num_processes, process_id)
    address, count, number = _detect(given) if None in given else given
    for flag, value in (("--coordinator-address", address), ("--num-processes", count), ("--process-id", number)):
        if value is None:
            raise ConfigError(
                f"{flag} is not given, and no Slurm, Open MPI or Kubernetes job is found that would tell it; "
                f"give {_FLAGS}"
            )
    assert address is not None
    assert count is not None
    assert number is not None
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--coordinator-address {address} is not HOST:PORT")
    if not 0 <= number < count:
        raise ConfigError(f"--process-id {number} must be from 0 to {count - 1} (--num-processes {count})")
    return ProcessPlace(host=host, port=int(port), num_processes=count, process_id=number)


def _is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process together with others (`srun -n 4`, `mpirun -n 4`)."""
    slurm = (
        environment.get("SLURM_NTASKS", "1") if {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= environment.keys() else "1"
    )
    return any(count not in ("", "1") for count in (slurm, environment.get("OMPI_COMM_WORLD_SIZE", "1")))


def _detect(given: tuple[str | None, int | None, int | None]) -> tuple[str | None, int | None, int | None]:
    try:
        result = subprocess.run(
            [sys.executable, "-c", _DETECT, json.dumps(given)],
            capture_output=True,
            text=True,
            timeout=_DETECTION_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"detecting the cluster took more than {_DETECTION_S:.0f} s; give {_FLAGS}") from None
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr or "").strip().rpartition("\n")[2]
        raise ConfigError(f"detecting the cluster failed ({last_line}); give {_FLAGS}") from None
    address, count, number = json.loads(result.stdout.splitlines()[-1])
    return address, count, number
