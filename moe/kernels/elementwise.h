// Elementwise functions in one pass over main memory, for which torch takes several: activations forward and backward,
// weighted sums of rows, and the greatest numbers of each row. For any CPU.
//
// Shapes: n rows, F width, G = 2 F for SwiGLU ([gate | up]) else F. All tensors are row-major.

#pragma once

#include "vectors.h"

namespace {

// Activations: a value and its derivatives. `up` is SwiGLU's second half, and unused by the others.

enum Activation { SWIGLU = 0, GELU = 1, GELU_TANH = 2 };

template <int KIND>
struct Activated {
    V value, slope, up_slope;
    Activated(V x, V up) {
        if constexpr (KIND == SWIGLU) {
            V sigmoid = 1.0f / (1.0f + exponential(-x));
            V silu = x * sigmoid;
            value = silu * up;
            slope = up * sigmoid * (1.0f + x * (1.0f - sigmoid));
            up_slope = silu;
        } else if constexpr (KIND == GELU) {
            V below = 0.5f * (1.0f + error_function(x * 0.70710678118654752f));
            value = x * below;
            slope = below + x * exponential(-0.5f * x * x) * 0.39894228040143268f;
            up_slope = V{};
        } else {
            const float a = 0.79788456080286536f, b = 0.044715f;
            V square = x * x;
            V tanh = 1.0f - 2.0f / (exponential(2.0f * a * x * (1.0f + b * square)) + 1.0f);
            value = 0.5f * x * (1.0f + tanh);
            slope = 0.5f * (1.0f + tanh) + 0.5f * x * (1.0f - tanh * tanh) * a * (1.0f + 3.0f * b * square);
            up_slope = V{};
        }
    }
};

template <int KIND, class T>
void activate(const T* hidden, int64_t n, int64_t width, T* out, int threads) {
    const int64_t outer = KIND == SWIGLU ? 2 * width : width;
#pragma omp parallel for num_threads(threads) schedule(static) if (n * width > 16384)
    for (int64_t i = 0; i < n; i++) {
        const T* row = hidden + i * outer;
        const T* up = KIND == SWIGLU ? row + width : row;
        T* to = out + i * width;
        int64_t f = 0;
        for (; f + LANES <= width; f += LANES) store(to + f, Activated<KIND>(load(row + f), load(up + f)).value);
        if (f < width) {
            V value = Activated<KIND>(load_part(row + f, width - f), load_part(up + f, width - f)).value;
            store_part(to + f, value, width - f);
        }
    }
}

// The gradient of some numbers of a row: of the hidden activation from `grad`, the gradient after the assignment's
// weight.
template <int KIND>
struct Backward {
    V hidden_grad, up_grad, activated, product;
    Backward(V x, V up, V grad, float weight) {
        Activated<KIND> result(x, up);
        product = grad * result.value;
        activated = result.value * weight;
        V weighted = grad * weight;
        hidden_grad = weighted * result.slope;
        up_grad = weighted * result.up_slope;
    }
};

template <int KIND, class T>
void activate_backward(const T* hidden, const T* grad, const float* weights, int64_t n, int64_t width, T* hidden_grad,
                       T* activated, float* probs_grad, int threads) {
    const int64_t outer = KIND == SWIGLU ? 2 * width : width;
#pragma omp parallel for num_threads(threads) schedule(static) if (n * width > 16384)
    for (int64_t i = 0; i < n; i++) {
        const T* row = hidden + i * outer;
        const T* up = KIND == SWIGLU ? row + width : row;
        T* row_grad = hidden_grad + i * outer;
        const float weight = weights[i];
        V total = V{};
        int64_t f = 0;
        for (; f + LANES <= width; f += LANES) {
            Backward<KIND> piece(load(row + f), load(up + f), load(grad + i * width + f), weight);
            store(row_grad + f, piece.hidden_grad);
            if (KIND == SWIGLU) store(row_grad + width + f, piece.up_grad);
            store(activated + i * width + f, piece.activated);
            total += piece.product;
        }
        if (f < width) {
            const int64_t rest = width - f;
            Backward<KIND> piece(load_part(row + f, rest), load_part(up + f, rest),
                                 load_part(grad + i * width + f, rest), weight);
            store_part(row_grad + f, piece.hidden_grad, rest);
            if (KIND == SWIGLU) store_part(row_grad + width + f, piece.up_grad, rest);
            store_part(activated + i * width + f, piece.activated, rest);
            total += piece.product;
        }
        probs_grad[i] = sum(total);
    }
}

// out[i] = the sum of source[index[j]] * weights[j] for starts[i] <= j < starts[i + 1]; without weights, of the rows.
template <class T>
void add_up(const T* source, int64_t columns, const int64_t* index, const int64_t* starts, int64_t num_sums,
            int64_t num_rows, const float* weights, T* out, int threads) {
    constexpr int PIECE = 4 * LANES;  // numbers added at once, in registers
#pragma omp parallel for num_threads(threads) schedule(static) if (num_rows * columns > 16384)
    for (int64_t i = 0; i < num_sums; i++) {
        const int64_t begin = starts[i], end = i + 1 < num_sums ? starts[i + 1] : num_rows;
        int64_t column = 0;
        for (; column + PIECE <= columns; column += PIECE) {
            V total[4] = {};
            for (int64_t j = begin; j < end; j++) {
                const T* from = source + index[j] * columns + column;
                const float weight = weights == nullptr ? 1.0f : weights[j];
                for (int k = 0; k < 4; k++) total[k] += weight * load(from + k * LANES);
            }
            for (int k = 0; k < 4; k++) store(out + i * columns + column + k * LANES, total[k]);
        }
        for (; column < columns; column += LANES) {
            const int64_t count = columns - column < LANES ? columns - column : LANES;
            V total = V{};
            for (int64_t j = begin; j < end; j++)
                total +=
                    (weights == nullptr ? 1.0f : weights[j]) * load_part(source + index[j] * columns + column, count);
            store_part(out + i * columns + column, total, count);
        }
    }
}

// The columns of the k greatest numbers of each row, the greatest first, of equal ones the first. As in torch, NaN is
// the greatest.
constexpr int64_t MAX_COLUMNS = 1024;

void top_k(const float* scores, int64_t rows, int64_t columns, int64_t k, int64_t* indices, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * columns > 16384)
    for (int64_t i = 0; i < rows; i++) {
        alignas(64) int32_t keys[MAX_COLUMNS];  // the numbers' bits, mapped so that integers compare like the numbers
        std::memcpy(keys, scores + i * columns, columns * sizeof(float));
        for (int64_t column = 0; column < columns; column++) {
            const bool is_nan = (keys[column] & INT32_MAX) > 0x7f800000;
            keys[column] = is_nan ? INT32_MAX : keys[column] ^ ((keys[column] >> 31) & INT32_MAX);
        }
        for (int64_t j = 0; j < k; j++) {
            int32_t best = INT32_MIN, place = INT32_MAX;
            for (int64_t column = 0; column < columns; column++) best = keys[column] > best ? keys[column] : best;
            for (int32_t column = 0; column < columns; column++) {
                const int32_t candidate = keys[column] == best ? column : INT32_MAX;
                place = candidate < place ? candidate : place;
            }
            keys[place] = INT32_MIN;  // less than the key of every number
            indices[i * k + j] = place;
        }
    }
}

template <class T>
void activate_any(int kind, const T* hidden, int64_t n, int64_t width, T* out, int threads) {
    if (kind == SWIGLU) activate<SWIGLU>(hidden, n, width, out, threads);
    if (kind == GELU) activate<GELU>(hidden, n, width, out, threads);
    if (kind == GELU_TANH) activate<GELU_TANH>(hidden, n, width, out, threads);
}

template <class T>
void activate_backward_any(int kind, const T* hidden, const T* grad, const float* weights, int64_t n, int64_t width,
                           T* hidden_grad, T* activated, float* probs_grad, int threads) {
    if (kind == SWIGLU)
        activate_backward<SWIGLU>(hidden, grad, weights, n, width, hidden_grad, activated, probs_grad, threads);
    if (kind == GELU)
        activate_backward<GELU>(hidden, grad, weights, n, width, hidden_grad, activated, probs_grad, threads);
    if (kind == GELU_TANH)
        activate_backward<GELU_TANH>(hidden, grad, weights, n, width, hidden_grad, activated, probs_grad, threads);
}

}  // namespace
