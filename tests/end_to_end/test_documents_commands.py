"""Every command in the documents is given, in the order of the document.

Each block of commands runs in a folder of its own, as one script of the shell, so that what the first command makes is
there for the next. Commands are given as they stand, but made small: options are appended, and the last one of a kind
counts. Which ones stands in SMALL, by script, and in SMALL_HERE for single commands; placeholders (`RUN_DIR`, a data
file, a trace) are made by the test. Blocks that begin with "# on a cluster" need one. What is neither our script nor in
one of the tables below fails the test: run it, or say why not.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from oobleck_jax.live_run import LiveRun
from oobleck_jax.run_dir import read_contact
from tests.documents import DOCUMENTS, ROOT, Block, blocks_of, script_of
from tests.end_to_end.training_runs import await_steps


pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

LIMIT_S = 240  # for each command
PATIENCE_S = 10  # for what is told to end
HOME = ROOT / ".pytest_cache" / "home"  # of the commands: programs that are compiled are kept from run to run
_GPT = "--preset gpt-test"
_TINY_LAPTOP = "--width 32 --num-heads 2 --context-length 16 --sequence-length 16 --eval-every 0"  # layers as before
_RUN = f"{_GPT} --nodes 2 --steps 3 --profile estimate --eval-every 0"
SMALL = {
    "audit": "",
    "bench_checkpoint": f"{_GPT} --nodes 1 --rounds 1 --steps 4 --every 2",
    "bench_control": "--agents 4 --steps 4",
    "bench_memory": f"{_GPT} --stages 2 --remats none --precisions float32 --schedules 1f1b",
    "bench_planner": "--rounds 1",
    "bench_prediction": f"{_GPT} --rounds 1 --steps 3 --cases 1",
    "bench_recovery": f"{_GPT} --nodes 2 --kills 1 --rounds 0",
    "bench_schedules": f"{_GPT} --rounds 1 --steps 4 --schedules 1f1b",
    "bench_throughput": "--cases gpt-test:float32 --nodes 1 --rounds 1 --steps 4",
    "bench_trace": f"{_GPT} --plan 0-3,3-6 --rounds 1 --steps 4",
    "evaluate": "--models bert-large --policies ours --traces .",
    "export_hf": "",
    "generate": "--max-new-tokens 3",
    "plan": "",
    "plot": "",
    "prepare_data": "",
    "profile": _GPT,
    "replay": "",
    "report": "",
    "timeline": "",
    "train": _RUN,
}
# Also made small, where the general way does not do: by the beginning of the command.
SMALL_HERE = {
    "make train": f"--steps 2 --profile estimate {_TINY_LAPTOP}",
    "make demo": f"{_RUN} --nodes 3 --max-nodes 4 --steps 5 --inject kill:1@1:backward,join@2,kill:0@3:commit",
    "python scripts/train.py --preset gpt-laptop --nodes 5 --plan": f'{_RUN} --plan "0-3,3-6"',
    "python scripts/train.py --nodes 5 --max-nodes 6": f"{_RUN} --steps 6 --inject kill:1@1:backward,join@3",
    "python scripts/train.py --preset gpt-laptop --nodes 4 --fault-tolerance 1": f"{_RUN} --checkpoint-every 2",
    "python scripts/train.py --preset gpt2-small --init-from gpt2/ ...": f"{_RUN} --init-from exported/",
    "python scripts/replay.py --live": f"{_GPT} --live-minutes 0.1",
}
# Given by another test.
TESTED = {
    "make test": (".ci/run", "make test"),
    "pytest tests/test_huggingface.py": (".ci/run", "make test"),
    "pytest -m documents_commands": (".ci/run", ".venv/bin/python -m pytest -n 2 -m documents_commands"),
    "python scripts/chaos.py": (
        "tests/end_to_end/test_chaos.py",
        "def test_fifteen_strikes_are_survived_and_change_nothing_T2(",
    ),
    "python scripts/check_devices.py": (
        "tests/test_check_devices.py",
        "def test_nodes_that_share_a_device_survive_in_mixed_precision(",
    ),
}
EXEMPT = (
    ". .venv/bin/activate",  # the virtual environment is the one of this test
    "python3 -m venv",  # `make` does the same
    "pip install",  # downloads; `make` does the same
    "make format",  # changes the sources
    "ssh -L",  # needs another machine
)
LONG = {
    "bench_checkpoint",
    "bench_memory",
    "bench_prediction",
    "bench_recovery",
    "bench_schedules",
    "bench_throughput",
    "bench_trace",
}
TRACE = "\n".join([*(f"0,add,n{node}" for node in range(9)), "600000,remove,n2", "1200000,add,n9", "1800000,remove,n0"])


def is_long(block: Block) -> bool:
    return any(script_of(command) in LONG or "--live" in command.split() for command in block.commands)


def blocks() -> list[Block]:
    """Return what there is to run; what a sentence repeats that takes long, only once."""
    found = [block for path in DOCUMENTS for block in blocks_of(path) if not block.is_for_cluster]
    run = {script_of(command) for block in found if not block.is_inline for command in block.commands}
    return [
        block for block in found if not block.is_inline or not is_long(block) or script_of(block.commands[0]) not in run
    ]


def beginning_of(command: str, beginnings: Iterable[str]) -> str | None:
    """Return with which of these words a command begins."""
    return next((words for words in beginnings if f"{command} ".startswith(f"{words} ")), None)


def recipe_of(target: str) -> str:
    """Return the commands of a target of the Makefile that start our scripts."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", f"RUN_DIR=runs/{target}", target]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return re.sub(r"\S+/bin/python", "python", " && ".join(line for line in lines if "scripts/" in line))


