"""The layout of the package: imports go one way, files and functions stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ["errors", "utils", "rotary", "feature_maps", "ops", "positions", "layers", "losses", "data", "generation"]
ROOMS += [
    "models",
    "segmented",
    "distributed",
    "profiling",
    "evaluation",
    "interop",
    "serving",
    "training",
    "cli",
    "__main__",
]
"""Top-level modules of linrope: each imports only from those before it."""
OPTIONAL = {
    "linrope.interop.transformers",  # an extra
    "linrope.interop.onnx.export",  # an extra
    "linrope.serving.http",  # an extra
    "linrope.serving.metrics",  # an extra
    "linrope.serving.server",  # an extra
    "linrope.data.tokenizers.subwords",  # an extra
    "linrope.models.sharded_checkpoint",  # torch.distributed is not in every build, and its import takes a second
    "linrope.ops.triton_kernel.compile_ahead",  # Triton is on some platforms only
    "linrope.ops.triton_kernel.configurations",
    "linrope.ops.triton_kernel.kernels",
    "linrope.ops.triton_kernel.one_configuration",
}
"""Where a function may import: of what is optional."""
KERNELS = ("linrope/ops/triton_kernel/kernels.py",)
FILES = sorted(path for top in ("linrope", "benchmarks") for path in (ROOT / top).rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


@cache
def imports_of(module: str) -> list[tuple[str, bool]]:
    """(module of this repository, whether a function imports it) for each import of a module; not those for types."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield (full if full in MODULES else node.module), inside
        elif isinstance(node, ast.Import):
            yield from ((name.name, inside) for name in node.names)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside or isinstance(node, ast.FunctionDef))

    tree = ast.parse(MODULES[module].read_text())
    return [(name, inside) for name, inside in walk(tree, False) if name in MODULES]


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines of code without the docstring) of each function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            first = node.body[0]
            docstring = first.end_lineno - first.lineno + 1 if has_docstring else 0
            yield node.name, node.end_lineno - node.lineno + 1 - docstring


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("linrope.")])
def test_imports_go_one_way(module):
    room = ROOMS.index(module.split(".")[1])
    later = [name for name, _ in imports_of(module) if name != "linrope" and ROOMS.index(name.split(".")[1]) > room]
    assert later == []


def test_no_modules_import_each_other():
    graph = {module: {name for name, inside in imports_of(module) if not inside} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_functions_import_optional_modules_only():
    found = {(module, name) for module in MODULES for name, inside in imports_of(module) if inside}
    assert {name for _, name in found} <= OPTIONAL, found


def test_files_and_functions_are_short():
    files = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: n for name, n in files.items() if n > 500 and name not in KERNELS} == {}
    functions = {f"{name}:{function}": n for name in files for function, n in functions_of(ROOT / name)}
    assert {name: n for name, n in functions.items() if n > 60 and not name.startswith(KERNELS)} == {}


def test_the_library_imports_no_test_and_no_benchmark():
    texts = {path: path.read_text() for path in FILES if path.is_relative_to(ROOT / "linrope")}
    assert [path for path, text in texts.items() if "from benchmarks" in text or "from tests" in text] == []


def test_no_kernel_shares_an_error_with_the_definition():
    """Only the table of backends imports the definition, which imports no kernel."""
    reference = "linrope.ops.reference"
    assert [module for module in MODULES if reference in dict(imports_of(module))] == ["linrope.ops.backends"]
    assert not [name for name, _ in imports_of(reference) if "kernel" in name or "registration" in name]


@pytest.mark.exhaustive
def test_it_can_be_imported_on_windows():
    """Where the modules of POSIX are missing."""
    program = """
import importlib, pkgutil, sys, types
import jsonargparse, lightning.pytorch.cli, multiprocessing.forkserver, rich.console, torch.distributed.checkpoint
sys.platform = "win32"
sys.modules |= dict.fromkeys(("fcntl", "resource", "termios", "pwd", "grp"))
sys.modules["msvcrt"] = types.ModuleType("msvcrt")
import linrope
for module in pkgutil.walk_packages(linrope.__path__, "linrope."):
    if module.name not in {*sys.argv[1:], "linrope.__main__"}:
        importlib.import_module(module.name)
"""
    subprocess.run([sys.executable, "-c", program, *OPTIONAL], cwd=ROOT, check=True)
