#include "ggml-spec-graph.h"

#include "ggml-impl.h"

void ggml_spec_graph_seal(struct ggml_cgraph * graph) {
    graph->uid = ggml_graph_next_uid();
}
