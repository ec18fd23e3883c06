"""Byte-level BPE on Hugging Face `tokenizers`, built from a GGUF vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from pyggml_spec.errors import ModelFileError, OptionError
from pyggml_spec.records import Vocabulary
from pyggml_spec.tokenizer.byte_alphabet import byte_of_character
from pyggml_spec.tokenizer.stream import StreamDecoder

_CONTROL, _USER_DEFINED = 3, 4
_END_TEXTS = ("<|endoftext|>", "<|im_end|>")  # end an answer whichever of them the file calls end of text


class Tokenizer:
    """Encodes and decodes text with one vocabulary; ids are those of the file.

    Raises ModelFileError for a kind of vocabulary or a pre-tokenizer that is not supported.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        if vocabulary.model != "gpt2":
            raise ModelFileError(
                f"'{vocabulary.file}' has a tokenizer of kind '{vocabulary.model}'; only byte-level BPE ('gpt2') works"
            )
        self.vocabulary = vocabulary
        self._split_pattern = _split_pattern(vocabulary)
        self._byte_of = byte_of_character()
        self._token_bytes: dict[int, bytes] = {}

    @property
    def n_tokens(self) -> int:
        """Tokens of the vocabulary."""
        return self.vocabulary.n_tokens

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text or an answer."""
        named = {token_id for token_id in (self.vocabulary.eos_id, self.vocabulary.eot_id) if token_id is not None}
        return frozenset(named | {self.control_ids[text] for text in _END_TEXTS if text in self.control_ids})

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: they steer the model and have no text of their own."""
        return frozenset(self._ids_of_type(_CONTROL))

    @cached_property
    def control_ids(self) -> Mapping[str, int]:
        """Control tokens by their spelling."""
        ids = [token_id for token_id in self._ids_of_type(_CONTROL) if self.vocabulary.tokens[token_id]]
        return dict(zip(_texts(self.vocabulary, [self.vocabulary.tokens[i] for i in ids]), ids, strict=True))

    def encode(
        self,
        text: str,
        *,
        parse_special: bool = True,
        add_bos: bool | None = None,
        stand_ins: Mapping[int, str] | None = None,
    ) -> list[int]:
        """Token ids of `text`, normalised to NFC.

        parse_special: whether the spelling of a control token, such as <|im_end|>, becomes that token.
        add_bos: whether to begin with the begin-of-text token; None = as the file says, unless the text does.
        stand_ins: characters (as for str.translate) that others stand for where no control token is meant; see `chat`.
        Raises OptionError when the text is not valid Unicode (an undecodable byte of the command line, say).
        """
        try:
            pieces = self._control_pattern.split(text) if parse_special else [text]
            ids: list[int] = []
            for plain, control in zip(pieces[::2], [*pieces[1::2], None], strict=True):
                if plain != "":
                    plain = plain.translate(stand_ins) if stand_ins else plain
                    ids += self._encoder.encode(plain, add_special_tokens=False).ids
                if control is not None:
                    ids.append(self.control_ids[control])
        except (UnicodeEncodeError, TypeError) as error:  # the package does not say what it stumbled over
            raise OptionError(f"the text cannot be tokenised: {_what_is_wrong(text)}") from error
        bos_id = self.vocabulary.bos_id
        wants_bos = self.vocabulary.add_bos and ids[:1] != [bos_id] if add_bos is None else add_bos
        return [bos_id, *ids] if wants_bos and bos_id is not None else ids

    def decode(self, token_ids: Iterable[int], *, with_special: bool = False) -> str:
        """The text of the tokens; control tokens are left out unless with_special. Invalid UTF-8 becomes U+FFFD."""
        text_of = self.token_bytes if with_special else self._visible_bytes
        return b"".join(map(text_of, token_ids)).decode("utf-8", errors="replace")

    def stream(self, *, with_special: bool = False) -> StreamDecoder:
        """A decoder for tokens that arrive one by one."""
        return StreamDecoder(self.token_bytes if with_special else self._visible_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a control token gives its spelling. Raises OptionError outside the range."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._spell(token_id)
        return known

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self.special_ids else self.token_bytes(token_id)

    def _spell(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.n_tokens:
            raise OptionError(f"token id {token_id} is outside the vocabulary of {self.n_tokens} tokens")
        stored = self.vocabulary.tokens[token_id]
        if self.vocabulary.token_types[token_id] in (_CONTROL, _USER_DEFINED):
            return stored
        try:
            return bytes(self._byte_of[character] for character in stored.decode("utf-8"))
        except (UnicodeDecodeError, KeyError):
            return stored  # a padding entry or the like, outside the byte alphabet

    def _ids_of_type(self, token_type: int) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.vocabulary.token_types) if kind == token_type]

    @cached_property
    def _encoder(self) -> tokenizers.Tokenizer:
        encoder = tokenizers.Tokenizer(_bpe_model(self.vocabulary))
        encoder.normalizer = normalizers.NFC()
        encoder.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(self._split_pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokens = self.vocabulary.tokens
        texts = _texts(self.vocabulary, [tokens[token_id] for token_id in self._ids_of_type(_USER_DEFINED)])
        encoder.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts if text])
        return encoder

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        """Finds control tokens, of those that begin alike the longest; with none it matches nowhere."""
        spellings = sorted(self.control_ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, spellings)) or '(?!)'})")


