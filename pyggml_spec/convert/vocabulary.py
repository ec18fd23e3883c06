"""The tokenizer of a checkpoint as metadata of a GGUF file: byte-level BPE of the Qwen kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyggml_spec.convert.settings import Settings, read_json
from pyggml_spec.convert.stored_keys import store_bool, store_int, store_ints, store_text, store_texts
from pyggml_spec.errors import ModelFileError

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # GGUF's numbering
_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
"""What a special token is for: the checkpoint's word -> GGUF's, whose misspelling is part of the format."""

_LETTERS = {r"\p{L}": "qwen2", r"[\p{L}\p{M}]": "qwen35"}


@dataclass(frozen=True)
class _Added:
    """A token beyond the merges."""

    token_id: int
    text: str
    is_special: bool

    @property
    def kind(self) -> int:
        # some releases do not mark their control tokens as special; the spelling gives them away
        is_control = self.is_special or (self.text.startswith("<|") and self.text.endswith("|>"))
        return _CONTROL if is_control else _USER_DEFINED


def vocabulary_keys(directory: Path, n_vocab: int) -> dict[str, bytes]:
    """The `tokenizer.*` keys of a checkpoint whose tables have n_vocab rows.

    Raises ModelFileError when the tokenizer is of another kind, or does not fit the tables.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ModelFileError(f"'{directory}' has no tokenizer.json; give a directory that holds the model's tokenizer")
    tokenizer = Settings(read_json(path), file=str(path))
    added = _read_added(tokenizer)
    tokens, kinds = _read_tokens(tokenizer, added, n_vocab)
    options = _optional_settings(directory / "tokenizer_config.json")
    return {
        _PREFIX + "model": store_text("gpt2"),
        _PREFIX + "pre": store_text(_recognise_split(tokenizer)),
        _PREFIX + "tokens": store_texts(tokens),
        _PREFIX + "token_type": store_ints(kinds),
        _PREFIX + "merges": store_texts(_read_merges(tokenizer)),
        **_special_ids(options, _optional_settings(directory / "config.json"), added, n_vocab),
        **_added_around(tokenizer, options),
        **_template_keys(directory, options),
    }


def _optional_settings(path: Path) -> Settings:
    return Settings(read_json(path) if path.exists() else {}, file=str(path))


def _read_added(tokenizer: Settings) -> list[_Added]:
    entries = tokenizer.find("added_tokens") or []
    try:
        return [_Added(int(e["id"]), str(e["content"]), bool(e.get("special"))) for e in entries]
    except (TypeError, KeyError, ValueError, AttributeError):
        tokenizer.fail(("added_tokens",), "must be a list of objects with 'id' and 'content'")


def _read_tokens(tokenizer: Settings, added: list[_Added], n_vocab: int) -> tuple[list[str], list[int]]:
    """(texts, kinds), one per row of the model's tables; rows without a token are named so that nothing means them."""
    if tokenizer.find("model.type") != "BPE":
        tokenizer.fail(("model.type",), "only byte-level BPE tokenizers are supported")
    texts = tokenizer.find("model.vocab")
    if not isinstance(texts, Mapping) or not texts:
        tokenizer.fail(("model.vocab",), "must map tokens to ids")
    tokens, kinds = [f"[PAD{row}]" for row in range(n_vocab)], [_UNUSED] * n_vocab
    placed = [(token_id, text, _NORMAL) for text, token_id in texts.items()]
    for token_id, text, kind in [*placed, *((token.token_id, token.text, token.kind) for token in added)]:
        if not isinstance(token_id, int) or not 0 <= token_id < n_vocab:
            raise ModelFileError(
                f"token {text[:40]!r} of '{tokenizer.file}' has id {token_id}, but the model's tables have {n_vocab} "
                "rows; use the tokenizer released with the model"
            )
        tokens[token_id], kinds[token_id] = text, kind
    return tokens, kinds


def _read_merges(tokenizer: Settings) -> list[str]:
    merges = tokenizer.find("model.merges")
    pairs = [m.split(" ") if isinstance(m, str) else m for m in merges] if isinstance(merges, list) else []
    if not pairs or not all(isinstance(pair, list) and [type(part) for part in pair] == [str, str] for pair in pairs):
        tokenizer.fail(("model.merges",), "must be a list of pairs of tokens")
    return [f"{left} {right}" for left, right in pairs]


