"""Obtain the pinned upstream, trim it to ggml and its licence, apply our edits, sync the result into a build folder.

Run by CMake at configure time; needs the standard library (and tomli before Python 3.11), and pip for a download.

    python prepare_upstream.py sync FOLDER      what the build runs
    python prepare_upstream.py trim ARCHIVE     write a small archive for machines without a network
    python prepare_upstream.py digest ARCHIVE   print the two pins of an archive (for a move to a newer upstream)
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VENDOR = Path(__file__).resolve().parent
ARCHIVE_VARIABLE = "PYGGML_SPEC_UPSTREAM"
Tree = dict[str, bytes]  # path inside upstream -> content


class PrepareError(Exception):
    """One sentence for whoever runs the build."""


@dataclass(frozen=True)
class Pin:
    """What upstream must be: upstream.txt and upstream.toml of a vendor folder."""

    requirement_file: Path
    requirement: str
    sdist_sha256: str
    tree_sha256: str
    root: str  # folder of the sdist that the kept paths are relative to
    keep: tuple[str, ...]
    drop: tuple[str, ...]

    @classmethod
    def read(cls, vendor: Path = VENDOR) -> Pin:
        """Raises PrepareError when upstream.txt is not one requirement with one sha256."""
        requirement_file = vendor / "upstream.txt"
        found = re.fullmatch(r"(\S+==\S+) --hash=sha256:([0-9a-f]{64})\s*", requirement_file.read_text())
        if found is None:
            raise PrepareError(f"{requirement_file} must hold one line: NAME==VERSION --hash=sha256:DIGEST")
        rules = tomllib.loads((vendor / "upstream.toml").read_text())
        return cls(
            requirement_file=requirement_file,
            requirement=found[1],
            sdist_sha256=found[2],
            tree_sha256=rules["tree_sha256"],
            root=rules["root"].rstrip("/") + "/",
            keep=tuple(rules["keep"]),
            drop=tuple(rules["drop"]),
        )

    def keeps(self, path: str) -> bool:
        """Whether a path inside upstream belongs to the trimmed tree."""
        return path.startswith(self.keep) and not path.startswith(self.drop)


@dataclass(frozen=True)
class Edit:
    """Lines inserted before or after the only line of a file that holds the anchor."""

    file: str
    anchor: str
    where: str
    text: str
    why: str


def read_edits(vendor: Path = VENDOR) -> list[Edit]:
    """The edits of a vendor folder, in file order."""
    edits = [Edit(**table) for table in tomllib.loads((vendor / "edits.toml").read_text()).get("edit", [])]
    for edit in edits:
        if edit.where not in ("before", "after"):
            raise PrepareError(f"edits.toml: where = {edit.where!r} of the edit in {edit.file} must be before or after")
        if "\n" in edit.anchor:
            raise PrepareError(f"edits.toml: the anchor {edit.anchor!r} in {edit.file} must not span lines")
    return edits


def tree_digest(tree: Tree) -> str:
    """sha256 over the sorted lines "<sha256 of file>  <path>\\n"."""
    lines = (f"{hashlib.sha256(tree[path]).hexdigest()}  {path}\n" for path in sorted(tree))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_tree(archive: Path, pin: Pin) -> Tree:
    """The trimmed tree inside a source distribution or an archive that `trim` wrote; not checked yet."""
    tree: Tree = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                path = member.name.removeprefix(pin.root)
                if member.isfile() and pin.keeps(path):
                    tree[path] = tar.extractfile(member).read()  # type: ignore[union-attr]
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        said = str(error).partition(":")[0].partition("\n")[0]
        raise PrepareError(f"{archive} is not a whole tar archive: {said}") from error
    return tree


def load_checked(archive: Path, pin: Pin) -> Tree:
    """The trimmed tree of an archive whose content is exactly the pinned one, whoever made the archive."""
    tree = read_tree(archive, pin)
    digest = tree_digest(tree)
    if digest != pin.tree_sha256:
        raise PrepareError(
            f"{archive} (sha256 {_file_sha256(archive)}) does not hold the pinned ggml: {len(tree)} files with tree "
            f"digest {digest}, wanted {pin.tree_sha256} of {pin.requirement} (sha256 {pin.sdist_sha256})"
        )
    return tree


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def user_cache() -> Path:
    """Folder that keeps trimmed archives between builds."""
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/pyggml-spec"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyggml-spec"


def obtain(pin: Pin, *, archive: Path | None, cache: Path) -> Tree:
    """The pinned tree from, in this order: a named archive, the user cache, the package index."""
    if archive is not None:
        if not archive.is_file():
            raise PrepareError(f"{ARCHIVE_VARIABLE} names no file: {archive} (fetch it with `{fetch_hint(pin)}`)")
        return load_checked(archive, pin)
    cached = cache / f"{pin.tree_sha256}.tar.gz"
    if cached.is_file():
        try:
            return load_checked(cached, pin)
        except PrepareError as error:
            print(f"cached archive ignored: {error}")
    with tempfile.TemporaryDirectory(prefix="pyggml-spec-") as folder:
        sdist = download(pin, Path(folder))
        if (digest := _file_sha256(sdist)) != pin.sdist_sha256:
            raise PrepareError(f"{sdist.name} has sha256 {digest}, but upstream.txt pins {pin.sdist_sha256}")
        tree = load_checked(sdist, pin)
    _store(tree, cached)
    return tree


def fetch_hint(pin: Pin) -> str:
    """The command that fetches the archive on a machine with a network."""
    return f"pip download --no-deps --no-binary :all: {pin.requirement}"


def download(pin: Pin, folder: Path) -> Path:
    """Fetch the source distribution into a folder through pip, which checks the pinned hash as well."""
    # Without --no-build-isolation the inner pip would create a second isolated environment just to read metadata.
    options = ["-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--no-cache-dir", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options, "-r", str(pin.requirement_file), "-d", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    archives = list(folder.glob("*.tar.gz"))
    if "DO NOT MATCH THE HASHES" in done.stdout:
        raise PrepareError(f"the package index serves another {pin.requirement} than sha256 {pin.sdist_sha256} pins")
    if done.returncode or len(archives) != 1:
        said = [line for line in done.stdout.splitlines() if line.strip()]
        raise PrepareError(
            f"{pin.requirement} cannot be downloaded and no cached archive exists: fetch it on a machine with a "
            f"network (`{fetch_hint(pin)}`) and name the file in the environment variable {ARCHIVE_VARIABLE} "
            f"(pip said: {said[-1].strip() if said else f'exit status {done.returncode}'})"
        )
    return archives[0]


def write_trimmed(tree: Tree, file: io.BufferedIOBase) -> None:
    """A tar.gz whose members depend on the tree alone."""
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as tar:
        for path in sorted(tree):
            member = tarfile.TarInfo(path)
            member.size = len(tree[path])
            tar.addfile(member, io.BytesIO(tree[path]))


def _store(tree: Tree, cached: Path) -> None:
    """Keep a trimmed archive; a cache that cannot be written costs the next build a download, nothing else."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cached.parent, delete=False) as file:
            write_trimmed(tree, file)  # type: ignore[arg-type]
        Path(file.name).replace(cached)
    except OSError as error:
        print(f"the trimmed archive was not cached: {error}")


