// Promises about graphs that are replayed.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// The graph has its addresses and will not change any more: a backend that replays recorded launches then recognises it
// by its identity instead of comparing every node with what it saw last.
GGML_API void ggml_spec_graph_seal(struct ggml_cgraph * graph);

#ifdef __cplusplus
}
#endif
