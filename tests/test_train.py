"""The command line as users meet it: what is refused before anything starts, what a run leaves behind, how it ends.

Workers are invented (tests/elastic/fake_worker.py), so nothing here compiles.
"""

import contextlib
import errno
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from oobleck_jax import events
from oobleck_jax.audit import audit
from oobleck_jax.checkpoint.store import CheckpointStore
from oobleck_jax.elastic.coordinator import bind
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.run_dir import RunDir
from oobleck_jax.train import main


FAKE_WORKER = (sys.executable, str(Path(__file__).parent / "elastic" / "fake_worker.py"))
MARKER = "OOBLECK_TEST_RUN"
LIMIT_S = 60.0  # for anything that is waited for, so that a slow machine under load keeps it


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command line that must be refused before any process starts; return the message, which is one line."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    assert main(["--preset", "gpt-test", *arguments], worker_command=("false",)) == 2
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("train.py: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "gpt3-huge"], "and a preset of your own is given as path/to/file.py:function"),
        (
            ["--nodes", "2", "--fault-tolerance", "2"],
            "--nodes 2 is too few for --fault-tolerance 2, which needs 3 pipelines; add nodes, or lower",
        ),
        (["--nodes", "0"], "--nodes is 0"),
        (["--remat", "auto", "--profile", "a.json"], "--remat auto compares what policies cost, but --profile a.json"),
        (["--microbatch-size", "2", "--devices-per-node", "3"], "make one a multiple of the other, or give"),
        (
            ["--global-batch-size", "4", "--microbatch-size", "4", "--nodes", "2", "--fault-tolerance", "1"],
            "but --fault-tolerance 1 needs 2 pipelines with one each; lower --microbatch-size",
        ),
        (
            ["--preset", f"{Path(__file__).parent / 'models' / 'toy_model.py'}:toy", "--init-from", "a"],
            "--init-from a: only a GPT can begin with the parameters of a GPT-2",
        ),
        (["--schedule", "zb-h1", "--remat", "layer"], "--remat layer begins with computing again; give --remat none"),
        (["--global-batch-size", "10", "--microbatch-size", "4"], "--global-batch-size 10 is not a multiple"),
        (["--data", "absent.bin"], "absent.bin"),
        (["--vocab-size", "16"], "vocabulary has 16"),
        (["--sequence-length", "17"], "--sequence-length 17 is more than the model's 16"),
        (["--max-nodes", "2", "--nodes", "3"], "--max-nodes 2 is less than the 3 nodes to begin with"),
        (["--orphan-minutes", "-1"], "--orphan-minutes is -1.0; it must not be negative"),
        (["--wait-minutes", "-1"], "--wait-minutes is -1.0; it must not be negative"),
        (["--keep", "0"], "--keep is 0; it must be at least 1"),
        (["--checkpoint-every", "5x"], "--checkpoint-every 5x: give steps, such as 20, or minutes, such as 5m"),
        (["--checkpoint-dir", "gs:/bucket/run"], "--checkpoint-dir gs:/bucket/run is no address"),
        (["--checkpoint-dir", "s4://bucket/run"], "--checkpoint-dir s4://bucket/run is no address of an object store"),
        (["--checkpoint-dir", "file:///run"], "az://CONTAINER/FOLDER, or give the path of a folder"),
        (["--checkpoint-dir", "gs://bucket/run-*"], "--checkpoint-dir gs://bucket/run-* has one of *?[]"),
        (["--init-from", "absent"], "absent/config.json cannot be read"),
        (["--join", "."], "--join .: there is no run in this directory"),
        (["--patience", "0"], "--patience is 0.0; it must be positive"),
        (["--plan", "0-3,3-7"], "pipeline 0 covers 7 layers, the model has 6"),
        (
            ["--plan", "0-3,3-6"],
            "--plan uses 2 nodes ([0, 1]), but --nodes 1 gives only [0]: [1] are missing; raise --nodes to 2",
        ),
        (
            ["--plan", "0-6", "--fault-tolerance", "1"],
            "--fault-tolerance 1 needs 2; add pipelines, or lower --fault-tolerance",
        ),
        (["--plan", "nonsense"], "'nonsense' is not a stage"),
        (["--plan", "absent.json"], "absent.json: No such file"),
        (
            ["--coordinator-address", "10.0.0.1:8471", "--num-processes", "2", "--process-id", "0"],
            "needs a token that all nodes know",
        ),
        (["--coordinator-address", "here", "--num-processes", "2", "--process-id", "0"], "here is not HOST:PORT"),
        (["--token", "a", "--token-file", "b"], "give --token or --token-file, not both"),
        (["--token-file", "absent"], "--token-file absent: No such file"),
        (["--tls-authority", "absent.pem"], "--tls-authority absent.pem has no certificate to trust"),
        (["--eval-batches", "0"], "--eval-batches is 0; give at least 1, or --eval-every 0"),
        (["--validation-fraction", "1"], "--validation-fraction is 1.0; it must be in [0, 1)"),
        (["--run-dir", "/proc/x"], "--run-dir /proc/x cannot be used: No such file or directory; choose another"),
        (["--trace", "--join", "127.0.0.1:1"], "--trace needs --run-dir on every host"),
        (["--tls-key", "key.pem"], "--tls-key is given without --tls-certificate"),
        (["--tls-certificate", "absent.pem"], "--tls-certificate absent.pem cannot be used"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused(arguments, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("scheme", "package"), [("gs", "gcsfs"), ("s3", "s3fs"), ("az", "adlfs")])
def test_an_object_store_without_its_package_is_refused_before_anything_starts(
    scheme: str, package: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    # What other tests have loaded does not count.
    monkeypatch.setattr(importlib.import_module("fsspec.registry"), "registry", {})
    message = refused(["--checkpoint-dir", f"{scheme}://bucket/run"], capsys)
    assert f"--checkpoint-dir {scheme}://bucket/run cannot be used: " in message
    assert f"nstall {package} to access" in message
    assert package in message.partition("(")[2]
    assert list(tmp_path.iterdir()) == []


def test_data_that_is_too_short_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.arange(10, dtype=np.uint16).tofile("short.bin")
    assert "a sample needs 17" in refused(["--data", "short.bin"], capsys)


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        message = refused(["--port", str(port), "--run-dir", str(tmp_path / "a")], capsys)
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another --port" in message


def test_a_run_directory_in_use_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with RunDir(tmp_path):
        message = refused(["--run-dir", str(tmp_path)], capsys)
    assert f"is in use by a running coordinator (process {os.getpid()})" in message
    with RunDir(tmp_path):
        pass  # it is free again


def test_the_schedule_is_printed_instead_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--preset", "gpt-test", "--nodes", "3", "--plan", "0-3,3-6:5 | 0-6:3", "--print-schedule"]) == 0
    out = capsys.readouterr().out
    assert "pipeline 0: 5 microbatches, 1f1b; stage 0 on node 0, stage 1 on node 1" in out
    assert "pipeline 1: 3 microbatches, 1f1b; stage 0 on node 2" in out
    assert "F0" in out
    assert "B4" in out


def test_help_explains_every_flag_and_shows_the_defaults_of_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--preset", "gpt2-small", "--help"])
    assert stopped.value.code == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for text in (
        "--num-blocks INT transformer blocks (default: 12)",
        "--steps INT optimizer steps to run (default: 40000)",
        "--warmup-steps INT steps of linear warm-up from 0 (default: 700)",
        "--remat {none,dots,layer,stage,auto}",
        "gpt-test, gpt-laptop",
    ):
        assert text in out


def test_characters_that_a_terminal_lacks_or_obeys_end_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(stream, encoding="ascii"))
    assert main(["--preset", "gpt-test", "--data", "Üb\x1b[2Jer.bin"]) == 2
    print("Übermut", flush=True)
    assert stream.getvalue() == b"?bermut\n"
    assert "Üb\N{REPLACEMENT CHARACTER}[2Jer.bin" in capsys.readouterr().err


def test_a_mistyped_flag_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--stepz", "3"])
    assert stopped.value.code == 2
    assert "--steps" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ real processes


@dataclass
class Launch:
    """A command line in a process of its own, with invented workers."""

    directory: Path
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def start(self, *arguments: str, worker: tuple[str, ...] = (), has_nodes: bool = True) -> "subprocess.Popen[str]":
        """Start a command line; it has the run directory `run_dir`."""
        code = (
            "import sys\n"
            "from oobleck_jax.train import main\n"
            f"sys.exit(main(sys.argv[1:], has_nodes={has_nodes}, worker_command={(*FAKE_WORKER, *worker)!r}))\n"
        )
        flags = ("--preset", "gpt-test", "--profile", "estimate", "--run-dir", str(self.run_dir))
        process = subprocess.Popen(
            [sys.executable, "-c", code, *flags, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # importing jax in this process has changed how much its C++ side logs
            env={**os.environ, MARKER: str(self.directory), "TF_CPP_MIN_LOG_LEVEL": "3"},
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def await_step(self, step: int) -> None:
        """Wait until a step is committed."""
        self.wait_for(lambda: any(f'"step":{step},' in line for line in self.lines("metrics.jsonl")))

    def await_steps_from_now(self, count: int) -> None:
        self.await_step(len(self.lines("journal.jsonl")) + count)

    def await_plan_with(self, node: int) -> None:
        """Wait until the last plan has a node."""
        self.wait_for(lambda: NodeId(node) in self.events(events.Planned)[-1].plan.nodes)  # pyright: ignore

    def interrupt(self, run: "subprocess.Popen[str]") -> None:
        """End a run that goes well."""
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=LIMIT_S)
        assert run.returncode == 130
        assert err.count("\n") == 1, err

    def lines(self, name: str) -> list[str]:
        path = self.run_dir / name
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, holds: Callable[[], bool]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < end_s, [process.poll() for process in self.processes]
            time.sleep(0.02)

    def find(self, *words: str, node: int) -> int:
        """Return the process whose command line has these words and which belongs to a node."""
        (pid,) = [
            process.pid
            for process in self.alive()
            if all(word in " ".join(process.cmdline()) for word in words) and self._node_of(process) == node
        ]
        return pid

    def _node_of(self, process: psutil.Process) -> int:
        """A process prints into the log of its node."""
        log = os.readlink(f"/proc/{process.pid}/fd/1")
        return int(log.rpartition("node-")[2].removesuffix(".log")) if "node-" in log else -1

    def alive(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARKER) == str(self.directory) and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def node_processes(self) -> set[int]:
        """The agents and workers that live."""
        return {process.pid for process in self.alive() if self._node_of(process) >= 0}

    def await_nothing_left(self) -> None:
        self.wait_for(lambda: not self.alive())

    def events(self, kind: type[events.Record]) -> list[events.Record]:
        return [record for _, record in events.read_events(self.run_dir / "events.jsonl") if isinstance(record, kind)]

    def kill_all(self) -> None:
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself, or with its agent
                process.kill()

    def close(self) -> None:
        self.kill_all()
        for process in self.processes:
            process.communicate()


def incidents_of(launch: Launch) -> list[events.Incident]:
    return [event for event in launch.events(events.Incident) if isinstance(event, events.Incident)]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.close()


@pytest.mark.process
def test_a_run_writes_its_files_and_leaves_nothing_behind(launch: Launch) -> None:
    summary = launch.directory / "summary.json"
    run = launch.start(
        *("--nodes", "3", "--fault-tolerance", "1", "--steps", "12", "--eval-every", "6"),
        *("--plan", "0-3,3-6 | 0-6", "--summary-json", str(summary)),
    )
    out, err = run.communicate(timeout=LIMIT_S)

    assert (run.returncode, err) == (0, "")
    assert out.splitlines()[1].startswith("page: http://127.0.0.1:")
    table = [line.split() for line in out.splitlines()[3:7]]
    assert table[0] == ["pipeline", "node", "layers", "microbatches", "cores"]
    assert table[1][:6] == ["0", "0", "embedding,", "block", "0-1", "6"]
    assert table[2][:4] == ["1", "block", "2-3,", "head"]
    assert table[3][:7] == ["1", "2", "embedding,", "block", "0-3,", "head", "2"]
    assert "all nodes are prepared after" in out
    assert "step 0/12  loss 5.5" in out
    assert "step 11/12  loss" in out
    assert "after step 5: evaluation loss 2.0000 over 128 tokens" in out
    assert out.splitlines()[-1].startswith("done: 12 of 12 steps in ")

    assert json.loads((launch.run_dir / "config.json").read_text())["preset"] == "gpt-test"
    metrics = [json.loads(line) for line in (launch.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(12))
    assert set(metrics[0]) == {
        *("step", "generation", "loss", "grad_norm", "learning_rate"),
        *("tokens_per_s", "step_time_s", "sample_first", "sample_end"),
    }
    assert [(line["sample_first"], line["sample_end"]) for line in metrics[:2]] == [(0, 8), (8, 16)]
    assert {event.node for event in launch.events(events.Joined)} == {0, 1, 2}  # pyright: ignore
    assert [event.step for event in launch.events(events.Evaluated)] == [5, 11]  # pyright: ignore
    assert len((launch.run_dir / "journal.jsonl").read_text().splitlines()) == 12

    written = json.loads(summary.read_text())
    assert (written["steps"], written["eval_loss"], written["exit_code"]) == (12, 2.0, 0)
    assert written["final_loss"] == metrics[-1]["loss"]
    assert written["median_tokens_per_s"] > 0
    peaks = written["peak_memory_bytes"]
    assert peaks["coordinator"] < 300e6
    assert max(peaks["agents"].values()) < 60e6
    assert set(peaks["workers"]) == {"0", "1", "2"}
    launch.await_nothing_left()


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "exit_code", "words"),
    [(signal.SIGINT, 130, "interrupted (Ctrl-C)"), (signal.SIGTERM, 143, "terminated (SIGTERM)")],
)
def test_a_signal_ends_the_run(launch: Launch, number: int, exit_code: int, words: str) -> None:
    run = launch.start("--nodes", "2", "--steps", "9999")
    launch.await_step(3)
    run.send_signal(number)
    _, err = run.communicate(timeout=LIMIT_S)
    assert run.returncode == exit_code
    assert f" of 9999 steps: {words}; see " in err
    assert err.count("\n") == 1
    launch.await_nothing_left()


@pytest.mark.process
@pytest.mark.parametrize(
    ("target", "number", "words"),
    [
        (
            "fake_worker.py",
            signal.SIGKILL,
            "failed: the worker of node 1 was killed by SIGKILL (kill -9, or out of memory)",
        ),
        ("elastic.agent", signal.SIGKILL, "failed: the agent of node 1 is gone (connection lost)"),
        ("fake_worker.py", signal.SIGSTOP, "failed: the worker of node 1 has been stopped by a signal (SIGSTOP)"),
        ("elastic.agent", signal.SIGSTOP, "failed: the agent of node 1 has been silent for 4.0 s"),
    ],
)
def test_the_loss_of_a_process_ends_the_run_M4(launch: Launch, target: str, number: int, words: str) -> None:
    run = launch.start("--nodes", "3", "--steps", "99999")
    launch.await_step(3)
    os.kill(launch.find(target, node=1), number)
    _, err = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 1
    assert words in err
    assert err.count("failed:") == 1
    launch.await_nothing_left()


@pytest.mark.process
def test_with_fault_tolerance_the_run_goes_on_without_the_lost_node(launch: Launch) -> None:
    run = launch.start("--nodes", "3", "--fault-tolerance", "1", "--steps", "600")
    launch.await_step(3)
    os.kill(launch.find("fake_worker.py", node=1), signal.SIGKILL)
    out, err = run.communicate(timeout=LIMIT_S)
    assert (run.returncode, err) == (0, "")
    assert "lost: the worker of node 1 was killed by SIGKILL (kill -9, or out of memory)\n" in out
    assert "the end of its log" not in out  # it says nothing of a signal
    assert "loss: the worker of node 1 was killed by SIGKILL" in out
    journal = [record for _, record in events.read_events(launch.run_dir / "journal.jsonl")]
    assert [record.step for record in journal] == list(range(600))  # pyright: ignore
    launch.await_nothing_left()


@pytest.mark.process
def test_a_worker_that_raises_ends_the_run_with_its_traceback(launch: Launch) -> None:
    run = launch.start("--nodes", "2", "--steps", "99", worker=("--fault", "raise@1:4"))
    _, err = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 1
    assert "failed: the worker of node 1 failed: ValueError: invented trouble (generation 1, step 4, log " in err
    assert "    Traceback (invented)\n    ValueError: invented trouble\n" in err
    assert err.splitlines()[-1].startswith("stopped after 4 of 99 steps; see ")
    launch.await_nothing_left()


@pytest.mark.process
def test_nothing_outlives_a_coordinator_that_nobody_starts_again(launch: Launch) -> None:
    run = launch.start("--nodes", "3", "--steps", "99999", "--orphan-minutes", "0.02")
    launch.await_step(3)
    run.kill()
    launch.await_nothing_left()


@pytest.mark.process
def test_a_coordinator_that_is_started_again_goes_on_with_the_same_processes_M2(launch: Launch) -> None:
    command = ("--nodes", "3", "--fault-tolerance", "1", "--steps", "400", "--eval-every", "150")
    command += ("--summary-json", str(launch.directory / "summary.json"))
    first = launch.start(*command)
    launch.await_step(3)
    processes = launch.node_processes()
    assert len(processes) == 6
    first.kill()
    first.wait()
    journal = launch.run_dir / "journal.jsonl"
    done = len(journal.read_bytes().splitlines())
    assert launch.node_processes() == processes
    with journal.open("ab") as file:
        file.write(b'{"time":1.0,"event":"comm')  # it was about to decide

    again = launch.start(*command)
    launch.await_step(done + 3)
    assert launch.node_processes() == processes
    out, err = again.communicate(timeout=LIMIT_S)
    assert (again.returncode, err) == (0, "")
    assert f"goes on after {done} of 400 steps" in out
    for name in ("journal.jsonl", "metrics.jsonl"):
        assert [json.loads(line)["step"] for line in launch.lines(name)] == list(range(400))
    assert [event.step for event in launch.events(events.Evaluated)] == [149, 299, 399]  # pyright: ignore
    assert json.loads((launch.directory / "summary.json").read_text())["steps"] == 400
    launch.await_nothing_left()

    third = launch.start(*command)
    out, err = third.communicate(timeout=LIMIT_S)
    assert (third.returncode, err) == (0, "")
    assert "this run is complete: all 400 steps are done" in out


@pytest.mark.process
def test_a_coordinator_that_is_started_again_replaces_agents_that_died_and_waits_for_those_of_others(launch) -> None:
    command = ("--nodes", "3", "--fault-tolerance", "1", "--steps", "99999")
    first = launch.start(*command)
    launch.await_step(3)
    os.kill(launch.find("elastic.agent", node=2), signal.SIGKILL)
    launch.wait_for(lambda: bool(launch.events(events.Failed)))
    joiner = launch.start("--join", str(launch.run_dir))
    launch.wait_for(lambda: len(launch.events(events.Joined)) == 4)
    launch.await_plan_with(2)
    launch.await_steps_from_now(1)
    first.kill()
    os.kill(launch.find("elastic.agent", node=1), signal.SIGKILL)
    first.wait()
    again = launch.start(*command)
    launch.wait_for(lambda: bool(launch.events(events.Resumed)))
    launch.await_plan_with(1)
    launch.await_steps_from_now(3)
    assert joiner.poll() is None
    assert launch.events(events.Rejected) == []
    assert 2 in launch.events(events.Planned)[-1].plan.nodes  # pyright: ignore
    launch.interrupt(again)
    joiner.communicate(timeout=LIMIT_S)
    launch.await_nothing_left()


@pytest.mark.process
def test_a_run_whose_processes_were_all_killed_goes_on_from_its_newest_checkpoint_T4(launch: Launch) -> None:
    command = ("--nodes", "3", "--fault-tolerance", "1", "--checkpoint-every", "20", "--steps", "300")
    command += ("--eval-every", "100")
    first = launch.start(*command)
    launch.await_step(70)
    launch.kill_all()
    first.wait()
    launch.await_nothing_left()

    out, err = launch.start(*command).communicate(timeout=LIMIT_S)
    assert err == ""
    assert "goes on with step" in out
    found = audit(launch.run_dir)
    assert (found.end_step, found.num_restores, found.violation) == (300, 1, None)
    assert 0 < found.num_undone_steps <= 40
    (incident,) = incidents_of(launch)
    assert (incident.kind, incident.num_redone_steps) == ("coordinator", found.num_undone_steps)
    assert {event.step for event in launch.events(events.Evaluated)} == {99, 199, 299}  # pyright: ignore
    folders = sorted(path.name for path in (launch.run_dir / "checkpoints").iterdir())
    assert [name.partition("-generation")[0] for name in folders] == [f"step-000{step}" for step in (259, 279, 299)]

    # More steps, on fewer nodes: the run goes on from where it ended. Another seed would be another run.
    longer = launch.start("--nodes", "2", "--steps", "350")
    out, err = longer.communicate(timeout=LIMIT_S)
    assert (longer.returncode, err) == (0, "")
    assert "it goes on with other settings: " in out
    assert "nodes 3 (now 2)" in out
    found = audit(launch.run_dir)
    assert (found.end_step, found.num_undone_steps, found.violation) == (350, incident.num_redone_steps, None)
    other = launch.start("--nodes", "2", "--steps", "350", "--seed", "3")
    _, err = other.communicate(timeout=LIMIT_S)
    assert other.returncode == 2
    assert "is of another run; they differ in seed 0 (saved) and 3 (now). Use the same settings, or another" in err


@pytest.mark.process
def test_a_run_that_loses_a_layer_goes_back_by_itself_and_one_that_is_interrupted_loses_nothing(launch: Launch) -> None:
    elsewhere = launch.directory / "elsewhere"
    command = ("--nodes", "2", "--fault-tolerance", "1", "--checkpoint-every", "20", "--steps", "99999")
    command += ("--checkpoint-dir", str(elsewhere))
    run = launch.start(*command)
    launch.await_step(50)
    for worker in [launch.find("fake_worker", node=node) for node in (0, 1)]:
        os.kill(worker, signal.SIGKILL)
    launch.wait_for(lambda: any(incident.num_redone_steps for incident in incidents_of(launch)))
    launch.await_steps_from_now(5)
    launch.interrupt(run)
    (loss,) = [incident for incident in incidents_of(launch) if incident.num_redone_steps]
    assert loss.kind == "loss"
    found = audit(launch.run_dir)
    assert found.violation is None
    assert found.num_undone_steps == loss.num_redone_steps
    # Its last step has a checkpoint, and a run of another directory can begin with it.
    assert max(elsewhere.iterdir()).name.startswith(f"step-{found.end_step - 1:06d}")
    other_dir = launch.directory / "second"
    second = launch.start(*command, "--run-dir", str(other_dir))
    files = [other_dir / name for name in ("config.json", "metrics.jsonl", "events.jsonl", "journal.jsonl")]
    launch.wait_for(lambda: all(file.exists() for file in files) and audit(other_dir).num_samples > 0)
    launch.interrupt(second)
    again = audit(other_dir)
    assert (again.first_step, again.violation) == (found.end_step, None)


@pytest.mark.process
def test_a_start_that_fails_or_is_killed_early_does_not_make_the_next_one_begin_anew(
    launch: Launch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--preset", "gpt-test", "--profile", "estimate", "--nodes", "2", "--checkpoint-every", "2", "--keep", "1")
    flags += ("--checkpoint-dir", str(launch.directory / "elsewhere"))
    first = launch.start(*flags, "--steps", "5")
    _, err = first.communicate(timeout=LIMIT_S)
    assert (first.returncode, err) == (0, "")

    failed, killed = launch.directory / "failed", launch.directory / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "last_generation", no_answer)
        message = refused([*flags, "--steps", "9", "--run-dir", str(failed)], capsys)
    assert "elsewhere cannot be read: not now; so nobody knows whether there is a checkpoint to go on from" in message
    # One that is killed before it has a plan leaves the beginnings of its files.
    killed.mkdir()
    config = (launch.run_dir / "config.json").read_text().replace('"steps": 5', '"steps": 13')
    (killed / "config.json").write_text(config)
    (killed / "events.jsonl").write_text(launch.lines("events.jsonl")[0] + "\n")
    for run_dir in (failed, killed):
        steps = ("--steps", "9" if run_dir is failed else "13")
        run = launch.start(*flags, *steps, "--run-dir", str(run_dir))
        _, err = run.communicate(timeout=LIMIT_S)
        assert (run.returncode, err) == (0, "")
        assert audit(run_dir).first_step == int(steps[1]) - 4
    (folder,) = (launch.directory / "elsewhere").iterdir()
    assert folder.name == "step-000012-generation-3"


def no_answer(_: CheckpointStore) -> int:
    raise OSError(errno.EIO, "not now")


@pytest.mark.process
def test_other_flags_do_not_go_on_with_a_run(launch: Launch) -> None:
    run = launch.start("--nodes", "2", "--steps", "9999")
    launch.await_step(3)
    second = launch.start("--nodes", "2", "--steps", "9999")
    _, err = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 2
    assert f"is in use by a running coordinator (process {run.pid})" in err
    run.kill()
    run.wait()
    other = launch.start("--nodes", "2", "--steps", "8888")
    _, err = other.communicate(timeout=LIMIT_S)
    assert other.returncode == 2
    assert "its run has other settings: steps 9999 (now 8888)" in err


@pytest.mark.process
def test_an_agent_that_is_told_to_end_leaves_and_the_others_go_on(launch: Launch) -> None:
    run = launch.start("--nodes", "3", "--fault-tolerance", "1", "--steps", "99999")
    launch.await_step(3)
    agent = psutil.Process(launch.find("elastic.agent", node=1))
    agent.terminate()
    launch.wait_for(lambda: agent.status() == psutil.STATUS_ZOMBIE)  # its parent looks after it in the end
    launch.await_steps_from_now(3)
    launch.interrupt(run)
    assert [event.node for event in launch.events(events.Leaving)] == [1]  # pyright: ignore
    assert launch.events(events.Failed) == []
    launch.await_nothing_left()


@pytest.mark.process
def test_a_node_whose_agent_stood_still_for_too_long_ends_when_it_goes_on(launch: Launch) -> None:
    run = launch.start("--nodes", "3", "--fault-tolerance", "1", "--steps", "99999")
    launch.await_step(3)
    agent = psutil.Process(launch.find("elastic.agent", node=1))
    worker = psutil.Process(launch.find("fake_worker.py", node=1))
    agent.suspend()
    launch.wait_for(lambda: bool(launch.events(events.Failed)))
    agent.resume()
    launch.wait_for(lambda: not agent.is_running() and not worker.is_running())
    log = (launch.run_dir / "logs" / "node-1.log").read_text()
    assert "node 1 ends: excluded: the agent of node 1 has been silent for 4.0 s" in log
    launch.await_steps_from_now(3)
    launch.interrupt(run)
    launch.await_nothing_left()


@pytest.mark.process
def test_a_node_joins_a_run_by_its_directory(launch: Launch) -> None:
    run = launch.start("--nodes", "2", "--max-nodes", "3", "--fault-tolerance", "1", "--steps", "99999")
    launch.await_step(3)
    joiner = launch.start("--join", str(launch.run_dir))
    launch.await_plan_with(2)
    launch.await_steps_from_now(3)
    launch.interrupt(run)
    _, err = joiner.communicate(timeout=LIMIT_S)
    assert (joiner.returncode, err) == (130, "")
    launch.await_nothing_left()


@pytest.mark.process
def test_a_worker_that_cannot_start_ends_the_run(launch: Launch) -> None:
    run = launch.start("--nodes", "2", worker=("--step-s", "soon"))
    _, err = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 1
    assert "ended with exit code 2" in err
    assert "invalid float value: 'soon'" in err  # the tail of its log
    launch.await_nothing_left()


@pytest.mark.process
def test_processes_on_several_hosts_take_part_in_one_run(launch: Launch) -> None:
    with bind("127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    common = ("--steps", "8", "--coordinator-address", address, "--num-processes", "2", "--token", "secret")
    common = (*common, "--fault-tolerance", "1")
    other = launch.start(*common, "--process-id", "1", worker=("--fault", "raise@1:4"))
    first = launch.start(*common, "--process-id", "0")
    out, err = first.communicate(timeout=LIMIT_S)
    assert (first.returncode, err) == (0, "")
    assert "done: 8 of 8 steps" in out
    assert "lost: the worker of node 1 failed: ValueError: invented trouble\n" in out
    log = f"  the end of its log ({launch.run_dir}/logs/node-1.log):\n"
    assert f"{log}    Traceback (invented)\n    ValueError: invented trouble\n" in out  # it came along
    other.communicate(timeout=LIMIT_S)
    assert other.returncode == 0
    launch.await_nothing_left()


@pytest.mark.process
def test_a_host_that_is_told_to_end_leaves_the_run_and_exits_with_0(launch: Launch) -> None:
    with bind("127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    common = ("--steps", "99999", "--fault-tolerance", "1", "--coordinator-address", address, "--num-processes", "3")
    first, second, third = [launch.start(*common, "--process-id", str(number)) for number in range(3)]
    launch.await_step(3)
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0
    launch.await_steps_from_now(3)
    launch.interrupt(first)
    third.communicate(timeout=LIMIT_S)
    assert third.returncode == 130
    assert launch.events(events.Failed) == []
    launch.await_nothing_left()


@pytest.mark.process
def test_a_coordinator_without_nodes_takes_those_that_join(launch: Launch) -> None:
    with bind("127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    coordinator = launch.start("--coordinator-address", address, "--nodes", "2", "--steps", "8", has_nodes=False)
    joined = [launch.start("--join", address) for _ in range(2)]
    out, err = coordinator.communicate(timeout=LIMIT_S)
    assert (coordinator.returncode, err) == (0, "")
    assert "done: 8 of 8 steps" in out
    for process in joined:
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
    launch.await_nothing_left()


@pytest.mark.process
def test_a_process_with_other_flags_is_refused_with_the_reason(launch: Launch) -> None:
    with bind("127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    common = ("--coordinator-address", address, "--num-processes", "2")
    first = launch.start(*common, "--process-id", "0", "--steps", "8")
    other = launch.start(*common, "--process-id", "1", "--steps", "9")
    _, err = other.communicate(timeout=LIMIT_S)
    assert other.returncode == 1
    assert "was started with other flags than the coordinator" in err
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=LIMIT_S)
