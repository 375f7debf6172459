// Products of bfloat16 matrices by tiles, with Intel's AMX or AVX-512's products of bfloat16. A product's result is
// processed while it is in the first-level cache and the next product multiplies.
//
// The left factor is stored in tiles of 16 rows x 32 columns, in the order of the rows of tiles. The right one is
// stored in panels of 32 columns, each a list of steps of 32 rows: two tiles of 16 columns, in which two rows are
// interleaved, as the instructions require.

#pragma once

#if defined(__AVX512BW__) && defined(__AVX512BF16__)
#define HAS_TILES 1
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define HAS_AMX 1
#endif
#endif

#ifdef HAS_TILES

#include "elementwise.h"
#include "gemm.h"

namespace {

constexpr int64_t TILE = 16, DEPTH = 32, PANEL = 32;  // rows and columns of a left tile; columns of a panel
constexpr int64_t TILE_BYTES = 1024, STEP_BYTES = 2 * TILE_BYTES;  // one tile; a panel's step
constexpr int64_t BLOCK = 2 * TILE, RESULT = BLOCK * PANEL;  // rows multiplied at once, and the numbers of their result
constexpr int64_t QUARTER = BLOCK / 4;
constexpr int64_t STEPS_AT_ONCE = 16;  // of a panel: 32 KiB, which stay in the first-level cache
#ifdef HAS_AMX
constexpr int64_t MAX_BLOCKS = 4;  // that share the cost of loading a panel
#else
constexpr int64_t MAX_BLOCKS = 2;  // here products take longer than loading, and second-level caches are smaller
#endif
constexpr int64_t SECOND_LEVEL = 1 << 20;  // bytes of right factors that fit the second-level cache with the other data

// `Tiles` are the thread's registers, while it lives.
//
// multiply: c [32 x 32] (+)= left right over `depth` columns of the left factor, at least the first `rows` of c;
// `stride`: bytes from the first 16 rows to the second. Columns beyond `depth` up to the next multiple of 32 are
// zeros, or not read. `between()` is called once per step, to do other work while the step multiplies.
#ifdef HAS_AMX

struct Tiles {
    Tiles() {
        alignas(64) struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
        _tile_loadconfig(&shape);
    }
    ~Tiles() { _tile_release(); }
};

template <class Between>
INLINE void multiply(const char* left, int64_t stride, const char* right, int64_t depth, float* c, bool add,
                     int64_t rows, const Between& between) {
    const bool second = rows > TILE;
    constexpr int64_t row = PANEL * sizeof(float);
    float* c1 = c + TILE * PANEL;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (add) {
        _tile_loadd(0, c, row);
        _tile_loadd(1, c + TILE, row);
        if (second) {
            _tile_loadd(2, c1, row);
            _tile_loadd(3, c1 + TILE, row);
        }
    }
    for (; depth > 0; depth -= DEPTH, left += TILE_BYTES, right += STEP_BYTES) {
        _tile_loadd(4, left, 64);
        _tile_loadd(6, right, 64);
        _tile_loadd(7, right + TILE_BYTES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (second) {
            _tile_loadd(5, left + stride, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        between();
    }
    _tile_stored(0, c, row);
    _tile_stored(1, c + TILE, row);
    if (second) {
        _tile_stored(2, c1, row);
        _tile_stored(3, c1 + TILE, row);
    }
}

#else

struct Tiles {
    Tiles() {}  // nothing to set up, but not trivial either, so that compilers see it used
};

// A quarter of a block's rows, with all of a panel's columns: 16 sums, enough to hide the latency of a product.
// Meanwhile `soon` is fetched to the second-level cache, a quarter of a step at a time.
template <class Between>
INLINE void multiply_quarter(const char* left, const char* right, int64_t depth, float* c, bool add, const char* soon,
                             const Between& between) {
    __m512 low[QUARTER], high[QUARTER];
    for (int row = 0; row < QUARTER; row++) {
        low[row] = add ? _mm512_load_ps(c + row * PANEL) : _mm512_setzero_ps();
        high[row] = add ? _mm512_load_ps(c + row * PANEL + TILE) : _mm512_setzero_ps();
    }
    for (; depth > 0; depth -= DEPTH, left += TILE_BYTES, right += STEP_BYTES, soon += STEP_BYTES / 4) {
        between();
        for (int64_t first = 0; 2 * first < least(depth, DEPTH); first += 2) {
            _mm_prefetch(soon + first * 32, _MM_HINT_T1);
#pragma GCC unroll 2
            for (int64_t pair = first; pair < first + 2; pair++) {
                const char* columns = right + pair * 64;
                const __m512bh former = (__m512bh)_mm512_load_si512(columns),
                               latter = (__m512bh)_mm512_load_si512(columns + TILE_BYTES);
#pragma GCC unroll 8
                for (int row = 0; row < QUARTER; row++) {
                    int32_t two;
                    std::memcpy(&two, left + row * 64 + pair * 4, sizeof two);
                    const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
                    low[row] = _mm512_dpbf16_ps(low[row], both, former);
                    high[row] = _mm512_dpbf16_ps(high[row], both, latter);
                }
            }
        }
    }
    for (int row = 0; row < QUARTER; row++) {
        _mm512_store_ps(c + row * PANEL, low[row]);
        _mm512_store_ps(c + row * PANEL + TILE, high[row]);
    }
}

template <class Between>
INLINE void multiply(const char* left, int64_t stride, const char* right, int64_t depth, float* c, bool add,
                     int64_t rows, const Between& between) {
    const int64_t steps = divided_up(depth, DEPTH);
    const char* soon = right + steps * STEP_BYTES;  // usually the factor of the next product
    multiply_quarter(left, right, depth, c, add, soon, between);
    for (int64_t i = 1; i < 4 && i * QUARTER < rows; i++) {
        const char* rows_of_it = left + i / 2 * stride + i % 2 * (TILE_BYTES / 2);
        multiply_quarter(rows_of_it, right, depth, c + i * (RESULT / 4), add, soon + i * steps * (STEP_BYTES / 4),
                         [] {});
    }
}

#endif

// Products of a left factor of at most MAX_BLOCKS * 32 rows and `depth` columns, and `groups` x FACTORS panels.
// `panel(group, factor)` is the address of one. `finish(group, row, c)` gets each row of each group's results, 32
// numbers of every factor (at intervals of RESULT * MAX_BLOCKS), in the order of groups; it runs while the next group
// multiplies.
template <int FACTORS, class Panel, class Finish>
INLINE void sweep(const char* left, int64_t rows, int64_t depth, int64_t groups, const Panel& panel,
                  const Finish& finish) {
    alignas(64) float results[2][FACTORS * MAX_BLOCKS * RESULT];
    const int64_t steps = divided_up(depth, DEPTH), blocks = divided_up(rows, BLOCK), stride = steps * TILE_BYTES;
    const int64_t share = divided_up(BLOCK, FACTORS * steps);
    int64_t next = rows;  // row of the group before to finish
    for (int64_t group = 0; group < groups; group++) {
        const float* before = results[(group + 1) % 2];
        const auto between = [&] {
            for (int64_t i = 0; i < share && next < rows; i++, next++) finish(group - 1, next, before + next * PANEL);
        };
        for (int factor = 0; factor < FACTORS; factor++)
            for (int64_t step = 0; step < steps; step += STEPS_AT_ONCE)
                for (int64_t block = 0; block < blocks; block++) {
                    float* c = results[group % 2] + (factor * MAX_BLOCKS + block) * RESULT;
                    const char* a = left + 2 * block * stride + step * TILE_BYTES;
                    multiply(a, stride, panel(group, factor) + step * STEP_BYTES,
                             least(depth - step * DEPTH, STEPS_AT_ONCE * DEPTH), c, step > 0, rows - block * BLOCK,
                             between);
                }
        while (next < rows) between();
        next = 0;
    }
    for (; next < rows; next++) finish(groups - 1, next, results[(groups + 1) % 2] + next * PANEL);
}

// Rows of a thread's iteration: more if the right factors exceed the cache, fewer if threads would be idle.
inline int64_t rows_at_once(int64_t rows, int64_t right_bytes, int64_t threads) {
    const int64_t fair = divided_up(divided_up(rows, threads), BLOCK) * BLOCK;
    return least(fair, BLOCK * (right_bytes > SECOND_LEVEL ? MAX_BLOCKS : 2));
}

// Bytes of a left factor.
inline int64_t left_bytes(int64_t rows, int64_t columns) { return divided_up(rows, BLOCK) * BLOCK * columns * 2; }

// The address of 32 numbers of a left factor.
inline bf16* in_tiles(char* left, uint64_t steps, uint64_t row, uint64_t step) {
    return reinterpret_cast<bf16*>(left + ((row / TILE) * steps + step) * TILE_BYTES + (row % TILE) * 64);
}

// Thirty-two numbers: a panel's row, or a left tile's.
struct Row {
    V low, high;
    void operator+=(const Row& other) { low += other.low, high += other.high; }
};

inline __m512i rounded(const Row& row) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)row.high, (__m512)row.low); }
inline Row widened(__m512i half) {
    return {widened((H16)_mm512_castsi512_si256(half)), widened((H16)_mm512_extracti64x4_epi64(half, 1))};
}
inline Row load_row(const float* from) { return {load(from), load(from + TILE)}; }
inline Row load_row(const bf16* from) { return widened(_mm512_loadu_si512(from)); }
inline void store_row(bf16* to, __m512i half) { _mm512_storeu_si512(to, half); }
inline void store_row(bf16* to, const Row& row) { store_row(to, rounded(row)); }

template <int KIND>
struct ActivatedRow {
    Row value;
    ActivatedRow(const Row& x, const Row& up)
        : value{Activated<KIND>(x.low, up.low).value, Activated<KIND>(x.high, up.high).value} {}
};

// Copies these rows of `source` [.., columns] to a left factor.
inline void gather(const bf16* source, const int64_t* rows, int64_t n, int64_t columns, char* left) {
    const int64_t steps = columns / DEPTH;
    for (int64_t i = 0; i < n; i++) {
        const bf16* from = source + rows[i] * columns;
        bf16* to = in_tiles(left, steps, i, 0);
        for (int64_t step = 0; step < steps; step++, to += TILE_BYTES / 2, from += DEPTH)
            _mm512_store_si512(to, _mm512_loadu_si512(from));
    }
}

// Copies consecutive rows to a left factor, and back.
inline void to_tiles(const bf16* from, int64_t n, int64_t columns, char* left) {
    for (int64_t i = 0; i < n; i++) {
        bf16* to = in_tiles(left, columns / DEPTH, i, 0);
        for (int64_t column = 0; column < columns; column += DEPTH, to += TILE_BYTES / 2)
            _mm512_store_si512(to, _mm512_loadu_si512(from + i * columns + column));
    }
}

inline void from_tiles(char* left, int64_t n, int64_t columns, bf16* to) {
    for (int64_t i = 0; i < n; i++) {
        const bf16* from = in_tiles(left, columns / DEPTH, i, 0);
        for (int64_t column = 0; column < columns; column += DEPTH, from += TILE_BYTES / 2)
            store_row(to + i * columns + column, _mm512_load_si512(from));
    }
}

// The same to memory that is not needed soon: past the caches, if it is aligned for that.
inline void from_tiles_away(char* left, int64_t n, int64_t columns, bf16* to) {
    if (reinterpret_cast<uintptr_t>(to) % 64 != 0) return from_tiles(left, n, columns, to);
    for (int64_t i = 0; i < n; i++) {
        const bf16* from = in_tiles(left, columns / DEPTH, i, 0);
        for (int64_t column = 0; column < columns; column += DEPTH, from += TILE_BYTES / 2)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i * columns + column), _mm512_load_si512(from));
    }
}

