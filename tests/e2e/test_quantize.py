"""The requantiser: llama.cpp's bytes where it has the same recipe, everything else kept, results that run."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner, Result
from reference.compare import differences

from pyggml_spec import Engine, assets
from pyggml_spec.cli import main
from pyggml_spec.convert import MIXTURES, UNIFORM_TYPES, Override, plan_requantisation, verify_requantisation
from pyggml_spec.convert.encode import PIECE_VALUES
from pyggml_spec.convert.recipes import NEED_IMATRIX
from pyggml_spec.errors import ModelFileError, OptionError
from pyggml_spec.gguf_io import open_gguf

from .conftest import DATA, DRAFTERS, load

pytestmark = pytest.mark.native

F16_FILE = DATA / "minnow-f16.gguf"
PROMPT = "def fibonacci(n):"


def invoke(*arguments: str | Path) -> Result:
    """Run the program in this process; anything but a clean exit is a failure of the test."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def requantise(source: Path, path: Path, recipe: str, *overrides: str) -> Path:
    """The requantised file."""
    with open_gguf(source) as file:
        plan_requantisation(file, recipe, [Override.parse(text) for text in overrides], n_threads=2).write(path)
    return path


@pytest.mark.parametrize(
    ("recipe", "reference"), [("q4_k_m", DATA / "minnow-q4_k_m.gguf"), ("q8_0", assets.embedded_target_path())]
)
def test_llama_cpps_bytes(recipe: str, reference: Path, tmp_path: Path) -> None:
    """The f16 model as llama.cpp's own quantiser writes it: every key, type and byte."""
    assert differences(requantise(F16_FILE, tmp_path / "out.gguf", recipe), reference) == set()


def test_target_runs(engine: Engine, tmp_path: Path) -> None:
    """Our engine loads the result and begins as the q8_0 model does; llama.cpp loads it and begins the same way."""
    path = requantise(F16_FILE, tmp_path / "out.gguf", "q5_k_m")
    ids = engine.tokenizer.encode(PROMPT)
    expected = engine.generate(ids, max_tokens=2, ignore_eos=True, spec="off").tokens
    with load(path, None) as smaller:
        assert smaller.generate(ids, max_tokens=2, ignore_eos=True).tokens == expected

    pytest.importorskip("xllamacpp", reason="compares with a packaged llama.cpp: pip install '.[llama]'")
    from reference.llama_cpp import LlamaCpp

    assert LlamaCpp(path, n_threads=1, n_ctx=256).generate(ids, 2).token_ids == expected


def test_drafter_runs(engine: Engine, tmp_path: Path) -> None:
    """A drafter of four bits drafts, and the text stays the target's."""
    drafter = requantise(assets.embedded_drafter_path(), tmp_path / "out.gguf", "iq4_xs")
    with load(assets.embedded_target_path(), drafter) as smaller:
        done = smaller.generate(PROMPT, max_tokens=32)

    assert done.stats["accepted"] > 0
    assert done.tokens == engine.generate(PROMPT, max_tokens=32, spec="off").tokens


def types_in(recipe: str, *overrides: str, source: Path = F16_FILE) -> dict[str, str]:
    """The type a recipe gives every matrix."""
    with open_gguf(source) as file:
        plan = plan_requantisation(file, recipe, [Override.parse(text) for text in overrides])
        return {t.name: t.type.name.lower() for t in plan.file.tensors if len(t.ne) > 1 and "conv1d" not in t.name}


def test_mixtures_spend_bits_where_they_count() -> None:
    """q5_k_m: six bits for the head, and for values and down-projections of the delicate layers; 5 for the rest."""
    types = types_in("q5_k_m")
    delicate = "|".join(map(str, (0, 1, 4, 7, 10, 13, 14, 15)))
    expected = re.compile(rf"token_embd\.weight|blk\.({delicate})\.(ffn_down|attn_v|attn_qkv)\.weight")

    assert types == {name: "q6_k" if expected.fullmatch(name) else "q5_k" for name in types}


def test_iq4_xs_spends_bits_on_early_projections() -> None:
    """iq4_xs: six bits for the head, five for the down-projections of the first eighth (values: two queries each)."""
    types = types_in("iq4_xs")
    better = {"token_embd.weight": "q6_k", "blk.0.ffn_down.weight": "q5_k", "blk.1.ffn_down.weight": "q5_k"}

    assert types == {name: better.get(name, "iq4_xs") for name in types}


