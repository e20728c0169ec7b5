import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from oobleck_jax.errors import PlanError
from oobleck_jax.plan_report import Report
from oobleck_jax.plan_tables import layers_text, ranges_text, seconds, sizes_text
from oobleck_jax.plan_text import read_plan
from oobleck_jax.planning.plan import Stage, Template
from oobleck_jax.planning.profile import profile_to_json
from oobleck_jax.propose import estimated_profile
from scripts.plan import Arguments, config_of, main, report_of


LAPTOP = Arguments(
    preset="gpt-laptop", nodes=7, fault_tolerance=1, device_memory_gib=0.06, profile="estimate", remat="layer"
)


def report(arguments: Arguments) -> Report:
    return report_of(arguments, config_of(arguments))


def test_report_holds_what_was_asked_for() -> None:
    result = report(LAPTOP)
    assert result.smallest_pipeline == 3
    assert [len(pipeline.nodes) for pipeline in result.planning.plan.pipelines] == [4, 3]
    assert result.throughput.tokens_per_s == pytest.approx(32 * 128 / result.throughput.step_s)
    assert [price.fault_tolerance for price in result.prices] == [0, 1]
    assert result.prices[0].loss == 0
    assert sorted(node for outcome in result.losses for node in outcome.lost) == list(range(7))
    assert all(sum(outcome.sizes) == 6 for outcome in result.losses)


def test_estimates_of_xla_need_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(replace(LAPTOP, profile="xla")) == 2
    assert "--profile xla estimates costs on a --device; name one" in capsys.readouterr().err


def test_a_profile_for_other_devices_is_refused(tmp_path: Path) -> None:
    profile = estimated_profile(config_of(LAPTOP))
    layers = tuple(replace(layer, costs=(replace(layer.costs[0], num_devices=2),)) for layer in profile.layers)
    path = tmp_path / "profile.json"
    path.write_bytes(profile_to_json(replace(profile, layers=layers)))
    with pytest.raises(
        PlanError, match=r"costs for \[2\] devices, but none for a power of two up to --devices-per-node 1"
    ):
        report(replace(LAPTOP, profile=str(path)))


def test_fault_tolerance_never_makes_a_plan_faster() -> None:
    arguments = Arguments(preset="gpt3-6.7b", device="a40", nodes=11, fault_tolerance=2)
    losses = [price.loss for price in report(arguments).prices]
    assert losses == sorted(losses)
    assert losses[-1] > 0


def test_loss_of_the_last_node_that_suffices_tells_what_is_missing() -> None:
    arguments = Arguments(preset="gpt-laptop", nodes=3, device_memory_gib=0.06, profile="estimate", remat="layer")
    outcomes = report(arguments).losses
    assert all(outcome.sizes == () and "smallest pipeline needs 3" in outcome.reason for outcome in outcomes)


def test_command_prints_everything_and_writes_json_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"json": tmp_path / "plan.json", "plot": tmp_path / "plan.png"}
    arguments = Arguments(preset="gpt3-6.7b", device="a40", nodes=30, fault_tolerance=3, **paths)
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for words in ("Templates", "Plan", "peak memory", "MFU", "What fault tolerance costs", "After one loss"):
        assert words in text
    assert msgspec.json.decode(paths["json"].read_bytes(), type=Report).request.nodes == 30
    plan = read_plan(str(paths["json"]), num_microbatches=0)
    assert json.loads(paths["json"].read_text())["planning"]["plan"] == json.loads(msgspec.json.encode(plan))
    assert paths["plot"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (Arguments(preset="gpt3-6.7b", device="a40", nodes=2), "smallest pipeline needs 4; add 2 nodes"),
        (Arguments(preset="gpt3-6.7b", device="a41", nodes=2), "--device a41 is not known"),
        (Arguments(preset="gpt3-175b", device="l4", nodes=8), "alone needs"),
        (Arguments(preset="gpt-laptop", nodes=3, fault_tolerance=8), "needs 9 pipelines"),
        (Arguments(preset="gpt9"), "there is no preset 'gpt9'"),
    ],
)
def test_impossible_requests_say_why(arguments: Arguments, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_profile_of_another_microbatch_size_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from oobleck_jax.planning.profile import profile_to_json
    from oobleck_jax.propose import estimated_profile

    path = tmp_path / "profile.json"
    path.write_bytes(profile_to_json(estimated_profile(config_of(Arguments(preset="gpt-laptop")))))
    assert main(Arguments(preset="gpt-laptop", nodes=2, profile=str(path))) == 0
    assert main(Arguments(preset="gpt-laptop", nodes=2, profile=str(path), microbatch_size=2)) == 2
    assert "profile again" in capsys.readouterr().err


def test_texts_are_short() -> None:
    template = Template(
        stages=(
            Stage(first_layer=0, end_layer=2),
            Stage(first_layer=2, end_layer=4),
            Stage(first_layer=4, end_layer=5, node_index=1, num_devices=2),
        )
    )
    assert layers_text(template) == "2 x 2, 1/2"
    assert sizes_text([4, 3, 3]) == "4, 2 x 3"
    assert ranges_text([7, 0, 1, 2, 3, 9, 10]) == "0-3, 7, 9-10"
    assert [seconds(value) for value in (0.0, 3e-9, 2e-5, 0.25, 63.4)] == ["0 s", "3 ns", "20 us", "250 ms", "63.4 s"]
