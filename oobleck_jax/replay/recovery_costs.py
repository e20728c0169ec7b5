"""What our own recoveries and checkpoints cost: measured on real runs, scaled to other models, links and clusters.

A loss is charged, besides the step that it interrupts:

    detect      a host vanishes without a word: its heartbeats must be missed
    plan        as measured, in proportion to the number of nodes
    copy        the time of the node that sends or gets most: on the link, and to pack its states and check them
    compile     nothing for nodes that take part, whose programs are compiled ahead; a node that joins loads its own
    fabric      as measured, in proportion to the number of nodes
    rest        what else was measured between the kill and the first commit after it, beyond a usual step

A join is charged the same without detection, after the time that a worker needs to be ready. A checkpoint costs a
fraction of the steps around it; it is written, and read, by each node for itself, at the rate that was measured.

Measured constants are files: `scripts/bench_recovery.py --json FILE` and `scripts/bench_checkpoint.py --json FILE`.
Without files, those of `measured.json` beside this module are used, which says where each comes from.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from oobleck_jax.errors import ConfigError
from oobleck_jax.planning.reconfigure import Copy


T = TypeVar("T")

DEFAULTS = Path(__file__).with_name("measured.json")
BENCH_EVERY = 10  # steps between the checkpoints of bench_checkpoint.py, to which its cost_fraction belongs


class RecoveryBench(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of a result of bench_recovery.py."""

    notice_s: dict[str, float]
    recovery_s: dict[str, float]
    phases_s: dict[str, float]
    nodes: int = 4


class CheckpointBench(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of a result of bench_checkpoint.py."""

    cost_fraction: float  # of the time of a step, with a checkpoint every `BENCH_EVERY` steps
    bytes: int
    durable_s: float
    restore_s: float


class _Defaults(msgspec.Struct, frozen=True, kw_only=True):
    recovery: RecoveryBench
    checkpoint: CheckpointBench
    check_bytes_per_s: float
    join_ready_s: float
    join_compile_s: float
    heartbeat_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryCosts:
    """Constants of recoveries."""

    detect_s: float
    plan_s_per_node: float
    fabric_s_per_node: float
    rest_s: float
    check_bytes_per_s: float  # packing a state and computing its checksum
    join_ready_s: float  # from the start of a worker until it can take part
    join_compile_s: float  # programs that a node loads while the others wait for it

    def regroup_s(self, num_nodes: int, copies: tuple[Copy, ...], copy_s: float, *, with_new_nodes: bool) -> float:
        """Return the seconds from knowing who is there to the next step.

        Args:
            num_nodes: that take part.
            copies: of states.
            copy_s: of the busiest node, on the link.
            with_new_nodes: some have just joined.
        """
        busy_bytes: dict[tuple[str, int], int] = {}
        for copy in copies:
            for role in (("from", copy.source), ("to", copy.destination)):
                busy_bytes[role] = busy_bytes.get(role, 0) + copy.num_bytes
        check_s = max(busy_bytes.values(), default=0) / self.check_bytes_per_s
        compile_s = self.join_compile_s if with_new_nodes else 0.0
        return num_nodes * (self.plan_s_per_node + self.fabric_s_per_node) + copy_s + check_s + compile_s + self.rest_s


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCosts:
    """Constants of checkpoints."""

    steps_per_save: float  # how many steps' time one costs
    write_bytes_per_s: float  # of a node
    read_bytes_per_s: float


def read_costs(
    *, recovery: Path | None = None, checkpoint: Path | None = None, hosts_vanish: bool = True
) -> tuple[RecoveryCosts, CheckpointCosts]:
    """Return the costs that were measured.

    Args:
        recovery: a result of bench_recovery.py (default: the one in the package).
        checkpoint: a result of bench_checkpoint.py (likewise).
        hosts_vanish: a lost node says nothing; else, only its processes end, and its host tells at once.

    Raises:
        ConfigError: a file cannot be read, or is no such result.
    """
    defaults = _read(DEFAULTS, _Defaults, "the package's own constants")
    killed = defaults.recovery if recovery is None else _read(recovery, RecoveryBench, "bench_recovery.py")
    saved = defaults.checkpoint if checkpoint is None else _read(checkpoint, CheckpointBench, "bench_checkpoint.py")
    phases_s = {phase: killed.phases_s.get(phase, 0.0) for phase in ("plan", "compile", "copy", "fabric")}
    rest_s = killed.recovery_s["median"] - killed.notice_s["median"] - sum(phases_s.values())
    return (
        RecoveryCosts(
            detect_s=max(defaults.heartbeat_s if hosts_vanish else 0.0, killed.notice_s["median"]),
            plan_s_per_node=phases_s["plan"] / killed.nodes,
            fabric_s_per_node=phases_s["fabric"] / killed.nodes,
            rest_s=max(rest_s, 0.0) + phases_s["compile"],
            check_bytes_per_s=defaults.check_bytes_per_s,
            join_ready_s=defaults.join_ready_s,
            join_compile_s=defaults.join_compile_s,
        ),
        CheckpointCosts(
            steps_per_save=BENCH_EVERY * max(saved.cost_fraction, 0.0),
            write_bytes_per_s=saved.bytes / saved.durable_s,
            read_bytes_per_s=saved.bytes / saved.restore_s,
        ),
    )


def _read(path: Path, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; it should hold a result of {what}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no result of {what}: {error}") from None
