"""Reading GGUF models: files, configurations, vocabularies. Needs no native code (except `weights`)."""

from pyggml_spec.gguf_io.reader import GgufFile, TensorInfo, open_gguf
from pyggml_spec.gguf_io.target import read_target_config, target_tensors

__all__ = ["GgufFile", "TensorInfo", "open_gguf", "read_target_config", "target_tensors"]
