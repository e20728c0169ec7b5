from dataclasses import replace
from pathlib import Path

import pytest

from models.presets import load_preset
from oobleck_jax.config import Precision, Remat
from oobleck_jax.errors import ConfigError
from oobleck_jax.options import ClusterOptions, CommandLine, parse_command_line, read_token


def parse(*arguments: str) -> CommandLine:
    return parse_command_line(arguments, program="train.py", description="Train.")


@pytest.mark.parametrize("preset", ["gpt-test", "gpt2-xl", "gpt3-175b"])
def test_without_flags_the_preset_is_run_as_it_is(preset: str) -> None:
    line = parse("--preset", preset)
    assert line.config == load_preset(preset)
    assert line.run.preset == preset


def test_flags_change_what_they_name_and_nothing_else() -> None:
    line = parse(
        *("--preset", "gpt-test", "--steps", "7", "--width", "64", "--no-tie-embeddings", "--clip-norm", "0.5"),
        *("--precision", "mixed", "--skip-steps", "3", "--remat", "none", "--run-dir", "a/b", "--print-schedule"),
    )
    preset = load_preset("gpt-test")
    assert line.config == replace(
        preset,
        steps=7,
        precision=Precision.MIXED,
        skip_steps=3,
        remat=Remat.NONE,
        model=replace(preset.model, width=64, tie_embeddings=False),  # pyright: ignore
        optimizer=replace(preset.optimizer, clip_norm=0.5),
    )
    assert (line.run.run_dir, line.run.print_schedule) == (Path("a/b"), True)


def test_a_model_of_the_users_own_brings_its_own_flags(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "from oobleck_jax.config import RunConfig\n"
        "@dataclass(frozen=True, kw_only=True, slots=True)\n"
        "class Mine:\n"
        "    depth: int = 4  # how deep it is\n"
        "    num_layers = 6\n"
        "    vocab_size = 256\n"
        "    max_sequence_length = 128\n"
        "def run():\n"
        "    return RunConfig(model=Mine(), steps=9)\n"
    )
    line = parse("--preset", f"{path}:run", "--depth", "5")
    assert (line.config.steps, line.config.model.depth) == (9, 5)  # pyright: ignore


def test_a_preset_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="--preset needs a name: gpt-test, "):
        parse("--preset")


def test_float16_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"--precision float16 is not there: .* take mixed, whose bfloat16 has the range"
    ):
        parse("--preset", "gpt-test", "--precision", "float16")


def test_a_token_comes_from_a_flag_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "empty").write_text("\n")
    assert read_token(ClusterOptions()) is None
    assert read_token(ClusterOptions(token="secret")) == "secret"
    assert read_token(ClusterOptions(token_file=tmp_path / "token")) == "secret"
    with pytest.raises(ConfigError, match="empty is empty"):
        read_token(ClusterOptions(token_file=tmp_path / "empty"))
