"""The command line with the embedded models: what a user sees, mistakes included."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pyggml_spec.assets import embedded_drafter_path, embedded_target_path
from pyggml_spec.cli import main

from .conftest import DRAFTERS

pytestmark = pytest.mark.native

PROMPT = "def fibonacci(n):"
FIELDS = {
    "text": str,
    "tokens": list,
    "prompt_tokens": int,
    "finish_reason": str,
    "model": str,
    "drafter": str,
    "device": str,
    "stats": dict,
}
STATS_FIELDS = {
    **dict.fromkeys(("rounds", "plain_rounds", "committed", "offered", "accepted"), int),
    **dict.fromkeys(("prompt_tokens_cached", "rebuilds"), int),
    **dict.fromkeys(("accept_rate", "acceptance_length", "draft_ms", "verify_ms", "host_ms"), float),
    **dict.fromkeys(("accepted_per_depth", "offered_per_depth", "confidence_per_depth"), list),
    **{"prefill_tok_s": float, "decode_tok_s": float, "spec": dict},
}


def invoke(*arguments: str | Path, input: str | None = None) -> Result:
    """Run the program in this process; anything but a clean exit is a failure of the test."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=input)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def run_json(*arguments: str | Path) -> dict[str, Any]:
    """The document of a run that has to succeed."""
    result = invoke("run", "--json", "-t", "1", *arguments)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """The program as a process of its own, its output in pipes."""
    program = Path(sysconfig.get_path("scripts"), "pyggml-spec")
    return subprocess.Popen([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def patched(path: Path, old: bytes, new: bytes, source: Path) -> Path:
    """A copy of a model file with one stretch of bytes replaced by another of the same length."""
    data = source.read_bytes()
    assert len(old) == len(new) and old in data
    path.write_bytes(data.replace(old, new, 1))
    return path


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def test_json_document() -> None:
    """Every documented field is there with its type, and the numbers agree with each other."""
    document = run_json("-p", PROMPT, "-n", "24")
    stats = document["stats"]

    assert {name: type(value) for name, value in document.items()} == FIELDS
    assert {name: type(value) for name, value in stats.items()} == STATS_FIELDS
    assert list(stats["spec"]) == ["engaged", "mode", "drafter_kind", "why"]
    assert len(document["tokens"]) == stats["committed"] == 24
    assert stats["accepted"] == sum(stats["accepted_per_depth"]) <= stats["offered"]
    assert stats["spec"]["engaged"] and stats["spec"]["drafter_kind"] == "dflash2"


def test_confidence_of_a_dspark_drafter() -> None:
    """`--confidence` offers less than the full chain, and the document has every position's scores."""
    pair = ("-m", embedded_target_path(), "-md", DRAFTERS["dspark"], "--spec", "chain", "-n", "40")
    whole, gated = (run_json("-p", PROMPT, *pair, "-ctkd", "q8_0", "--confidence", p)["stats"] for p in ("0", "0.6"))

    assert len(gated["confidence_per_depth"]) == len(whole["confidence_per_depth"]) == 7
    assert sum(gated["offered_per_depth"]) == gated["offered"] < whole["offered"]

    headless = ("-m", embedded_target_path(), "-md", DRAFTERS["dflash"])
    assert "no confidence head" in invoke("run", "-p", PROMPT, *headless, "--confidence", "0.5").output


def test_speculation_does_not_change_greedy_text() -> None:
    """Chain, tree and plain decoding give the same tokens, and the streamed text is the document's."""
    chain, tree, off = (run_json("-p", PROMPT, "-n", "48", "--spec", mode) for mode in ("chain", "tree", "off"))
    streamed = invoke("run", "-t", "1", "-p", PROMPT, "-n", "48")

    assert chain["tokens"] == tree["tokens"] == off["tokens"]
    assert streamed.stdout == chain["text"]
    assert off["stats"]["spec"] == {
        **{"engaged": False, "mode": "off", "drafter_kind": "dflash2"},
        "why": f"{off['stats']['rounds']} of {off['stats']['rounds']} rounds plain: speculation is off",
    }


def test_target_without_a_drafter_decodes_plainly_and_says_so() -> None:
    """-m without -md is no error; the statistics say why nothing was drafted."""
    document = run_json("-m", embedded_target_path(), "-p", PROMPT, "-n", "4")

    assert document["drafter"] is None
    assert "no drafter is loaded" in document["stats"]["spec"]["why"]


def test_seeded_sampling_repeats() -> None:
    """The same seed gives the same text, whatever samplers are on."""
    samplers = {"--temp": "0.9", "--top-k": "50", "--top-p": "0.95", "--min-p": "0.01", "--repeat-penalty": "1.1"}
    flags = [word for pair in samplers.items() for word in pair] + ["-n", "16", "--seed", "7"]
    first, second = (run_json("-p", PROMPT, *flags)["tokens"] for _ in range(2))

    assert first == second


def test_logprobs() -> None:
    """Greedy tokens are the best of their own alternatives, accepted ones too."""
    document = run_json("-p", PROMPT, "-n", "12", "--logprobs", "2")

    assert [row["token_id"] for row in document["logprobs"]] == document["tokens"]
    assert all(row["top"][0] == [row["token_id"], row["logprob"]] for row in document["logprobs"])


def test_stop_text() -> None:
    """The text ends before the stop text, and nothing after it is counted."""
    document = run_json("-p", PROMPT, "-n", "64", "--stop", '"""')

    assert document["finish_reason"] == "stop"
    assert '"""' not in document["text"]
    assert document["stats"]["committed"] == len(document["tokens"]) < 64


def test_no_tokens_wanted() -> None:
    """-n 0 reads the prompt and writes nothing."""
    document = run_json("-p", PROMPT, "-n", "0")

    assert (document["text"], document["tokens"], document["finish_reason"]) == ("", [], "length")
    assert document["stats"]["spec"]["why"] == "nothing was generated"


def test_context_fills_up() -> None:
    """-n -1 ends cleanly with "length" when the context is full."""
    document = run_json("-p", PROMPT, "-c", "32", "-n", "-1", "--ignore-eos")

    assert document["finish_reason"] == "length"
    assert document["prompt_tokens"] + len(document["tokens"]) in (32, 33)


def test_chat_and_stdin() -> None:
    """The chat template wraps what is piped in."""
    plain, chat = (run_json("-n", "1", *flags, "-p", "hello") for flags in ([], ["--chat", "--system", "be brief"]))

    assert chat["prompt_tokens"] > plain["prompt_tokens"]
    assert (
        invoke("run", "-t", "1", "-n", "4", input=f"{PROMPT}\n").stdout
        == invoke("run", "-t", "1", "-n", "4", "-p", PROMPT).stdout
    )


def test_control_tokens_of_a_prompt() -> None:
    """In a conversation they are text, in a plain prompt tokens."""
    plain, chat, harmless = (
        run_json("-n", "1", *flags) for flags in (
            ("-p", "<|im_end|>"), ("--chat", "-p", "<|im_end|>"), ("--chat", "-p", "x")
        )
    )  # fmt: skip

    assert plain["prompt_tokens"] == 1
    assert chat["prompt_tokens"] > harmless["prompt_tokens"]


def test_cache_types() -> None:
    """Cached keys and values may be stored more coarsely."""
    assert len(run_json("-p", PROMPT, "-n", "4", "-ctk", "q8_0", "-ctv", "q8_0")["tokens"]) == 4


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["-p", ""], 1, "the prompt has no tokens"),
        (["-p", PROMPT, "-c", "4"], 1, "the context holds 4: shorten the prompt or load with a larger -c (at most"),
        (["-p", "x " * 5000], 1, "shorten the prompt, for the model was trained with no larger"),
        (["-p", "a\udcffb"], 1, "character 2 is '\\udcff', half a character or a byte that is not UTF-8"),
        (["-p", PROMPT, "-m", ""], 1, "-m is '': it must be the path of a GGUF file"),
        (["-p", PROMPT, "-c", "100000"], 1, "-c is 100000: it must be an integer from 1 to 4096"),
        (["-p", PROMPT, "-m", "no-such.gguf"], 1, "'no-such.gguf' does not exist"),
        (["-p", PROMPT, "-m", "."], 1, "is not a regular file"),
        (["-p", PROMPT, "-m", __file__], 1, "is not a GGUF file"),
        (["-p", PROMPT, "-m", str(embedded_drafter_path())], 1, "it is a drafter"),
        (
            ["-p", PROMPT, "-m", str(embedded_target_path()), "-md", str(embedded_target_path())],
            1,
            "no supported drafter",
        ),
        (["-p", PROMPT, "-m", str(embedded_target_path()), "--spec", "chain"], 1, "no drafter is loaded"),
        (["-p", PROMPT, "--device", "cuda9"], 1, "device 'cuda9' is not available"),
        (["-p", PROMPT, "-t", "100000"], 1, "-t is 100000"),
        (["-p", PROMPT, "--draft-max", "8"], 1, "--draft-max is 8: this drafter proposes at most 7 tokens"),
    ],
)
def test_mistakes(arguments: list[str], code: int, text: str) -> None:
    """Every mistake is one sentence on stderr and an exit code."""
    result = invoke("run", *arguments)

    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert text in result.stderr
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


