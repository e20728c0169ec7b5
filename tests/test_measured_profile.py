"""The measured profile of a run: measured once, found again, and never in the way of a run."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.presets import load_preset
from oobleck_jax.errors import PlanError
from oobleck_jax.measured_profile import Place, Profiler, place_of, read_profile
from oobleck_jax.planning.profile import profile_from_json, profile_to_json
from oobleck_jax.propose import estimated_profile
from tests.ages import age


# Writes what it was asked for beside the profile, so that tests see how often and how it was called.
FAKE = """
import json, os, sys
from pathlib import Path
from typing import Any
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
calls = Path({calls!r})
with calls.open("a") as file:
    print(json.dumps([json.loads(sys.stdin.read())["preset"], os.environ.get("XLA_FLAGS", ""), arguments]), file=file)
Path(arguments["--output"]).write_text(Path({profile!r}).read_text())
"""


@pytest.fixture
def config():
    return load_preset("gpt-test")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def profiler(config, said, tmp_path: Path) -> Profiler:
    profile = replace(estimated_profile(config), source="measured")
    (tmp_path / "profile.json").write_bytes(profile_to_json(profile))
    code = FAKE.format(calls=str(tmp_path / "calls"), profile=str(tmp_path / "profile.json"))
    return profiler_with((sys.executable, "-c", code), tmp_path, said)


def profiler_with(command: tuple[str, ...], folder: Path, said: list[str], limit_s: float = 30.0) -> Profiler:
    return Profiler(
        compilation_cache=folder / "programs",
        place=Place(cores=(), num_threads=1, peer_core=None),
        versions={"jax": "1"},
        limit_s=limit_s,
        say=said.append,
        command=command,
    )


def calls(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_a_profile_is_measured_once_and_kept_beside_the_programs(profiler, config, said, tmp_path):
    assert profiler.kept("gpt-test", config) is None
    first = profiler.profile("gpt-test", config)
    assert first.source == "measured"
    assert profiler.profile("gpt-test", config) == first == profiler.kept("gpt-test", config)
    ((preset, flags, arguments),) = calls(tmp_path)
    assert preset == "gpt-test"
    assert "--xla_cpu_multi_thread_eigen=false" in flags
    assert arguments["--compilation-cache"] == str(tmp_path / "programs")
    assert said[0] == f"measuring the layers of gpt-test (once; kept in {tmp_path / 'programs-profiles'})"
    assert len(said) == 2
    assert [path.name for path in (tmp_path / "programs-profiles").iterdir()] == [
        profiler.path("gpt-test", config).name
    ]


def test_whatever_changes_the_cost_of_a_layer_is_measured_anew(profiler, config):
    same = [config, replace(config, steps=7, seed=3, nodes=4, global_batch_size=32, fault_tolerance=1)]
    others = [
        replace(config, microbatch_size=2),
        replace(config, sequence_length=8),
        replace(config, remat="none"),
        replace(config, devices_per_node=2),
        replace(config, model=replace(config.model, width=64)),
    ]
    assert len({profiler.path("gpt-test", other) for other in same}) == 1
    assert len({profiler.path("gpt-test", other) for other in (config, *others)}) == 6
    newer = replace(profiler, versions={"jax": "2"})
    wider = replace(profiler, place=Place(cores=(0, 1), num_threads=2, peer_core=0))
    assert len({found.path("gpt-test", config) for found in (profiler, newer, wider)}) == 3


@pytest.mark.parametrize(
    ("code", "limit_s", "reason"),
    [
        ("import sys; sys.exit('no memory left')", 30.0, "exit code 1: no memory left"),
        ("import time; time.sleep(60)", 0.2, "it took more than 0.2 s"),
        ("pass", 30.0, "No such file"),
    ],
)
def test_a_run_goes_on_with_estimates_when_nothing_can_be_measured(config, said, tmp_path, code, limit_s, reason):
    profiler = profiler_with((sys.executable, "-c", code), tmp_path, said, limit_s)
    assert profiler.profile("gpt-test", config) == estimated_profile(config)
    assert reason in said[-1]
    assert said[-1].startswith("WARNING: the layers of gpt-test could not be measured")
    assert profiler.kept("gpt-test", config) is None


def test_a_damaged_file_is_measured_again(profiler, config, tmp_path):
    profiler.profile("gpt-test", config)
    profiler.path("gpt-test", config).write_text("{")
    profiler.profile("gpt-test", config)
    assert len(calls(tmp_path)) == 2


def test_profiles_that_nobody_used_for_months_are_removed_when_another_is_added(profiler, config):
    same, old, used = (replace(profiler, versions={"jax": version}) for version in ("1", "2", "3"))
    for one in (same, old, used):
        one.profile("gpt-test", config)
        age(one.path("gpt-test", config), days=91)
    notes = old.path("gpt-test", config).with_name("notes.json")
    notes.touch()
    age(notes, days=91)
    assert used.kept("gpt-test", config) is not None
    assert used.path("gpt-test", config).stat().st_mtime > notes.stat().st_mtime  # not only its time of reading
    assert same.profile("gpt-test", config).source == "measured"
    newer = replace(profiler, versions={"jax": "4"})
    newer.profile("gpt-test", config)
    left = {one.path("gpt-test", config) for one in (same, used, newer)} | {notes}
    assert set(notes.parent.iterdir()) == left


def test_a_given_profile_must_be_of_the_same_microbatches(config, tmp_path):
    path = tmp_path / "given.json"
    path.write_bytes(profile_to_json(estimated_profile(config)))
    assert read_profile(path, config) == profile_from_json(path.read_bytes())
    with pytest.raises(
        PlanError,
        match="microbatches of 1, precision float32 and remat layer, but the run has 6 layers, microbatches of 4",
    ):
        read_profile(path, replace(config, microbatch_size=4))
    with pytest.raises(PlanError, match=r"absent.json: No such file"):
        read_profile(tmp_path / "absent.json", config)


def test_nodes_are_measured_where_they_will_run():
    assert place_of(num_nodes=4, cores=(0, 1)) == Place(cores=(0,), num_threads=1, peer_core=1)
    assert place_of(num_nodes=1, cores=(0, 1)) == Place(cores=(0, 1), num_threads=2, peer_core=0)
    assert place_of(num_nodes=4, cores=()) == Place(cores=(), num_threads=0, peer_core=None)
