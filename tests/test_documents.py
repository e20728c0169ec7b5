"""What the documents say is so: commands have flags that exist, links lead somewhere, messages are the code's own."""

import ast
import contextlib
import importlib
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from oobleck_jax.config import check_config
from oobleck_jax.data import check_data
from oobleck_jax.options import CommandLine, parse_command_line
from oobleck_jax.propose import make_proposer
from tests.documents import DOCUMENTS, ON_A_CLUSTER, ROOT, blocks_of, codes_of, commands_in_pictures, script_of


LAUNCH_FILES = sorted((ROOT / "scripts" / "launch").iterdir())
MANY_HOSTS = 8  # where the scheduler says how many
SMALLEST_PIECE = 9  # characters of a message that are worth looking for


def commands_of(path: Path) -> list[str]:
    """Return the commands of a document that start our scripts."""
    return [command for block in blocks_of(path) for command in block.commands if script_of(command)]


def strings_of_the_code() -> list[str]:
    """Return all string literals, with a gap in place of each value that is filled in."""
    found: list[str] = []
    for path in [*ROOT.glob("oobleck_jax/**/*.py"), *ROOT.glob("models/**/*.py"), *ROOT.glob("scripts/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def parse(command: str) -> None:
    words = shlex.split(re.sub(r"\$\w+", "0", command.removeprefix("python ")), comments=True)
    script, arguments = words[0].removeprefix("scripts/").removesuffix(".py"), words[1:]
    if "--help" in arguments or "..." in arguments:
        return
    if script in ("train", "coordinator"):
        check_run(parse_command_line(arguments, program=script, description=""))
    else:
        tyro.cli(importlib.import_module(f"scripts.{script}").Arguments, args=arguments)


def check_run(line: CommandLine) -> None:
    """Refuse what `train.py` would refuse, but for files that only a reader has."""
    if line.cluster.join is not None:
        return
    num_hosts = MANY_HOSTS if line.cluster.coordinator_address == "auto" else line.cluster.num_processes
    config = replace(line.config, nodes=num_hosts or line.config.nodes)
    check_config(config)
    if config.data == "builtin":
        check_data(config)
    given = (line.run.device_memory_gib or 1024) * 2**30
    make_proposer(
        config, plan=line.run.plan, device_memory_bytes=int(given), max_nodes=line.run.max_nodes or config.nodes
    ).check()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_for_several_hosts_are_marked(path: Path) -> None:
    for block in blocks_of(path):
        for command in block.commands:
            if script_of(command) and ("--coordinator-address" in command or "--token-file" in command):
                assert block.is_for_cluster, f"{path.name}: {command} needs {ON_A_CLUSTER!r} before it"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_have_flags_that_exist(path: Path) -> None:
    for command in commands_of(path):
        try:
            parse(command)
        except SystemExit as ended:
            pytest.fail(f"{path.name}: {command}: exit code {ended.code}")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_command_is_taken_for_a_part_of_a_picture(path: Path) -> None:
    assert not commands_in_pictures(path)


def test_a_character_that_nobody_types_does_not_hide_commands(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("```\nmake train  # 2 → 3 nodes\n```\n", encoding="utf-8")
    assert commands_in_pictures(path) == ["make train  # 2 → 3 nodes"]


def test_flags_in_sentences_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = {"--check": "ruff", "--no-kill": "Slurm"}.keys() | flags_of("train", capsys)
    for script in (ROOT / "scripts").glob("*.py"):
        if script.stem not in ("train", "coordinator", "__init__"):
            known |= flags_of(script.stem, capsys)
    for path in DOCUMENTS:
        for code in codes_of(path.read_text(encoding="utf-8")):
            assert flags_in(code) <= known, f"{path.name}: {code}"


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))


def flags_of(script: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return the flags that the help of a script has."""
    with contextlib.suppress(SystemExit):
        if script == "train":
            parse_command_line(["--help"], program=script, description="")
        else:
            tyro.cli(importlib.import_module(f"scripts.{script}").Arguments, args=["--help"])
    return flags_in(capsys.readouterr().out)


def test_there_are_commands_and_each_names_a_script() -> None:
    commands = [command for path in DOCUMENTS for command in commands_of(path)]
    assert len(commands) > 10
    for command in commands:
        assert (ROOT / command.split()[1]).is_file(), command


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.name)
def test_launch_files_have_flags_that_exist(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".yaml":
        runs = [
            re.findall(r"^ +- (\S+)", block, re.MULTILINE)
            for block in re.findall(r"^ +args:\n((?: +- [^\n]*\n)+)", text, re.MULTILINE)
        ]
    else:
        text = re.sub(r"\\\n\s*", " ", re.sub(r"<[^>\n]*>", "70", text))
        runs = [shlex.split(line[line.index("python scripts/") :]) for line in re.findall(r"^srun .*$", text, re.M)]
    assert runs
    for run in runs:
        parse(shlex.join(run))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    messages = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(messages) > 20
    known = strings_of_the_code()
    for message in messages:
        pieces = [piece for piece in message.split("...") if len(piece.strip()) >= SMALLEST_PIECE]
        assert pieces, f"{message!r} has no piece that is long enough to be found"
        for piece in pieces:
            assert any(piece.strip() in text for text in known), f"no message says {piece!r} (of {message!r})"
