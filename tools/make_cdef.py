"""Make pyggml_spec/_native/cdef.h: the declarations of ggml that names.txt lists, as cffi reads them.

    python tools/make_cdef.py            rewrite cdef.h
    python tools/make_cdef.py --check    exit with 1 if it is not what the headers and names.txt give

Needs a C compiler, pycparser (cffi brings it) and the pinned upstream (from the cache, or as the build obtains it).
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pycparser import c_ast, c_generator, c_parser

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "pyggml_spec/_native"
HEAD = "// Made by tools/make_cdef.py from the pinned headers and names.txt; not to be edited.\n\n"

# What pycparser cannot read; none of it changes a declaration's type.
UNREADABLE = [
    "-D__attribute__(x)=", "-D__asm__(x)=", "-D__extension__=", "-D__restrict=", "-D__inline=",
    "-D__builtin_va_list=int",
]
BUILTIN_TYPES = {"size_t", "bool", "_Bool", "FILE"} | {f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)}


class CdefError(Exception):
    """One sentence for whoever runs the tool."""


def read_names(file: Path) -> list[str]:
    """The wanted names, in order."""
    lines = (line.split("#")[0].strip() for line in file.read_text().splitlines())
    return [line for line in lines if line]


def preprocess(includes: list[Path], *flags: str) -> str:
    """What the C preprocessor makes of prologue.h."""
    options = [*flags, *UNREADABLE, *(f"-I{folder}" for folder in includes)]
    command = [os.environ.get("CC", "cc"), "-E", *options, str(NATIVE / "prologue.h")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CdefError(f"the headers cannot be preprocessed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def integer_macros(includes: list[Path]) -> dict[str, str]:
    """Macros of the headers whose value is one integer literal."""
    lines = preprocess(includes, "-dM").splitlines()
    found = (re.fullmatch(r"#define (\w+) (\(?-?\d[\dxXa-fA-F]*\)?)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


class Declarations:
    """The declarations of a translation unit, by name, in the order of the source."""

    def __init__(self, source: str) -> None:
        """Parses preprocessed C."""
        self.nodes: list[c_ast.Node] = []
        self.functions: dict[str, int] = {}
        self.tags: dict[str, int] = {}  # "struct x", "enum x" with a body
        self.typedefs: dict[str, int] = {}
        for node in c_parser.CParser().parse(source).ext:
            self._add(node.decl if isinstance(node, c_ast.FuncDef) else node)

    def _add(self, node: c_ast.Node) -> None:
        at = len(self.nodes)
        self.nodes.append(node)
        if isinstance(node, c_ast.Typedef):
            self.typedefs.setdefault(node.name, at)  # headers repeat some, the first comes before its uses
        elif isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl):
            node.storage, node.funcspec = [], []
            self.functions.setdefault(node.name, at)
        for tagged in (child for _, child in node.children() if isinstance(child, (c_ast.Struct, c_ast.Enum))):
            if tag_body(tagged) and tagged.name:
                self.tags[tag_of(tagged)] = at

    def find(self, pattern: str) -> list[int]:
        """Functions and tagged types whose name matches."""
        named = [*self.functions.items(), *((tag.split()[1], at) for tag, at in self.tags.items())]
        return [at for name, at in named if fnmatch.fnmatchcase(name, pattern)]

    def needs(self, at: int) -> set[int]:
        """Declarations that one declaration refers to."""
        visitor = _References(self)
        visitor.visit(self.nodes[at])
        return visitor.found - {at}


def tag_of(node: c_ast.Struct | c_ast.Enum) -> str:
    """"struct x" or "enum x"."""
    return f"{type(node).__name__.lower()} {node.name}"


def tag_body(node: c_ast.Struct | c_ast.Enum) -> object:
    """Members or enumerators, None for a mere mention."""
    return node.decls if isinstance(node, c_ast.Struct) else node.values


class _References(c_ast.NodeVisitor):
    def __init__(self, declarations: Declarations) -> None:
        self.declarations = declarations
        self.found: set[int] = set()

    def visit_IdentifierType(self, node: c_ast.IdentifierType) -> None:
        for name in node.names:
            if name in self.declarations.typedefs and name not in BUILTIN_TYPES:
                self.found.add(self.declarations.typedefs[name])

    def _visit_tagged(self, node: c_ast.Struct | c_ast.Enum) -> None:
        if not tag_body(node) and tag_of(node) in self.declarations.tags:
            self.found.add(self.declarations.tags[tag_of(node)])
        self.generic_visit(node)

    visit_Struct = visit_Enum = _visit_tagged


def select(declarations: Declarations, macros: dict[str, str], names: list[str]) -> tuple[set[int], list[str]]:
    """Declarations that the names need, and the macros among the names; raises CdefError for unknown names."""
    wanted: set[int] = set()
    constants: list[str] = []
    unknown = []
    for name in names:
        found, matching = declarations.find(name), sorted(fnmatch.filter(macros, name))
        wanted.update(found)
        constants.extend(matching)
        if not found and not matching:
            unknown.append(name)
    if unknown:
        raise CdefError(f"names.txt lists what the pinned headers do not declare: {', '.join(unknown)}")
    open_ends = list(wanted)
    while open_ends:
        new = declarations.needs(open_ends.pop()) - wanted
        wanted |= new
        open_ends.extend(new)
    return wanted, constants


def make_cdef(includes: list[Path], names: list[str]) -> str:
    """The text of cdef.h."""
    declarations = Declarations(preprocess(includes, "-P"))
    wanted, constants = select(declarations, integer_macros(includes), names)
    generator = c_generator.CGenerator()
    lines = [f"#define {name} ..." for name in constants]
    lines += [generator.visit(declarations.nodes[at]) + ";" for at in sorted(wanted)]
    # cffi cannot evaluate sizeof in an array length; [...] lets the compiler fill it in.
    return HEAD + re.sub(r"\[[^]]*sizeof[^]]*\]", "[...]", "\n".join(lines)) + "\n"


def upstream_includes(folder: Path) -> list[Path]:
    """Include folders, with the pinned upstream unpacked into a folder."""
    command = [sys.executable, str(ROOT / "vendor/prepare_upstream.py"), "sync", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CdefError(done.stderr.strip())
    return [folder / "ggml/include", ROOT / "vendor/ggml-spec/include"]


def main() -> int:
    """Exit status 1 if --check finds a difference or the headers do not fit names.txt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    target = NATIVE / "cdef.h"
    with tempfile.TemporaryDirectory() as folder:
        try:
            text = make_cdef(upstream_includes(Path(folder)), read_names(NATIVE / "names.txt"))
        except CdefError as error:
            print(error, file=sys.stderr)
            return 1
    if not check:
        target.write_text(text)
    elif not target.is_file() or target.read_text() != text:
        print(f"{target} is not what the headers and names.txt give: run python tools/make_cdef.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