def small(command: str) -> str:
    """Return a command as it is run here; empty: it is not."""
    if " && " in command:
        return " && ".join(filter(None, map(small, command.split(" && "))))
    if beginning_of(command, TESTED) or beginning_of(command, EXEMPT):
        return ""
    if command.startswith("make "):
        return " && ".join(made_small(part, command) for part in recipe_of(command.split()[1]).split(" && "))
    if script_of(command) or command.startswith(("curl ", "TOKEN=")):
        return made_small(command, command)
    raise AssertionError(f"`{command}` is neither run here nor exempted: see the tables of {Path(__file__).name}")


def made_small(command: str, given: str) -> str:
    """Append what makes a command small; `given` is what the document says, which may be a target of the Makefile."""
    script = script_of(command)
    if script is None or "--help" in command:
        return command
    here = beginning_of(given, SMALL_HERE) if script == "train" or "--live" in command else None
    assert script in SMALL, f"`{command}`: {Path(__file__).name} does not say how to make it small"
    return f"{command.removesuffix(' ...')} {SMALL[script] if here is None else SMALL_HERE[here]}"


def environment(folder: Path) -> dict[str, str]:
    HOME.mkdir(parents=True, exist_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(HOME), "TMPDIR": str(folder)}


def give(commands: list[str], folder: Path, *, limit_s: float = LIMIT_S, patience_s: float = PATIENCE_S) -> None:
    """Run commands in one shell; the first that fails fails the test. Nothing that they started is left."""
    script = "\n".join(commands).replace("python scripts/", f"python {shlex.quote(str(ROOT))}/scripts/")
    path = folder.with_name(f"{folder.name}.out")
    with path.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-exo", "pipefail", "-c", script],
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    ended = "not in time"
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = f"with exit code {shell.wait(timeout=limit_s * len(commands))}"
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGTERM)  # runs end their agents then, which have sessions of their own
        while left := processes_of(folder):
            _, left = psutil.wait_procs(left, timeout=patience_s)
            for process in left:
                process.kill()
        shell.wait()
    assert ended == "with exit code 0", f"ended {ended}:\n{path.read_text(errors='replace')}"


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes that have the environment of the commands of a folder."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process)
    return found


def make_what_is_given(text: str, folder: Path) -> list[str]:
    """Make what these commands expect to be there; return what else must be run before."""
    for trace in ("spot.csv", "scale_p3-trace.csv"):
        if trace in text:
            (folder / trace).write_text(TRACE, encoding="utf-8")
    if "corpus.bin" in text:
        return [f"python scripts/prepare_data.py --input {shlex.quote(str(ROOT / 'README.md'))} --output corpus.bin"]
    return []


@pytest.fixture
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """A run that goes on."""
    folder = tmp_path_factory.mktemp("running")
    flags = f"{_RUN} --nodes 3 --fault-tolerance 1 --steps 100000 --inject slow:0@0:0.1"
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), *shlex.split(flags)]
    run = LiveRun(folder / "run", [*command, "--run-dir", str(folder / "run")], environment=environment(folder))
    run.start()
    try:
        await_steps(run, 1)
        yield run
    finally:
        run.kill_all()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is over."""
    folder = tmp_path_factory.mktemp("over")
    give([f"python scripts/train.py {_RUN} --steps 13 --trace --run-dir run"], folder)
    return folder / "run"


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            block,
            id=str(block),
            marks=[
                pytest.mark.timeout(LIMIT_S * (2 + len(block.commands))),  # other than `give`, this ends no agents
                *([pytest.mark.documents_commands] if is_long(block) else []),
            ],
        )
        for block in blocks()
    ],
)
def test_commands_run(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    commands = [text for command in block.commands if (text := small(command))]
    text = "\n".join(commands)
    if "curl" in text:
        if shutil.which("curl") is None:
            pytest.skip("there is no curl")
        path = request.getfixturevalue("running").run_dir
        contact = read_contact(path)
        assert contact is not None
        address = f"//{contact.address}/"
        commands = [re.sub(r"//127.0.0.1:\d+/", address, command).replace("RUN_DIR", str(path)) for command in commands]
        commands = [command.replace("curl ", "curl --fail --silent --show-error ") for command in commands]
    elif "RUN_DIR" in text:
        path = request.getfixturevalue("run_dir")
        commands = [command.replace("RUN_DIR", str(path)) for command in commands]
    if commands:
        give([*make_what_is_given(text, tmp_path), *commands], tmp_path)


@pytest.mark.parametrize("command", TESTED)
def test_what_is_said_to_be_tested_elsewhere_is(command: str) -> None:
    path, words = TESTED[command]
    text = (ROOT / path).read_text(encoding="utf-8")
    assert any(line.startswith(words) for line in text.splitlines())
    if script := script_of(command):
        assert script in text


def test_a_command_that_nobody_has_thought_of_fails() -> None:
    for command in ("python scripts/absent.py", "docker run image", "pip3 install x"):
        with pytest.raises(AssertionError, match=re.escape(command)):
            small(command)
        with pytest.raises(AssertionError, match=re.escape(command)):
            small(f"pip install x && {command}")


def test_a_block_is_long_if_one_of_its_commands_is() -> None:
    commands = ("python scripts/plan.py", "python scripts/bench_memory.py")
    assert is_long(Block(path=ROOT, number=0, commands=commands))
    assert not is_long(Block(path=ROOT, number=0, commands=commands[:1]))


def test_of_commands_that_do_not_end_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ended not in time:\n(.*\n)* *so far\n"):
        give(["echo so far", "setsid sleep 1000 & sleep 1000"], tmp_path, limit_s=2, patience_s=0.5)
    assert not processes_of(tmp_path)
