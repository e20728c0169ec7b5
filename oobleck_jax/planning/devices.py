"""Devices that one may plan for without having them: peak rates, memory, and what part of the peaks is reached.

Peaks are those of dense matmuls in the data sheets of the makers (bfloat16 with float32 accumulation; float32 as
TF32 where there is such a mode), for the SXM form where there is one. Rates between the devices of a node are one
way: half of the sheet's figure for NVLink, 32 GB/s for PCIe 4 x16, 16 GB/s for PCIe 3 x16.

`matmul_fraction` is the part of the peak that large transformers reach while they compute. Published runs include
bubbles and communication: Narayanan et al. 2021 (table 1) reach 44 to 52 % of the peak of the A100. Without those we
assume 55 % for it and its generation, and less where power or bandwidth limits more. It is the least certain number
here; a measured profile needs none of this.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from oobleck_jax.config import Precision
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.estimate import DeviceRates
from oobleck_jax.planning.profile import Rate


USABLE_MEMORY = 0.92  # of a device; the runtime, its libraries and fragmentation take the rest
BANDWIDTH_FRACTION = 0.8  # of the peak, of memory and of links


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A kind of device."""

    name: str
    bfloat16_flops_per_s: float  # peak
    float32_flops_per_s: float  # peak, TF32 where there is such a mode
    memory_bytes: int
    memory_bytes_per_s: float  # peak
    node_bytes_per_s: float  # peak, one way, between devices of a node
    matmul_fraction: float  # of the peak that is reached

    def peak_flops_per_s(self, precision: Precision) -> float:
        return self.float32_flops_per_s if precision is Precision.FLOAT32 else self.bfloat16_flops_per_s

    @property
    def usable_memory_bytes(self) -> int:
        return int(self.memory_bytes * USABLE_MEMORY)


def _nvidia(
    name: str,
    bfloat16_tflops: float,
    float32_tflops: float,
    memory_gb: int,
    memory_gb_s: float,
    node_gb_s: float,
    fraction: float,
) -> Device:
    return Device(
        name=name,
        bfloat16_flops_per_s=bfloat16_tflops * 1e12,
        float32_flops_per_s=float32_tflops * 1e12,
        memory_bytes=memory_gb * 10**9,
        memory_bytes_per_s=memory_gb_s * 1e9,
        node_bytes_per_s=node_gb_s * 1e9,
        matmul_fraction=fraction,
    )


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            _nvidia("v100-16gb", 125, 15.7, 16, 900, 150, 0.45),
            _nvidia("v100-32gb", 125, 15.7, 32, 900, 150, 0.45),
            _nvidia("t4", 65, 8.1, 16, 320, 16, 0.35),
            _nvidia("a40", 149.7, 74.8, 48, 696, 32, 0.45),
            _nvidia("a100-40gb", 312, 156, 40, 1555, 300, 0.55),
            _nvidia("a100-80gb", 312, 156, 80, 2039, 300, 0.55),
            _nvidia("l4", 121, 60, 24, 300, 32, 0.35),
            _nvidia("l40s", 362, 183, 48, 864, 32, 0.45),
            _nvidia("h100", 989, 495, 80, 3350, 450, 0.5),
            _nvidia("h200", 989, 495, 141, 4800, 450, 0.5),
            _nvidia("b200", 2250, 1125, 180, 7700, 900, 0.5),
        )
    }
)


def device_named(name: str) -> Device:
    """Return a device of the table.

    Raises:
        PlanError: there is none of this name.
    """
    device = DEVICES.get(name)
    if device is None:
        raise PlanError(f"--device {name} is not known; there are {', '.join(DEVICES)}. Or give a measured --profile")
    return device


def device_of_kind(kind: str) -> Device | None:
    """Return the device that JAX calls by this name, such as "NVIDIA H100 80GB HBM3"; None: it is not in the table."""
    words = kind.lower()
    fitting = [device for device in DEVICES.values() if all(part in words for part in device.name.split("-"))]
    return max(fitting, key=lambda device: len(device.name), default=None)


def rates_of(
    device: Device, *, precision: Precision, network_bytes_per_s: float, network_latency_s: float
) -> DeviceRates:
    """Return the rates that a device reaches, with a network of this peak rate in each direction between nodes."""
    network = Rate(bytes_per_s=network_bytes_per_s * BANDWIDTH_FRACTION, latency_s=network_latency_s)
    return DeviceRates(
        name=device.name,
        flops_per_s=device.peak_flops_per_s(precision) * device.matmul_fraction,
        memory_bytes_per_s=device.memory_bytes_per_s * BANDWIDTH_FRACTION,
        node_bytes_per_s=device.node_bytes_per_s * BANDWIDTH_FRACTION,
        link=network,
        sum=network,
    )
