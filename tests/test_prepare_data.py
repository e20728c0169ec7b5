"""scripts/prepare_data.py: from text to a token file that trains."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from oobleck_jax.errors import ConfigError, DataError
from oobleck_jax.token_file import TokenFileHeader, read_token_file
from scripts import prepare_data
from scripts.prepare_data import Arguments, find_files, prepare


def written(path: Path) -> tuple[list[int], TokenFileHeader]:
    tokens, header = read_token_file(path, "uint16")
    assert header is not None
    return tokens.tolist(), header


def save_tokenizer(path: Path, vocabulary: dict[str, int]) -> Path:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(path))
    return path


def test_bytes_become_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "new" / "tokens.bin"
    text.write_bytes("naïve\r\n".encode())
    prepare(Arguments(input=(str(text),), output=output))
    tokens, header = written(output)
    assert tokens == list("naïve\r\n".encode())
    assert (header.vocab_size, header.dtype, header.tokenizer) == (256, "uint16", "bytes")
    printed = capsys.readouterr()
    assert "8 tokens of 1 files" in printed.out
    assert "1/1" in printed.err


def test_a_tokenizer_json_tokenizes_files_with_its_end_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_data, "_PIECE_CHARACTERS", 3)
    monkeypatch.setattr(prepare_data, "_PIECES_AT_ONCE", 2)
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", {"?": 0, "a": 1, "b": 2, "<end>": 70000})
    for name, text in (("1.txt", "a b\nb b\na a\na b\nb\n"), ("2.txt", "b unknown")):
        (tmp_path / name).write_text(text)
    output = tmp_path / "tokens.bin"
    prepare(Arguments(input=(f"{tmp_path}/*.txt",), output=output, tokenizer=tokenizer, end_of_text="<end>"))
    tokens, header = written(output)
    assert tokens == [1, 2, 2, 2, 1, 1, 1, 2, 2, 70000, 2, 0, 70000]
    assert (header.vocab_size, header.dtype) == (70001, "uint32")
    assert header.tokenizer.startswith("tokenizer.json sha256:")


def test_pieces_of_a_file_give_back_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_data, "_PIECE_CHARACTERS", 5)
    monkeypatch.setattr(prepare_data, "_PIECES_AT_ONCE", 2)
    text = "line\r\nüber\n\n\nlonger than a piece\nno end"
    (tmp_path / "text.txt").write_bytes(text.encode())
    pieces = [piece for group in prepare_data._text_pieces(tmp_path / "text.txt") for piece in group]
    assert "".join(pieces) == text
    assert len(pieces) > 2
    assert all(piece.endswith("\n") for piece in pieces[:-1])


def test_inputs_are_files_directories_and_globs_each_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    names = lambda *inputs, pattern="*.txt": [  # noqa: E731
        str(file.relative_to(tmp_path)) for file in find_files(tuple(f"{tmp_path}/{i}" for i in inputs), pattern)
    ]
    assert names("") == ["a.txt", "b.txt", "sub/c.txt"]
    assert names("b.txt", "") == ["b.txt", "a.txt", "sub/c.txt"]
    assert names("*.txt", "sub/*") == ["a.txt", "b.txt", "sub/c.txt", "sub/d.md"]
    assert names("sub", pattern="*.md") == ["sub/d.md"]
    with pytest.raises(ConfigError, match=r"nothing\* has no file \(in directories, --pattern \*\.txt is looked for\)"):
        names("a.txt", "nothing*")


def test_what_cannot_be_used_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "tokens.bin"
    text.write_bytes(b"latin \xe9")
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", {"?": 0})

    def refused(message: str, error: type[ConfigError] = ConfigError, **arguments: object) -> None:
        with pytest.raises(error, match=message):
            prepare(Arguments(**({"input": (str(text),), "output": output} | arguments)))  # pyright: ignore[reportArgumentType]

    refused(r"must end in \.bin; its header goes to a \.json beside it", output=tmp_path / "tokens")
    refused("--end-of-text needs --tokenizer: with bytes", end_of_text="<end>")
    refused("does not exist", tokenizer=tmp_path / "missing.json")
    refused("is not a tokenizer.json", tokenizer=text)
    refused("'<end>' is not a token of", tokenizer=tokenizer, end_of_text="<end>")
    refused(r"text\.txt is not UTF-8 text .*convert it, or leave out --tokenizer", DataError, tokenizer=tokenizer)
    text.write_bytes(b"")
    refused("nothing to write", DataError)
    assert not output.exists()


def test_large_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_data, "_PIECE_CHARACTERS", 7)
    content = bytes(np.random.default_rng(0).integers(0, 256, 100, dtype=np.uint8))
    (tmp_path / "text.txt").write_bytes(content)
    prepare(Arguments(input=(str(tmp_path),), output=tmp_path / "tokens.bin"))
    assert bytes(written(tmp_path / "tokens.bin")[0]) == content
