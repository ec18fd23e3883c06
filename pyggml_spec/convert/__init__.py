"""Making model files: Hugging Face checkpoints to GGUF, and GGUF to GGUF of another type."""

from pyggml_spec.convert.conversion import Conversion, plan_conversion
from pyggml_spec.convert.recipes import MIXTURES, UNIFORM_TYPES, Override
from pyggml_spec.convert.requantise import Requantisation, plan_requantisation
from pyggml_spec.convert.verify import TensorError, verify_requantisation

__all__ = [
    "MIXTURES",
    "UNIFORM_TYPES",
    "Conversion",
    "Override",
    "Requantisation",
    "TensorError",
    "plan_conversion",
    "plan_requantisation",
    "verify_requantisation",
]
