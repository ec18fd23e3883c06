"""The command line with a fake engine: options, output, exit codes. No native code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from pyggml_spec.cli import machine, main
from pyggml_spec.cli.interrupt import soft_interrupt
from pyggml_spec.cli.render import align, format_bytes
from pyggml_spec.decode.stats import Stats
from pyggml_spec.errors import ContextLimitError, ModelFileError, OptionError, PyggmlSpecError
from pyggml_spec.records import TokenLogprob

run_module = import_module("pyggml_spec.cli.run")  # as an attribute of the package `run` is the command


@dataclass
class FakePiece:
    text: str
    token_ids: list[int]


@dataclass
class FakeCompletion:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 3
    stats: Any = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


class FakeStream:
    """Yields one word a round; every round looks whether it was cancelled, as a session does."""

    def __init__(self, words: list[str], press_ctrl_c_after: int | None = None) -> None:
        self.words = words
        self.press_ctrl_c_after = press_ctrl_c_after
        self.completion = FakeCompletion(stats=Stats("chain", "dflash").report())
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def __iter__(self) -> Iterator[FakePiece]:
        for number, word in enumerate(self.words):
            if self.is_cancelled:
                self.completion.finish_reason = "cancelled"
                return
            self.completion.text += word
            self.completion.tokens.append(number)
            self.completion.logprobs.append(TokenLogprob(number, -0.5, ((number, -0.5),)))
            if number == self.press_ctrl_c_after:
                signal.raise_signal(signal.SIGINT)
            yield FakePiece(word, [number])
        self.completion.finish_reason = "length"


class FakeEngine:
    """Records what it was asked; `error` is raised instead of generating."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.words = ["def ", "fib(n):", "\n"]
        self.press_ctrl_c_after: int | None = None
        self.error: BaseException | None = None
        self.tokenizer = SimpleNamespace(encode=lambda text: text)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.asked["closed"] = True

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        return "|".join(f"{message['role']}:{message['content']}" for message in messages)

    def stream(self, prompt: str, **options: Any) -> FakeStream:
        if self.error:
            raise self.error
        self.asked |= {"prompt": prompt, **options}
        return FakeStream(self.words, self.press_ctrl_c_after)

    def describe(self) -> dict[str, Any]:
        return {"model": "minnow", "drafter": "minnow-dflash", "device": "cpu", "device_kind": "cpu"}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine that `run` gets instead of a real one; no GPU is looked for."""
    fake = FakeEngine()
    monkeypatch.setattr(run_module, "load_engine", lambda given, bar: fake)
    monkeypatch.setattr(machine, "find_gpu_vendors", lambda: [])
    return fake


def invoke(*arguments: str, input: str | bytes | None = None) -> Result:
    """Run the program; anything but a clean exit is a failure of the test."""
    result = CliRunner().invoke(main, list(arguments), input=input)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--version"], 0, "pyggml-spec "),
        (["--help"], 0, "Commands:"),
        (["run", "--help"], 0, "--prompt"),
        ([], 2, "Usage:"),
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["run", "--nonsense"], 2, "No such option"),
        (["run", "-p", "x", "-f", "y"], 2, "-p/--prompt and -f/--file both give a prompt"),
        (["run", "-p", "x", "-md", "d.gguf"], 2, "its target is missing: give -m FILE too"),
        (["run", "-p", "x", "--system", "be brief"], 2, "give --chat too"),
        (["run", "-p", "x", "--logprobs", "2"], 2, "give --json too"),
        (["run", "-p", "x", "--json", "--display-prompt"], 2, "leave --display-prompt out"),
        (["run", "-p", "x", "--spec", "off", "--draft-max", "3"], 2, "leave --draft-max out"),
        (["run", "-p", "x", "--spec", "off", "--policy", "cost"], 2, "leave --policy out"),
        (["run", "-p", "x", "-n", "many"], 2, "'many' is not a valid integer range"),
        (["run", "-p", "x", "-n", "-2"], 2, "-2 is not in the range x>=-1"),
        (["run", "-p", "x", "-c", "-1"], 2, "-1 is not in the range x>=0"),
        (["run", "-p", "x", "-t", "0"], 2, "0 is not in the range x>=1"),
        (["run", "-p", "x", "--temp", "nan"], 2, "'nan' is not a finite number"),
        (["run", "-p", "x", "--temp", "inf"], 2, "'inf' is not a finite number"),
        (["run", "-p", "x", "--temp", "-0.1"], 2, "is not in the range"),
        (["run", "-p", "x", "--temp", "warm"], 2, "'warm' is not a valid float"),
        (["run", "-p", "x", "--top-k", "-1"], 2, "-1 is not in the range x>=0"),
        (["run", "-p", "x", "--top-k", "1.5"], 2, "'1.5' is not a valid integer range"),
        (["run", "-p", "x", "--top-p", "0"], 2, "is not in the range 0<x<=1"),
        (["run", "-p", "x", "--top-p", "nan"], 2, "'nan' is not a finite number"),
        (["run", "-p", "x", "--min-p", "1.1"], 2, "is not in the range 0<=x<=1"),
        (["run", "-p", "x", "--repeat-penalty", "0"], 2, "is not in the range"),
        (["run", "-p", "x", "--presence-penalty", "nan"], 2, "'nan' is not a finite number"),
        (["run", "-p", "x", "--frequency-penalty", "1e999"], 2, "'1e999' is not a finite number"),
        (["run", "-p", "x", "--seed", "-2"], 2, "is not in the range"),
        (["run", "-p", "x", "--stop", ""], 2, "would stop before the first token"),
        (["run", "-p", "x", "--logprobs", "21", "--json"], 2, "is not in the range 0<=x<=20"),
        (["run", "-p", "x", "--draft-max", "0"], 2, "is not in the range"),
        (["run", "-p", "x", "-m", "t.gguf", "--draft-max", "3"], 2, "--draft-max needs a drafter: give -md FILE"),
        (["run", "-p", "x", "-m", "t.gguf", "--policy", "cost"], 2, "--policy needs a drafter: give -md FILE"),
        (["run", "-p", "x", "-m", "t.gguf", "-ctkd", "q8_0"], 2, "Only a drafter's cache has -ctkd: give -md FILE"),
        (["run", "-p", "x", "--repeat-last-n", "9"], 2, "--repeat-last-n is how far penalties look back"),
        (["run", "-p", "x", "--repeat-last-n", "0", "--repeat-penalty", "2"], 2, "turns penalties off: leave it out"),
        (["run", "-p", "x", "--tau", "3"], 2, "give --spec tree"),
        (["run", "-p", "x", "--spec", "tree", "--tau", "nan"], 2, "'nan' is not a finite number"),
        (["run", "-p", "x", "--spec", "tree", "--tau", "-1"], 2, "is not in the range x>=0"),
        (["run", "-p", "x", "--spec", "tree", "--tree-top-k", "17"], 2, "17 is not in the range 1<=x<=16"),
        (["run", "-p", "x", "--spec", "tree", "--budget", "0"], 2, "0 is not in the range"),
        (["run", "-p", "x", "--spec", "tree", "--budget", "128"], 2, "128 is not in the range 1<=x<=127"),
        (["run", "-p", "x", "--top-k", "5"], 2, "give another --temp, or leave --top-k out"),
        (["run", "-p", "x", "--top-p", "0.5", "--seed", "3"], 2, "leave --top-p and --seed out"),
        (["quantize", "a", "b", "q8_0", "--dry-run", "--verify"], 2, "leave --verify out"),
        (["bench", "--drafter-check", "--budget", "22"], 2, "drafts chains: leave --budget out"),
        (["bench", "--drafter-check", "--tau", "6"], 2, "drafts chains: leave --tau out"),
        (["inspect", ""], 2, "no name of a file"),
        (["run", "-p", "x", "--spec", "perhaps"], 2, "'perhaps' is not one of 'auto'"),
        (["run", "-p", "x", "-ctk", "q3"], 2, "'q3' is not one of"),
        (["run", "-f", "no-such-prompt.txt"], 1, "'no-such-prompt.txt' cannot be read: No such file"),
        (["run", "-f", "."], 1, "'.' cannot be read: Is a directory"),
        (["inspect", "no-such-model.gguf"], 1, "no-such-model.gguf"),
    ],
)
def test_answers(engine: FakeEngine, arguments: list[str], code: int, text: str) -> None:
    """Every answer has its exit code and says what was wrong; no model is touched."""
    result = invoke(*arguments)

    assert (result.exit_code, text in result.output) == (code, True), result.output
    assert "Traceback" not in result.output
    assert not engine.asked


def test_text_goes_to_stdout_alone(engine: FakeEngine) -> None:
    """A pipe gets the generated text, byte for byte: no prompt, no newline added, no statistics."""
    result = invoke("run", "-p", "write fib", "--stats")

    assert (result.exit_code, result.stdout) == (0, "def fib(n):\n")
    assert "speculation" in result.stderr
    assert engine.asked["closed"]


def test_prompt_is_shown_on_demand(engine: FakeEngine) -> None:
    """--display-prompt puts the prompt before the text."""
    result = invoke("run", "-p", "# fib\n", "--display-prompt")

    assert result.stdout == "# fib\ndef fib(n):\n"


@pytest.mark.parametrize(
    ("arguments", "piped", "prompt"),
    [
        (["-p", "one line"], None, "one line"),
        (["-p", "one line"], "ignored", "one line"),
        ([], "piped\n", "piped"),
        (["-f", "-"], "two\nlines\n\n", "two\nlines\n"),
        ([], "windows\r\n", "windows"),
        ([], b"\xef\xbb\xbfwith a mark", "with a mark"),
        (["-p", ""], None, ""),
        (["--chat"], "hello", "user:hello"),
        (["--chat", "--system", "be brief", "-p", "hello"], None, "system:be brief|user:hello"),
    ],
)
def test_prompt_sources(engine: FakeEngine, arguments: list[str], piped: str | bytes | None, prompt: str) -> None:
    """-p, -f, a pipe and the chat template all lead to the prompt one expects."""
    result = invoke("run", *arguments, input=piped)

    assert result.exit_code == 0, result.output
    assert engine.asked["prompt"] == prompt


def test_prompt_that_is_not_text(engine: FakeEngine) -> None:
    """Bytes that are no UTF-8 are refused with their place."""
    result = invoke("run", input=b"abc\xff")

    assert result.exit_code == 1
    assert "The prompt from stdin is not UTF-8 text: byte 3 is 0xff." in result.output


def test_options_arrive_at_the_engine(engine: FakeEngine) -> None:
    """Every flag reaches the engine under the engine's own name."""
    flags = "-n 7 --temp 0.5 --top-k 40 --top-p 0.9 --min-p 0.05 --repeat-penalty 1.1 --presence-penalty 0.2"
    flags += (
        " --frequency-penalty 0.3 --repeat-last-n 32 -s 42 --stop END --stop FIN --ignore-eos --spec chain --draft 4"
        " --policy ema"
    )
    invoke("run", "-p", "x", *flags.split())

    expected = {
        **{"max_tokens": 7, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repeat_penalty": 1.1},
        **{"presence_penalty": 0.2, "frequency_penalty": 0.3, "penalty_last_n": 32, "seed": 42, "stop": ("END", "FIN")},
        **{"ignore_eos": True, "spec": "chain", "draft_max": 4, "logprobs": 0, "policy": "ema"},
    }
    assert {name: engine.asked[name] for name in expected} == expected


def test_tree_options_arrive_only_when_given(engine: FakeEngine) -> None:
    """The engine's own defaults hold unless an option says otherwise; an infinite tau keeps every branch."""
    invoke("run", "-p", "x", "--spec", "tree", "--tau", "inf", "--budget", "9")

    assert (engine.asked["tau"], engine.asked["budget"]) == (float("inf"), 9)
    assert "tree_top_k" not in engine.asked


def test_json_is_the_only_output(engine: FakeEngine) -> None:
    """--json prints the documented fields and nothing else."""
    result = invoke("run", "-p", "x", "--json")
    document = json.loads(result.stdout)

    fields = ["text", "tokens", "prompt_tokens", "finish_reason", "model", "drafter", "device", "stats"]
    assert list(document) == fields
    assert (document["text"], document["finish_reason"]) == ("def fib(n):\n", "length")


def test_json_with_logprobs(engine: FakeEngine) -> None:
    """--logprobs adds one entry per token."""
    document = json.loads(invoke("run", "-p", "x", "--json", "--logprobs", "1").stdout)

    assert document["logprobs"][1] == {"token_id": 1, "logprob": -0.5, "top": [[1, -0.5]]}


def test_ctrl_c_keeps_the_text(engine: FakeEngine) -> None:
    """Ctrl-C ends the text after the running round; exit code 130, no error message."""
    engine.press_ctrl_c_after = 1
    result = invoke("run", "-p", "x")

    assert (result.exit_code, result.output) == (130, "def fib(n):")


def test_ctrl_c_with_json(engine: FakeEngine) -> None:
    """A cancelled generation still gives its document."""
    engine.press_ctrl_c_after = 0
    result = invoke("run", "-p", "x", "--json")

    assert result.exit_code == 130
    assert json.loads(result.stdout)["finish_reason"] == "cancelled"


def test_second_ctrl_c_interrupts_at_once() -> None:
    """Who presses twice does not want to wait for the round."""
    presses: list[str] = []
    with pytest.raises(KeyboardInterrupt), soft_interrupt(lambda: presses.append("one")):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    assert presses == ["one"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_errors_become_one_sentence(engine: FakeEngine) -> None:
    """An error of the package is a sentence on stderr and exit code 1."""
    engine.error = ModelFileError("'x.gguf' is no GGUF file; its first bytes are b'PK'")
    result = invoke("run", "-p", "x")

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: 'x.gguf' is no GGUF file; its first bytes are b'PK'\n"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OptionError("`n_ctx` is 9: it must be 1 to 4"), "-c is 9: it must be 1 to 4"),
        (OptionError("`n_threads` is 9: too many"), "-t is 9: too many"),
        (OptionError("`draft_max` is 9: at most 7"), "--draft-max is 9: at most 7"),
        (OptionError("`spec` is 'chain', `n_parallel` is 1"), "--spec is 'chain', n_parallel is 1"),
        (OptionError("see `pyggml-spec devices`"), "see `pyggml-spec devices`"),
        (ContextLimitError("shorten it or load with a larger `n_ctx`"), "shorten it or load with a larger -c"),
    ],
)
def test_errors_name_flags(engine: FakeEngine, error: PyggmlSpecError, text: str) -> None:
    """What the package calls an argument is a flag here; for programs it stays the argument."""
    engine.error = error
    result = invoke("run", "-p", "x")

    assert (result.exit_code, result.stderr) == (1, f"Error: {text}\n")
    assert "`n_" not in str(error) and "--" not in str(error)