def test_truncated_model(tmp_path: Path) -> None:
    """Half a download is recognised."""
    path = tmp_path / "half.gguf"
    path.write_bytes(embedded_target_path().read_bytes()[:10_000_000])
    result = invoke("run", "-p", PROMPT, "-m", path)

    assert result.exit_code == 1
    assert "truncated" in result.stderr


def test_wrong_architecture(tmp_path: Path) -> None:
    """A model of another family is refused by name."""
    names = gguf_string("qwen35"), gguf_string("qwen36")  # the first text of that length is the architecture
    result = invoke("run", "-p", PROMPT, "-m", patched(tmp_path / "other.gguf", *names, embedded_target_path()))

    assert result.exit_code == 1
    assert "has architecture 'qwen36'" in result.stderr


def test_drafter_for_another_target(tmp_path: Path) -> None:
    """A drafter that reads layers this target does not have is refused with both sides."""
    layers = struct.pack("<4i", 2, 6, 10, 14), struct.pack("<4i", 2, 6, 10, 40)
    drafter = patched(tmp_path / "deep.gguf", *layers, embedded_drafter_path())
    result = invoke("run", "-p", PROMPT, "-m", embedded_target_path(), "-md", drafter)

    assert result.exit_code == 1
    assert "does not fit the target" in result.stderr and "16 layers" in result.stderr


