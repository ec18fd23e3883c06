"""Drafters of a few thousand random weights beside their arrays: graphs of models/dflash.py, no files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType

import gguf
import numpy as np
from native_helpers import Harness

from pyggml_spec.ggml import F32, Backend, Context, GraphArena, TensorType, spec_ops
from pyggml_spec.ggml.backend import choose_device
from pyggml_spec.ggml.graph import Graph
from pyggml_spec.gguf_io.drafter import drafter_tensors
from pyggml_spec.gguf_io.reader import TensorInfo
from pyggml_spec.gguf_io.weights import Weights
from pyggml_spec.models import dflash
from pyggml_spec.records import DrafterConfig
from pyggml_spec.state.features import FeatureRing
from pyggml_spec.state.kv_cells import KvCache, KvTypes

DFLASH = DrafterConfig(
    kind="dflash",
    dialect="llama.cpp",
    n_layers=2,
    n_embd=32,
    n_ff=48,
    n_heads=4,
    n_heads_kv=2,
    head_dim=64,
    n_vocab=50,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    draft_block_size=5,
    mask_token_id=49,
    target_layer_ids=(0, 2),
    n_embd_target=24,
    n_vocab_target=50,
    rope_dims=64,
)
DSPARK = replace(
    DFLASH, kind="dspark", sample_from_anchor=True, has_confidence_head=True, has_confidence_bias=True, markov_rank=8
)
DFLASH2 = replace(DFLASH, kind="dflash2", conv_taps=2, conv_group_size=8, selector_rank=8, selector_top_k=4)


def random_weights(config: DrafterConfig, seed: int) -> dict[str, np.ndarray]:
    """f32 arrays (rows, cols) under the names of a drafter file, sized so that activations stay around 1."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for name, ne in drafter_tensors(config).items():
        values = rng.normal(size=ne[::-1])
        if name == "d2t":
            values = rng.permutation(config.n_vocab_target)[: config.n_vocab].astype(np.int64)
        elif "norm" in name or name.endswith("conv_base"):
            values = 1 + 0.3 * values
        elif len(ne) > 1 and not name.startswith(("markov", "selector_p", "selector_s")):
            values /= np.sqrt(ne[0])
        arrays[name] = values if name == "d2t" else values.astype(np.float32)
    return arrays


def tensor_info(name: str, array: np.ndarray) -> TensorInfo:
    """An array as a file would hold it."""
    kind = gguf.GGMLQuantizationType.I64 if array.dtype == np.int64 else gguf.GGMLQuantizationType.F32
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return TensorInfo(name, array.shape[::-1], kind, data.nbytes, data)


@dataclass
class Drawn:
    """Everything an oracle needs: the drafter's arrays, the tables it borrows, and its context."""

    config: DrafterConfig
    arrays: dict[str, np.ndarray]
    embeddings: np.ndarray  # (n_vocab, n_embd)
    head: np.ndarray  # (n_rows, n_embd)
    features: np.ndarray  # (n_context, n_features * n_embd_target)

    @classmethod
    def from_seed(cls, config: DrafterConfig, seed: int, n_context: int) -> Drawn:
        """Random weights and features."""
        rng, arrays = np.random.default_rng(seed + 1000), random_weights(config, seed)
        borrowed = rng.normal(size=(config.n_vocab_target, config.n_embd)).astype(np.float32)
        embeddings = arrays.get("token_embd.weight", borrowed)
        head = arrays.get("output.weight", embeddings if config.has_own_embeddings else borrowed)
        shape = (n_context, len(config.target_layer_ids) * config.n_embd_target)
        return cls(config, arrays, embeddings, head, rng.normal(size=shape).astype(np.float32))


class TinyDrafter:
    """The drafter on the device under test; `run` injects all features and drafts one block."""

    def __init__(
        self, drawn: Drawn, *, kv_type: TensorType = F32, n_threads: int = 1, rotates_keys: bool = False
    ) -> None:
        self.drawn, config = drawn, drawn.config
        self.backend = Backend(choose_device(Harness.device), n_threads)
        self.arena = GraphArena(self.backend)
        infos = {name: tensor_info(name, array) for name, array in drawn.arrays.items()}
        self.weights = Weights(self.backend, infos, infos, dflash.drafter_stacks(config), "a tiny drafter")
        self.context = Context(2)
        tables = [drawn.embeddings, drawn.head]
        tensors = [self.context.new_tensor(F32, table.shape[::-1], f"table{i}") for i, table in enumerate(tables)]
        self.table_buffer = self.backend.allocate(self.context, "tables")
        for tensor, table in zip(tensors, tables, strict=True):
            tensor.set(np.ascontiguousarray(table))
        n_context, n_features = len(drawn.features), len(config.target_layer_ids)
        self.ring = FeatureRing(
            self.backend, n_features=n_features, n_embd=config.n_embd_target, n_slots=1, n_rows=n_context
        )
        self.ring.tensor.set(np.concatenate([drawn.features, np.zeros_like(drawn.features[:1])]))
        self.kv = KvCache(
            self.backend,
            n_layers=config.n_layers,
            width=config.head_dim * config.n_heads_kv,
            n_cells=n_context + config.draft_block_size,
            n_ctx=n_context + config.draft_block_size,
            n_slots=1,
            types=KvTypes(kv_type, kv_type),
            rotated_head_dim=config.head_dim if rotates_keys else 0,
        )
        self.tables = dflash.SharedTables(*tensors)
        self.state = dflash.DrafterState(self.kv, self.ring)

    def run(self, anchor: int, top_k: int) -> dict[str, np.ndarray]:
        """Results of one block by name, each (cols of ne[1], ne[0]). Context cells lie in reverse order."""
        config, n_context = self.drawn.config, len(self.drawn.features)
        graph = Graph(self.arena, dflash.n_graph_nodes(config))
        built = dflash.build_drafter(
            graph, config, self.weights, self.state, self.tables, n_inject=n_context, top_k=top_k
        )
        host, n = built.inputs.host, config.draft_block_size
        cells, block_cells = np.arange(n_context, dtype=np.int32)[::-1].copy(), np.arange(n_context, n_context + n)
        self.kv.committed.set(cells)
        host["inject_rows"][:] = host["inject_pos"][:] = np.arange(n_context)
        host["inject_cells"][:] = cells
        host["tokens"][:] = config.mask_token_id
        host["tokens"][0] = anchor
        host["pos"][:] = np.arange(n_context, n_context + n)
        host["cells"][:] = block_cells
        host["nodes"][: spec_ops.NODES_HEADER] = (spec_ops.NODES_VERSION, n, n_context, 0)
        host["nodes"][spec_ops.NODES_HEADER :: 2] = block_cells
        host["nodes"][spec_ops.NODES_HEADER + 1 :: 2] = np.arange(-1, n - 1)
        built.inputs.upload()
        graph.run()
        results = {name: tensor.get() for name, tensor in built.results.items()}
        graph.close()
        return results

    def close(self) -> None:
        """Free everything."""
        for owner in (self.kv, self.ring, self.weights, self.table_buffer, self.context, self.arena, self.backend):
            owner.close()

    def __enter__(self) -> TinyDrafter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def ids_and_values(top: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A top-k result (n, 2k) as ids (n, k) and float32 values (n, k)."""
    k = top.shape[1] // 2
    return top[:, :k], np.ascontiguousarray(top[:, k:]).view(np.float32)