def test_every_argument_has_its_flag() -> None:
    """All that `run` passes on can be named in an error, be it called like the option or like its value."""
    names = (*run_module.LOADING, *run_module.GENERATING, *run_module.TREES)
    flags = main._flags(SimpleNamespace(invoked_subcommand="run"))
    bench_flags = main._flags(SimpleNamespace(invoked_subcommand="bench"))

    assert {name: flags[name][0] for name in names} == dict.fromkeys(names, "-")
    assert (flags["n_ctx"], flags["max_tokens"], flags["kv_type_draft_k"]) == ("-c", "-n", "-ctkd")
    assert (bench_flags["draft_max"], bench_flags["budget"]) == ("--draft-max", "--budget")


def shell(line: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A line of bash with the program as `$0`."""
    command = f"{sys.executable} -m pyggml_spec"
    arguments = ["bash", "-c", f"set -o pipefail; {line.replace('$0', command)}"]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("arguments", ["run -p x", "--version", "inspect", "bench --json"])
def test_a_closed_stdout_is_an_error(arguments: str) -> None:
    """What cannot be written anywhere is not done, and not called a success."""
    done = shell(f"$0 {arguments} >&-")

    assert done.returncode == 1
    assert done.stderr.startswith("Error: stdout is closed") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", ["inspect", "inspect --json", "inspect --tensors", "run --help"])
def test_a_reader_that_goes_away_is_no_error(arguments: str) -> None:
    """`| head` ends the program without a word."""
    done = shell(f"$0 {arguments} | head -c 5")

    assert (len(done.stdout), done.stderr) == (5, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("arguments", ["--help", "--version", "run --help"])
def test_a_full_disk_is_an_error(arguments: str) -> None:
    """One sentence, no traceback."""
    done = shell(f"$0 {arguments} > /dev/full")

    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "No space left" in done.stderr


def test_ctrl_c_while_the_command_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quiet and 130 from the first moment, not click's "Aborted!"."""
    monkeypatch.setattr(click.Group, "parse_args", lambda *_: signal.raise_signal(signal.SIGINT))

    assert (invoke("run").exit_code, invoke("run").output) == (130, "")


def test_ctrl_c_while_modules_are_imported(tmp_path: Path) -> None:
    """No traceback before the program has begun: here the first module that it needs is where the signal comes."""
    (tmp_path / "click.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n")
    program = "import runpy, sys; sys.path.insert(0, sys.argv.pop()); runpy.run_module('pyggml_spec', None, '__main__')"
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (130, "")


def test_idle_gpu_is_reported(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is here but unused is worth a warning, unless the device was chosen by name."""
    monkeypatch.setattr(machine, "find_gpu_vendors", lambda: ["NVIDIA"])

    assert "Warning: NVIDIA GPU is here but not used" in invoke("run", "-p", "x").stderr
    assert invoke("run", "-p", "x", "--device", "cpu").stderr == ""


def test_an_unused_drafter_is_reported(engine: FakeEngine) -> None:
    """A drafter that was asked for and did nothing is mentioned even without --stats."""
    result = invoke("run", "-p", "x", "-m", "t.gguf", "-md", "d.gguf")

    assert result.stderr == "Note: the drafter was not used: nothing was generated.\n"


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    """`--help` imports neither native code nor NumPy."""
    check = (
        "import sys\nfrom pyggml_spec.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'numpy', 'gguf', 'tokenizers', 'rich', 'jinja2', 'cffi', 'pyggml_spec.decode'} & set(sys.modules)\n"
        "heavy |= {name for name in sys.modules if '_ggml_' in name}\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr


def test_columns_and_sizes() -> None:
    """Columns line up; the last one is never padded; sizes are decimal."""
    assert align([("a", "bb", "c"), ("aaa", "b", "")]) == "a    bb  c\naaa  b"
    assert [format_bytes(n) for n in (0, 999, 1000, 20_600_000)] == ["0 B", "999 B", "1.0 kB", "20.6 MB"]
