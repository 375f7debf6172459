// Kernels for experts on the host: the functions that Python calls, in one shared object of all headers here.
//
// The elementwise functions are for any CPU, in float and bfloat16. The block functions compute all blocks of rows of a
// call: in float with our products or torch's BLAS, in bfloat16 if the processor multiplies it (tiles.h).
//
// They take addresses and 64 bit integers; the last argument is the number of threads.

#include <span>

#include "bf16_experts.h"
#include "elementwise.h"
#include "float_experts.h"
#include "gemm.h"
#include "tiles.h"

#ifdef HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern "C" {

// Whether the block functions work here: the compiler knew the instructions, and the system allows them.
int mixtrain_has_tiles() {
#ifdef HAS_AMX
    // arch_prctl's ARCH_REQ_XCOMP_PERM, and the feature's number.
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#elif defined(HAS_TILES)
    return 1;
#else
    return 0;
#endif
}

void mixtrain_add_up_float(const float* source, int64_t columns, const int64_t* index, const int64_t* starts,
                           int64_t num_sums, int64_t num_rows, const float* weights, float* out, int64_t threads) {
    add_up(source, columns, index, starts, num_sums, num_rows, weights, out, threads);
}

void mixtrain_add_up_bf16(const bf16* source, int64_t columns, const int64_t* index, const int64_t* starts,
                          int64_t num_sums, int64_t num_rows, const float* weights, bf16* out, int64_t threads) {
    add_up(source, columns, index, starts, num_sums, num_rows, weights, out, threads);
}

void mixtrain_activate_float(int64_t kind, const float* hidden, int64_t n, int64_t width, float* out, int64_t threads) {
    activate_any(kind, hidden, n, width, out, threads);
}

void mixtrain_activate_bf16(int64_t kind, const bf16* hidden, int64_t n, int64_t width, bf16* out, int64_t threads) {
    activate_any(kind, hidden, n, width, out, threads);
}

void mixtrain_activate_backward_float(int64_t kind, const float* hidden, const float* grad, const float* weights,
                                      int64_t n, int64_t width, float* hidden_grad, float* activated,
                                      float* probs_grad, int64_t threads) {
    activate_backward_any(kind, hidden, grad, weights, n, width, hidden_grad, activated, probs_grad, threads);
}

void mixtrain_activate_backward_bf16(int64_t kind, const bf16* hidden, const bf16* grad, const float* weights,
                                     int64_t n, int64_t width, bf16* hidden_grad, bf16* activated, float* probs_grad,
                                     int64_t threads) {
    activate_backward_any(kind, hidden, grad, weights, n, width, hidden_grad, activated, probs_grad, threads);
}

// Whether there is `multiply_float`: out [m, n] (+)= left [m, k] right [k, n], whose factors may be transposed.
int mixtrain_has_products() {
#ifdef __AVX512F__
    return 1;
#else
    return 0;
#endif
}

#ifdef __AVX512F__
void mixtrain_multiply_float(int64_t left_order, int64_t right_order, int64_t m, int64_t n, int64_t k,
                             const float* left, const float* right, float* out, int64_t add, int64_t threads) {
    Product{left, right, out, m, n, k, add != 0}.run(static_cast<Order>(left_order), static_cast<Order>(right_order),
                                                     static_cast<int>(threads));
}
#endif

void mixtrain_top_k(const float* scores, int64_t rows, int64_t columns, int64_t k, int64_t* indices, int64_t threads) {
    top_k(scores, rows, columns, k, indices, threads);
}

// The blocks of a call in float; `gemm` is sgemm's address. See the functions for bfloat16.
void mixtrain_forward_blocks_float(int64_t kind, const Block* blocks, int64_t num_blocks, Gemm gemm,
                                   const float* source, const int64_t* rows, int64_t size, int64_t width,
                                   const float* fc1, const float* fc1_bias, const float* fc2, const float* fc2_bias,
                                   float* hidden, float* output, float* scratch, int64_t threads) {
    const Host host{gemm, static_cast<int>(threads)};
    for (const Block& block : std::span(blocks, num_blocks)) {
        const Expert<float> expert(block.expert, kind, size, width, fc1, fc1_bias, fc2, fc2_bias);
        host.forward_block(kind, expert, source, rows + block.start, block.rows(),
                           at(hidden, block.start, expert.outer), output + block.start * size, scratch);
    }
}

void mixtrain_backward_blocks_float(int64_t kind, const Block* blocks, int64_t num_blocks, Gemm gemm,
                                    const float* source, const int64_t* rows, const float* output_grad,
                                    const int64_t* output_rows, const float* probs, int64_t size, int64_t width,
                                    const float* fc1, const float* fc1_bias, const float* fc2, const float* fc2_bias,
                                    const float* hidden, float* hidden_grad, float* activated, float* probs_grad,
                                    float* input_grad, float* fc1_grad, float* fc2_grad, float* scratch,
                                    int64_t threads) {
    const Host host{gemm, static_cast<int>(threads)};
    for (const Block& block : std::span(blocks, num_blocks)) {
        const Expert<float> expert(block.expert, kind, size, width, fc1, fc1_bias, fc2, fc2_bias);
        const int64_t start = block.start, first = fc1_grad == nullptr ? start : 0;
        host.backward_block(kind, expert, source, rows + start, output_grad, output_rows + start, probs + start,
                            block.rows(), at(hidden, start, expert.outer), hidden_grad + first * expert.outer,
                            activated + first * width, probs_grad + start, input_grad + start * size,
                            at(fc1_grad, block.expert, expert.outer * size), at(fc2_grad, block.expert, size * width),
                            block.add != 0, scratch);
    }
}

