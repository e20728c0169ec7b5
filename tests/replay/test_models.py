import pytest

from oobleck_jax.replay.models import PAPER_MODELS, paper_workload
from oobleck_jax.replay.published import OOBLECK_RECONFIGURE_S, VARUNA_RESTART_S


@pytest.mark.parametrize(
    ("name", "num_parameters", "samples"),
    [
        ("bert-large", 334e6, 8192),
        ("gpt2", 355e6, 1024),
        ("gpt3-medium", 356e6, 819),
        ("gpt3-2.7b", 2.65e9, 512),
        ("gpt3-6.7b", 6.66e9, 1024),
    ],
)
def test_models_have_their_parameters_and_batches(name: str, num_parameters: float, samples: int) -> None:
    workload = paper_workload(name)
    assert workload.num_parameters == pytest.approx(num_parameters, rel=0.01)
    assert workload.samples_per_step == samples
    assert workload.state_bytes == 12 * workload.num_parameters


def test_there_are_five() -> None:
    assert len(PAPER_MODELS) == 5


def test_published_numbers_are_interpolated_and_grow_beyond_the_largest_model() -> None:
    assert OOBLECK_RECONFIGURE_S.at(0.1e9) == 2
    assert OOBLECK_RECONFIGURE_S.at(6.7e9) == 10
    assert VARUNA_RESTART_S.at(2.7e9) == 515
    assert 515 < VARUNA_RESTART_S.at(4e9) < 701
    assert VARUNA_RESTART_S.at(13.4e9) == 1402