def test_uniform_types_are_uniform() -> None:
    """One type for all matrices means all, the embeddings too."""
    assert set(types_in("q4_0").values()) == {"q4_0"}


def test_overrides() -> None:
    """Expressions choose by name, the last match counts."""
    types = types_in("q4_0", "attn=q8_0", r"attn_v|blk\.1\.ffn_up=q6_k", r"^blk\.15\.=f16")

    assert (types["blk.0.attn_qkv.weight"], types["blk.3.attn_v.weight"]) == ("q8_0", "q6_k")
    assert (types["blk.1.ffn_up.weight"], types["blk.2.ffn_up.weight"]) == ("q6_k", "q4_0")
    assert {kind for name, kind in types.items() if name.startswith("blk.15.")} == {"f16"}


def test_rows_that_do_not_fit(tmp_path: Path) -> None:
    """Codebooks of rank 64 have no K-quants: the nearest type of smaller blocks is taken, and said."""
    source, path = DRAFTERS["dflash2"], tmp_path / "out.gguf"
    done = invoke("quantize", source, path, "q4_k_m", "-t", 1)

    assert done.exit_code == 0
    assert "note: selector_successor.weight: rows of 64 do not divide into q4_k's blocks of 256" in done.stderr
    assert "note: the input is quantised already (q8_0)" in done.stderr
    assert "note: a drafter below q8_0 drafts worse" in done.stderr
    with open_gguf(path) as file:
        assert file.tensors["selector_successor.weight"].type.name == "Q5_0"


ODD_SHAPES = {
    "token_embd.weight": (5, 64),
    "blk.0.attn_norm.weight": (64,),
    "blk.0.attn_q.weight": (7, 64),
    "blk.0.ffn_gate_exps.weight": (3, 5, 32),
    "blk.0.ssm_conv1d.weight": (32, 4),
    "blk.0.narrow.weight": (3, 20),
}


def write_odd_file(path: Path, alignment: int, **options: Any) -> Path:
    """A file with keys of every type, a tensor in every role, and offsets of an unusual alignment."""
    writer = gguf.GGUFWriter(path, "qwen35", **options)
    writer.add_custom_alignment(alignment)
    for kind, value in (
        *(("uint8", 200), ("int8", -3), ("uint16", 40000), ("int16", -300), ("uint32", 2**31), ("int32", -7)),
        *(("uint64", 2**40), ("int64", -(2**40)), ("float32", 0.1), ("float64", 0.1), ("bool", True), ("string", "ü")),
    ):
        writer.add_key_value(f"odd.{kind}", value, gguf.GGUFValueType[kind.upper()])
    for kind, items in (("INT16", [1, -2, 3]), ("BOOL", [True, False]), ("STRING", ["a", ""]), ("FLOAT64", [0.1])):
        array = gguf.GGUFValueType.ARRAY
        writer.add_key_value(f"odd.{kind}.array", items, array, sub_type=gguf.GGUFValueType[kind])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    rng = np.random.default_rng(0)
    for name, shape in ODD_SHAPES.items():
        writer.add_tensor(name, rng.standard_normal(shape, np.float32))
    writer.add_tensor("d2t", np.arange(5))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_everything_else_is_kept(alignment: int, tmp_path: Path) -> None:
    """Keys of every type, tensors that are no matrices, and any alignment, offsets included."""
    source = write_odd_file(tmp_path / "in.gguf", alignment)
    path = requantise(source, tmp_path / "out.gguf", "q8_0")
    changed = {"token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_gate_exps.weight", "blk.0.narrow.weight"}
    reader = gguf.GGUFReader(path)

    assert differences(path, source) == changed | {"general.file_type", "general.quantization_version"}
    assert reader.alignment == alignment
    assert [t.data_offset % alignment for t in reader.tensors] == [0] * 7
    for tensor, old in zip(reader.tensors, gguf.GGUFReader(source).tensors, strict=True):
        if tensor.name == "d2t":
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_allclose(values.reshape(old.data.shape), old.data, atol=0.03)


