import pytest

from oobleck_jax import cluster
from oobleck_jax.cluster import ProcessPlace, find_place
from oobleck_jax.errors import ConfigError


SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_NODELIST": "node[001-003]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


def test_without_flags_or_launcher_all_runs_here() -> None:
    assert find_place(None, None, None, {}) is None
    assert find_place(None, None, None, SLURM | {"SLURM_NTASKS": "1"}) is None
    assert find_place(None, None, None, {"SLURM_NTASKS": "4"}) is None  # an allocation, but no step of it


def test_flags_count() -> None:
    assert find_place("head:8471", 4, 2, SLURM) == ProcessPlace(host="head", port=8471, num_processes=4, process_id=2)


@pytest.mark.process
def test_slurm_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    found = find_place(None, None, None, SLURM)
    assert found is not None
    assert (found.host, found.num_processes, found.process_id) == ("node001", 3, 1)
    assert find_place("head:8471", None, None, SLURM) == ProcessPlace(
        host="head", port=8471, num_processes=3, process_id=1
    )


@pytest.mark.process
def test_what_cannot_be_detected_must_be_given() -> None:
    with pytest.raises(ConfigError, match="--coordinator-address is not given, and no Slurm"):
        find_place("auto", None, None, {})


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "limit_s", "words"),
    [
        (
            "raise SystemExit('no host of that name')",
            60.0,
            r"failed \(no host of that name\); give --coordinator-address",
        ),
        ("import time; time.sleep(60)", 0.2, "took more than 0 s; give --coordinator-address"),
    ],
)
def test_a_detection_that_fails_says_what_to_give(
    monkeypatch: pytest.MonkeyPatch, program: str, limit_s: float, words: str
) -> None:
    monkeypatch.setattr(cluster, "_DETECT", program)
    monkeypatch.setattr(cluster, "_DETECTION_S", limit_s)
    with pytest.raises(ConfigError, match=f"detecting the cluster {words}"):
        find_place("auto", None, None, SLURM)


@pytest.mark.parametrize(
    ("address", "count", "number", "words"),
    [
        ("head", 2, 0, "head is not HOST:PORT"),
        (":8471", 2, 0, "is not HOST:PORT"),
        ("head:8471", 2, 2, "--process-id 2 must be from 0 to 1"),
        ("head:8471", 2, -1, "--process-id -1 must be from 0 to 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(address: str, count: int, number: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_place(address, count, number, {})