def _what_is_wrong(text: object) -> str:
    if not isinstance(text, str):
        return f"{text!r:.80} is no text"
    at = next((at for at, character in enumerate(text) if "\ud800" <= character <= "\udfff"), 0)
    found = f"character {at + 1} is {text[at : at + 1]!r}"
    return f"{found}, half a character or a byte that is not UTF-8; give valid Unicode text"


def _split_pattern(vocabulary: Vocabulary) -> str:
    """The rule that cuts text into words before merging: the same for both Qwen generations but for combining marks.

    In order: English contractions; a word with at most one leading symbol; one digit; a run of symbols with the line
    breaks after it; line breaks with the blanks before them; blanks, leaving one for a following word.
    """
    marks = {"qwen2": "", "qwen35": r"\p{M}"}.get(vocabulary.pre_tokenizer)
    if marks is None:
        raise ModelFileError(
            f"'{vocabulary.file}' splits text by the rule '{vocabulary.pre_tokenizer}'; "
            "only 'qwen2' and 'qwen35' are supported"
        )
    letter = r"[\p{L}" + marks + "]"
    symbol = r"[^\s\p{L}\p{N}" + marks + "]"
    return "|".join(
        [
            r"(?i:'(?:s|t|re|ve|m|ll|d))",
            r"[^\r\n\p{L}\p{N}]?" + letter + "+",
            r"\p{N}",
            " ?" + symbol + r"+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )


def _bpe_model(vocabulary: Vocabulary) -> models.BPE:
    texts = _texts(vocabulary, vocabulary.tokens)
    ids = dict(zip(texts, range(len(texts)), strict=True))
    if len(ids) != len(texts):
        raise ModelFileError(f"the vocabulary of '{vocabulary.file}' has the same token twice; convert the model again")
    # a rule without a space fails in the package, with the others that do not fit
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in _texts(vocabulary, vocabulary.merges))]
    try:
        return models.BPE(vocab=ids, merges=merges)
    except Exception as error:  # the package raises bare Exception
        raise ModelFileError(f"the merges of '{vocabulary.file}' do not fit its tokens: {str(error)[:80]!r}") from error


def _texts(vocabulary: Vocabulary, items: list[bytes]) -> list[str]:
    try:
        return [item.decode("utf-8") for item in items]
    except UnicodeDecodeError as error:
        raise ModelFileError(
            f"the vocabulary of '{vocabulary.file}' holds {error.object[:40]!r}, which is not UTF-8; convert it again"
        ) from error
