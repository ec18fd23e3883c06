"""The tool that obtains, checks, edits and unpacks upstream: offline, on archives of a few bytes."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

VENDOR = Path(__file__).resolve().parents[2] / "vendor"
ROOT = "thing-1.0/inner/"
FILES = {"LICENSE": b"be kind\n", "ggml/src/a.c": b"int a;\nvoid hook(void) {\n}\n", "ggml/src/b.c": b"int b;\n"}
EXTRA = {"README.md": b"not kept", "ggml/src/ggml-metal/m.m": b"dropped"}


def load_tool() -> ModuleType:
    """vendor/prepare_upstream.py as a module."""
    spec = importlib.util.spec_from_file_location("prepare_upstream", VENDOR / "prepare_upstream.py")
    assert spec is not None and spec.loader is not None, "the tool is part of the repository"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    """A tar.gz of some files."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    """What a package index would serve."""
    files = {ROOT + name: content for name, content in (FILES | EXTRA).items()}
    return write_archive(tmp_path / "thing-1.0.tar.gz", files)


@pytest.fixture
def vendor(tmp_path: Path, sdist: Path) -> Path:
    """A vendor folder that pins `sdist` and makes no edit."""
    folder = tmp_path / "vendor"
    folder.mkdir()
    (folder / "upstream.txt").write_text(f"thing==1.0 --hash=sha256:{hashlib.sha256(sdist.read_bytes()).hexdigest()}\n")
    (folder / "upstream.toml").write_text(
        f'root = "{ROOT}"\nkeep = ["LICENSE", "ggml/"]\ndrop = ["ggml/src/ggml-metal/"]\n'
        f'tree_sha256 = "{tool.tree_digest(FILES)}"\n'
    )
    (folder / "edits.toml").write_text("")
    return folder


@pytest.fixture(autouse=True)
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that would reach the package index fails."""

    def refuse(*_: object) -> Path:
        raise AssertionError("must not download")

    monkeypatch.setattr(tool, "download", refuse)


def add_edit(vendor: Path, **fields: str) -> None:
    """One more edit in edits.toml."""
    values = {"file": "ggml/src/a.c", "anchor": "void hook", "where": "after", "text": "    ours();", "why": "a test"}
    lines = "\n".join(f"{key} = '{value}'" for key, value in (values | fields).items())
    with (vendor / "edits.toml").open("a") as file:
        file.write(f"[[edit]]\n{lines}\n")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_named_archive_is_trimmed_and_synced(vendor: Path, sdist: Path, tmp_path: Path) -> None:
    """Only the kept files arrive, and a second run changes nothing."""
    out = tmp_path / "out"

    assert tool.prepare(out, vendor=vendor, archive=sdist, cache=tmp_path / "cache") == len(FILES)
    assert contents(out) == FILES
    assert tool.prepare(out, vendor=vendor, archive=sdist, cache=tmp_path / "cache") == 0


def test_sync_goes_by_content(vendor: Path, sdist: Path, tmp_path: Path) -> None:
    """Untouched files keep their dates, changed ones are restored, foreign ones removed."""
    out = tmp_path / "out"
    tool.prepare(out, vendor=vendor, archive=sdist)
    os.utime(out / "LICENSE", (1, 1))
    (out / "ggml/src/a.c").write_bytes(b"stale")
    (out / "ggml/src/old.c").write_bytes(b"of an earlier pin")

    assert tool.prepare(out, vendor=vendor, archive=sdist) == 2
    assert contents(out) == FILES
    assert (out / "LICENSE").stat().st_mtime == 1


