"""The policy without feedback: always speculate, as far as the options and limits allow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.policy.protocol import DraftLimits, DraftPlan, RoundObservation


class FixedPolicy:
    """Draft the full horizon in every round and verify all of it."""

    def plan(self, limits: DraftLimits) -> DraftPlan:
        """The limits themselves."""
        return DraftPlan(limits.n_draft, limits.budget)

    def choose_width(
        self, logprobs: NDArray[np.float32], parents: NDArray[np.int32], confidence: NDArray[np.float32] | None
    ) -> int:
        """Every node."""
        return len(logprobs)

    def observe(self, observation: RoundObservation) -> None:
        """Nothing to learn."""
