from dataclasses import dataclass
from pathlib import Path

import pytest

from oobleck_jax.errors import ConfigError, OobleckError
from oobleck_jax.script import check_picture, make_room, run_script


@dataclass(frozen=True, kw_only=True)
class Arguments:
    json: Path | None = None
    plot: Path | None = None


def write(arguments: Arguments) -> None:
    assert arguments.json is not None
    arguments.json.write_text("{}")


def test_the_folder_of_a_result_is_made(tmp_path: Path) -> None:
    assert run_script(write, Arguments(json=tmp_path / "new" / "result.json", plot=tmp_path / "new" / "a.png")) == 0
    assert (tmp_path / "new" / "result.json").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file/result.json", "its folder cannot be made (File exists); choose another"),
        ("plan.gif", "the ending says what is written; give one of .png, .pdf, .svg"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / name
    arguments = Arguments(plot=path) if path.suffix == ".gif" else Arguments(json=path)
    assert run_script(lambda _: pytest.fail("it began"), arguments) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=r"--json .* cannot be written; choose another folder"):
        make_room(tmp_path / "a.json", flag="--json")


def test_what_fails_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: Arguments) -> int:
        raise OobleckError("no core is left")

    assert run_script(fail, Arguments()) == 1
    assert capsys.readouterr().err.endswith(": no core is left\n")


def test_other_endings_may_be_allowed() -> None:
    check_picture(Path("trace.json"), flag="--output", besides=(".json",))