def test_download_is_cached_trimmed(vendor: Path, sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second build needs no download."""
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(tool, "download", lambda pin, folder: sdist)
        tool.prepare(tmp_path / "first", vendor=vendor, cache=cache)

    tool.prepare(tmp_path / "second", vendor=vendor, cache=cache)

    assert contents(tmp_path / "second") == FILES
    assert [path.name for path in cache.iterdir()] == [f"{tool.tree_digest(FILES)}.tar.gz"]


def test_damaged_cache_is_replaced(
    vendor: Path, sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cached archive is checked like any other."""
    cached = tmp_path / "cache" / f"{tool.tree_digest(FILES)}.tar.gz"
    cached.parent.mkdir()
    cached.write_bytes(b"half an archive")
    monkeypatch.setattr(tool, "download", lambda pin, folder: sdist)

    tool.prepare(tmp_path / "out", vendor=vendor, cache=cached.parent)

    assert "cached archive ignored" in capsys.readouterr().out
    assert tool.load_checked(cached, tool.Pin.read(vendor)) == FILES


def test_trimmed_archive_depends_on_the_tree_alone(vendor: Path, tmp_path: Path) -> None:
    """The archive made for machines without a network is accepted in place of the source distribution."""
    trimmed = tmp_path / "trimmed.tar.gz"
    with trimmed.open("wb") as file:
        tool.write_trimmed(FILES, file)

    tool.prepare(tmp_path / "out", vendor=vendor, archive=trimmed)

    assert contents(tmp_path / "out") == FILES


@pytest.mark.parametrize("change", [{"ggml/src/b.c": b"int c;\n"}, {"ggml/src/c.c": b"new"}])
def test_changed_archive_is_refused(vendor: Path, tmp_path: Path, change: dict[str, bytes]) -> None:
    """One byte or one file more than pinned stops the build, naming both digests, with nothing unpacked."""
    archive = write_archive(tmp_path / "other.tar.gz", FILES | change)

    with pytest.raises(tool.PrepareError, match="does not hold the pinned ggml") as caught:
        tool.prepare(tmp_path / "out", vendor=vendor, archive=archive)

    assert tool.tree_digest(FILES) in str(caught.value)
    assert tool.tree_digest(FILES | change) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_downloaded_archive_must_have_the_pinned_hash(
    vendor: Path, sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files in another archive are not what upstream.txt pins."""
    repacked = write_archive(tmp_path / "repacked.tar.gz", FILES)
    monkeypatch.setattr(tool, "download", lambda pin, folder: repacked)

    with pytest.raises(tool.PrepareError, match=r"has sha256 [0-9a-f]{64}, but upstream\.txt pins"):
        tool.prepare(tmp_path / "out", vendor=vendor, cache=tmp_path / "cache")


def test_not_an_archive(vendor: Path, tmp_path: Path) -> None:
    """One line, whatever tar says."""
    file = tmp_path / "page.html"
    file.write_text("<html>not found</html>")

    with pytest.raises(tool.PrepareError, match="is not a whole tar archive") as caught:
        tool.prepare(tmp_path / "out", vendor=vendor, archive=file)

    assert "\n" not in str(caught.value)


def test_missing_named_archive_names_the_way_out(vendor: Path, tmp_path: Path) -> None:
    """The message has the environment variable and the command that fetches the archive."""
    with pytest.raises(tool.PrepareError, match="PYGGML_SPEC_UPSTREAM names no file") as caught:
        tool.prepare(tmp_path / "out", vendor=vendor, archive=tmp_path / "nowhere.tar.gz")

    assert "pip download --no-deps --no-binary :all: thing==1.0" in str(caught.value)


def test_no_network_and_no_cache(tmp_path: Path) -> None:
    """The real script, with an index that has nothing: exit status 1 and one sentence with the way out."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYGGML_"))}
    environment |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, str(VENDOR / "prepare_upstream.py"), "sync", str(tmp_path / "out")]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "PYGGML_SPEC_UPSTREAM" in done.stderr and "pip download" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("where", "line"), [("before", 1), ("after", 2)])
def test_edit_goes_beside_its_anchor(vendor: Path, sdist: Path, tmp_path: Path, where: str, line: int) -> None:
    """The lines stand where they should and are marked as ours."""
    add_edit(vendor, where=where)

    tool.prepare(tmp_path / "out", vendor=vendor, archive=sdist)

    lines = (tmp_path / "out/ggml/src/a.c").read_text().splitlines()
    assert lines[line : line + 2] == ["// pyggml-spec: a test", "    ours();"]
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("fields", "count"),
    [({"anchor": "void gone"}, 0), ({"anchor": "int "}, 2), ({"file": "ggml/src/gone.c"}, 0)],
    ids=["no anchor", "two anchors", "no file"],
)
def test_edit_that_does_not_fit(vendor: Path, tmp_path: Path, fields: dict[str, str], count: int) -> None:
    """File, anchor and count are named, and not even the edits that do fit are written."""
    tree = FILES | {"ggml/src/a.c": b"int a; int c;\nvoid hook(void) {\n}\n"}
    add_edit(vendor)
    add_edit(vendor, **fields)
    before = dict(tree)

    with pytest.raises(tool.PrepareError, match=f"found {count} times") as caught:
        tool.apply_edits(tree, tool.read_edits(vendor))

    assert repr(fields.get("anchor", "void hook")) in str(caught.value)
    assert fields.get("file", "ggml/src/a.c") in str(caught.value)
    assert tree == before


def test_edit_with_a_bad_place(vendor: Path) -> None:
    """`where` is one of two words."""
    add_edit(vendor, where="inside")

    with pytest.raises(tool.PrepareError, match="where = 'inside'"):
        tool.read_edits(vendor)


@pytest.mark.parametrize("text", ["thing==1.0\n", "thing>=1 --hash=sha256:" + "0" * 64, ""])
def test_pin_must_be_one_hashed_requirement(vendor: Path, text: str) -> None:
    """A pin without a hash is no pin."""
    (vendor / "upstream.txt").write_text(text)

    with pytest.raises(tool.PrepareError, match="must hold one line"):
        tool.Pin.read(vendor)


def test_the_project_s_own_pins() -> None:
    """Few edits, each with a reason, and the package knows the same version as the build."""
    pin, edits = tool.Pin.read(), tool.read_edits()
    namespace: dict[str, str] = {}
    exec((VENDOR.parent / "pyggml_spec/_native/pin.py").read_text(), namespace)
    rules = tool.tomllib.loads((VENDOR / "upstream.toml").read_text())

    assert len(edits) < 20 and all(edit.why for edit in edits)
    assert namespace["GGML_COMMIT"] == pin.sdist_sha256[:12]
    assert namespace["GGML_VERSION"] == rules["ggml_version"]
