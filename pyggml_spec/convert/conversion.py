"""One conversion from a checkpoint's directory to a GGUF file: planned first, then written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gguf

from pyggml_spec.convert import drafter, target
from pyggml_spec.convert.borrowed import BorrowedFromTarget, open_borrowed, repeats
from pyggml_spec.convert.checkpoint import Checkpoint
from pyggml_spec.convert.drafter_keys import LLAMA_CPP, LUCEBOX, MASK_KEY, llama_cpp_keys, lucebox_keys
from pyggml_spec.convert.model_keys import general_keys
from pyggml_spec.convert.output_file import OutputFile, Progress, check_outline, refuse_input, write_file
from pyggml_spec.convert.stored_keys import store_int
from pyggml_spec.convert.tensors import MATRIX_TYPES, TensorPlan, output_tensors
from pyggml_spec.convert.vocabulary import vocabulary_keys
from pyggml_spec.errors import ModelFileError, OptionError
from pyggml_spec.gguf_io import open_gguf, read_drafter_config, read_target_config


@dataclass(frozen=True)
class Conversion:
    """A planned conversion; nothing is written yet."""

    role: Literal["target", "drafter"]
    architecture: str
    file: OutputFile
    notes: tuple[str, ...]  # what was left out or stored otherwise than asked
    inputs: tuple[Path, ...]  # files that are read, or belong to those that are
    settings_file: str  # the checkpoint's config.json

    def check(self) -> None:
        """Raise ModelFileError unless the file would be one that this package can run."""
        check_outline(self.file, "the converted model", self._check_readable)

    def write(self, path: Path, on_progress: Progress | None = None, *, replace: bool = True) -> None:
        """Write the file; an interrupted run leaves nothing under its name. `replace`: a file of that name may go."""
        refuse_input(path, self.inputs)
        write_file(self.file, path, self._check_readable, on_progress, replace=replace)

    def _check_readable(self, path: Path) -> None:
        read = read_target_config if self.role == "target" else read_drafter_config
        try:
            with open_gguf(path) as file:
                read(file)
        except ModelFileError as error:  # of a file that is not there yet: what its maker can mend is the checkpoint
            raise ModelFileError.about(
                self.settings_file,
                f"does not fit the tensors beside it: {error.finding or error}",
                way_out="correct it or download it again",
            ) from error


def plan_conversion(
    directory: Path,
    *,
    outtype: str = "q8_0",
    dialect: drafter.DialectName = "llama.cpp",
    target_path: Path | None = None,
    n_threads: int = 1,
) -> Conversion:
    """The conversion of a checkpoint; the class config.json names decides whether it is a target or a drafter.

    outtype: type of the matrices (f32, f16, bf16, q8_0); norms, vectors and convolutions are always f32.
    target_path: a drafter's target, a directory or a GGUF file: vocabulary and kind of rotary embedding come from it.
    Raises ModelFileError when the checkpoint is of another kind, incomplete, or describes an unsupported variant.
    """
    if outtype not in MATRIX_TYPES:
        raise OptionError(f"`outtype` is {outtype!r}: it must be one of {', '.join(MATRIX_TYPES)}")
    checkpoint = Checkpoint(directory)
    if checkpoint.architecture in target.CLASSES:
        return _plan_target(checkpoint, MATRIX_TYPES[outtype], n_threads)
    if checkpoint.architecture in drafter.CLASSES:
        return _plan_drafter(checkpoint, MATRIX_TYPES[outtype], dialect, target_path, n_threads)
    raise ModelFileError(_unknown(checkpoint))


def _unknown(checkpoint: Checkpoint) -> str:
    known = ", ".join((*target.CLASSES, *drafter.CLASSES))
    hint = ""
    if "Moe" in checkpoint.architecture:
        hint = " (mixture-of-experts models are not supported yet)"
    elif checkpoint.settings.find("dflash_config", "markov_rank") is not None:
        hint = " (its settings are a drafter's: name its class as the release it was trained after does)"
    return f"'{checkpoint.directory}' holds a {checkpoint.architecture}{hint}; supported are {known}"


def _plan_target(checkpoint: Checkpoint, matrix_type: gguf.GGMLQuantizationType, n_threads: int) -> Conversion:
    settings = target.read_target_settings(checkpoint)
    keys = target.target_keys(settings)
    notes: list[str] = []
    plans = target.target_tensors(checkpoint, settings, notes)
    n_vocab = settings.require_int("vocab_size", low=1, high=1 << 22)
    keys |= vocabulary_keys(checkpoint.directory, n_vocab)
    return _finish("target", target.ARCHITECTURE, checkpoint, keys, plans, matrix_type, n_threads, notes)


def _plan_drafter(
    checkpoint: Checkpoint,
    matrix_type: gguf.GGMLQuantizationType,
    dialect: drafter.DialectName,
    target_path: Path | None,
    n_threads: int,
) -> Conversion:
    settings = drafter.read_drafter_settings(checkpoint)
    plans = drafter.drafter_tensors(checkpoint, dialect)
    borrowed = None if target_path is None else open_borrowed(target_path)
    if borrowed is not None:
        _check_features(settings, checkpoint, borrowed)
    notes: list[str] = _notes_on_layers(settings, dialect)
    plans = _without_repeated(plans, borrowed, notes)
    if dialect == "lucebox":
        keys = lucebox_keys(settings)
        return _finish("drafter", LUCEBOX, checkpoint, keys, plans, matrix_type, n_threads, notes, borrowed)
    if borrowed is None:
        raise OptionError(
            "a drafter in llama.cpp's dialect holds its target's vocabulary: give the target's directory or GGUF file "
            "with `target_path`"
        )
    keys = llama_cpp_keys(settings, target_has_sections=borrowed.has_sections) | borrowed.vocabulary(settings.n_vocab)
    keys[MASK_KEY] = store_int(settings.mask_token_id)  # the drafter's own, whatever the target calls its mask
    return _finish("drafter", LLAMA_CPP, checkpoint, keys, plans, matrix_type, n_threads, notes, borrowed)


def _check_features(settings: drafter.DrafterSettings, checkpoint: Checkpoint, target: BorrowedFromTarget) -> None:
    """The layers the drafter reads must exist in the target, and be as wide as its projection expects."""
    ids = settings.target_layer_ids
    if target.n_layers and max(ids) >= target.n_layers:
        raise ModelFileError(f"'{checkpoint.directory}' reads target layers {ids}, the target has {target.n_layers}")
    projection = next((t for name, t in checkpoint.tensors.items() if name.endswith("fc.weight")), None)
    n_inputs = projection.shape[-1] if projection is not None and projection.shape else 0
    if target.n_embd and n_inputs != len(ids) * target.n_embd:
        raise ModelFileError(
            f"'{checkpoint.directory}' projects features of {n_inputs} values (fc.weight), but its {len(ids)} layers "
            f"of a target of width {target.n_embd} give {len(ids) * target.n_embd}; use the drafter's own target"
        )


def _notes_on_layers(settings: drafter.DrafterSettings, dialect: drafter.DialectName) -> list[str]:
    last = settings.n_target_layers - 1
    if dialect == "llama.cpp" and last >= 0 and last in settings.target_layer_ids:
        return [f"it reads the output of the target's last layer ({last}), which llama.cpp cannot provide"]
    return []


def _without_repeated(
    plans: list[TensorPlan], borrowed: BorrowedFromTarget | None, notes: list[str]
) -> list[TensorPlan]:
    """The plans without tables that the target has too: the drafter then uses the target's."""
    tables = {} if borrowed is None else borrowed.tables
    kept = []
    for plan in plans:
        if repeats(plan.stored, tables.get(plan.name)):
            notes.append(f"left out: {plan.stored.name}, equal to the target's")
        else:
            kept.append(plan)
    return kept


def _finish(
    role: Literal["target", "drafter"],
    architecture: str,
    checkpoint: Checkpoint,
    keys: dict[str, bytes],
    plans: list[TensorPlan],
    matrix_type: gguf.GGMLQuantizationType,
    n_threads: int,
    notes: list[str],
    borrowed: BorrowedFromTarget | None = None,
) -> Conversion:
    tensors = output_tensors(plans, matrix_type, n_threads, notes)
    n_parameters = sum(math.prod(tensor.ne) for tensor in tensors)
    general = general_keys(architecture, checkpoint.directory.resolve().name, n_parameters, matrix_type)
    inputs = checkpoint.files() + (() if borrowed is None else borrowed.inputs)
    file = OutputFile(general | keys, tensors)
    return Conversion(role, architecture, file, tuple(notes), inputs, checkpoint.settings.file)
