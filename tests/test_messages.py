"""Each error that a user can meet is met by a test: one that quotes its message."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from oobleck_jax import errors
from tests.documents import ROOT


QUOTED = 20  # characters in a row of the longest piece of a message that are enough to know it by
# Messages that no test of this suite quotes.
UNMET = {
    "does not fit this model and optimizer:",  # a checkpoint of another optimizer: other settings are refused before
    "has no record in its manifest",  # of checkpoints
    "has one of *?[], which stand for other characters there",  # of --checkpoint-dir
    "steps are committed)",  # a run of scripts/chaos.py that stands still
    "the coordinator cannot go on:",  # a disk that fails in the middle of a run
    # These are met by runs of scripts that take minutes, and go well where they are tested.
    "layers cannot be; give fewer",
    "the run of",
    "the run ended (",
    "two cores are needed, one for each node",
    "without a profile there is nothing to compare",
    "; two at least, or nobody is left to go on",
}
# Where a message is made elsewhere, in which tests look for it.
NO_WORDS: set[tuple[str, str]] = {
    ("oobleck_jax/checkpoint/reader.py", "CheckpointDamaged(what, step=checkpoint.step, group=group, file=None)"),
    ("oobleck_jax/checkpoint/store.py", "CheckpointDamaged(what, step=manifest.step, group=None, file=folder)"),
    (
        "oobleck_jax/checkpoint/store.py",
        "CheckpointDamaged(what, step=int(match[1]) if match else None, group=None, file=path)",
    ),
    ("oobleck_jax/checkpoint/store.py", "CheckpointUnwritable(folder / MANIFEST, str(error.strerror))"),
    ("oobleck_jax/checkpoint/writer.py", "CheckpointUnwritable(folder / group, cause_of(error))"),
    ("oobleck_jax/checkpoint/object_store.py", "ObjectStoreError(path, cause_of(errors[-1]))"),
    ("oobleck_jax/checkpoint/object_store.py", "ObjectStoreError(path, f'no answer within {limit_s:.0f} s')"),
    (
        "oobleck_jax/checkpoint/store.py",
        "CheckpointDamaged(found[1], step=self.step, group=group, file=folder / found[0])",
    ),
    ("oobleck_jax/saved_states.py", "CheckpointUnreadable(str(error), step=point.step, group=group)"),
    ("oobleck_jax/elastic/coordinator.py", "ActionRefused(why)"),
    ("oobleck_jax/options.py", "ConfigError(WHY_NOT_FLOAT16)"),
    ("oobleck_jax/train.py", "ConfigError(past.why_not(run_dir.path))"),
    ("scripts/export_hf.py", "ConfigError(str(error))"),
}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted([*ROOT.glob("oobleck_jax/**/*.py"), *ROOT.glob("models/*.py"), *ROOT.glob("scripts/*.py")]):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def errors_of_users() -> set[str]:
    """Return the names of our errors, but for those that errors.py says are internal."""
    classes = [node for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = {"OobleckError"}
    while new := {one.name for one in classes if {base.id for base in one.bases if isinstance(base, ast.Name)} & found}:
        if new <= found:
            break
        found |= new
    internal = re.findall(r"^ +(\w+) .*\(internal\)$", errors.__doc__ or "", re.MULTILINE)
    assert set(internal) < found
    return found - set(internal)


def raised() -> Iterator[tuple[str, str, str]]:
    """Yield where an error is raised, how, and the longest piece of its message that stands there, or nothing."""
    names = errors_of_users()
    for path, tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=arguments) as call) if name in names:
                    pieces = [piece.strip() for argument in arguments[:1] for piece in literals(argument)]
                    yield str(path.relative_to(ROOT)), ast.unparse(call), max(pieces, key=len, default="")
                case _:
                    pass


def literals(message: ast.expr) -> list[str]:
    """Return what stands between the values that are filled in."""
    if isinstance(message, ast.JoinedStr):
        return [str(part.value) for part in message.values if isinstance(part, ast.Constant)]
    return [message.value] if isinstance(message, ast.Constant) and isinstance(message.value, str) else []


def strings_of_tests() -> str:
    """Return all strings in tests, with a gap after each, as they stand and as regular expressions without escapes."""
    found: list[str] = []
    for path in (ROOT / "tests").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) if path != Path(__file__) else []
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        constants = [node for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
        found += [node.value for node in constants if isinstance(node.value, str)]
    text = "\0".join(found)
    return text + "\0" + re.sub(r"\\(.)", r"\1", text)


def is_quoted(piece: str, text: str) -> bool:
    length = min(QUOTED, len(piece))
    return any(piece[first : first + length] in text for first in range(len(piece) - length + 1))


def test_each_message_of_an_error_is_quoted_by_a_test() -> None:
    text = strings_of_tests()
    unmet = {piece for _, _, piece in raised() if piece and not is_quoted(piece, text)}
    assert unmet == UNMET


def test_where_a_message_is_made_elsewhere_is_known() -> None:
    assert {(path, call) for path, call, piece in raised() if not piece} == NO_WORDS


def test_the_errors_of_users_are_those_of_the_package() -> None:
    names = errors_of_users()
    assert {"ConfigError", "NotEnoughNodes", "LiveRunError", "TraceError"} < names
    assert not {"PeerLost", "Stalled", "ValueError"} & names


def test_a_few_words_do_not_quote_a_message() -> None:
    message = "must end in .bin; its header goes to a .json beside it"
    assert is_quoted(message, "--output a must end in .bin; its header goes elsewhere")
    assert not is_quoted(message, "must end in .bin")
    assert is_quoted("too few", "there are too few")
