"""Turn text files into a token file for training.

    python scripts/prepare_data.py --input book.txt notes/ 'more/*.txt' --output data/books.bin
    python scripts/prepare_data.py --input notes/ --output data/notes.bin --tokenizer tokenizer.json
    python scripts/train.py --preset gpt2-small --data data/notes.bin

Without --tokenizer each byte is a token. A tokenizer.json is what Hugging Face's tokenizers library saves; most models
on its hub have one.
"""

import glob
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from oobleck_jax.errors import ConfigError, DataError
from oobleck_jax.token_file import write_token_file


# A piece is tokenized at once: large enough to be fast, small enough for memory. Pieces end at the end of a line, so
# that cutting a file changes its tokens at most there.
_PIECE_CHARACTERS = 1 << 20
_PIECES_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """What to tokenize, how, and where to write it."""

    input: tuple[str, ...]  # text files, directories (all files that match --pattern, recursively) or globs
    output: Path  # the token file to write (.bin); its header is written beside it (.json)
    tokenizer: Path | None = None  # tokenizer.json of Hugging Face tokenizers; without it, bytes
    end_of_text: str | None = None  # a token of --tokenizer to put after each file, such as <|endoftext|>
    pattern: str = "*.txt"  # which files of a directory to take


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How a file becomes tokens.

    Attributes:
        read: yields (tokens, bytes read so far of the file) of each piece of a file.
        description: for the header of the token file.
    """

    read: Callable[[Path], Iterator[tuple[np.ndarray, int]]]
    vocab_size: int
    description: str


def prepare(arguments: Arguments) -> None:
    """Write the token file.

    Raises:
        ConfigError: an argument or an input file cannot be used.
    """
    if arguments.output.suffix != ".bin":
        raise ConfigError(f"--output {arguments.output} must end in .bin; its header goes to a .json beside it")
    files = find_files(arguments.input, arguments.pattern)
    encoding = bytes_encoding(arguments) if arguments.tokenizer is None else tokenizer_encoding(arguments)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    header = write_token_file(
        arguments.output,
        _with_progress(files, encoding),
        vocab_size=encoding.vocab_size,
        tokenizer=encoding.description,
    )
    print(
        f"{arguments.output}: {header.num_tokens:,} tokens of {len(files)} files, {header.dtype}, vocabulary of "
        f"{header.vocab_size:,} ({header.tokenizer})"
    )


def find_files(inputs: tuple[str, ...], pattern: str) -> list[Path]:
    """Return the files of all inputs, each once: inputs in the order given, what they contain sorted by path."""
    files: dict[Path, None] = {}
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            found = sorted(file for file in path.rglob(pattern) if file.is_file())
        elif path.is_file():
            found = [path]
        else:
            found = sorted(Path(name) for name in glob.glob(given, recursive=True) if Path(name).is_file())
        if not found:
            raise ConfigError(f"--input {given} has no file (in directories, --pattern {pattern} is looked for)")
        files |= dict.fromkeys(found)
    return list(files)


def bytes_encoding(arguments: Arguments) -> Encoding:
    """Return the encoding in which each byte is a token."""
    if arguments.end_of_text is not None:
        raise ConfigError("--end-of-text needs --tokenizer: with bytes there is no token left for it")

    def read(path: Path) -> Iterator[tuple[np.ndarray, int]]:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_CHARACTERS):
                yield np.frombuffer(piece, dtype=np.uint8), file.tell()

    return Encoding(read=read, vocab_size=256, description="bytes")


def tokenizer_encoding(arguments: Arguments) -> Encoding:
    """Return the encoding of a Hugging Face `tokenizer.json`."""
    from tokenizers import Tokenizer

    assert arguments.tokenizer is not None
    if not arguments.tokenizer.is_file():
        raise ConfigError(f"--tokenizer {arguments.tokenizer} does not exist")
    content = arguments.tokenizer.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except ValueError as error:
        raise ConfigError(f"--tokenizer {arguments.tokenizer} is not a tokenizer.json: {error}") from error
    end_id = None
    if arguments.end_of_text is not None:
        end_id = tokenizer.token_to_id(arguments.end_of_text)
        if end_id is None:
            raise ConfigError(f"--end-of-text {arguments.end_of_text!r} is not a token of {arguments.tokenizer}")

    def read(path: Path) -> Iterator[tuple[np.ndarray, int]]:
        num_bytes = 0
        for texts in _text_pieces(path):
            num_bytes += sum(len(text.encode()) for text in texts)
            encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
            yield np.concatenate([np.asarray(piece.ids, dtype=np.uint32) for piece in encoded]), num_bytes
        if end_id is not None:
            yield np.array([end_id], dtype=np.uint32), num_bytes

    return Encoding(
        read=read,
        # Ids may have gaps, so the number of tokens can be less than the largest id.
        vocab_size=1 + max(tokenizer.get_vocab(with_added_tokens=True).values()),
        description=f"{arguments.tokenizer.name} sha256:{hashlib.sha256(content).hexdigest()}",
    )


def _text_pieces(path: Path) -> Iterator[list[str]]:
    """Yield the text of a file, cut at ends of lines, in lists to tokenize in parallel."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            while True:
                pieces = [file.read(_PIECE_CHARACTERS) + file.readline() for _ in range(_PIECES_AT_ONCE)]
                pieces = [piece for piece in pieces if piece]
                if not pieces:
                    return
                yield pieces
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text ({error}); convert it, or leave out --tokenizer") from error


def _with_progress(files: list[Path], encoding: Encoding) -> Iterator[np.ndarray]:
    """Yield the tokens of all files; show progress on stderr, as plain lines where that is no terminal."""
    console = Console(stderr=True)
    total, done = sum(file.stat().st_size for file in files), 0
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokenizing", total=total)
        for number, file in enumerate(files, start=1):
            progress.update(task, description=f"{number}/{len(files)} {file.name}")
            if not console.is_terminal:
                console.print(f"{number}/{len(files)} {file} ({done:,} of {total:,} bytes done)", soft_wrap=True)
            for tokens, num_bytes in encoding.read(file):
                yield tokens
                progress.update(task, completed=done + num_bytes)
            done += file.stat().st_size


def main() -> None:
    try:
        prepare(tyro.cli(Arguments, description=__doc__))
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
