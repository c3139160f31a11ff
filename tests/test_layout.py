"""The layout that packaging depends on, and the sizes that keep code readable."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = ("kvstore", "transports", "codecs", "bench")
TOP_LEVEL = {"pyproject.toml", "README.md", *SOURCE_ROOTS, "tests", "examples", "docs", "Makefile"} | {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "constraints.txt",
}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def packages(root: Path) -> Iterator[Path]:
    """Every folder below ``kvferry/`` of a source root that has Python files of its own or below it."""
    for folder in sorted(p for p in (root / "kvferry").rglob("*") if p.is_dir() and p.name != "__pycache__"):
        if any(folder.rglob("*.py")):
            yield folder


def test_the_top_level_is_fixed() -> None:
    built = {"build", "dist", "htmlcov"}
    found = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")} - built
    assert found <= TOP_LEVEL, f"not in the layout: {sorted(found - TOP_LEVEL)}"
    assert found >= TOP_LEVEL - {"examples"}, f"missing: {sorted(TOP_LEVEL - found)}"


@pytest.mark.parametrize("name", SOURCE_ROOTS)
def test_source_roots_hold_portions_of_a_namespace(name: str) -> None:
    """An ``__init__.py`` here would hide the other portions, or the standard library's ``codecs``."""
    root = ROOT / name
    assert not (root / "__init__.py").exists()
    assert not (root / "kvferry" / "__init__.py").exists()
    assert {p.name for p in root.iterdir()} - {"__pycache__"} == {"kvferry"}
    first_level = [p for p in packages(root) if p.parent.name == "kvferry"]
    assert first_level or name == "kvstore"
    for package in packages(root):
        assert (package / "__init__.py").is_file(), f"{package} has no __init__.py"
    for package in first_level:
        assert (package / "py.typed").is_file(), f"{package} has no py.typed"


def test_tests_are_no_packages() -> None:
    found = list((ROOT / "tests").rglob("__init__.py"))
    assert not found, f"pytest runs with --import-mode=importlib: remove {found}"


def test_files_are_short() -> None:
    lengths = {p: len(p.read_text().splitlines()) for p in python_files(*SOURCE_ROOTS)}
    long = [f"{p.relative_to(ROOT)}: {n}" for p, n in lengths.items() if n > MAX_FILE_LINES]
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Public docstrings say a lot; they do not make the code longer."""
    first = node.body[0]
    documented = ast.get_docstring(node) is not None
    return (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0


def test_functions_are_short() -> None:
    long = []
    for path in python_files(*SOURCE_ROOTS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines}")
    assert not long, f"over {MAX_FUNCTION_LINES} lines: {long}"


def test_the_installed_version_is_that_of_the_project() -> None:
    found = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    assert metadata.version("kvferry") == found[1]
    assert f"[{found[1]}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_has_a_reason() -> None:
    """ADR 0007 names each distribution that pyproject.toml asks for."""
    text = (ROOT / "pyproject.toml").read_text()
    tables = text[text.index("dependencies = [") : text.index("[project.scripts]")]
    names = set(re.findall(r'^\s*"([A-Za-z0-9][A-Za-z0-9._-]*)', tables, re.MULTILINE))
    names |= set(re.findall(r'[\[,]\s*"([A-Za-z0-9][A-Za-z0-9._-]*)', tables))
    reasons = next((ROOT / "docs" / "adr").glob("0007-*.md")).read_text()
    missing = sorted(n for n in names - {"kvferry"} if f"`{n}`" not in reasons)
    assert not missing, f"docs/adr/0007 says nothing of {missing}"


def test_decisions_are_numbered_and_listed() -> None:
    folder = ROOT / "docs" / "adr"
    files = sorted(p.name for p in folder.glob("[0-9]*.md"))
    assert [name[:4] for name in files] == [f"{i:04d}" for i in range(len(files))]
    index = (folder / "README.md").read_text()
    assert not [name for name in files if f"({name})" not in index]


def test_every_package_is_in_the_wheel() -> None:
    """The build backend takes a table, one line a sub-package; a folder without a line would be left out."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = set(re.findall(r'^"(kvferry/\w+)" = "(\w+)/kvferry/\w+"$', text, re.MULTILINE))
    found = {
        (f"kvferry/{package.name}", root)
        for root in SOURCE_ROOTS
        for package in packages(ROOT / root)
        if package.parent.name == "kvferry"
    }
    assert listed == found
