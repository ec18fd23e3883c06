"""Reading GGUF models: files, configurations, vocabularies. Needs no native code (except `weights`)."""

from pyggml_spec.gguf_io.dialects import canonical_tensors
from pyggml_spec.gguf_io.drafter import drafter_tensors, read_drafter_config
from pyggml_spec.gguf_io.fit import FitRow, check_drafter_fits, explain_fit
from pyggml_spec.gguf_io.reader import GgufFile, TensorInfo, open_gguf
from pyggml_spec.gguf_io.target import read_target_config, target_tensors
from pyggml_spec.gguf_io.vocab import find_vocabulary, read_vocabulary

__all__ = [
    "FitRow",
    "GgufFile",
    "TensorInfo",
    "canonical_tensors",
    "check_drafter_fits",
    "drafter_tensors",
    "explain_fit",
    "find_vocabulary",
    "open_gguf",
    "read_drafter_config",
    "read_target_config",
    "read_vocabulary",
    "target_tensors",
]
