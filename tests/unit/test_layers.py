"""The layer rule, enforced on every import statement of the package, wherever in a file it stands."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "pyggml_spec"
FILES = sorted(ROOT.rglob("*.py"))
LEAVES = {"errors", "records"}
PURE_DECODE = {
    *("alone", "arguments", "prefix_cache", "protocols", "round", "sampling", "session", "session_caches"),
    *("stats", "stops"),
}

# package -> what of ours it may import besides itself and the leaves
ALLOWED = {
    "_native": set(),
    "ggml": {"_native"},
    "gguf_io": set(),
    "models": {"ggml", "gguf_io", "state"},
    "state": {"ggml", "gguf_io"},
    "tree": set(),
    "policy": set(),
    "tokenizer": set(),
    "assets": set(),
    "decode": {"ggml", "gguf_io", "models", "state", "tree", "policy", "tokenizer", "assets"},
    "convert": {"gguf_io", "ggml"},  # ggml for its quantisers
    "cli": {"decode", "gguf_io", "ggml", "tokenizer", "assets", "convert", "tree", "_native"},
    "": {"decode", "cli"},  # __init__.py and __main__.py
    "errors": set(),
    "records": set(),
}


@cache
def syntax_of(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    """Dotted name below pyggml_spec, without __init__."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name below pyggml_spec) of every import of ours, relative ones resolved."""
    package = ["pyggml_spec", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(syntax_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{prefix}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "pyggml_spec":
                yield node.lineno, name.removeprefix("pyggml_spec").lstrip(".")


def allowed_for(module: str) -> set[str]:
    """Top-level packages that a module may import."""
    package, _, rest = module.partition(".")
    if package == "__main__":
        package = ""
    if module == "gguf_io.weights":
        return LEAVES | {"gguf_io", "ggml"}
    if package == "decode" and rest in PURE_DECODE:
        return LEAVES | {"decode", "tree", "policy"}
    return LEAVES | {package} | ALLOWED[package]


def breaches(path: Path) -> Iterator[str]:
    """Imports of one file that its layer must not make."""
    module = module_of(path)
    is_pure = module.startswith("decode.") and module.partition(".")[2] in PURE_DECODE
    for line, name in imports_of(path):
        first, _, rest = name.partition(".")
        if first in ("", "__version__"):
            continue
        if first not in allowed_for(module) or (
            is_pure and first == "decode" and rest.split(".")[0] not in PURE_DECODE
        ):
            yield f"{module or '__init__'}:{line} imports {name}"


def test_imports_go_one_way():
    """No module imports a layer above its own, nor a sibling it must stay independent of."""
    assert [text for path in FILES for text in breaches(path)] == []


def test_the_rule_notices_a_breach(tmp_path, monkeypatch):
    """A module that imports upwards is seen, relative or absolute, inside a function or not."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "tree" / "bad.py"
    file.parent.mkdir()
    file.write_text(
        "from ..decode import session\nimport pyggml_spec.ggml\ndef f():\n    from pyggml_spec import cli\n"
    )

    assert [name for _, name in imports_of(file)] == ["decode.session", "ggml", "cli"]
    assert not {"decode", "ggml", "cli"} & allowed_for("tree.bad")


def names_used(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of calls by bare name, of attributes, imported names and `global` statements."""
    for node in ast.walk(syntax_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.lineno, node.func.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Global):
            yield node.lineno, "global"


def test_only_the_command_line_prints_or_reads_the_environment():
    """No environment variables as an API, no output from a library, no state in module globals."""
    forbidden = {"print", "environ", "environb", "getenv", "global"}
    exempt = {("_native.flavours", "print")}  # the build runs this file as a script
    used = [
        f"{module}:{line} {name}"
        for path in FILES
        if not (module := module_of(path)).startswith("cli")
        for line, name in names_used(path)
        if name in forbidden and (module, name) not in exempt
    ]

    assert used == []


def test_importing_loads_no_native_code():
    """The package and everything that decides about decoding come up without an extension module of ours or cffi."""
    names = [f"pyggml_spec.decode.{name}" for name in sorted(PURE_DECODE)]
    names += ["pyggml_spec", "pyggml_spec.tree.build", "pyggml_spec.policy"]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "bad = [m for m in sys.modules if m.startswith(('pyggml_spec._native', 'pyggml_spec.ggml', '_cffi_backend'))]\n"
        "sys.exit(f'loaded {bad}' if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
