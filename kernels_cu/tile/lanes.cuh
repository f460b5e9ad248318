// Which part of a warp's fragment a lane holds (atom.cuh).
#pragma once
#include "../types.cuh"

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarpSize; }

// Where element r of a lane's part of row tile m, or of column tile n, lies.
__device__ __forceinline__ int row_in_fragment(int m, int r) {
    return 16 * m + lane_id() / 4 + 8 * (r / 2);
}
__device__ __forceinline__ int col_in_fragment(int n, int r) {
    return 8 * n + lane_id() % 4 * 2 + r % 2;
}
