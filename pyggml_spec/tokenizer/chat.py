"""Rendering a conversation with the chat template that a model file carries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyggml_spec.errors import ModelFileError, OptionError

Message = Mapping[str, Any]

_MAX_REASON_CHARS = 300


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The prompt text of a conversation, rendered the way Hugging Face tokenizers do it.

    messages: mappings with "role" and "content"; add_generation_prompt: end with the start of the assistant's turn;
    variables: whatever else the template reads (tools, enable_thinking, ...).
    The template comes from a file and runs in a sandbox without access to attributes, files or mutation.
    Raises ModelFileError when the template is missing or broken, OptionError when it refuses the messages.
    """
    if not template:
        raise ModelFileError("this model has no chat template; give a plain prompt instead of a conversation")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise OptionError(f"a chat message needs a 'role' and a 'content', found {message!r}")
    try:
        compiled = _sandbox().from_string(template)
        return compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
    except OptionError:
        raise
    except jinja2.TemplateSyntaxError as error:
        reason = _one_line(str(error.message))
        raise ModelFileError(f"the chat template is broken at line {error.lineno}: {reason}") from error
    except Exception as error:  # templates compute: any Python error can come out
        reason = _one_line(str(error) or type(error).__name__)
        raise ModelFileError(f"the chat template cannot render these messages: {reason}") from error


def _sandbox() -> ImmutableSandboxedEnvironment:
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return sandbox


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise OptionError(f"the chat template refuses these messages: {_one_line(str(message))}")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_REASON_CHARS else line[:_MAX_REASON_CHARS] + "..."
