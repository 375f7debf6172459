// Products of matrices in float for processors that torch's BLAS is not tuned for: classical blocking, with AVX-512.

#pragma once

#include <algorithm>
#include <cstdlib>

#include "vectors.h"

namespace {

#define INLINE \
    inline __attribute__((always_inline))  // so that a function passed as an argument is inlined in the loop

enum Order { PLAIN, TRANSPOSED };

inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#ifdef __AVX512F__

inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// The classical blocked product: blocks of both factors are copied so that they are read in order and stay in the
// second-level cache, the right one to panels of 32 columns, the left one to strips of 8 rows. Strips and panels are
// padded with zeros.
struct Product {
    static constexpr int64_t STRIP = 8, PANEL = 2 * LANES;  // rows and columns of sums in registers
    static constexpr int64_t MOST_ROWS = 256, MOST_COLUMNS = 256, MOST_DEPTH = 512;  // of a copied block
    static constexpr int64_t LEAST = 32;  // rows, columns and depth from which the copies pay off

    const float *left, *right;
    float* out;
    int64_t m, n, k;
    bool add;

    struct Memory {  // of one thread, reused
        float* left = static_cast<float*>(std::aligned_alloc(64, MOST_ROWS * MOST_DEPTH * sizeof(float)));
        float* right = static_cast<float*>(std::aligned_alloc(64, MOST_COLUMNS * MOST_DEPTH * sizeof(float)));
        ~Memory() { std::free(left), std::free(right); }
    };

    static Memory& memory() {
        thread_local Memory kept;
        return kept;
    }

    // Sixteen numbers of a row with `count` numbers.
    static __m512 row_of(const float* from, int64_t count) {
        return count >= LANES ? _mm512_loadu_ps(from)
               : count <= 0   ? _mm512_setzero_ps()
                              : _mm512_maskz_loadu_ps((1u << count) - 1, from);
    }

    // Sixteen rows of 16 numbers of a matrix; `stride`: numbers from row to row.
    static void square_of(const float* from, int64_t stride, int64_t rows, int64_t count, __m512i r[16]) {
        for (int i = 0; i < LANES; i++)
            r[i] = (__m512i)(i < rows ? row_of(from + i * stride, count) : _mm512_setzero_ps());
    }

    // Strips [depth, 8] of `rows` from `row` and `depth` from `from`.
    template <Order ORDER>
    void pack_left(int64_t row, int64_t rows, int64_t from, int64_t depth, float* to) const {
        for (int64_t strip = 0; strip < rows; strip += STRIP, to += depth * STRIP) {
            const int64_t there = least(rows - strip, STRIP);
            if (ORDER == TRANSPOSED) {
                const __mmask16 mask = (1u << there) - 1;
                for (int64_t i = 0; i < depth; i++)
                    _mm512_mask_storeu_ps(to + i * STRIP, 0xff,
                                          _mm512_maskz_loadu_ps(mask, left + (from + i) * m + row + strip));
            } else {
                for (int64_t i = 0; i < depth; i += LANES) {
                    __m512i r[16];
                    square_of(left + (row + strip) * k + from + i, k, there, depth - i, r);
                    transpose(r);
                    for (int64_t j = 0; j < least(depth - i, LANES); j++)
                        _mm512_mask_storeu_epi32(to + (i + j) * STRIP, 0xff, r[j]);
                }
            }
        }
    }

    // A panel [depth, 32] of `columns` from `column`.
    template <Order ORDER>
    void pack_right(int64_t column, int64_t columns, int64_t from, int64_t depth, float* to) const {
        for (int64_t half = 0; half < PANEL; half += LANES, to += LANES)
            if (ORDER == PLAIN) {
                for (int64_t i = 0; i < depth; i++)
                    _mm512_store_ps(to + i * PANEL, row_of(right + (from + i) * n + column + half, columns - half));
            } else {
                for (int64_t i = 0; i < depth; i += LANES) {
                    __m512i r[16];
                    square_of(right + (column + half) * k + from + i, k, columns - half, depth - i, r);
                    transpose(r);
                    for (int64_t j = 0; j < least(depth - i, LANES); j++)
                        _mm512_store_si512(to + (i + j) * PANEL, r[j]);
                }
            }
    }

