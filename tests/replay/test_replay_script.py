import json
from dataclasses import replace
from pathlib import Path

import pytest

from oobleck_jax.script import run_script
from scripts.replay import Arguments, main


TRACE = "\n".join([*(f"0,add,n{node}" for node in range(6)), "600000,remove,n2", "900000,add,n7", "1800000,remove,n0"])


@pytest.fixture
def arguments(tmp_path: Path) -> Arguments:
    trace = tmp_path / "spot.csv"
    trace.write_text(TRACE, encoding="utf-8")
    return Arguments(
        preset="gpt2-small", device="a40", fault_tolerance=1, trace=str(trace), json=tmp_path / "result.json"
    )


def test_a_file_is_replayed_by_all_policies_and_drawn(arguments: Arguments, tmp_path: Path) -> None:
    plot = tmp_path / "result.png"
    assert main(replace(arguments, plot=plot)) == 0
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert {"oracle", "ours", "oobleck", "varuna-best", "bamboo", "recycle", "restart"} <= set(result)
    assert result["oracle"]["share_of_oracle"] == 1
    assert result["ours"]["losses_survived"] == 1  # the other one is at the very end
    assert sum(result["ours"]["breakdown"].values()) == pytest.approx(1800)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_sweeps_replay_for_each_value(arguments: Arguments, tmp_path: Path) -> None:
    plot = tmp_path / "sweep.png"
    assert main(replace(arguments, policies="ours,recycle", sweep="f=0..1", plot=plot)) == 0
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert [set(scores) for scores in result.values()] == [{"ours", "recycle"}] * 2
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_replayed_is_said_in_one_line(arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script(main, replace(arguments, policies="ours,theirs")) == 2
    assert "--policies theirs is not known; there are oracle, ours" in capsys.readouterr().err
    assert run_script(main, replace(arguments, trace="poisson:every=3")) == 2
    assert run_script(main, replace(arguments, sweep="mtbf=60,600")) == 2
    assert "needs a recipe" in capsys.readouterr().err
