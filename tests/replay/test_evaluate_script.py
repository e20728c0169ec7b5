import json
from pathlib import Path

import pytest

from scripts.evaluate import Arguments, main


def test_one_command_evaluates_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "scale_gcp-trace.csv").write_text(
        "\n".join(
            [*(f"0,add,n{node}" for node in range(9)), "600000,remove,n2", "1200000,add,n9", "1800000,remove,n0"]
        ),
        encoding="utf-8",
    )
    arguments = Arguments(
        models="gpt3-medium",
        policies="oracle,ours,bamboo",
        traces=tmp_path,
        json=tmp_path / "result.json",
        figures=tmp_path / "figures",
        processes=1,
    )
    assert main(arguments) == 0
    results = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert list(results) == ["6h", "3h", "1h", "30m", "10m", "gcp", "gcp+notice"]
    for models in results.values():
        ours = models["gpt3-medium"]["ours"]
        assert 0.5 < ours["share_of_oracle"] <= 1
        assert ours["samples_per_s"] > 0
        assert {"useful", "redone", "recovery", "checkpoint", "idle"} <= set(ours["breakdown"])
    assert "out of memory" in results["gcp"]["gpt3-medium"]["bamboo"]["note"]
    assert results["gcp+notice"]["gpt3-medium"]["ours"]["breakdown"]["redone"] == 0
    assert len(list((tmp_path / "figures").glob("*.png"))) == 3
    printed = capsys.readouterr().out
    assert "| bamboo | cannot run |" in printed
    assert "left out: p3" in printed


def test_an_unknown_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Arguments(models="gpt5", traces=tmp_path)) == 2
    assert "--models gpt5 is not known; there are bert-large" in capsys.readouterr().err
