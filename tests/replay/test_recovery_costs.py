import json
from pathlib import Path

import pytest

from oobleck_jax.errors import ConfigError
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.reconfigure import Copy
from oobleck_jax.replay.recovery_costs import DEFAULTS, read_costs
from tests.replay.workloads import COSTS


RECOVERY = {
    "kills": 20,
    "nodes": 2,
    "notice_s": {"median": 0.1, "p95": 0.2},
    "recovery_s": {"median": 1.0, "p95": 2.0},
    "phases_s": {"plan": 0.02, "compile": 0.1, "copy": 0.3, "fabric": 0.2, "first_step": 3.0, "total": 4.0},
    "received_bytes": 5.0,
}
CHECKPOINT = {"stall_fraction": 0.03, "cost_fraction": 0.01, "bytes": 1000, "durable_s": 2.0, "restore_s": 4.0}


def copy(source: int, destination: int, num_bytes: int) -> Copy:
    return Copy(name="layer", layers=(0,), source=NodeId(source), destination=NodeId(destination), num_bytes=num_bytes)


def test_results_of_the_benchmarks_become_costs(tmp_path: Path) -> None:
    recovery, checkpoint = tmp_path / "r.json", tmp_path / "c.json"
    recovery.write_text(json.dumps(RECOVERY), encoding="utf-8")
    checkpoint.write_text(json.dumps(CHECKPOINT), encoding="utf-8")
    costs, saves = read_costs(recovery=recovery, checkpoint=checkpoint)
    assert (costs.plan_s_per_node, costs.fabric_s_per_node) == (0.01, 0.1)
    assert costs.rest_s == pytest.approx(1.0 - 0.1 - 0.62 + 0.1)  # what was compiled is not spared
    assert costs.detect_s == 4.0  # heartbeats, because hosts vanish without a word
    assert (saves.steps_per_save, saves.write_bytes_per_s, saves.read_bytes_per_s) == (0.1, 500, 250)


def test_costs_grow_with_nodes_and_with_the_bytes_of_the_busiest_node() -> None:
    assert COSTS.regroup_s(5, (), 0.0, with_new_nodes=False) == pytest.approx(5 * 0.3 + 1)
    assert COSTS.regroup_s(5, (), 0.0, with_new_nodes=True) == pytest.approx(5 * 0.3 + 1 + 2)
    copies = (copy(0, 1, 100), copy(0, 2, 200), copy(3, 2, 150))
    assert COSTS.regroup_s(5, copies, 7.0, with_new_nodes=False) == pytest.approx(5 * 0.3 + 1 + 7 + 3.5)


def test_the_package_has_constants_and_says_where_they_come_from() -> None:
    costs, saves = read_costs()
    assert 0 < costs.rest_s < 10
    assert saves.write_bytes_per_s > 1e6
    assert "scripts/bench_recovery.py" in json.loads(DEFAULTS.read_text(encoding="utf-8"))["source"]


def test_a_file_that_is_no_result_is_refused_with_the_name_of_the_program(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"bytes": 1}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is no result of bench_checkpoint\.py"):
        read_costs(checkpoint=wrong)
    with pytest.raises(ConfigError, match=r"No such file or directory; it should hold a result of bench_recovery\.py"):
        read_costs(recovery=tmp_path / "absent.json")
