"""What generation returns to callers of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from pyggml_spec.decode.session import Emission, Session
from pyggml_spec.decode.stats import StatsReport
from pyggml_spec.errors import OptionError, PyggmlSpecError
from pyggml_spec.records import FinishReason, TokenLogprob


@dataclass(frozen=True)
class Piece:
    """Text and tokens of one round; text may lag behind while it could be half a character or a stop string."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Completion:
    """A finished generation."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    stats: StatsReport
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Stream:
    """A running generation: iterate over its pieces, then read `completion`.

    Closing it (or leaving a `with` block) ends the generation between two rounds; what was emitted stays valid.
    """

    def __init__(
        self, session: Session, emissions: Iterator[Emission], prompt_tokens: int, on_end: Callable[[Session], None]
    ) -> None:
        self._session = session
        self._emissions = emissions
        self._on_end = on_end
        self._prompt_tokens = prompt_tokens
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._has_ended = False
        self._why_lost: str | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        try:
            emission = next(self._emissions)
        except BaseException as error:
            self._end()
            if self._why_lost is not None and isinstance(error, StopIteration | PyggmlSpecError):
                raise OptionError(self._why_lost) from None
            raise
        self._tokens += emission.token_ids
        self._texts.append(emission.text)
        self._logprobs += emission.logprobs
        return Piece(emission.text, emission.token_ids)

    def cancel(self) -> None:
        """End after the running round; safe from signal handlers and other threads."""
        self._session.cancel()

    def abandon(self, why: str) -> None:
        """End at once, whoever reads: unless all was emitted the reader gets an OptionError with this sentence."""
        if self._session.finish_reason is None:
            self._why_lost = why
        with suppress(OptionError):  # another thread is inside: its next call on the device fails
            self.close()

    def close(self) -> None:
        """End now, between rounds; safe to call twice."""
        close = getattr(self._emissions, "close", None)
        if close is not None and not self._has_ended:
            try:
                close()
            except ValueError:  # its generator is running, so another thread is inside
                self.cancel()
                raise OptionError(
                    "another thread is reading this stream: it was cancelled and ends after its round, close it then"
                ) from None
        self._end()

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._on_end(self._session)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def has_ended(self) -> bool:
        """Whether no piece is to come any more."""
        return self._has_ended

    @property
    def completion(self) -> Completion:
        """Everything emitted; raises OptionError while pieces are still to come."""
        if not self._has_ended:
            raise OptionError("the stream has not ended: iterate over all of its pieces or close it first")
        return Completion(
            text="".join(self._texts),
            tokens=self._tokens,
            finish_reason=self._session.finish_reason or "cancelled",
            prompt_tokens=self._prompt_tokens,
            stats=self._session.stats.report(),
            logprobs=self._logprobs,
        )
