"""Training data: which samples a step takes, as a pure function of seed and step, and their tokens.

The tokens of a file are cut into samples of T tokens (and the next one, because targets are inputs shifted by one).
The last part of the file is for evaluation. Training goes through an endless sequence of passes; each pass is a fresh
permutation of all training samples, and step s takes the positions s*G .. (s+1)*G of the sequence (G: global batch
size), also across the border of two passes. So each sample is used once in every pass, whatever dies (property T4).

The permutation is computed for each position by itself, by a small block cipher (a Feistel network over the next power
of 4, walked until the result is a sample), keyed by (seed, pass): no node stores one, however large the file. Why not

- grain's `MapDataset.shuffle().repeat()`, which has the same semantics: importing grain adds 0.6-0.7 s of CPU time and
  34-37 MB to every worker (measured with grain 0.2.18 beside jax 0.10.2 and 0.12.0), and it takes 0.5 ms a sample;
- `numpy.random.Generator.permutation`: 8 bytes per sample in every process, 1.2 GB for the 300 billion tokens of
  GPT-3, and numpy does not promise the same stream in its next version (NEP 19), so an upgrade between two parts of a
  run would repeat samples.
"""

import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from oobleck_jax.config import RunConfig
from oobleck_jax.errors import DataError
from oobleck_jax.token_file import read_token_file, scan_tokens


