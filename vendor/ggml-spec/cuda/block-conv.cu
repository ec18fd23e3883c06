// DFlash2's convolution: one thread a channel and slot.
#include "spec-device.cuh"

namespace ggml_spec_cuda {
namespace {

constexpr int block_lanes = 128;

__global__ void block_conv(strided x, strided dynamic, strided base, float * y, int n_channels, int n_taps, int n_groups, int side) {
    const int channel = blockIdx.x * block_lanes + threadIdx.x;
    const int slot    = blockIdx.y;
    if (channel >= n_channels) {
        return;
    }
    const float * weights = dynamic.row(slot) + side * n_taps * n_groups + channel / (n_channels / n_groups);
    float sum = 0.0f;
    for (int tap = 0; tap < n_taps && tap <= slot; tap++) {
        const float weight = plus(base.row(tap, side)[channel], weights[tap * n_groups]);
        sum = plus(sum, times(x.row(slot - tap)[channel], weight));
    }
    y[(int64_t) slot * n_channels + channel] = sum;
}

}  // namespace

bool block_conv_supported(const ggml_tensor * op) {
    return op->ne[1] <= 65535;
}

void block_conv_launch(ggml_tensor * op, cudaStream_t stream) {
    const int  n_channels = (int) op->ne[0];
    const int  n_taps     = (int) op->src[2]->ne[1];
    const int  n_groups   = (int) op->src[1]->ne[0] / (2 * n_taps);
    const dim3 grid((n_channels + block_lanes - 1) / block_lanes, (unsigned) op->ne[1]);
    block_conv<<<grid, block_lanes, 0, stream>>>(
        strided_view(op->src[0]), strided_view(op->src[1]), strided_view(op->src[2]), (float *) op->data, n_channels, n_taps, n_groups,
        op->op_params[0]);
}

}  // namespace ggml_spec_cuda
