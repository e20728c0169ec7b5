"""Rules of the house that a machine can check: who may import whom, what stays free of jax, how long files are."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PACKAGES = ("oobleck_jax", "models", "scripts")
MAX_LINES = 400
# A state machine belongs into one file: everything that changes its state can be read in one place.
LONG = {
    "oobleck_jax/elastic/course.py": 600,
    "oobleck_jax/elastic/membership.py": 425,
    "oobleck_jax/execution/node.py": 420,
}

BASE = (
    "oobleck_jax.checkpoint.manifest",
    "oobleck_jax.config",
    "oobleck_jax.errors",
    "oobleck_jax.events",
    "oobleck_jax.learning_rate",
    "oobleck_jax.memory",
    "oobleck_jax.model",
    "oobleck_jax.model_config",
    "oobleck_jax.planning.plan",
)
# What a folder, or a module, may import of this project besides itself. Who is not listed may import anything.
MAY_IMPORT = {
    "oobleck_jax/planning": ("oobleck_jax.config", "oobleck_jax.errors"),
    "oobleck_jax/elastic": BASE,
    "oobleck_jax/execution": (
        *BASE,
        "oobleck_jax.data",
        "oobleck_jax.inject",
        "oobleck_jax.kept_files",
        "oobleck_jax.token_file",
        "oobleck_jax.planning",
    ),
    "oobleck_jax/checkpoint": (*BASE, "oobleck_jax.planning", "oobleck_jax.execution"),
    "oobleck_jax/replay": ("oobleck_jax.config", "oobleck_jax.errors", "oobleck_jax.planning"),
    "models": ("oobleck_jax.config", "oobleck_jax.errors", "oobleck_jax.model", "oobleck_jax.model_config"),
    "oobleck_jax/config.py": BASE,
    "oobleck_jax/data.py": ("oobleck_jax.config", "oobleck_jax.errors", "oobleck_jax.token_file"),
    "oobleck_jax/errors.py": (),
    "oobleck_jax/events.py": BASE,
    "oobleck_jax/inject.py": BASE,
    "oobleck_jax/kept_files.py": (),
    "oobleck_jax/learning_rate.py": BASE,
    "oobleck_jax/memory.py": (),
    "oobleck_jax/model.py": (),
    "oobleck_jax/model_config.py": ("oobleck_jax.model",),
}
# Heavy packages, and the folders that do without.
FORBIDDEN = {
    "oobleck_jax/planning": ("jax", "jaxlib", "flax", "optax", "orbax", "time", "random", "socket", "asyncio"),
    "oobleck_jax/elastic": ("jax", "jaxlib", "flax", "optax", "orbax", "numpy", "rich", "tyro"),
    "oobleck_jax/elastic/membership.py": ("time", "random", "socket", "asyncio", "aiohttp", "threading", "logging"),
    "oobleck_jax/elastic/course.py": ("time", "random", "socket", "asyncio", "aiohttp", "threading", "logging"),
    "oobleck_jax/elastic/roster.py": ("time", "random", "socket", "asyncio", "aiohttp", "threading", "logging"),
    "oobleck_jax/elastic/generation.py": ("time", "random", "socket", "asyncio", "aiohttp", "threading", "logging"),
    **{
        f"oobleck_jax/checkpoint/{name}.py": ("jax", "flax", "orbax", "numpy", "oobleck_jax.execution")
        for name in ("compatibility", "election", "files", "manifest", "object_store", "scratch", "store")
    },
    "oobleck_jax/replay": ("jax", "jaxlib", "flax", "optax", "orbax", "time", "socket", "asyncio", "subprocess"),
    "oobleck_jax/elastic/child.py": ("oobleck_jax", "msgspec", "aiohttp"),
}


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, wherever in it, except for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if _is_module(name) else str(node.module) for name in names)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def rules_for(path: Path, rules: dict[str, tuple[str, ...]]) -> list[tuple[str, tuple[str, ...]]]:
    name = name_of(path)
    return [(where, what) for where, what in rules.items() if name == where or name.startswith(f"{where}/")]


def test_imports_go_one_way() -> None:
    wrong: list[str] = []
    for path in modules():
        found = list(imports(path))
        for where, allowed in rules_for(path, MAY_IMPORT):
            own = where.removesuffix(".py").replace("/", ".")
            ours = [module for module in found if is_within(module, PACKAGES)]
            wrong += [f"{name_of(path)}: {module}" for module in ours if not is_within(module, (*allowed, own))]
        for _, forbidden in rules_for(path, FORBIDDEN):
            wrong += [f"{name_of(path)}: {module}" for module in found if is_within(module, forbidden)]
        if not name_of(path).startswith("scripts/"):
            wrong += [f"{name_of(path)}: {module}" for module in found if is_within(module, ("scripts", "tests"))]
    assert wrong == []


def test_what_is_private_to_jax_is_used_in_one_module() -> None:
    private = ("jax._src", "jaxlib", "jax.experimental")
    users = {name_of(path) for path in modules() if any(is_within(module, private) for module in imports(path))}
    assert users <= {"oobleck_jax/execution/jaxlib_private.py"}


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert {name: length for name, length in lengths.items() if length > LONG.get(name, MAX_LINES)} == {}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("oobleck_jax.train", {"jax", "jaxlib", "flax", "scipy"}),
        ("oobleck_jax.elastic.agent", {"jax", "jaxlib", "numpy", "rich", "tyro"}),
        ("oobleck_jax.worker", {"scipy", "orbax", "aiohttp"}),
        ("oobleck_jax.planning.planner", {"jax", "jaxlib", "aiohttp"}),
        ("models.presets", {"jax", "jaxlib", "flax"}),
    ],
)
def test_processes_that_must_stay_small_do_not_import_what_is_big(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert absent.isdisjoint(loaded.split())