BUILTIN = "builtin"
_BYTE_VOCABULARY = 256
_NUM_ROUNDS = 8
_FINGERPRINT_TOKENS = 4096
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, the increment of splitmix64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenDataset:
    """Samples of a token file.

    Attributes:
        train_part: tokens to train on.
        eval_part: tokens kept for evaluation.
        vocab_size: all tokens are below it; None when nobody knows (a file without header).
    """

    train_part: np.ndarray
    eval_part: np.ndarray
    vocab_size: int | None
    sequence_length: int
    global_batch_size: int
    seed: int

    @classmethod
    def open(cls, config: RunConfig) -> "TokenDataset":
        """Open the data of a run; nothing is read but sizes.

        Raises:
            DataError: the file is missing, truncated, or of an unknown type.
        """
        if config.data == BUILTIN:
            tokens, vocab_size = builtin_tokens(), _BYTE_VOCABULARY
        else:
            tokens, header = read_token_file(Path(config.data), config.data_dtype)
            vocab_size = None if header is None else header.vocab_size
        num_train_tokens = len(tokens) - int(len(tokens) * config.validation_fraction)
        return cls(
            train_part=tokens[:num_train_tokens],
            eval_part=tokens[num_train_tokens:],
            vocab_size=vocab_size,
            sequence_length=config.sequence_length,
            global_batch_size=config.global_batch_size,
            seed=config.seed,
        )

    @property
    def num_train_samples(self) -> int:
        return max(0, (len(self.train_part) - 1) // self.sequence_length)

    @property
    def num_eval_samples(self) -> int:
        return max(0, (len(self.eval_part) - 1) // self.sequence_length)

    @property
    def fingerprint(self) -> str:
        """Tell these training data from others, whatever their file is called; reads a few thousand tokens."""
        stride = max(1, len(self.train_part) // _FINGERPRINT_TOKENS)
        crc32 = zlib.crc32(self.train_part[::stride].astype("<u4").tobytes())
        return f"{len(self.train_part)} tokens, crc32 {crc32:08x} of every {stride}th"

    def sample_range(self, step: int) -> tuple[int, int]:
        """Return (first, end) of a step's positions in the endless sequence of passes."""
        return step * self.global_batch_size, (step + 1) * self.global_batch_size

    def sample_indices(self, step: int) -> np.ndarray:
        """Return the training samples of a step, int64 `[global_batch_size]`."""
        positions = np.arange(*self.sample_range(step), dtype=np.int64)
        passes, positions = np.divmod(positions, self.num_train_samples)
        return shuffled(positions, self.num_train_samples, seed=self.seed, passes=passes)

    def eval_indices(self, batch: int) -> np.ndarray:
        """Return the samples of an evaluation batch, int64 `[global_batch_size]`: always the same, in file order."""
        return np.arange(*self.sample_range(batch), dtype=np.int64)

    def tokens(self, indices: np.ndarray) -> np.ndarray:
        """Return training samples, int32 `[len(indices), T + 1]`: inputs are `[:, :-1]`, targets `[:, 1:]`."""
        return self._gather(self.train_part, indices)

    def eval_tokens(self, indices: np.ndarray) -> np.ndarray:
        """Return evaluation samples, as `tokens` does training samples."""
        return self._gather(self.eval_part, indices)

    def _gather(self, part: np.ndarray, indices: np.ndarray) -> np.ndarray:
        offsets = np.asarray(indices)[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        return part[offsets].astype(np.int32)


def check_data(config: RunConfig) -> None:
    """Refuse data that cannot serve a run, before any process starts.

    Raises:
        DataError: with the numbers and the way out.
    """
    dataset = TokenDataset.open(config)
    _check_vocabulary(dataset, config)
    tokens_per_sample = config.sequence_length + 1
    if dataset.num_train_samples == 0:
        raise DataError(
            f"{config.data} has {len(dataset.train_part)} tokens for training, a sample needs {tokens_per_sample} "
            f"(--sequence-length {config.sequence_length} and the next token); lower it, lower --validation-fraction "
            f"{config.validation_fraction}, or give more data"
        )
    needed = config.eval_batches * config.global_batch_size if config.eval_every else 0
    if dataset.num_eval_samples < needed:
        raise DataError(
            f"an evaluation needs {needed} samples (--eval-batches {config.eval_batches} times --global-batch-size "
            f"{config.global_batch_size}), but --validation-fraction {config.validation_fraction} of {config.data} "
            f"gives {dataset.num_eval_samples} of {config.sequence_length} tokens; change one of them, or give "
            "--eval-every 0"
        )


def _check_vocabulary(dataset: TokenDataset, config: RunConfig) -> None:
    needed, hint = dataset.vocab_size, ""
    if needed is None:
        scans = [scan_tokens(part) for part in (dataset.train_part, dataset.eval_part) if len(part)]
        needed = 1 + max(largest for largest, _ in scans)
        if all(odd_are_zero for _, odd_are_zero in scans):
            raise DataError(
                f"every second token of {config.data} is 0: these look like 32-bit tokens read as 16-bit ones; set "
                "--data-dtype uint32"
            )
        hint = f", or set --data-dtype if its tokens are not {config.data_dtype}"
    if needed > config.model.vocab_size:
        raise DataError(
            f"{config.data} has token ids up to {needed - 1}, but the model's vocabulary has "
            f"{config.model.vocab_size}; raise --vocab-size to at least {needed}{hint}"
        )


@cache
def builtin_tokens() -> np.ndarray:
    """Return the prose that every Python carries (the texts of `help()`), as bytes: about 0.5 million tokens.

    It differs a little from one version of Python to the next.
    """
    from pydoc_data.topics import topics

    return np.frombuffer("".join(topics.values()).encode(), dtype=np.uint8)


def shuffled(positions: np.ndarray, num_samples: int, *, seed: int, passes: np.ndarray) -> np.ndarray:
    """Return the samples at some positions of seeded permutations of `range(num_samples)`.

    Args:
        positions: int64, each in `[0, num_samples)`.
        passes: int64 of the same shape; each pass has its own permutation.
    """
    half_bits = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
    keys = _mix(_mix(np.full(positions.shape, seed % 2**64, dtype=np.uint64)) + passes.astype(np.uint64))
    samples = _encrypt(positions.astype(np.uint64), keys, half_bits)
    # Each walk comes back into the range at last, because encryption is a permutation and the walk began there.
    while (outside := samples >= num_samples).any():
        samples[outside] = _encrypt(samples[outside], keys[outside], half_bits)
    return samples.astype(np.int64)


def _encrypt(values: np.ndarray, keys: np.ndarray, half_bits: np.uint64) -> np.ndarray:
    """Permute `[0, 4**half_bits)` by a Feistel network, which is invertible whatever the round function."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for _ in range(_NUM_ROUNDS):
        keys = _mix(keys)
        left, right = right, left ^ (_mix(right ^ keys) & mask)
    return left << half_bits | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit values (splitmix64: Steele, Lea and Flood, OOPSLA '14)."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
