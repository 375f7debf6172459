// What an AdamW update reads and writes, with next to no arithmetic: the bound that memory sets.
#include <cstdint>

static uint16_t upper(float number) {
    union { float number; uint32_t bits; } value = {number};
    return static_cast<uint16_t>(value.bits >> 16);
}

// The state in one pass, then the weights of its masters in another, as ours.
extern "C" void two_passes(float* master, float* exp_avg, float* exp_avg_sq, const float* grad, uint16_t* weight,
                           int64_t count, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; ++i) {
        exp_avg[i] += grad[i];
        exp_avg_sq[i] += grad[i];
        master[i] += grad[i];
    }
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; ++i) weight[i] = upper(master[i]);
}

extern "C" void one_pass(float* master, float* exp_avg, float* exp_avg_sq, const float* grad, uint16_t* weight,
                         int64_t count, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; ++i) {
        exp_avg[i] += grad[i];
        exp_avg_sq[i] += grad[i];
        master[i] += grad[i];
        weight[i] = upper(master[i]);
    }
}
