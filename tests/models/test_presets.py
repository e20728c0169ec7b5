"""Presets by name and by file, and their way through JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from models.presets import PRESETS, config_from_json, config_to_json, load_preset
from oobleck_jax.config import Remat, check_config
from oobleck_jax.data import check_data
from oobleck_jax.errors import ConfigError


TOY = f"{Path(__file__).parent / 'toy_model.py'}:toy"


def test_names_are_those_of_the_papers() -> None:
    assert set(PRESETS) >= {"gpt-test", "gpt-laptop"}
    assert set(PRESETS) >= {f"gpt2-{size}" for size in ("small", "medium", "large", "xl")}
    assert set(PRESETS) >= {
        f"gpt3-{size}" for size in ("small", "medium", "large", "xl", "2.7b", "6.7b", "13b", "175b")
    }


@pytest.mark.parametrize("reference", [*PRESETS, TOY])
def test_presets_can_run(reference: str) -> None:
    config = load_preset(reference)
    check_config(config)
    check_data(replace(config, eval_every=0))


@pytest.mark.parametrize("reference", ["gpt-test", "gpt-laptop", TOY])
def test_small_presets_run_and_evaluate_without_a_file(reference: str) -> None:
    check_data(load_preset(reference))


@pytest.mark.parametrize("reference", [*PRESETS, TOY])
def test_json_gives_back_the_configuration(reference: str) -> None:
    config = load_preset(reference)
    changed = replace(
        config,
        remat=Remat.NONE,
        data="some file.bin",
        optimizer=replace(config.optimizer, peak_learning_rate=0.1 + 0.2),
        model=replace(config.model, vocab_size=1000),  # pyright: ignore[reportArgumentType]
    )
    for each in (config, changed):
        text = config_to_json(reference, each)
        assert config_from_json(text) == (reference, each)
        assert isinstance(config_from_json(text)[1].remat, Remat)


def test_equal_configurations_are_equal_text() -> None:
    assert config_to_json("gpt-test", load_preset("gpt-test")) == config_to_json("gpt-test", PRESETS["gpt-test"]())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "many"}, "Expected `int`"),
        ({"remat": "sometimes"}, "Invalid enum value"),
        ({"preset": None}, "Expected `str`"),
        ({"preset": "gpt-tset"}, "did you mean gpt-test"),
    ],
    ids=str,
)
def test_damaged_json_is_refused(change: dict, message: str) -> None:
    values = json.loads(config_to_json("gpt-test", load_preset("gpt-test")))
    with pytest.raises(ConfigError, match=message):
        config_from_json(json.dumps(values | change))
    with pytest.raises(ConfigError, match="not the configuration of a run"):
        config_from_json("[]")
    del values["steps"]
    with pytest.raises(ConfigError, match="lacks 'steps'"):
        config_from_json(json.dumps(values))


def test_an_unknown_preset_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'gpt2-smal' \(did you mean gpt2-small\?\).*gpt3-175b"):
        load_preset("gpt2-smal")
    with pytest.raises(ConfigError, match=r"no preset 'resnet'; there are gpt-test"):
        load_preset("resnet")


def test_a_file_that_offers_no_preset_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def broken():\n    return 3\n")
    with pytest.raises(ConfigError, match=r"no file .*missing\.py"):
        load_preset(f"{tmp_path}/missing.py:run")
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ConfigError, match=r"mine\.txt is not a Python file; its name must end in \.py"):
        load_preset(f"{tmp_path}/mine.txt:run")
    with pytest.raises(ConfigError, match="no function 'run'"):
        load_preset(f"{file}:run")
    with pytest.raises(ConfigError, match="returns a int; it must return a RunConfig"):
        load_preset(f"{file}:broken")


def test_a_model_of_the_users_own_is_one_file() -> None:
    config = load_preset(TOY)
    model = config.model.build()
    assert len(model.layers) == config.model.num_layers == 5
    assert type(load_preset(TOY).model) is type(config.model)


def test_a_file_that_has_no_such_preset_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--preset: there is no file .*absent\.py \(looked for it in "):
        load_preset(f"{tmp_path / 'absent.py'}:toy")
    with pytest.raises(ConfigError, match="has no function 'toys' that returns a RunConfig"):
        load_preset(f"{TOY}s")


def test_a_configuration_that_lacks_something_is_refused() -> None:
    fields = json.loads(config_to_json("gpt-test", load_preset("gpt-test")))
    del fields["steps"]
    with pytest.raises(ConfigError, match=r"lacks .steps.; was it written by another version\?"):
        config_from_json(json.dumps(fields))