def apply_edits(tree: Tree, edits: list[Edit]) -> Tree:
    """A copy of the tree with every edit made; raises PrepareError, with nothing changed, if one does not fit."""
    misfits = []
    edited = dict(tree)
    for edit in edits:
        count = edited.get(edit.file, b"").count(edit.anchor.encode())
        if count != 1:
            misfits.append(f"{edit.file}: anchor {edit.anchor!r} found {count} times")
            continue
        edited[edit.file] = _inserted(edited[edit.file].decode(), edit).encode()
    if misfits:
        raise PrepareError(f"edits.toml does not fit upstream, each anchor must occur once: {'; '.join(misfits)}")
    return edited


def _inserted(text: str, edit: Edit) -> str:
    lines = text.splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if edit.anchor in line) + (edit.where == "after")
    comment = "#" if edit.file.endswith(("CMakeLists.txt", ".cmake")) else "//"
    lines.insert(at, f"{comment} pyggml-spec: {edit.why}\n{edit.text.rstrip()}\n")
    return "".join(lines)


def sync(tree: Tree, folder: Path) -> int:
    """Make a folder hold exactly this tree; returns how many files changed.

    Files are compared by content and written only if they differ: the dates inside an archive are older than the
    objects of an earlier build, so that copying with dates would leave stale objects behind.
    """
    changed = 0
    for path in [p for p in folder.rglob("*") if p.is_file()] if folder.exists() else []:
        if path.relative_to(folder).as_posix() not in tree:
            path.unlink()
            changed += 1
    for name, content in tree.items():
        path = folder / name
        if path.is_file() and path.read_bytes() == content:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        changed += 1
    return changed


def prepare(folder: Path, *, vendor: Path = VENDOR, archive: Path | None = None, cache: Path | None = None) -> int:
    """Everything the build needs: obtain, check, edit, sync; returns how many files of the folder changed."""
    tree = obtain(Pin.read(vendor), archive=archive, cache=cache or user_cache())
    return sync(apply_edits(tree, read_edits(vendor)), folder)


def _run(arguments: argparse.Namespace) -> None:
    pin = Pin.read()
    if arguments.action == "sync":
        named = os.environ.get(ARCHIVE_VARIABLE)
        changed = prepare(arguments.path, archive=Path(named) if named else None)
        print(f"{pin.requirement}: {changed} files changed in {arguments.path}")
    elif arguments.action == "trim":
        target = Path.cwd() / f"ggml-{pin.tree_sha256[:12]}.tar.gz"
        with target.open("wb") as file:
            write_trimmed(load_checked(arguments.path, pin), file)
        print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")
    else:
        print(f"sdist sha256: {_file_sha256(arguments.path)}")
        print(f"tree_sha256:  {tree_digest(read_tree(arguments.path, pin))}")


def main() -> int:
    """Exit status 1 and one sentence on stderr when upstream cannot be prepared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("action", choices=["sync", "trim", "digest"])
    parser.add_argument("path", type=Path)
    try:
        _run(parser.parse_args())
    except PrepareError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
