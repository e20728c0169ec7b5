"""The commands that the documents tell people to give.

A code block is a picture if it has characters that nobody types (lines, arrows), an example of a file if it begins with
a brace, and else consists of commands, one on each line. Code in a sentence is one if it begins with a program's name.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
ON_A_CLUSTER = "# on a cluster"  # first line of a block whose commands need one
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PROGRAM = re.compile(r"(python3?|pip|pytest|make|curl|ssh|scp|git|docker|kubectl|sbatch|srun|export|\.) ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Commands that are given one after the other."""

    path: Path  # of the document
    number: int  # in it; those in sentences come last
    commands: tuple[str, ...]  # without comments, continued lines joined
    is_for_cluster: bool = False
    is_inline: bool = False  # in a sentence

    def __str__(self) -> str:
        return f"{self.path.name}-{self.number}"


def blocks_of(path: Path) -> Iterator[Block]:
    """Yield the blocks of commands of a document, and each command in a sentence as one of its own."""
    text = path.read_text(encoding="utf-8")
    number = 0
    for block in _BLOCK.findall(text):
        if not _is_picture(block) and not block.startswith("{"):
            lines = re.sub(r"\\\n\s*", " ", block).splitlines()
            commands = tuple(command for line in lines if (command := _without_comment(line)))
            yield Block(path=path, number=number, commands=commands, is_for_cluster=block.startswith(ON_A_CLUSTER))
            number += 1
    for command in codes_of(text):
        if _PROGRAM.match(command):
            yield Block(path=path, number=number, commands=(command,), is_inline=True)
            number += 1


def commands_in_pictures(path: Path) -> list[str]:
    """Return the lines of pictures that are commands: a character that nobody types must not hide them."""
    pictures = filter(_is_picture, _BLOCK.findall(path.read_text(encoding="utf-8")))
    return [line for picture in pictures for line in picture.splitlines() if _PROGRAM.match(line)]


def _is_picture(block: str) -> bool:
    return not block.isascii()


def codes_of(text: str) -> list[str]:
    """Return the code in the sentences of a document."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", _BLOCK.sub("", text))]


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s+)#.*", "", line).strip()


def script_of(command: str) -> str | None:
    """Return the name of our script that a command starts; None: it is none of ours."""
    match = re.match(r"python scripts/(\w+)\.py\b", command)
    return match and match[1]