// Packs the transpose of `matrix` [columns, depth] as a right factor; called by all threads of a region.
inline void pack_transposed(const bf16* matrix, int64_t columns, int64_t depth, char* right) {
#pragma omp for schedule(static)
    for (int64_t column = 0; column < columns; column += TILE)
        for (int64_t step = 0; step < depth / DEPTH; step++) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(matrix + (column + i) * depth + step * DEPTH);
            transpose(r);
            char* to =
                right + ((column / PANEL) * (depth / DEPTH) + step) * STEP_BYTES + (column % PANEL) / TILE * TILE_BYTES;
            for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 64, r[i]);
        }
}

inline __m512i interleaved(const bf16* even, const bf16* odd) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// Packs one step of a right factor [.., columns] of `steps` steps; `at(row, column)` is the address of 32 numbers of
// one of its 32 rows.
template <class At>
INLINE void pack_step(const At& at, int64_t columns, int64_t steps, int64_t step, char* right) {
    for (int64_t row = 0; row < DEPTH; row += 2) {
        char* to = right + step * STEP_BYTES + row / 2 * 64;
        for (int64_t column = 0; column < columns; column += PANEL, to += steps * STEP_BYTES) {
            const bf16 *even = at(row, column), *odd = at(row + 1, column);
            _mm512_store_si512(to, interleaved(even, odd));
            _mm512_store_si512(to + TILE_BYTES, interleaved(even + TILE, odd + TILE));
        }
    }
}

// Packs `matrix` [depth, columns] as a right factor; called by all threads of a region.
inline void pack(const bf16* matrix, int64_t depth, int64_t columns, char* right) {
#pragma omp for schedule(static)
    for (int64_t step = 0; step < depth / DEPTH; step++)
        pack_step([=](int64_t row, int64_t column) { return matrix + (step * DEPTH + row) * columns + column; },
                  columns, depth / DEPTH, step, right);
}

// Packs one step of the transpose of a matrix [.., columns] as a left factor of `steps` steps; `at` as above.
template <class At>
INLINE void transpose_step(const At& at, int64_t columns, int64_t steps, int64_t step, char* left) {
    for (int64_t column = 0; column < columns; column += DEPTH)
        for (int64_t half = 0; half < DEPTH; half += TILE) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = interleaved(at(2 * i, column) + half, at(2 * i + 1, column) + half);
            transpose(r);
            char* to = left + ((column + half) / TILE * steps + step) * TILE_BYTES;
            for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 64, r[i]);
        }
}

alignas(64) const bf16 ZEROS[DEPTH] = {};

}  // namespace

#endif  // HAS_TILES
