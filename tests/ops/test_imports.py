"""The definition stands alone: an error in it cannot be shared by a kernel."""

import ast
from pathlib import Path

import linrope.ops

OPS = Path(linrope.ops.__file__).parent


def imported(file: Path) -> set[str]:
    """The modules, and names of modules, that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_no_kernel_imports_the_definition():
    """Only the table of backends does."""
    importers = [file.name for file in OPS.rglob("*.py") if "linrope.ops.reference" in imported(file)]
    assert importers == ["backends.py"]


def test_the_definition_imports_no_kernel():
    assert not [name for name in imported(OPS / "reference.py") if "kernel" in name or "registration" in name]
