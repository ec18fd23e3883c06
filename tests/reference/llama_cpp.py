"""llama.cpp, as packaged in xllamacpp: the same file, the same tokens, another implementation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class GreedyRun:
    """Greedy tokens with the natural-log probabilities of the best two at each position, and the time a token took."""

    token_ids: list[int]
    top2: list[list[tuple[int, float]]]
    ms_per_token: float


class LlamaCpp:
    """A llama.cpp server inside this process, without HTTP calls."""

    def __init__(
        self,
        target: Path,
        drafter: Path | None = None,
        *,
        draft_type: str = "DRAFT_DFLASH",
        draft_max: int | None = None,
        n_threads: int = 2,
        n_ctx: int = 2048,
        kv_type: str = "f32",
    ) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(target)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = n_ctx, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
        params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kv_type.upper()}")
        params.verbosity = -1
        if drafter is not None:
            draft = params.speculative.draft
            draft.mparams.path = str(drafter)
            draft.n_gpu_layers = 0
            if draft_max is not None:
                draft.n_max = draft_max
            draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = n_threads
            kinds = xllamacpp.common_speculative_type
            params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{draft_type}")]
        self._server = xllamacpp.Server(params)

    def generate(self, token_ids: list[int], n_tokens: int, *, n_probs: int = 2) -> GreedyRun:
        """Greedy continuation; end tokens do not stop it. Tokens that are part of a character are left out (its server
        reports whole characters), so ask for ASCII text."""
        request: dict[str, Any] = {
            "prompt": token_ids, "n_predict": n_tokens, "temperature": 0.0, "cache_prompt": False,
            "ignore_eos": True, "n_probs": n_probs, "return_tokens": True,
        }  # fmt: skip
        answer = self._server.handle_completions(request)
        answer = json.loads(answer) if isinstance(answer, str) else answer
        if "choices" not in answer:
            raise RuntimeError(f"llama.cpp refused the request: {answer}")
        rows = (answer["choices"][0].get("logprobs") or {}).get("content", [])
        top2 = [[(entry["id"], entry["logprob"]) for entry in row["top_logprobs"]] for row in rows]
        timings = answer["timings"]
        return GreedyRun([row["id"] for row in rows], top2, timings["predicted_ms"] / max(1, timings["predicted_n"]))
