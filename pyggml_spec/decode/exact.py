"""Which call widths compute a row to the same bits, found by trying: the base of exact mode.

Kernels for a matrix product are chosen by the number of columns and may add up in another order, so a token verified
beside others can differ in the last bits from the same token decoded alone. The widest call is the reference. It must
not care in which column a token stands; a narrower width is exact when every one of its rows equals the reference's.
All layers, types and products of the model take part in the trial, with as many different tokens as columns, so a
kernel that adds up differently shows in some bit of some logit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyggml_spec.errors import DeviceError
from pyggml_spec.tree.draft_tree import DraftTree

if TYPE_CHECKING:
    from pyggml_spec.decode.target import Target
    from pyggml_spec.decode.target_sequence import NativeTargetSequence

_CANDIDATES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96)


def find_exact_widths(target: Target) -> tuple[int, ...]:
    """Widths, ascending, at which a verify gives every row the bits that a verify of `max_width` gives it.

    Raises:
        DeviceError: even at `max_width` a row depends on its column, so exact mode is impossible on this device.
    """
    widest = target.limits.max_width
    sequence = target.open_sequence()
    try:
        ids = np.linspace(0, target.config.n_vocab - 1, widest + 1).astype(np.int32)[1:]
        reference = _rows(sequence, target, ids, widest)
        moved = np.concatenate([ids[:1], ids[:0:-1]])
        if not _equal(_rows(sequence, target, moved, widest), _permuted(reference)):
            raise DeviceError(
                f"exact mode is impossible on device '{target.backend.device.name}': at width {widest} a row's bits "
                "depend on its column; use another max_width, another device, or no exact mode"
            )
        narrower = (w for w in _CANDIDATES if w < widest)
        return (*(w for w in narrower if _equal(_rows(sequence, target, ids[:w], w), reference[:w])), widest)
    finally:
        sequence.close()


def _rows(sequence: NativeTargetSequence, target: Target, ids: np.ndarray, width: int) -> np.ndarray:
    """Logits of a star (the first id is the anchor, the others its children) at one width: (width, n_vocab)."""
    star = DraftTree.from_parents(ids, [-1] + [0] * (len(ids) - 1))
    return sequence.trial(target.graph(width, "logits", 0), star)


def _permuted(rows: np.ndarray) -> np.ndarray:
    """The anchor's row, then the children's in reverse."""
    return np.concatenate([rows[:1], rows[:0:-1]])


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))