def _recognise_split(tokenizer: Settings) -> str:
    """llama.cpp's name of the rule that cuts text into words, by the expression the tokenizer gives."""
    splits = [step for step in _steps(tokenizer, "pre_tokenizer", "pretokenizers") if step.find("type") == "Split"]
    found = [str(step.find("pattern.Regex")) for step in splits]
    names = {split_expression(letters): name for letters, name in _LETTERS.items()}
    if len(found) != 1 or found[0] not in names:
        shown = " and ".join(repr(expression)[:80] for expression in found) or "no expression"
        raise ModelFileError(
            f"'{tokenizer.file}' splits text by {shown}; only the rules of Qwen2 ('qwen2') and Qwen3.5 ('qwen35') "
            "are supported"
        )
    return names[found[0]]


def _steps(tokenizer: Settings, key: str, inner_key: str) -> list[Settings]:
    """What a stage of the tokenizer does: the steps of a sequence, or itself as the only one."""
    inner = tokenizer.find(f"{key}.{inner_key}")
    steps = inner if isinstance(inner, list) else [tokenizer.find(key)]
    return [Settings(step, file=tokenizer.file) for step in steps if isinstance(step, Mapping)]


def split_expression(letters: str) -> str:
    r"""The expression that Qwen's tokenizer.json files hold; `letters` is what makes up words, \p{L} or with marks."""
    inside = letters.strip("[]")
    return "|".join(
        (
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+",
            r"\p{N}",
            rf" ?[^\s{inside}\p{{N}}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


def _special_ids(options: Settings, config: Settings, added: list[_Added], n_vocab: int) -> dict[str, bytes]:
    """Ids of special tokens: the tokenizer's texts first, then the model's numbers."""
    id_of = {token.text: token.token_id for token in added}
    keys: dict[str, bytes] = {}
    for role, name in _ROLES.items():
        text = options.find(f"{role}_token.content", f"{role}_token")
        token_id = id_of.get(text) if isinstance(text, str) else None
        if token_id is None:
            token_id = config.find(f"{role}_token_id", f"text_config.{role}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < n_vocab:
            keys[f"{_PREFIX}{name}_token_id"] = store_int(token_id)
    return keys


def _added_around(tokenizer: Settings, options: Settings) -> dict[str, bytes]:
    """Whether encoding adds tokens before or after a text."""
    kinds = {str(step.find("type")) for step in _steps(tokenizer, "post_processor", "processors")}
    if kinds - {"ByteLevel"}:
        tokenizer.fail(("post_processor",), "only tokenizers that add no tokens of their own are supported")
    flags: dict[str, bool | None] = {role: options.find_bool(f"add_{role}_token") for role in ("bos", "eos")}
    if kinds:
        flags = dict.fromkeys(flags, False)
    return {f"{_PREFIX}add_{role}_token": store_bool(flag) for role, flag in flags.items() if flag is not None}


def _template_keys(directory: Path, options: Settings) -> dict[str, bytes]:
    """The chat template, from a file of its own or from the tokenizer's settings; further ones by name."""
    template = options.find("chat_template")
    path = directory / "chat_template.jinja"
    if path.exists():
        template = _read_text(path)
    elif template is None:
        template = _optional_settings(directory / "chat_template.json").find("chat_template")
    if isinstance(template, str):
        return {_TEMPLATE: store_text(template)}
    named = _named_templates(template, options)
    others = {name: text for name, text in named.items() if name != "default"}
    keys = {_TEMPLATE: store_text(named["default"])} if "default" in named else {}
    if others:
        keys["tokenizer.chat_templates"] = store_texts(list(others))
    return keys | {f"{_TEMPLATE}.{name}": store_text(text) for name, text in others.items()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelFileError(f"'{path}' cannot be read as UTF-8 text: {error}; download it again") from error


def _named_templates(template: Any, options: Settings) -> dict[str, str]:
    if template is None:
        return {}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    except (TypeError, KeyError):
        options.fail(("chat_template",), "must be a text or a list of objects with 'name' and 'template'")
