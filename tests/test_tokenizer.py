import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from models.presets import load_preset
from oobleck_jax.config import RunConfig
from oobleck_jax.errors import ConfigError
from oobleck_jax.token_file import header_path, write_token_file
from oobleck_jax.tokenizer import byte_tokenizer, tokenizer_of


@given(st.text())
def test_tokens_of_the_byte_tokenizer_are_the_bytes(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def run_with(path: Path, tokenizer: str) -> RunConfig:
    write_token_file(path, [np.arange(50)], vocab_size=256, tokenizer=tokenizer)
    return replace(load_preset("gpt-test"), data=str(path))


def words(path: Path) -> str:
    """Write a tokenizer; return what the header of a token file says of it."""
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_bytes_need_no_file(tmp_path: Path) -> None:
    assert tokenizer_of(load_preset("gpt-test")).get_vocab_size() == 256
    assert tokenizer_of(run_with(tmp_path / "a.bin", "bytes")).get_vocab_size() == 256


def test_the_tokenizer_is_found_beside_the_token_file_or_given(tmp_path: Path) -> None:
    config = run_with(tmp_path / "a.bin", words(tmp_path / "words.json"))
    assert tokenizer_of(config).encode("two one").ids == [1, 0]
    moved = (tmp_path / "words.json").rename(tmp_path / "elsewhere.json")
    assert tokenizer_of(config, moved).encode("two").ids == [1]
    with pytest.raises(ConfigError, match=r"there is no .*words\.json.* give --tokenizer FILE"):
        tokenizer_of(config)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    config = run_with(tmp_path / "a.bin", words(tmp_path / "words.json"))
    with (tmp_path / "words.json").open("a") as file:
        file.write("\n")
    with pytest.raises(ConfigError, match="is not the tokenizer of"):
        tokenizer_of(config)


def test_an_unknown_tokenizer_is_asked_for(tmp_path: Path) -> None:
    config = run_with(tmp_path / "a.bin", "bytes")
    header_path(tmp_path / "a.bin").unlink()
    with pytest.raises(ConfigError, match="has no header that names its tokenizer; give --tokenizer FILE"):
        tokenizer_of(config)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is no tokenizer\.json"):
        tokenizer_of(config, tmp_path / "bad.json")