void mixtrain_weights_blocks_float(const Block* blocks, int64_t num_blocks, Gemm gemm, const float* source,
                                   const int64_t* rows, const float* output_grad, const int64_t* output_rows,
                                   const float* hidden_grad, const float* activated, int64_t size, int64_t width,
                                   int64_t outer, float* fc1_grad, float* fc2_grad, float* scratch, int64_t threads) {
    const Host host{gemm, static_cast<int>(threads)};
    for (const Block& block : std::span(blocks, num_blocks)) {
        const int64_t start = block.start, n = block.rows();
        float *x = scratch, *dy = x + n * size;
        host.gather(source, rows + start, n, size, x);
        host.gather(output_grad, output_rows + start, n, size, dy);
        host.weight_gradients(size, width, outer, n, hidden_grad + start * outer, x, dy, activated + start * width,
                              fc1_grad + block.expert * outer * size, fc2_grad + block.expert * size * width,
                              block.add != 0);
    }
}

#ifdef HAS_TILES

int64_t mixtrain_gate_scratch_bytes(int64_t n, int64_t size, int64_t experts, int64_t threads) {
    const int64_t right_bytes = divided_up(experts, PANEL) * PANEL * size * 2;
    return right_bytes + threads * left_bytes(rows_at_once(n, right_bytes, threads), size);
}

// `weight` has a multiple of 32 rows.
void mixtrain_gate(const bf16* x, int64_t n, int64_t size, const bf16* weight, int64_t experts, float* logits,
                   char* scratch, int64_t threads) {
    gate(x, n, size, weight, experts, logits, scratch, threads);
}

// Bytes of scratch memory that the block functions need.
int64_t mixtrain_scratch_bytes(int64_t backward, int64_t n, int64_t size, int64_t width, int64_t outer,
                               int64_t recompute, int64_t weights, int64_t threads) {
    const Scratch parts(n, size, width, outer, backward != 0, recompute != 0, weights != 0, threads);
    return parts.shared + threads * parts.own;
}

int64_t mixtrain_weights_scratch_bytes(int64_t n, int64_t size, int64_t width, int64_t outer, int64_t) {
    return Factors(n, size, width, outer, nullptr).bytes();
}

void mixtrain_forward_blocks_bf16(int64_t kind, const Block* blocks, int64_t num_blocks, Gemm, const bf16* source,
                                  const int64_t* rows, int64_t size, int64_t width, const bf16* fc1,
                                  const bf16* fc1_bias, const bf16* fc2, const bf16* fc2_bias, bf16* hidden,
                                  bf16* output, char* scratch, int64_t threads) {
    const auto run = kind == SWIGLU ? forward_block<SWIGLU>
                     : kind == GELU ? forward_block<GELU>
                                    : forward_block<GELU_TANH>;
    for (const Block& block : std::span(blocks, num_blocks)) {
        const Expert<bf16> expert(block.expert, kind, size, width, fc1, fc1_bias, fc2, fc2_bias);
        run(expert, same_expert(blocks, block), source, rows + block.start, block.rows(),
            at(hidden, block.start, expert.outer), output + block.start * size, scratch, threads);
    }
}

// `hidden_grad` and `activated` are written for all blocks if there are no gradients of the matrices, else at most for
// the last block.
void mixtrain_backward_blocks_bf16(int64_t kind, const Block* blocks, int64_t num_blocks, Gemm, const bf16* source,
                                   const int64_t* rows, const bf16* output_grad, const int64_t* output_rows,
                                   const float* probs, int64_t size, int64_t width, const bf16* fc1,
                                   const bf16* fc1_bias, const bf16* fc2, const bf16* fc2_bias, const bf16* hidden,
                                   bf16* hidden_grad, bf16* activated, float* probs_grad, bf16* input_grad,
                                   bf16* fc1_grad, bf16* fc2_grad, char* scratch, int64_t threads) {
    const auto run = kind == SWIGLU ? backward_block<SWIGLU>
                     : kind == GELU ? backward_block<GELU>
                                    : backward_block<GELU_TANH>;
    for (const Block& block : std::span(blocks, num_blocks)) {
        const Expert<bf16> expert(block.expert, kind, size, width, fc1, fc1_bias, fc2, fc2_bias);
        const int64_t start = block.start, first = fc1_grad == nullptr ? start : 0;
        run(expert, same_expert(blocks, block), source, rows + start, output_grad, output_rows + start,
            probs + start, block.rows(), at(hidden, start, expert.outer), at(hidden_grad, first, expert.outer),
            at(activated, first, width), probs_grad + start, input_grad + start * size,
            at(fc1_grad, block.expert, expert.outer * size), at(fc2_grad, block.expert, size * width), block.add != 0,
            scratch, threads);
    }
}

void mixtrain_weights_blocks_bf16(const Block* blocks, int64_t num_blocks, Gemm, const bf16* source,
                                  const int64_t* rows, const bf16* output_grad, const int64_t* output_rows,
                                  const bf16* hidden_grad, const bf16* activated, int64_t size, int64_t width,
                                  int64_t outer, bf16* fc1_grad, bf16* fc2_grad, char* scratch, int64_t threads) {
    for (const Block& block : std::span(blocks, num_blocks)) {
        const int64_t start = block.start;
        weights_block(size, width, outer, source, rows + start, output_grad, output_rows + start,
                      hidden_grad + start * outer, activated + start * width, block.rows(),
                      fc1_grad + block.expert * outer * size, fc2_grad + block.expert * size * width, block.add != 0,
                      scratch, threads);
    }
}

#endif

}  // extern "C"