def test_shards_become_one_file(tmp_path: Path) -> None:
    """A model in several parts gives one file, from any part's name; keys about parts are gone."""
    write_odd_file(tmp_path / "in.gguf", 32, split_max_tensors=2)
    shards = sorted(tmp_path.glob("in-*.gguf"))
    assert len(shards) == 4
    path = requantise(shards[2], tmp_path / "out.gguf", "q8_0")
    with open_gguf(path) as file:
        assert len(file.tensors) == 7 and not [key for key in file.metadata if key.startswith("split.")]
    write_odd_file(tmp_path / "whole.gguf", 32)
    assert differences(path, requantise(tmp_path / "whole.gguf", tmp_path / "out2.gguf", "q8_0")) == set()


@pytest.mark.parametrize("recipe", [*UNIFORM_TYPES, *MIXTURES])
def test_every_recipe_and_its_file_type(recipe: str, tmp_path: Path) -> None:
    """Every recipe writes a readable file with a number llama.cpp knows, and --help lists it."""
    path = requantise(write_odd_file(tmp_path / "in.gguf", 32), tmp_path / "out.gguf", recipe)
    with open_gguf(path) as file:
        kind = gguf.LlamaFileType(file.metadata["general.file_type"]).name

    assert kind.removesuffix("_S").endswith(recipe.upper())
    assert recipe in " ".join(invoke("quantize", "--help").stdout.replace("(", " ").replace(",", " ").split())


def test_report(tmp_path: Path) -> None:
    """--verify --json: sizes, types, and the error of every tensor that changed."""
    done = invoke("quantize", F16_FILE, tmp_path / "out.gguf", "q8_0", "--verify", "--json", "-t", 1)
    report = json.loads(done.stdout)

    assert (report["written"], report["n_tensors"]) == (True, 214)
    assert report["n_bytes"] == sum(row["bytes"] for row in report["types"].values()) < report["n_bytes_before"]
    assert len(report["errors"]) == report["types"]["Q8_0"]["tensors"]
    assert all(0.004 < row["relative_error"] < 0.007 for row in report["errors"])


def test_dry_run(tmp_path: Path) -> None:
    """--dry-run lists what every tensor would become, and writes nothing."""
    done = invoke("quantize", F16_FILE, tmp_path / "out.gguf", "q4_k_m", "--dry-run")

    assert done.exit_code == 0
    assert "would write" in done.stdout and "blk.15.ffn_down.weight             Q6_K  768 x 256" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_memory_stays_near_one_piece(tmp_path: Path) -> None:
    """The largest tensor has 2 million values, 8 MiB as f32: no more than a few pieces are held at once."""
    with open_gguf(F16_FILE) as file:
        plan = plan_requantisation(file, "q8_0")
        tracemalloc.start()
        plan.write(tmp_path / "out.gguf")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert peak < 3 * 4 * PIECE_VALUES


