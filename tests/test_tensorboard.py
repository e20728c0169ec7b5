"""Scalars for TensorBoard, read back from the file."""

import struct
import sys
from pathlib import Path

import pytest

from oobleck_jax import events
from oobleck_jax.plan_text import parse_plan
from oobleck_jax.tensorboard import Scalars, check_tensorboard
from oobleck_jax.train import main
from tests.test_progress import committed, incident


def scalars_in(folder: Path) -> list[tuple[str, int, float]]:
    """Return (name, step, value) of all scalars: a file is records of length, checksum, data, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            event = Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


def test_what_a_run_tells_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    scalars = Scalars(tmp_path, tokens_per_step=1000, learning_rate=lambda step: 0.5 * step, first_step=0)
    plan = parse_plan("0-2,2-4 | 0-4", num_microbatches=4)
    for record in (
        events.Planned(generation=3, step=0, reason="", plan=plan, plan_reason=""),
        committed(0),
        committed(1, step_time_s=0.25),
        events.Evaluated(generation=1, step=1, loss=2.5, num_tokens=100),
        incident(kind="join"),
    ):
        scalars.take(record)
    scalars.close()
    assert scalars_in(tmp_path) == [
        ("cluster/generation", 0, 3.0),
        ("cluster/working_nodes", 0, 3.0),
        *_of_step(0, 4.25, 0.0, 0.5),
        *_of_step(1, 4.25, 0.5, 0.25),
        ("evaluation/loss", 1, 2.5),
        ("incidents/join_seconds", 1, 0.5),
    ]


def _of_step(step: int, loss: float, rate: float, seconds: float) -> list[tuple[str, int, float]]:
    return [
        ("train/loss", step, loss),
        ("train/grad_norm", step, 1.0),
        ("train/learning_rate", step, rate),
        ("speed/step_seconds", step, seconds),
        ("speed/tokens_per_second", step, 1000 / seconds),
    ]


def test_without_the_package_the_flag_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr("oobleck_jax.tensorboard.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert main(["--preset", "gpt-test", "--tensorboard"]) == 2
    assert "pip install 'oobleck-jax[tensorboard]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_with_the_package_it_is_not() -> None:
    pytest.importorskip("tensorboardX")
    check_tensorboard()
