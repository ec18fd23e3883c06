"""Two spellings of the same drafters: llama.cpp's and lucebox's, brought to one set of names at the door."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io.metadata import Metadata
from pyggml_spec.gguf_io.reader import GgufFile, TensorInfo

MASK_KEY = "tokenizer.ggml.mask_token_id"


@dataclass(frozen=True)
class Dialect:
    """Where one kind of drafter file keeps its own keys."""

    name: Literal["llama.cpp", "lucebox"]
    prefix: str  # of the keys every model has
    block_size: str
    mask_keys: tuple[str, ...]  # any of them may hold the mask token id
    target_layers: str
    target_layer_shift: int  # stored number minus the 0-based layer whose output is read
    conv_prefix: str  # of conv_kernel_size, conv_group_size, selector_rank, selector_top_k


def find_dialect(file: GgufFile) -> Dialect:
    """The dialect of a drafter file by its architecture; ModelFileError when it is no drafter."""
    architecture = file.architecture
    if architecture == "dflash":
        return _llama_cpp("dflash.")
    if architecture in ("qwen35-dflash-draft", "dflash-draft"):
        return _lucebox(f"{architecture}.")
    raise ModelFileError.about(
        file.path,
        f"has architecture '{architecture}', which is no supported drafter; "
        "drafters are 'dflash' (llama.cpp) or 'qwen35-dflash-draft' (lucebox)",
    )


def _llama_cpp(prefix: str) -> Dialect:
    # llama.cpp names the layer whose INPUT is read, so the output of layer i is stored as i + 1.
    return Dialect(
        name="llama.cpp",
        prefix=prefix,
        block_size=prefix + "block_size",
        mask_keys=(MASK_KEY, prefix + "mask_token_id"),
        target_layers=prefix + "target_layers",
        target_layer_shift=1,
        conv_prefix=prefix,
    )


def _lucebox(prefix: str) -> Dialect:
    return Dialect(
        name="lucebox",
        prefix=prefix,
        block_size=prefix + "dflash.block_size",
        mask_keys=(prefix + "dflash.mask_token_id", MASK_KEY),
        target_layers=prefix + "dflash.target_layer_ids",
        target_layer_shift=0,
        conv_prefix=prefix + "dflash.dflash2.",
    )


def read_mask_token_id(keys: Metadata, dialect: Dialect, most: int) -> int:
    """The mask token id under any of the dialect's keys; files that store two different ones are refused."""
    found = {key: keys.require_int(key, 0, most) for key in dialect.mask_keys if key in keys}
    if not found:
        keys.fail(dialect.mask_keys[0], "a drafter must name the mask token it was trained with", "convert it again")
    if len(set(found.values())) > 1:
        keys.fail(dialect.mask_keys[0], f"'{dialect.mask_keys[1]}' holds {found[dialect.mask_keys[1]]}")
    return next(iter(found.values()))


_LUCEBOX_NAMES = {
    "dflash.fc.weight": "fc.weight",
    "dflash_fc.weight": "fc.weight",
    "dflash.hidden_norm.weight": "enc.output_norm.weight",
    "dflash_hidden_norm.weight": "enc.output_norm.weight",
    "dflash.dspark.markov.w1": "markov_w1.weight",
    "dflash.dspark.markov.w2": "markov_w2.weight",
    "dflash.dspark.confidence.weight": "conf_proj.weight",
    "dflash.dspark.confidence.bias": "conf_proj.bias",
    "dflash.selector.hproj.weight": "selector_hidden.weight",
    "dflash.selector.pred_cb": "selector_predecessor.weight",
    "dflash.selector.succ_cb": "selector_successor.weight",
}
_LUCEBOX_BLOCK_NAMES = {
    "post_attention_norm.weight": "ffn_norm.weight",
    "attn_conv.base": "attn_conv_base",
    "attn_conv.proj.weight": "attn_conv_proj.weight",
    "ffn_conv.base": "ffn_conv_base",
    "ffn_conv.proj.weight": "ffn_conv_proj.weight",
}
_BLOCK = re.compile(r"(blk\.\d+\.)(.+)")


def canonical_tensors(file: GgufFile) -> dict[str, TensorInfo]:
    """The tensors of a drafter file under llama.cpp's names, whatever its dialect."""
    if find_dialect(file).name == "llama.cpp":
        return file.tensors
    renamed = [replace(tensor, name=_canonical_name(name)) for name, tensor in file.tensors.items()]
    tensors = {tensor.name: tensor for tensor in renamed}
    if len(tensors) != len(renamed):
        raise ModelFileError.about(
            file.path, "holds a tensor under two spellings of its name", way_out="convert the drafter again"
        )
    return tensors


def _canonical_name(name: str) -> str:
    block = _BLOCK.fullmatch(name)
    if block:
        return block[1] + _LUCEBOX_BLOCK_NAMES.get(block[2], block[2])
    return _LUCEBOX_NAMES.get(name, name)
