"""Size budgets and documentation of the package, counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parents[2] / "pyggml_spec"
SOURCES = {path.relative_to(ROOT): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
SYNTAX = {path: ast.parse(source) for path, source in SOURCES.items()}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
N_LINES_OBVIOUS = 4  # a function or property this short may go without a docstring


def n_lines(node: ast.stmt) -> int:
    """Lines of a definition without its decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_are_short():
    """At most 400 lines a file, 600 for a model builder."""
    limits = {path: 600 if path.parent.name == "models" else 400 for path in SOURCES}

    assert [path for path, source in SOURCES.items() if len(source.splitlines()) > limits[path]] == []


def test_functions_are_short():
    """Half of all functions fit into 12 lines and nine of ten into 40 (docstrings count)."""
    lengths = [n_lines(node) for tree in SYNTAX.values() for node in ast.walk(tree) if isinstance(node, FUNCTION)]

    assert median(lengths) <= 12
    assert quantiles(lengths, n=10)[-1] <= 40


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public classes, functions and methods without a docstring, and the module itself."""
    if tree.body and not ast.get_docstring(tree):
        yield "module"
    for node in tree.body:
        if not isinstance(node, (ast.ClassDef, *FUNCTION)) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node) and (isinstance(node, ast.ClassDef) or n_lines(node) > N_LINES_OBVIOUS):
            yield node.name
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            is_public = isinstance(member, FUNCTION) and not member.name.startswith("_")
            if is_public and n_lines(member) > N_LINES_OBVIOUS and not ast.get_docstring(member):
                yield f"{node.name}.{member.name}"


def test_public_names_are_documented():
    """Every module, public class and public function of more than a few lines has a docstring."""
    assert [f"{path}: {name}" for path, tree in SYNTAX.items() for name in undocumented(tree)] == []
