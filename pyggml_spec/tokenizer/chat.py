"""Rendering a conversation with the chat template that a model file carries.

Control tokens come from the template alone: one that is spelled in a message is text, whoever wrote it. Templates mix
both into one text, cut it and join it, so while one runs every control token in a message has another first character,
which occurs nowhere else; it gets its own back after the control tokens were found. The text that is tokenised is
otherwise the one that Hugging Face tokenizers see, across the borders of messages too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import starmap
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyggml_spec.errors import ModelFileError, OptionError

if TYPE_CHECKING:
    from pyggml_spec.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, Any]

_MAX_REASON_CHARS = 300
_STAND_INS = range(0xA000, 0xA48D)  # Yi syllables: rare, without case, and printable, so that no repr escapes them


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any) -> list[int]:
    """The prompt of a conversation as token ids: `render_chat`, with the control tokens of the template alone.

    What is said in messages, or in lists and mappings among the variables (tools, documents), is text; a text given as
    a variable (bos_token, say) is the caller's own, as the template is.
    """
    template = tokenizer.vocabulary.chat_template
    disguise = _Disguise(tokenizer.control_ids, "".join([template or "", *_texts_in([messages, variables])]))
    hidden: dict[str, Any] = {
        name: value if isinstance(value, str) else disguise.put_on(value) for name, value in variables.items()
    }
    text = render_chat(template, disguise.put_on(messages), **hidden)
    return tokenizer.encode(text, stand_ins=disguise.stand_ins)


class _Disguise:
    """Other first characters for control tokens, none of which occurs in the text `used`."""

    def __init__(self, control_tokens: Collection[str], used: str) -> None:
        groups = {token[0]: [other[1:] for other in control_tokens if other[0] == token[0]] for token in control_tokens}
        free = (chr(code) for code in _STAND_INS if chr(code) not in used)
        self._other = dict(zip(groups, free, strict=False))
        if len(self._other) < len(groups):
            raise OptionError("the messages have every Yi syllable, of which control tokens need one: leave one out")
        self.stand_ins = {ord(other): first for first, other in self._other.items()}
        self._pattern = re.compile("|".join(starmap(_beginning, groups.items())) or "(?!)")

    def put_on(self, value: Any) -> Any:
        """The value with every text in it disguised."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._other[found[0]], value)
        if isinstance(value, Mapping):
            return {self.put_on(key): self.put_on(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = map(self.put_on, value)
            return list(items) if isinstance(value, list) else tuple(items)
        return value


def _beginning(first: str, rests: Sequence[str]) -> str:
    """An expression for the first character of a token, also of one that the end of the text cuts off: the next
    message, or the next part of this one, may hold its rest."""
    begun = {rest[:n] for rest in rests for n in range(len(rest))}
    return f"{re.escape(first)}(?={'|'.join(map(re.escape, rests))}|(?:{'|'.join(map(re.escape, begun))})\\Z)"


def _texts_in(value: Any) -> Iterator[str]:
    """Every text in lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_in([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item)


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
        odd = next((m for m in messages if not isinstance(m.get("content"), str)), None)
        if odd is not None:  # some templates take them
            found = f"{odd.get('content')!r:.80}"
            raise OptionError(f"the chat template cannot render the content {found}: give a text ({reason})") from error
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
