"""The order of samples, their tokens, and the refusal of data that cannot serve."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from models.gpt import GptConfig
from oobleck_jax.config import RunConfig
from oobleck_jax.data import TokenDataset, builtin_tokens, check_data, shuffled
from oobleck_jax.errors import DataError
from oobleck_jax.token_file import header_path, write_token_file


def dataset(num_samples: int, global_batch_size: int, seed: int = 0, sequence_length: int = 1) -> TokenDataset:
    return TokenDataset(
        train_part=np.arange(num_samples * sequence_length + 1),
        eval_part=np.arange(0),
        vocab_size=None,
        sequence_length=sequence_length,
        global_batch_size=global_batch_size,
        seed=seed,
    )


def run_config(path: Path | str = "builtin", **changes: object) -> RunConfig:
    config = RunConfig(
        model=GptConfig(num_blocks=1, width=8, num_heads=1, vocab_size=300, context_length=64),
        global_batch_size=2,
        microbatch_size=1,
        sequence_length=8,
        data=str(path),
        eval_batches=1,
        validation_fraction=0.25,
    )
    return replace(config, **changes)  # pyright: ignore[reportArgumentType]


@given(
    num_samples=st.integers(1, 200),
    global_batch_size=st.integers(1, 50),
    seed=st.integers(-(2**70), 2**70),
    num_passes=st.integers(1, 3),
)
def test_each_sample_is_used_once_in_every_pass_T4(
    num_samples: int, global_batch_size: int, seed: int, num_passes: int
) -> None:
    data = dataset(num_samples, global_batch_size, seed)
    num_steps = -(-num_samples * num_passes // global_batch_size)
    sequence = np.concatenate([data.sample_indices(step) for step in range(num_steps)])
    for one_pass in range(num_passes):
        used = sequence[one_pass * num_samples : (one_pass + 1) * num_samples]
        assert sorted(used) == list(range(num_samples))


@given(step=st.integers(0, 10**9), num_samples=st.integers(1, 10**10), global_batch_size=st.integers(1, 64))
def test_a_batch_is_a_function_of_the_step_alone(step: int, num_samples: int, global_batch_size: int) -> None:
    data = replace(dataset(1, global_batch_size), train_part=np.broadcast_to(np.uint16(0), num_samples + 1))
    indices = data.sample_indices(step)
    assert indices.dtype == np.int64
    assert indices.shape == (global_batch_size,)
    assert ((indices >= 0) & (indices < num_samples)).all()
    data.sample_indices(step + 1)
    np.testing.assert_array_equal(data.sample_indices(step), indices)


def test_sample_ranges_follow_each_other() -> None:
    data = dataset(10, 4)
    assert [data.sample_range(step) for step in range(3)] == [(0, 4), (4, 8), (8, 12)]


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    positions = np.arange(1000)
    orders = [shuffled(positions, 1000, seed=seed, passes=np.full(1000, each)) for seed in (0, 1) for each in (0, 1, 2)]
    for i, one in enumerate(orders):
        for other in [positions, *orders[:i]]:
            assert (one == other).mean() < 0.01


@pytest.mark.parametrize("num_samples", [2, 5, 16, 23])
def test_every_sample_is_equally_likely_at_every_position(num_samples: int) -> None:
    num_passes = 4000
    passes = np.repeat(np.arange(num_passes), num_samples)
    positions = np.tile(np.arange(num_samples), num_passes)
    samples = shuffled(positions, num_samples, seed=7, passes=passes)
    counts = np.zeros((num_samples, num_samples))
    np.add.at(counts, (positions, samples), 1)
    expected = num_passes / num_samples
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = (num_samples - 1) ** 2
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)


def test_neighbours_of_a_pass_are_not_neighbours_of_the_file() -> None:
    num_samples = 10_000
    samples = shuffled(np.arange(num_samples), num_samples, seed=0, passes=np.zeros(num_samples, dtype=np.int64))
    distances = np.abs(np.diff(samples))
    assert distances.mean() == pytest.approx(num_samples / 3, rel=0.03)
    assert (distances < 10).mean() < 0.005


def test_the_order_stays_what_it_was() -> None:
    """A run that goes on with a newer version must not repeat samples: change this only with a new format of runs."""
    assert dataset(1000, 6, seed=5).sample_indices(0).tolist() == [38, 261, 733, 674, 197, 348]


def test_samples_are_consecutive_and_targets_are_the_next_tokens() -> None:
    data = dataset(10, 4, sequence_length=8)
    tokens = data.tokens(np.array([3, 0, 9]))
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [list(range(24, 33)), list(range(9)), list(range(72, 81))]


def test_evaluation_takes_the_end_of_the_file_in_order(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    write_token_file(path, [np.arange(200, dtype=np.uint16)], vocab_size=200, tokenizer="numbers")
    data = TokenDataset.open(run_config(path))
    assert data.train_part.max() == 149
    assert data.num_train_samples == 18
    assert data.num_eval_samples == 6
    assert data.eval_indices(0).tolist() == [0, 1]
    assert data.eval_indices(2).tolist() == [4, 5]
    assert data.eval_tokens(data.eval_indices(0)).tolist() == [list(range(150, 159)), list(range(158, 167))]
    check_data(run_config(path))


def test_builtin_text_is_prose_and_needs_no_file() -> None:
    tokens = builtin_tokens()
    assert len(tokens) > 300_000
    assert b"statement" in tokens.tobytes()
    data = TokenDataset.open(run_config())
    assert data.vocab_size == 256
    check_data(run_config())


def test_a_file_without_header_is_read_as_its_type_says(tmp_path: Path) -> None:
    for name in ("uint16", "uint32"):
        path = tmp_path / f"{name}.bin"
        np.arange(200, dtype=name).tofile(path)
        config = run_config(path, data_dtype=name)
        check_data(config)
        np.testing.assert_array_equal(TokenDataset.open(config).train_part, np.arange(150))


def refused(config: RunConfig, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_data(config)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    refused(run_config(path), r"numbers\.bin does not exist.*prepare_data")
    write_token_file(path, [np.arange(200, dtype=np.uint16)], vocab_size=200, tokenizer="numbers")
    refused(run_config(header_path(path)), r"is a header; give the \.bin")
    whole = path.read_bytes()
    path.write_bytes(whole[:-6])
    refused(run_config(path), "394 bytes, but its header numbers.json says 200 tokens of 2 bytes = 400")
    path.write_bytes(b"")
    refused(run_config(path), "is empty")
    header_path(path).unlink()
    path.write_bytes(whole[:-1])
    refused(
        run_config(path),
        "399 bytes, not a multiple of the 2 bytes of uint16: truncated, or another type; copy it again",
    )
    refused(run_config(path, data_dtype="int64"), "--data-dtype is 'int64'; it must be one of uint16, uint32")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "is not the header of a token file"),
        ("what", "is not the header of a token file"),
        ('{"dtype": "float8", "num_tokens": 9, "vocab_size": 9, "tokenizer": "", "sha256": ""}', "is 'float8'"),
        (
            '{"dtype": "uint16", "num_tokens": 9, "vocab_size": 9, "tokenizer": "", "sha256": "", "format_version": 7}',
            "has format version 7, this program reads 1",
        ),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "numbers.bin"
    np.arange(9, dtype=np.uint16).tofile(path)
    header_path(path).write_text(content)
    refused(run_config(path), message)


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    write_token_file(path, [np.arange(200, dtype=np.uint16)], vocab_size=301, tokenizer="numbers")
    refused(run_config(path), r"token ids up to 300, but the model's vocabulary has 300; raise --vocab-size to .* 301")
    header_path(path).unlink()
    check_data(run_config(path))
    np.array([*range(150), 300, *range(50)], dtype=np.uint16).tofile(path)
    refused(run_config(path), "token ids up to 300")


def test_a_wrong_type_of_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    np.arange(200, dtype=np.uint32).tofile(path)
    refused(run_config(path, data_dtype="uint16"), "every second token .* is 0.* set --data-dtype uint32")
    np.arange(200, dtype=np.uint16).tofile(path)
    refused(run_config(path, data_dtype="uint32"), "set --data-dtype if its tokens are not uint32")


def test_too_few_tokens_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    write_token_file(path, [np.arange(20, dtype=np.uint16)], vocab_size=20, tokenizer="numbers")
    refused(run_config(path, sequence_length=16), "has 15 tokens for training, a sample needs 17")
    refused(
        run_config(path),
        "an evaluation needs 2 samples .* 0.25 of .* gives 0 of 8 tokens; change one of them, or give --eval-every 0",
    )
    check_data(run_config(path, eval_every=0))


def test_data_are_known_again_by_their_content_not_by_their_file(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(256, size=20_000)
    for name, content in (("a", tokens), ("b", tokens), ("c", tokens[::-1]), ("d", tokens[:-9])):
        write_token_file(tmp_path / f"{name}.bin", [content], vocab_size=256, tokenizer="bytes")
    a, b, c, d = (TokenDataset.open(run_config(tmp_path / f"{name}.bin")).fingerprint for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3
