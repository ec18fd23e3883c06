"""Comparing the tensors of a file with the table its configuration implies."""

from __future__ import annotations

from collections.abc import Mapping

import gguf

from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io.reader import GgufFile, TensorInfo

Shape = tuple[int, ...]

_F32_SUFFIXES = ("norm.weight", ".bias", ".ssm_a", ".ssm_conv1d.weight", "_conv_base")
_NOT_FOR_MATRICES = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})


def check_tensors(
    file: GgufFile,
    expected: Mapping[str, Shape],
    tensors: Mapping[str, TensorInfo],
    *,
    skipped_prefixes: tuple[str, ...] = (),
) -> None:
    """Check that `tensors` (of `file`, perhaps renamed) are those of `expected` (name -> ne), with fitting types.

    Norms, biases, gates and convolutions must be F32 (they are operands of element-wise operations); the others may
    have any type that matrices have. A tensor the table does not know is an error, because leaving it out would
    change the result silently; names that start with one of skipped_prefixes are allowed and left out.
    Raises ModelFileError naming the first offender.
    """
    for name, ne in expected.items():
        _check_tensor(file, tensors.get(name), name, ne)
    unknown = [name for name in tensors if name not in expected and not name.startswith(skipped_prefixes)]
    if unknown:
        raise ModelFileError.about(
            file.path,
            f"has a tensor '{unknown[0]}' that plain {file.architecture} models do not have; "
            "this variant of the model is not supported",
        )


def _check_tensor(file: GgufFile, tensor: TensorInfo | None, name: str, ne: Shape) -> None:
    if tensor is None:
        raise ModelFileError.about(
            file.path, f"has no tensor '{name}' (expected ne={list(ne)})", way_out="convert the model again"
        )
    if trimmed_shape(tensor.ne) != trimmed_shape(ne):
        raise ModelFileError.about(
            file.path,
            f"has ne={list(tensor.ne)}, but the keys imply ne={list(ne)}",
            part=f"tensor '{name}'",
            way_out="convert the model again",
        )
    rule = _broken_type_rule(name, tensor.type)
    if rule:
        raise ModelFileError.about(
            file.path,
            f"has type {tensor.type.name}, but {rule}",
            part=f"tensor '{name}'",
            way_out="convert or requantise the model again",
        )


def _broken_type_rule(name: str, tensor_type: gguf.GGMLQuantizationType) -> str:
    if name == "d2t":
        return "" if tensor_type == gguf.GGMLQuantizationType.I64 else "a draft-to-target table must be I64"
    if name.endswith(_F32_SUFFIXES):
        return "" if tensor_type == gguf.GGMLQuantizationType.F32 else "it must be F32"
    return "no matrix has that type" if tensor_type.name in _NOT_FOR_MATRICES else ""


def trimmed_shape(ne: Shape) -> Shape:
    """ne without trailing ones: files may store [n] as [n, 1]."""
    n_dims = len(ne)
    while n_dims > 1 and ne[n_dims - 1] == 1:
        n_dims -= 1
    return ne[:n_dims]
