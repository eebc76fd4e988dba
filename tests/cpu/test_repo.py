"""The rules of the repository itself: layers, line budget, the file map in docs/architecture.md."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "octavo"

# A module imports lower layers and, within its own layer, only what stands to its left.
LAYERS: list[list[str]] = [
    ["errors", "env", "files", "logging", "sampling_params", "outputs"],
    ["config"],
    ["core", "kernels", "distributed"],
    ["attention", "layers"],
    ["models", "weights", "sample", "structured", "spec_decode", "kv_transfer"],
    ["worker"],
    ["executor"],
    ["engine"],
    ["llm", "server", "cli"],
]
# Siblings of layer 3 do not see each other; `models` sees nothing of `weights`' left, and so on.
ISOLATED = [{"core", "kernels", "distributed"}]
# Read-only tools beside the stack: they may use layers 1-3 and the facade.
TOOLS = {"inspect", "bench"}
TOOLS_MAY_USE = {*LAYERS[0], *LAYERS[1], *LAYERS[2], "llm", *TOOLS}
NO_TORCH = ["errors", "env", "files", "logging", "sampling_params", "outputs", "config", "core"]


def place(part: str) -> tuple[int, int]:
    for number, layer in enumerate(LAYERS):
        if part in layer:
            return number, layer.index(part)
    raise AssertionError(f"octavo.{part} has no layer")


def imports_of(path: Path) -> set[str]:
    """Absolute module names that a file imports anywhere, type-checking blocks included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def allowed(importer: str, imported: str) -> bool:
    if importer == imported or importer in ("cli", "__init__", "__main__"):
        return True
    if importer in TOOLS:
        return imported in TOOLS_MAY_USE
    if imported in TOOLS:
        return False
    if any({importer, imported} <= group for group in ISOLATED):
        return False
    return place(imported) < place(importer)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    importer = part_of(path)
    for name in imports_of(path):
        pieces = name.split(".")
        if pieces[0] == "octavo" and len(pieces) > 1:
            target = PACKAGE / pieces[1]
            if target.exists() or target.with_suffix(".py").exists():
                assert allowed(importer, pieces[1]), f"{importer} must not import {name}"
        if importer in NO_TORCH:
            assert pieces[0] not in ("torch", "transformers"), f"{importer} must not import {name}"


def test_layering_check_can_fail() -> None:
    assert not allowed("core", "worker")
    assert not allowed("attention", "layers")
    assert not allowed("engine", "bench")
    assert allowed("layers", "attention")


def test_line_budget() -> None:
    total = 0
    for path in modules():
        text = path.read_text()
        lines = len(text.splitlines())
        total += lines
        assert lines <= 400, f"{path} has {lines} lines (budget 400)"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{path}:{node.lineno} {node.name} has {length} lines"
    assert total <= 20_000, f"the package has {total} lines (budget 20,000)"


def test_every_module_says_what_it_owns() -> None:
    for path in modules():
        tree = ast.parse(path.read_text())
        assert not tree.body or ast.get_docstring(tree), f"{path} has no module docstring"


def test_architecture_map_is_up_to_date() -> None:
    """`python tools/file_map.py` makes it from the modules' docstrings."""
    spec = importlib.util.spec_from_file_location("file_map", ROOT / "tools" / "file_map.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert tool.updated(text) == text
