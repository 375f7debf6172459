// Computes an expert's block of rows in float, with our products (gemm.h) or torch's BLAS; all passes run while the
// block is in the cache.
//
// Shapes: n rows of a block, H hidden size, F width, G = 2 F for SwiGLU ([gate | up]) else F. All tensors are
// row-major.

#pragma once

#include "elementwise.h"
#include "gemm.h"

namespace {

// Consecutive rows of one expert; `add`: its gradients are added to existing ones.
struct Block {
    int64_t expert, start, end, add;
    int64_t rows() const { return end - start; }
};

template <class T>
T* at(T* tensor, int64_t row, int64_t columns) {
    return tensor == nullptr ? nullptr : tensor + row * columns;
}

template <class T>
struct Expert {
    int64_t size, width, outer;  // H, F, G
    const T *fc1, *fc1_bias, *fc2, *fc2_bias;

    // One of the stacked experts.
    Expert(int64_t i, int64_t kind, int64_t size, int64_t width, const T* fc1, const T* fc1_bias, const T* fc2,
           const T* fc2_bias)
        : size(size), width(width), outer(kind == SWIGLU ? 2 * width : width), fc1(at(fc1, i, outer * size)),
          fc1_bias(at(fc1_bias, i, outer)), fc2(at(fc2, i, size * width)), fc2_bias(at(fc2_bias, i, size)) {}
};

typedef void (*Gemm)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                     const int*, const float*, const int*, const float*, float*, const int*);

struct Host {  // the functions that multiply
    Gemm gemm;
    int threads;

    // out [m, n] (+)= left [m, k] right [k, n], of which a transposed one is stored as [k, m] or [n, k].
    void multiply(Order left_order, Order right_order, int64_t m, int64_t n, int64_t k, const float* left,
                  const float* right, float* out, bool add) const {
#ifdef __AVX512F__
        if (has_own_products() && std::min({m, n, k}) >= Product::LEAST)
            return Product{left, right, out, m, n, k, add}.run(left_order, right_order, threads);
#endif
        // BLAS is column-major: for it every matrix here is its transpose.
        const int columns = n, rows = m, depth = k, left_stride = left_order == PLAIN ? k : m,
                  right_stride = right_order == PLAIN ? n : k;
        const float one = 1.0f, factor = add;
        gemm(right_order == PLAIN ? "N" : "T", left_order == PLAIN ? "N" : "T", &columns, &rows, &depth, &one, right,
             &right_stride, left, &left_stride, &factor, out, &columns);
    }

    void gather(const float* source, const int64_t* rows, int64_t n, int64_t columns, float* out) const {
#pragma omp parallel for num_threads(threads) schedule(static) if (n * columns > 16384)
        for (int64_t i = 0; i < n; i++)
            std::memcpy(out + i * columns, source + rows[i] * columns, columns * sizeof(float));
    }

    void add_bias(const float* bias, int64_t n, int64_t columns, float* out) const {
        for (int64_t i = 0; bias != nullptr && i < n; i++)
            for (int64_t column = 0; column < columns; column++) out[i * columns + column] += bias[column];
    }

    void hidden_of(const Expert<float>& e, const float* x, int64_t n, float* hidden) const {
        multiply(PLAIN, TRANSPOSED, n, e.outer, e.size, x, e.fc1, hidden, false);
        add_bias(e.fc1_bias, n, e.outer, hidden);
    }

    void forward_block(int kind, const Expert<float>& e, const float* source, const int64_t* rows, int64_t n,
                       float* hidden, float* output, float* scratch) const {
        float *x = scratch, *activated = x + n * e.size;
        hidden = hidden == nullptr ? activated + n * e.width : hidden;
        gather(source, rows, n, e.size, x);
        hidden_of(e, x, n, hidden);
        activate_any(kind, hidden, n, e.width, activated, threads);
        multiply(PLAIN, TRANSPOSED, n, e.size, e.width, activated, e.fc2, output, false);
        add_bias(e.fc2_bias, n, e.size, output);
    }

    void backward_block(int kind, const Expert<float>& e, const float* source, const int64_t* rows,
                        const float* output_grad, const int64_t* output_rows, const float* probs, int64_t n,
                        const float* hidden, float* hidden_grad, float* activated, float* probs_grad,
                        float* input_grad, float* fc1_grad, float* fc2_grad, bool add, float* scratch) const {
        float *dy = scratch, *grad = dy + n * e.size, *x = grad + n * e.width, *again = x + n * e.size;
        if (hidden == nullptr || fc1_grad != nullptr) gather(source, rows, n, e.size, x);
        if (hidden == nullptr) hidden_of(e, x, n, again);
        gather(output_grad, output_rows, n, e.size, dy);
        multiply(PLAIN, PLAIN, n, e.width, e.size, dy, e.fc2, grad, false);
        activate_backward_any(kind, hidden == nullptr ? again : hidden, grad, probs, n, e.width, hidden_grad,
                              activated, probs_grad, threads);
        for (int64_t i = 0; e.fc2_bias != nullptr && i < n; i++) {  // the weight also multiplies the bias
            V products = V{};
            int64_t h = 0;
            for (; h + LANES <= e.size; h += LANES) products += load(dy + i * e.size + h) * load(e.fc2_bias + h);
            if (h < e.size)
                products += load_part(dy + i * e.size + h, e.size - h) * load_part(e.fc2_bias + h, e.size - h);
            probs_grad[i] += sum(products);
        }
        multiply(PLAIN, PLAIN, n, e.size, e.outer, hidden_grad, e.fc1, input_grad, false);
        if (fc1_grad != nullptr)
            weight_gradients(e.size, e.width, e.outer, n, hidden_grad, x, dy, activated, fc1_grad, fc2_grad, add);
    }

    void weight_gradients(int64_t size, int64_t width, int64_t outer, int64_t n, const float* hidden_grad,
                          const float* x, const float* dy, const float* activated, float* fc1_grad, float* fc2_grad,
                          bool add) const {
        multiply(TRANSPOSED, PLAIN, outer, size, n, hidden_grad, x, fc1_grad, add);
        multiply(TRANSPOSED, PLAIN, size, width, n, dy, activated, fc2_grad, add);
    }
};

}  // namespace
