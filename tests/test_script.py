import ast
from pathlib import Path

import pytest

from oobleck_jax.errors import ConfigError, OobleckError
from oobleck_jax.script import make_room, make_room_for_picture, run_script
from tests.documents import ROOT


SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
RESULTS = {"json", "plot", "output"}  # flags that name a file to write
WRITERS = {"make_room", "make_room_for_picture"}
OTHERS = {
    ("export_hf", "output"),  # a folder
    ("prepare_data", "output"),  # two files, that are written while it works
}


def test_the_folder_of_a_result_is_made(tmp_path: Path) -> None:
    make_room(tmp_path / "new" / "result.json", flag="--json")
    (tmp_path / "new" / "result.json").write_text("{}")
    make_room(tmp_path / "new" / "result.json", flag="--json")
    make_room_for_picture(tmp_path / "other" / "a.png", flag="--plot")
    assert (tmp_path / "other").is_dir()
    make_room(None, flag="--json")
    make_room_for_picture(None, flag="--plot")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file/result.json", "its folder cannot be made (File exists); choose another"),
        ("folder", "is a folder; name a file, such as {path}/result"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    path = tmp_path / name
    with pytest.raises(ConfigError) as refused:
        make_room(path, flag="--json")
    assert message.format(path=path) in str(refused.value)


@pytest.mark.parametrize("name", ["plan.PNG", "plan.pdf", "plan.svg", "plan.jpg"])
def test_whatever_can_be_drawn_may_be_named(tmp_path: Path, name: str) -> None:
    make_room_for_picture(tmp_path / name, flag="--plot")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the ending says what is written; give one of \.json, .*\.png"):
        make_room_for_picture(tmp_path / "plan.txt", flag="--plot", besides=(".json",))
    make_room_for_picture(tmp_path / "plan.json", flag="--plot", besides=(".json",))


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=r"--json .* cannot be written; choose another folder"):
        make_room(tmp_path / "a.json", flag="--json")


@pytest.mark.parametrize(("error", "exit_code"), [(OobleckError, 1), (ConfigError, 2)])
def test_what_fails_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], error: type[OobleckError], exit_code: int
) -> None:
    def fail(_: None) -> int:
        raise error("no core is left")

    assert run_script(fail, None) == exit_code
    assert capsys.readouterr().err.endswith(": no core is left\n")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_makes_room_for_its_results(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    flags = {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in RESULTS
    }
    made = {
        node.args[0].attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WRITERS
        if isinstance(node.args[0], ast.Attribute)
    }
    assert made == {flag for flag in flags if (path.stem, flag) not in OTHERS}
