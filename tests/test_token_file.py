"""Token files are written whole or not at all, and say what they hold."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from oobleck_jax.errors import DataError
from oobleck_jax.token_file import header_path, read_token_file, scan_tokens, write_token_file


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_what_is_written_is_read(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    path = tmp_path / "tokens.bin"
    chunks = [np.array([0, vocab_size - 1]), np.array([5], dtype=np.uint8)]
    header = write_token_file(path, chunks, vocab_size=vocab_size, tokenizer="test")
    tokens, read = read_token_file(path, "uint16")
    assert read == header
    assert tokens.tolist() == [0, vocab_size - 1, 5]
    assert tokens.dtype == np.dtype(dtype).newbyteorder("<")
    assert json.loads(header_path(path).read_text()) == {
        "format_version": 1,
        "dtype": dtype,
        "num_tokens": 3,
        "vocab_size": vocab_size,
        "tokenizer": "test",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def test_a_write_that_fails_leaves_the_old_files(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    write_token_file(path, [np.arange(4)], vocab_size=4, tokenizer="old")

    def failing() -> Iterator[np.ndarray]:
        yield np.arange(2)
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        write_token_file(path, failing(), vocab_size=4, tokenizer="new")
    with pytest.raises(DataError, match=r"nothing to write to .*: the texts are empty"):
        write_token_file(path, [], vocab_size=4, tokenizer="new")
    tokens, header = read_token_file(path, "uint16")
    assert tokens.tolist() == [0, 1, 2, 3]
    assert header is not None
    assert header.tokenizer == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tokens.bin", "tokens.json"]


def test_a_scan_reads_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oobleck_jax.token_file._SCAN_TOKENS", 4)
    assert scan_tokens(np.array([1, 2, 3, 4, 9, 0], dtype=np.uint16)) == (9, False)
    assert scan_tokens(np.array([1, 0, 3, 0, 9, 0], dtype=np.uint16)) == (9, True)
    assert scan_tokens(np.array([1, 0, 3, 0, 9, 7], dtype=np.uint16)) == (9, False)
    assert scan_tokens(np.array([1, 0, 3, 0], dtype=np.uint32)) == (3, False)