def test_pieces_are_smaller_than_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor read in many pieces, by several threads, has the same bytes."""
    whole = requantise(DRAFTERS["dflash2"], tmp_path / "whole.gguf", "q6_k")
    monkeypatch.setattr("pyggml_spec.convert.encode.PIECE_VALUES", 3000)

    assert differences(requantise(DRAFTERS["dflash2"], tmp_path / "out.gguf", "q6_k"), whole) == set()


@pytest.mark.parametrize("n_threads", [1, 2])
def test_nothing_left_behind(n_threads: int, tmp_path: Path) -> None:
    """Ctrl-C in the middle leaves neither the file nor a part of it."""

    def interrupt(n_done: int, n_total: int) -> None:
        if n_done > n_total // 2:
            raise KeyboardInterrupt

    with open_gguf(F16_FILE) as file, pytest.raises(KeyboardInterrupt):
        plan_requantisation(file, "q8_0", n_threads=n_threads).write(tmp_path / "out.gguf", interrupt)

    assert list(tmp_path.iterdir()) == []


def test_damage_is_noticed(tmp_path: Path) -> None:
    """Verifying finds a copied tensor that is no copy, and values that are not finite."""
    path = tmp_path / "out.gguf"
    with open_gguf(write_odd_file(tmp_path / "in.gguf", 32)) as file:
        plan = plan_requantisation(file, "q8_0")
        plan.write(path)
        offsets = {t.name: t.data_offset for t in gguf.GGUFReader(path).tensors}
        for name, content, message in (
            ("blk.0.attn_norm.weight", b"\x01\x02", r"'blk.0.attn_norm.weight' .* is not the copy"),
            ("token_embd.weight", b"\x00\x7c", r"'token_embd.weight' .* not finite"),
        ):
            whole = path.read_bytes()
            path.write_bytes(whole[: offsets[name]] + content + whole[offsets[name] + 2 :])
            with pytest.raises(ModelFileError, match=message):
                verify_requantisation(plan, path)
            path.write_bytes(whole)


@pytest.mark.parametrize("name", NEED_IMATRIX)
def test_types_that_need_an_importance_matrix(name: str, tmp_path: Path) -> None:
    """They are refused with the reason."""
    done = invoke("quantize", F16_FILE, tmp_path / "out.gguf", name)

    assert done.exit_code == 2
    assert f"type '{name}' is not supported: it needs an importance matrix, which is not supported" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("q4_k_x",), 2, "type 'q4_k_x' is not supported; choose one of q4_k_m"),
        (("q8_0", "--imatrix", "x.dat"), 2, "importance matrices are not supported"),
        (("q8_0", "--override", "attn_v"), 2, "override 'attn_v' must be PATTERN=TYPE"),
        (("q8_0", "--override", "attn_v=q4_k_m"), 2, "type 'q4_k_m' cannot be given to a tensor; choose one of f32"),
        (("q8_0", "--override", "(=q6_k"), 2, "is no regular expression"),
        (("q8_0", "--override", "atn_v=q6_k"), 1, "override 'atn_v' matches no matrix"),
        (("q8_0", "--override", "attn_norm=q6_k"), 1, "override 'attn_norm' matches no matrix"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], code: int, message: str, tmp_path: Path) -> None:
    """Wrong usage is told in one sentence, and nothing is written."""
    done = invoke("quantize", F16_FILE, tmp_path / "out.gguf", *arguments)

    assert (done.exit_code, message in done.stderr) == (code, True), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_output_names(tmp_path: Path) -> None:
    """The input is never overwritten, nor is a file named like a part of a model."""
    source = write_odd_file(tmp_path / "in.gguf", 32)
    (tmp_path / "link.gguf").symlink_to(source)
    with open_gguf(source) as file:
        plan = plan_requantisation(file, "q8_0")
        for name, message in (("link.gguf", "is the input"), ("o-00001-of-00002.gguf", "is named like a part")):
            with pytest.raises(OptionError, match=message):
                plan.write(tmp_path / name)


def test_an_existing_file_is_replaced_only_when_told_so(tmp_path: Path) -> None:
    """Nobody loses a file over a name; a dry run touches none, and the input is never replaced, told so or not."""
    path, source = tmp_path / "mine.gguf", write_odd_file(tmp_path / "in.gguf", 32)
    path.write_text("precious")
    refused, listed = invoke("quantize", source, path, "q8_0"), invoke("quantize", source, path, "q8_0", "--dry-run")

    assert (refused.exit_code, refused.stderr.count("\n"), listed.exit_code) == (1, 1, 0)
    assert "exists already: give --force" in refused.stderr
    assert "without --dry-run this would be refused" in listed.stderr
    assert path.read_text() == "precious"
    for flags in ((), ("--force",)):
        done = invoke("quantize", source, source, "q8_0", *flags)
        assert (done.exit_code, "is the input" in done.stderr) == (1, True)
    assert invoke("quantize", source, path, "q8_0", "--force").exit_code == 0
    assert path.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize("source", ["no-such.gguf", "."])
def test_an_input_that_is_missing(source: str, tmp_path: Path) -> None:
    """Exit code 1, as wherever a file is at fault."""
    done = invoke("quantize", source, tmp_path / "out.gguf", "q8_0")

    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert f"'{source}'" in done.stderr


def test_only_ordinary_files_are_replaced(tmp_path: Path) -> None:
    """A pipe or a device would become a file; a link stays one, and what it names is written."""
    pipe, real, link = tmp_path / "pipe", tmp_path / "real.gguf", tmp_path / "link.gguf"
    os.mkfifo(pipe)
    real.touch()
    link.symlink_to(real)
    source = F16_FILE
    refused = invoke("quantize", source, pipe, "q8_0")
    done = invoke("quantize", source, link, "q8_0", "--force")

    assert refused.exit_code == 1
    assert "no ordinary file" in refused.output
    assert pipe.is_fifo()
    assert done.exit_code == 0, done.output
    assert link.is_symlink()
    assert real.stat().st_size > 20_000_000