    // c [8, 32] (+)= strip panel; `stride`: numbers from row to row of c.
    static INLINE void multiply(const float* strip, const float* panel, int64_t depth, float* c, int64_t stride,
                                bool add) {
        __m512 low[STRIP], high[STRIP];
        for (int row = 0; row < STRIP; row++) {
            low[row] = add ? _mm512_loadu_ps(c + row * stride) : _mm512_setzero_ps();
            high[row] = add ? _mm512_loadu_ps(c + row * stride + LANES) : _mm512_setzero_ps();
        }
        for (int64_t i = 0; i < depth; i++, strip += STRIP, panel += PANEL) {
            const __m512 first = _mm512_load_ps(panel), last = _mm512_load_ps(panel + LANES);
#pragma GCC unroll 8
            for (int row = 0; row < STRIP; row++) {
                const __m512 one = _mm512_set1_ps(strip[row]);
                low[row] = _mm512_fmadd_ps(one, first, low[row]);
                high[row] = _mm512_fmadd_ps(one, last, high[row]);
            }
        }
        for (int row = 0; row < STRIP; row++) {
            _mm512_storeu_ps(c + row * stride, low[row]);
            _mm512_storeu_ps(c + row * stride + LANES, high[row]);
        }
    }

    // The same for fewer rows or columns.
    static void multiply_part(const float* strip, const float* panel, int64_t depth, float* c, int64_t stride, bool add,
                              int64_t rows, int64_t columns) {
        alignas(64) float part[STRIP * PANEL] = {};
        for (int64_t row = 0; add && row < rows; row++) std::copy_n(c + row * stride, columns, part + row * PANEL);
        multiply(strip, panel, depth, part, PANEL, true);
        for (int64_t row = 0; row < rows; row++) std::copy_n(part + row * PANEL, columns, c + row * stride);
    }

    // Called by all threads of a region, with `at_once` rows each; they share `packed`.
    template <Order LEFT, Order RIGHT>
    void run(int64_t at_once, float* packed) const {
        float* strips = memory().left;
        for (int64_t column = 0; column < n; column += MOST_COLUMNS)
            for (int64_t from = 0; from < k; from += MOST_DEPTH) {
                const int64_t columns = least(n - column, MOST_COLUMNS), depth = least(k - from, MOST_DEPTH);
#pragma omp for schedule(static)
                for (int64_t panel = 0; panel < columns; panel += PANEL)
                    pack_right<RIGHT>(column + panel, least(columns - panel, PANEL), from, depth,
                                      packed + panel * depth);
#pragma omp for schedule(static)
                for (int64_t row = 0; row < m; row += at_once) {
                    const int64_t rows = least(m - row, at_once);
                    pack_left<LEFT>(row, rows, from, depth, strips);
                    for (int64_t panel = 0; panel < columns; panel += PANEL)
                        for (int64_t strip = 0; strip < rows; strip += STRIP) {
                            float* c = out + (row + strip) * n + column + panel;
                            const float *a = strips + strip * depth, *b = packed + panel * depth;
                            if (rows - strip >= STRIP && columns - panel >= PANEL)
                                multiply(a, b, depth, c, n, add || from > 0);
                            else
                                multiply_part(a, b, depth, c, n, add || from > 0, least(rows - strip, STRIP),
                                              least(columns - panel, PANEL));
                        }
                }
            }
    }

    void run(Order left_order, Order right_order, int threads) const {
        const int64_t at_once = least(divided_up(m, threads * STRIP) * STRIP, MOST_ROWS);
        float* packed = memory().right;
#pragma omp parallel num_threads(threads)
        {
            if (left_order == TRANSPOSED)
                run<TRANSPOSED, PLAIN>(at_once, packed);
            else if (right_order == TRANSPOSED)
                run<PLAIN, TRANSPOSED>(at_once, packed);
            else
                run<PLAIN, PLAIN>(at_once, packed);
        }
    }
};

#endif

// Whether `Product` is used: MKL, torch's BLAS, is tuned for Intel's processors.
bool has_own_products() {
#ifdef __AVX512F__
    return !__builtin_cpu_is("intel");
#else
    return false;
#endif
}

}  // namespace
