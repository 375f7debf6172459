// What an AdamW update reads and writes, with next to no arithmetic: the bound that memory sets.
#include <cstdint>

namespace {

struct Bucket {
    float *master, *exp_avg, *exp_avg_sq;
    const float* grad;
    uint16_t* weight;

    void update(int64_t i) const {
        exp_avg[i] += grad[i];
        exp_avg_sq[i] += grad[i];
        master[i] += grad[i];
    }

    void take_weight(int64_t i) const {
        union { float number; uint32_t bits; } value = {master[i]};
        weight[i] = static_cast<uint16_t>(value.bits >> 16);
    }
};

}  // namespace

// The state in one pass, then the weights of its masters in another, as ours.
extern "C" void two_passes(float* master, float* exp_avg, float* exp_avg_sq, const float* grad, uint16_t* weight,
                           int64_t count, int threads) {
    const Bucket bucket{master, exp_avg, exp_avg_sq, grad, weight};
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; ++i) bucket.update(i);
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; ++i) bucket.take_weight(i);
}

extern "C" void one_pass(float* master, float* exp_avg, float* exp_avg_sq, const float* grad, uint16_t* weight,
                         int64_t count, int threads) {
    const Bucket bucket{master, exp_avg, exp_avg_sq, grad, weight};
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; ++i) {
        bucket.update(i);
        bucket.take_weight(i);
    }
}
