"""Text to token ids and back, from the vocabulary a model file carries. `chat` does so for conversations."""

from pyggml_spec.tokenizer.stream import StreamDecoder
from pyggml_spec.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer"]
