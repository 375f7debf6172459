// Computes an expert's block of rows in bfloat16, and a router's logits, with the products of tiles.h.
//
// Shapes as in float_experts.h.

#pragma once

#include "float_experts.h"
#include "tiles.h"

#ifdef HAS_TILES

#include <omp.h>

namespace {

// The factors of the weight gradients of n rows: transposed hidden and output gradients on the left, inputs and
// activations on the right.
struct Factors {
    int64_t n, steps, size, width, outer;
    char *hidden, *x, *dy, *activated;

    Factors(int64_t n, int64_t size, int64_t width, int64_t outer, char* memory)
        : n(n), steps(divided_up(n, DEPTH)), size(size), width(width), outer(outer) {
        const int64_t of_column = steps * DEPTH * 2;
        hidden = memory, x = hidden + outer * of_column, dy = x + size * of_column, activated = dy + size * of_column;
    }
    int64_t bytes() const { return steps * DEPTH * 2 * (outer + width + 2 * size); }
};

// Layout of the scratch memory of a pass over n rows: right factors that all threads share, and memory of each thread.
struct Scratch {
    int64_t at_once, shared, own, fc2, fc1_transposed,
        factors;  // rows per thread and iteration; bytes; offsets in the shared memory

    Scratch(int64_t n, int64_t size, int64_t width, int64_t outer, bool backward, bool recompute, bool weights,
            int64_t threads) {
        const int64_t fc1_bytes = outer * size * 2, fc2_bytes = size * width * 2;
        fc2 = fc1_bytes;
        fc1_transposed = fc1_bytes + fc2_bytes;
        factors = fc1_transposed + (recompute ? fc1_bytes : 0);
        shared = factors + (weights ? Factors(n, size, width, outer, nullptr).bytes() : 0);
        at_once = rows_at_once(n, fc1_bytes + fc2_bytes, threads);
        own = left_bytes(at_once, backward ? size + (recompute ? size : 0) + 2 * outer + width : size + width + outer) +
              (backward ? at_once * sizeof(V) : 0);
    }
};

// gradient [rows, columns] (+)= left right over `depth`; called by all threads of a region.
inline void gradient_of(const char* left, const char* right, int64_t rows, int64_t columns, int64_t depth,
                        bf16* gradient, bool add) {
    const int64_t steps = divided_up(depth, DEPTH),
                  at_once = rows_at_once(rows, columns * steps * DEPTH * 2, omp_get_num_threads());
#pragma omp for schedule(static)
    for (int64_t first = 0; first < rows; first += at_once)
        sweep<1>(
            left + first / TILE * steps * TILE_BYTES, least(rows - first, at_once), depth, columns / PANEL,
            [=](int64_t group, int) { return right + group * steps * STEP_BYTES; },
            [=](int64_t group, int64_t row, const float* c) {
                bf16* to = gradient + (first + row) * columns + group * PANEL;
                Row sums = load_row(c);
                if (add) {
                    _mm_prefetch(to + PANEL, _MM_HINT_T1);  // the next group's sums are added to it
                    sums += load_row(to);
                }
                store_row(to, sums);
            });
}

inline void weight_gradients(const Factors& f, bf16* fc1_grad, bf16* fc2_grad, bool add) {
    gradient_of(f.hidden, f.x, f.outer, f.size, f.n, fc1_grad, add);
    gradient_of(f.dy, f.activated, f.size, f.width, f.n, fc2_grad, add);
}

// Computes the preactivations of the rows `x` (a left factor): `use(row, group, value, up)` gets 32 numbers and, for
// SwiGLU, those of the second half.
template <int KIND, class Use>
INLINE void hidden_of(const Expert<bf16>& e, const char* x, int64_t rows, const char* packed_fc1, const Use& use) {
    constexpr int FACTORS = KIND == SWIGLU ? 2 : 1;
    const int64_t steps = e.size / DEPTH, groups = e.width / PANEL, width = e.width;
    const bf16* bias = e.fc1_bias;
    sweep<FACTORS>(
        x, rows, e.size, groups,
        [=](int64_t group, int factor) { return packed_fc1 + (factor * groups + group) * steps * STEP_BYTES; },
        [=](int64_t group, int64_t row, const float* c) {
            Row value = load_row(c), up{};
            if (KIND == SWIGLU) up = load_row(c + MAX_BLOCKS * RESULT);
            if (bias != nullptr) {
                value += load_row(bias + group * PANEL);
                if (KIND == SWIGLU) up += load_row(bias + width + group * PANEL);
            }
            use(row, group, rounded(value), rounded(up));
        });
}

// Whether the block before this one has the same expert, whose packed matrices are then in the scratch memory.
inline bool same_expert(const Block* first, const Block& block) {
    return &block != first && (&block)[-1].expert == block.expert;
}

template <int KIND>
void forward_block(const Expert<bf16>& e, bool packed, const bf16* source, const int64_t* rows, int64_t n, bf16* hidden,
                   bf16* output, char* scratch, int threads) {
    const int64_t size = e.size, width = e.width, outer = e.outer, width_steps = width / DEPTH,
                  outer_steps = outer / DEPTH;
    const Scratch parts(n, size, width, outer, false, false, false, threads);
    const int64_t at_once = parts.at_once;
    char *fc1 = scratch, *fc2 = scratch + parts.fc2;
    const bf16* fc2_bias = e.fc2_bias;
#pragma omp parallel num_threads(threads)
    {
        char *x = scratch + parts.shared + omp_get_thread_num() * parts.own, *activated = x + left_bytes(at_once, size);
        char* hidden_tiles = activated + left_bytes(at_once, width);
        const Tiles tiles;
        if (!packed) {
            pack_transposed(e.fc1, outer, size, fc1);
            pack_transposed(e.fc2, size, width, fc2);
        }
#pragma omp for schedule(static)
        for (int64_t first = 0; first < n; first += at_once) {
            const int64_t now = least(n - first, at_once);
            gather(source, rows + first, now, size, x);
            hidden_of<KIND>(e, x, now, fc1, [=](int64_t row, int64_t group, __m512i value, __m512i up) {
                if (hidden != nullptr) {
                    store_row(in_tiles(hidden_tiles, outer_steps, row, group), value);
                    if (KIND == SWIGLU) store_row(in_tiles(hidden_tiles, outer_steps, row, width_steps + group), up);
                }
                // From the rounded numbers, which a backward pass reads or recomputes.
                store_row(in_tiles(activated, width_steps, row, group),
                          ActivatedRow<KIND>(widened(value), widened(up)).value);
            });
            if (hidden != nullptr) from_tiles_away(hidden_tiles, now, outer, hidden + first * outer);
            sweep<1>(
                activated, now, width, size / PANEL,
                [=](int64_t group, int) { return fc2 + group * width_steps * STEP_BYTES; },
                [=](int64_t group, int64_t row, const float* c) {
                    Row sums = load_row(c);
                    if (fc2_bias != nullptr) sums += load_row(fc2_bias + group * PANEL);
                    store_row(output + (first + row) * size + group * PANEL, sums);
                });
        }
    }
}

template <int KIND>
void backward_block(const Expert<bf16>& e, bool packed, const bf16* source, const int64_t* rows,
                    const bf16* output_grad, const int64_t* output_rows, const float* probs, int64_t n,
                    const bf16* hidden, bf16* hidden_grad, bf16* activated, float* probs_grad, bf16* input_grad,
                    bf16* fc1_grad, bf16* fc2_grad, bool add, char* scratch, int threads) {
    const int64_t size = e.size, width = e.width, outer = e.outer, steps = size / DEPTH, width_steps = width / DEPTH,
                  outer_steps = outer / DEPTH;
    const Scratch parts(n, size, width, outer, true, hidden == nullptr, fc1_grad != nullptr, threads);
    const Factors factors(n, size, width, outer, scratch + parts.factors);
    const int64_t at_once = parts.at_once;
    char *fc1 = scratch, *fc2 = scratch + parts.fc2, *fc1_transposed = scratch + parts.fc1_transposed;
#pragma omp parallel num_threads(threads)
    {
        char *dy = scratch + parts.shared + omp_get_thread_num() * parts.own, *grad = dy + left_bytes(at_once, size);
        char *hidden_tiles = grad + left_bytes(at_once, outer),
             *activated_tiles = hidden_tiles + left_bytes(at_once, outer);
        V* totals = reinterpret_cast<V*>(activated_tiles + left_bytes(at_once, width));
        char* x = reinterpret_cast<char*>(totals + at_once);
        const Tiles tiles;
        if (!packed) {
            pack(e.fc1, outer, size, fc1);
            pack(e.fc2, size, width, fc2);
            if (hidden == nullptr) pack_transposed(e.fc1, outer, size, fc1_transposed);
        }
#pragma omp for schedule(static)
        for (int64_t first = 0; first < n; first += at_once) {
            const int64_t now = least(n - first, at_once);
            if (hidden == nullptr) {
                gather(source, rows + first, now, size, x);
                hidden_of<KIND>(e, x, now, fc1_transposed, [=](int64_t row, int64_t group, __m512i value, __m512i up) {
                    store_row(in_tiles(hidden_tiles, outer_steps, row, group), value);
                    if (KIND == SWIGLU) store_row(in_tiles(hidden_tiles, outer_steps, row, width_steps + group), up);
                });
            } else {
                to_tiles(hidden + first * outer, now, outer, hidden_tiles);
            }
            gather(output_grad, output_rows + first, now, size, dy);
            std::fill_n(totals, now, V{});
            sweep<1>(
                dy, now, size, width / PANEL, [=](int64_t group, int) { return fc2 + group * steps * STEP_BYTES; },
                [=](int64_t group, int64_t row, const float* c) {
                    const float weight = probs[first + row];
                    const Row value = load_row(in_tiles(hidden_tiles, outer_steps, row, group)), gradient = load_row(c);
                    const Row up = KIND == SWIGLU
                                       ? load_row(in_tiles(hidden_tiles, outer_steps, row, width_steps + group))
                                       : Row{};
                    const Backward<KIND> low(value.low, up.low, gradient.low, weight),
                        high(value.high, up.high, gradient.high, weight);
                    store_row(in_tiles(grad, outer_steps, row, group), {low.hidden_grad, high.hidden_grad});
                    if (KIND == SWIGLU)
                        store_row(in_tiles(grad, outer_steps, row, width_steps + group), {low.up_grad, high.up_grad});
                    store_row(in_tiles(activated_tiles, width_steps, row, group), {low.activated, high.activated});
                    totals[row] += low.product + high.product;
                });
            if (hidden_grad != nullptr) from_tiles(grad, now, outer, hidden_grad + first * outer);
            if (activated != nullptr) from_tiles(activated_tiles, now, width, activated + first * width);
            for (int64_t step = first / DEPTH; fc1_grad != nullptr && step * DEPTH < first + now; step++) {
                const int64_t skip = step * DEPTH - first;
                const auto in = [=](char* tiles, int64_t of_row) {
                    return [=](int64_t row, int64_t column) {
                        return skip + row < now ? in_tiles(tiles, of_row, skip + row, column / DEPTH) : ZEROS;
                    };
                };
                transpose_step(in(grad, outer_steps), outer, factors.steps, step, factors.hidden);
                transpose_step(in(dy, steps), size, factors.steps, step, factors.dy);
                pack_step(in(activated_tiles, width_steps), width, factors.steps, step, factors.activated);
                pack_step(
                    [=](int64_t row, int64_t column) {
                        return skip + row < now ? source + rows[first + skip + row] * size + column : ZEROS;
                    },
                    size, factors.steps, step, factors.x);
            }
            sweep<1>(
                grad, now, outer, size / PANEL,
                [=](int64_t group, int) { return fc1 + group * outer_steps * STEP_BYTES; },
                [=](int64_t group, int64_t row, const float* c) {
                    store_row(input_grad + (first + row) * size + group * PANEL, load_row(c));
                });
            for (int64_t row = 0; row < now; row++) {
                V products = V{};  // the weight also multiplies the bias
                for (int64_t h = 0; e.fc2_bias != nullptr && h < size; h += LANES)
                    products += load(output_grad + output_rows[first + row] * size + h) * load(e.fc2_bias + h);
                probs_grad[first + row] = sum(totals[row] + products);
            }
        }
        if (fc1_grad != nullptr) weight_gradients(factors, fc1_grad, fc2_grad, add);
    }
}

void weights_block(int64_t size, int64_t width, int64_t outer, const bf16* source, const int64_t* rows,
                   const bf16* output_grad, const int64_t* output_rows, const bf16* hidden_grad, const bf16* activated,
                   int64_t n, bf16* fc1_grad, bf16* fc2_grad, bool add, char* scratch, int threads) {
    const Factors factors(n, size, width, outer, scratch);
#pragma omp parallel num_threads(threads)
    {
        const Tiles tiles;
#pragma omp for schedule(static)
        for (int64_t step = 0; step < factors.steps; step++) {
            const auto in = [=](const bf16* from, int64_t columns, const int64_t* index) {
                return [=](int64_t row, int64_t column) {
                    const int64_t k = step * DEPTH + row;
                    return k < n ? from + (index == nullptr ? k : index[k]) * columns + column : ZEROS;
                };
            };
            transpose_step(in(hidden_grad, outer, nullptr), outer, factors.steps, step, factors.hidden);
            transpose_step(in(output_grad, size, output_rows), size, factors.steps, step, factors.dy);
            pack_step(in(activated, width, nullptr), width, factors.steps, step, factors.activated);
            pack_step(in(source, size, rows), size, factors.steps, step, factors.x);
        }
        weight_gradients(factors, fc1_grad, fc2_grad, add);
    }
}

// Computes a router's logits: the products are exact, and added in float.
void gate(const bf16* x, int64_t n, int64_t size, const bf16* weight, int64_t experts, float* logits, char* scratch,
          int threads) {
    const int64_t steps = size / DEPTH, groups = divided_up(experts, PANEL), right_bytes = groups * PANEL * size * 2;
    const int64_t at_once = rows_at_once(n, right_bytes, threads);
#pragma omp parallel num_threads(threads)
    {
        char* left = scratch + right_bytes + omp_get_thread_num() * left_bytes(at_once, size);
        const Tiles tiles;
        pack_transposed(weight, groups * PANEL, size, scratch);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < n; first += at_once) {
            const int64_t now = least(n - first, at_once);
            to_tiles(x + first * size, now, size, left);
            sweep<1>(
                left, now, size, groups, [=](int64_t group, int) { return scratch + group * steps * STEP_BYTES; },
                [=](int64_t group, int64_t row, const float* c) {
                    const int64_t column = group * PANEL;
                    std::memcpy(logits + (first + row) * experts + column, c,
                                least(experts - column, PANEL) * sizeof(float));
                });
        }
    }
}

}  // namespace

#endif  // HAS_TILES
