import pytest

from oobleck_jax.errors import ConfigError
from oobleck_jax.replay.sweep import Sweep, parse_sweep


def test_sweeps_are_ranges_or_lists() -> None:
    assert parse_sweep("f=0..4") == Sweep(name="f", values=(0, 1, 2, 3, 4))
    assert parse_sweep("mtbf=600,1800.5").values == (600, 1800.5)


def test_a_value_goes_into_the_recipe() -> None:
    sweep = parse_sweep("mtbf=600,60")
    assert sweep.in_recipe("bursts:mtbf=1,size=4", 600) == "bursts:mtbf=600,size=4"
    with pytest.raises(ConfigError, match="--sweep mtbf needs a recipe as --trace, such as poisson"):
        sweep.in_recipe("trace.csv", 600)


@pytest.mark.parametrize("text", ["f=", "f=0..x", "f=1.5", "mtbf=-3", "f"])
def test_wrong_sweeps_are_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--sweep {text}: '.*' are no values; give {text.partition('=')[0]}=0..4, or"
    ):
        parse_sweep(text)


def test_what_can_be_swept_is_told() -> None:
    with pytest.raises(ConfigError, match=r"--sweep g=1: give f=0\.\.4, or mtbf=SECONDS,SECONDS,\.\.\."):
        parse_sweep("g=1")
