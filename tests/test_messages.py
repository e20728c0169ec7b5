"""Each error that a user can meet is met by a test: one that quotes its message."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import ROOT


ERRORS = {
    "ActionRefused",
    "CheckpointDamaged",
    "CheckpointUnwritable",
    "ConfigError",
    "DataError",
    "LiveError",
    "LiveRunError",
    "NotEnoughNodes",
    "PlanError",
    "RunFailed",
    "TraceError",
    "UnsupportedJax",
}
QUOTED = 12  # characters in a row that are enough to know a message by
# Not met by a test of this suite:
EXEMPT = {
    "the coordinator cannot go on": "a disk that fails in the middle of a run",
    "the run ended (": "scripts/replay.py --live is run by a test of documents only",
}


def raised() -> Iterator[tuple[str, list[str]]]:
    """Yield where an error is raised, and the parts of its message that stand in the source."""
    for path in [*ROOT.glob("oobleck_jax/**/*.py"), *ROOT.glob("models/*.py"), *ROOT.glob("scripts/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                parts = [part.strip() for argument in node.exc.args[:1] for part in literals(argument)]
                if node.exc.func.id in ERRORS and any(len(part) >= QUOTED for part in parts):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", [part for part in parts if len(part) >= QUOTED]


def literals(message: ast.expr) -> list[str]:
    """Return what stands between the values that are filled in."""
    if isinstance(message, ast.JoinedStr):
        return [str(part.value) for part in message.values if isinstance(part, ast.Constant)]
    return [message.value] if isinstance(message, ast.Constant) and isinstance(message.value, str) else []


@pytest.fixture(scope="module")
def tests_text() -> str:
    """All tests, with pieces of strings joined and without what regular expressions add."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    return re.sub(r"\\(.)", r"\1", re.sub(r'"\s*\n\s*[rf]*"', "", "\n".join(texts)))


def test_each_message_of_an_error_is_quoted_by_a_test(tests_text: str) -> None:
    unmet = [
        f"{where}: {' ... '.join(parts)}"
        for where, parts in raised()
        if not any(beginning in parts[0] for beginning in EXEMPT)
        and not any(
            part[first : first + QUOTED] in tests_text for part in parts for first in range(len(part) - QUOTED + 1)
        )
    ]
    assert not unmet, "\n".join(unmet)