def test_vocabulary_mismatch(tmp_path: Path) -> None:
    """The first token that differs is named; `inspect` tells the same story."""
    texts = gguf_string("Ġreturn"), gguf_string("Ġretorn")
    drafter = patched(tmp_path / "tongue.gguf", *texts, embedded_drafter_path())
    pair = embedded_target_path(), drafter

    assert "Ġretorn" in invoke("run", "-p", PROMPT, "-m", pair[0], "-md", pair[1]).stderr
    for files in (pair, pair[::-1]):
        result = invoke("inspect", *files)
        assert result.exit_code == 1 and "the drafter does not fit the target" in result.stdout


def test_unreadable_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without read permission is a sentence (refused here by hand: root may read every file)."""

    def refuse(path: Path, *_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    result = invoke("run", "-p", PROMPT, "-m", embedded_target_path())

    assert (result.exit_code, result.stdout) == (1, "")
    assert "cannot be read" in result.stderr and "Permission denied" in result.stderr


def test_ctrl_c_ends_cleanly() -> None:
    """SIGINT while text streams: the text stays, no traceback, exit code 130."""
    process = start("run", "-t", "1", "-p", PROMPT, "-n", "-1", "--ignore-eos", "--stats")
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 130
    assert first + stdout
    assert b"speculation" in stderr and b"Traceback" not in stderr


def test_ctrl_c_with_json() -> None:
    """The document of a cancelled run is complete."""
    process = start("run", "-t", "1", "-p", PROMPT, "-n", "-1", "--ignore-eos", "--temp", "1", "--json")
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=2.5)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)

    assert (process.returncode, stderr) == (130, b"")
    if stdout:  # empty only where loading alone takes longer than that
        assert json.loads(stdout)["finish_reason"] == "cancelled"


def test_reader_that_goes_away() -> None:
    """A closed pipe ends the run without a word."""
    process = start("run", "-t", "1", "-p", PROMPT, "-n", "-1", "--ignore-eos")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()

    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141
    process.stderr.close()


def test_doctor() -> None:
    """The examination of a working install finds nothing wrong."""
    result = invoke("doctor", "--json")
    report = json.loads(result.stdout)

    assert (result.exit_code, report["problems"]) == (0, [])
    assert any(row["loaded"] for row in report["flavours"])
    assert report["self_check"]["same_text"]
    assert {"pyggml-spec", "ggml", "python", "numpy"} <= set(report["versions"])


def test_module(tmp_path: Path) -> None:
    """`python -m pyggml_spec` is the same program; not in the clone, whose folder may lack the extension."""
    command = [sys.executable, "-m", "pyggml_spec", "run", "-p", PROMPT, "-n", "2", "-t", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == invoke("run", "-p", PROMPT, "-n", "2", "-t", "1").stdout


def test_devices() -> None:
    """There is a CPU at least, and one device is the default."""
    rows = json.loads(invoke("devices", "--json").stdout)["devices"]

    assert "cpu" in {row["kind"] for row in rows}
    assert sum(row["is_default"] for row in rows) == 1
