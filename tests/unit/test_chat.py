"""Conversations rendered the way Hugging Face tokenizers do it, in a sandbox."""

from __future__ import annotations

import pytest

from pyggml_spec.assets import embedded_target_path
from pyggml_spec.errors import ModelFileError, OptionError
from pyggml_spec.gguf_io import open_gguf, read_vocabulary
from pyggml_spec.tokenizer.chat import render_chat

HELLO = [{"role": "user", "content": "hello"}]


def test_embedded_template() -> None:
    """Turns are delimited, and the assistant's is opened on demand."""
    with open_gguf(embedded_target_path()) as file:
        template = read_vocabulary(file).chat_template
    messages = [{"role": "system", "content": "be brief"}, *HELLO]

    turns = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    assert render_chat(template, messages) == turns + "<|im_start|>assistant\n"
    assert render_chat(template, messages, add_generation_prompt=False) == turns


def test_blocks_leave_no_blanks() -> None:
    """A block's line break and the blanks before it are not part of the prompt."""
    template = "{% for m in messages %}\n    {% if m.role %}\n{{ m.content }}!\n    {% endif %}\n{% endfor %}\n"
    assert render_chat(template, HELLO) == "hello!\n"


def test_what_templates_expect() -> None:
    """Loop controls, JSON without escapes, dates and further variables."""
    loop = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    assert render_chat(loop, HELLO * 2) == "hello"
    assert render_chat("{{ tools | tojson }}", HELLO, tools=[{"name": "größe<"}]) == '[{"name": "größe<"}]'
    assert render_chat("{{ {'a': 1} | tojson(indent=2) }}", HELLO) == '{\n  "a": 1\n}'
    assert len(render_chat("{{ strftime_now('%Y') }}", HELLO)) == 4
    assert render_chat("{{ 'yes' if enable_thinking else 'no' }}", HELLO, enable_thinking=True) == "yes"
    assert render_chat("{{ bos_token }}{{ messages[0]['content'] }}", HELLO) == "hello"


@pytest.mark.parametrize("template", [None, ""])
def test_no_template(template: str | None) -> None:
    """A model without a template says what to do instead."""
    with pytest.raises(ModelFileError, match="no chat template"):
        render_chat(template, HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}",
        "{{ messages[",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ 'x' + 1 }}",
        "{{ messages | unknown_filter }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10000000) | list }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_broken_or_hostile_template(template: str) -> None:
    """Whatever a template does, it fails with one sentence and touches nothing."""
    with pytest.raises(ModelFileError) as caught:
        render_chat(template, HELLO)
    assert "\n" not in str(caught.value)


def test_template_that_refuses() -> None:
    """A template's own complaint reaches the user."""
    with pytest.raises(OptionError, match="refuses these messages: no system role"):
        render_chat("{{ raise_exception('no system\n role') }}", HELLO)


@pytest.mark.parametrize("message", ["hello", {"content": "x"}, {"role": 3}])
def test_bad_message(message: object) -> None:
    """A message without a role is refused before rendering."""
    with pytest.raises(OptionError, match="'role'"):
        render_chat("x", [message])  # type: ignore[list-item]
