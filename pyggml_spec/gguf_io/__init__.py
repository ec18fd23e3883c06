"""Reading GGUF models: files, configurations, vocabularies. Needs no native code (except `weights`)."""

from pyggml_spec.gguf_io.reader import GgufFile, TensorInfo, open_gguf

__all__ = ["GgufFile", "TensorInfo", "open_gguf"]
