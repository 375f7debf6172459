// Kernels for experts on the host: what torch does in many passes over main memory, done in one.
//
// The elementwise functions (activations forward and backward, weighted sums of rows) are for any CPU, in float and bfloat16. The block
// functions compute the experts' blocks of rows, all of a call: in float by products of our own or torch's BLAS, one pass after the
// other while a block is in the cache; in bfloat16 with Intel's AMX or AVX-512's products of bfloat16, where they do what comes after a
// product while its result is in the first-level cache and the next one multiplies.
//
// Shapes: n rows of a block, H hidden size, F width, G = 2 F for SwiGLU ([gate | up]) else F. All tensors are row-major.

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>

#if defined(__AVX512BW__) && defined(__AVX512BF16__)
#define HAS_TILES 1
#include <omp.h>
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Sixteen numbers at once; the compiler cuts them to the width of the machine's registers.
// ---------------------------------------------------------------------------------------------------------------------

constexpr int LANES = 16;
typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H16 __attribute__((vector_size(2 * LANES)));

struct bf16 {
    uint16_t bits;
};

inline V splat(float value) { return V{} + value; }

inline V load(const float* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline V widened(H16 half) {
#ifdef __AVX512F__
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);  // what a compiler makes of the other line takes three steps more
#else
    return (V)(__builtin_convertvector(half, U) << 16);
#endif
}

inline V load(const bf16* from) {
    H16 half;
    std::memcpy(&half, from, sizeof half);
    return widened(half);
}

inline void store(float* to, V value) { std::memcpy(to, &value, sizeof value); }

// To the nearest, ties to even; a NaN stays one.
inline H16 rounded(V value) {
#ifdef __AVX512BF16__
    return (H16)_mm512_cvtneps_pbh((__m512)value);
#else
    U bits = (U)value;
    U nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((U)(value == value ? (I)nearest : (I)(U{} + 0x7fc0)), H16);
#endif
}

inline void store(bf16* to, H16 half) { std::memcpy(to, &half, sizeof half); }
inline void store(bf16* to, V value) { store(to, rounded(value)); }

template <class T>
inline V load_part(const T* from, int64_t count) {
    T part[LANES] = {};
    std::memcpy(part, from, count * sizeof(T));
    return load(part);
}

template <class T>
inline void store_part(T* to, V value, int64_t count) {
    T part[LANES];
    store(part, value);
    std::memcpy(to, part, count * sizeof(T));
}

inline float sum(V value) {
    typedef float Half __attribute__((vector_size(32)));
    typedef float Quarter __attribute__((vector_size(16)));
    Half half[2];
    std::memcpy(half, &value, sizeof value);
    half[0] += half[1];
    Quarter quarter[2];
    std::memcpy(quarter, half, sizeof quarter);
    quarter[0] += quarter[1];
    return (quarter[0][0] + quarter[0][2]) + (quarter[0][1] + quarter[0][3]);
}

// A NaN stays one.
inline V clamped(V x, float low, float high) {
#ifdef __AVX512F__
    return (V)_mm512_min_ps((__m512)splat(high), _mm512_max_ps((__m512)splat(low), (__m512)x));  // compilers take four steps for the other lines
#else
    x = x < low ? splat(low) : x;
    return x > high ? splat(high) : x;
#endif
}

// Within 2 units in the last place between -87 and 88, and clamped there (polynomial of Cephes' expf).
inline V exponential(V x) {
    x = clamped(x, -87.3f, 88.3f);
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    V shifted = x * 1.44269504088896341f + shift;
    V power = shifted - shift;
    V r = x - power * 0.693359375f;
    r = r - power * -2.12194440e-4f;
    V y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    I exponent = (I)shifted - (I)splat(shift);
    return (V)((I)y + (exponent << 23));
}

// A rational approximation on [-4, 4], where |erf| reaches 1 in float (the one of Eigen and XLA).
inline V error_function(V x) {
    x = clamped(x, -4.0f, 4.0f);
    V square = x * x;
    V above = splat(-2.72614225801306e-10f);
    above = above * square + 2.77068142495902e-08f;
    above = above * square + -2.10102402082508e-06f;
    above = above * square + -5.69250639462346e-05f;
    above = above * square + -7.34990630326855e-04f;
    above = above * square + -2.95459980854025e-03f;
    above = above * square + -1.60960333262415e-02f;
    V below = splat(-1.45660718464996e-05f);
    below = below * square + -2.13374055278905e-04f;
    below = below * square + -1.68282697438203e-03f;
    below = below * square + -7.37332916720468e-03f;
    below = below * square + -1.42647390514189e-02f;
    return x * above / below;
}

// ---------------------------------------------------------------------------------------------------------------------
// Activations: a value and its derivatives. `up` is SwiGLU's second half, and unused by the others.
// ---------------------------------------------------------------------------------------------------------------------

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

// The gradient of one piece of a row: what `grad`, the gradient after the pair's weight, makes of the hidden activation.
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
void activate_backward(const T* hidden, const T* grad, const float* weights, int64_t n, int64_t width, T* hidden_grad, T* activated, float* weight_grad,
                       int threads) {
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
            Backward<KIND> piece(load_part(row + f, rest), load_part(up + f, rest), load_part(grad + i * width + f, rest), weight);
            store_part(row_grad + f, piece.hidden_grad, rest);
            if (KIND == SWIGLU) store_part(row_grad + width + f, piece.up_grad, rest);
            store_part(activated + i * width + f, piece.activated, rest);
            total += piece.product;
        }
        weight_grad[i] = sum(total);
    }
}

// out[i] = the sum of source[index[j]] * weights[j] for j from starts[i] to the next one's; without weights, of the rows.
template <class T>
void add_up(const T* source, int64_t columns, const int64_t* index, const int64_t* starts, int64_t num_sums, int64_t num_rows, const float* weights, T* out,
            int threads) {
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
                total += (weights == nullptr ? 1.0f : weights[j]) * load_part(source + index[j] * columns + column, count);
            store_part(out + i * columns + column, total, count);
        }
    }
}

// The columns of the k greatest numbers of each row, the greatest first, of equal ones the first. As for torch, NaN is the greatest.
constexpr int64_t MAX_COLUMNS = 1024;

void top_k(const float* scores, int64_t rows, int64_t columns, int64_t k, int64_t* indices, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * columns > 16384)
    for (int64_t i = 0; i < rows; i++) {
        alignas(64) int32_t keys[MAX_COLUMNS];  // the numbers' bits, so that integers compare as they do
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
            keys[place] = INT32_MIN;  // below every number's
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
void activate_backward_any(int kind, const T* hidden, const T* grad, const float* weights, int64_t n, int64_t width, T* hidden_grad, T* activated,
                           float* weight_grad, int threads) {
    if (kind == SWIGLU) activate_backward<SWIGLU>(hidden, grad, weights, n, width, hidden_grad, activated, weight_grad, threads);
    if (kind == GELU) activate_backward<GELU>(hidden, grad, weights, n, width, hidden_grad, activated, weight_grad, threads);
    if (kind == GELU_TANH) activate_backward<GELU_TANH>(hidden, grad, weights, n, width, hidden_grad, activated, weight_grad, threads);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products of matrices in float
// ---------------------------------------------------------------------------------------------------------------------

#define INLINE inline __attribute__((always_inline))  // so that what a function is given to call becomes part of its loop

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

// The classical blocked product: parts of both factors are copied so that they are read in order, the right one to panels of 32 columns,
// the left one to strips of 8 rows, and stay in the second-level cache. The rest of a strip or panel that is not full is zeros.
struct Product {
    static constexpr int64_t STRIP = 8, PANEL = 2 * LANES;                           // rows and columns of sums in registers
    static constexpr int64_t MOST_ROWS = 256, MOST_COLUMNS = 256, MOST_DEPTH = 512;  // of what is copied at once
    static constexpr int64_t LEAST = 32;                                             // rows, columns and depth that are worth the copies

    const float *left, *right;
    float* out;
    int64_t m, n, k;
    bool add;

    struct Memory {  // of one thread, kept
        float* left = static_cast<float*>(std::aligned_alloc(64, MOST_ROWS * MOST_DEPTH * sizeof(float)));
        float* right = static_cast<float*>(std::aligned_alloc(64, MOST_COLUMNS * MOST_DEPTH * sizeof(float)));
        ~Memory() { std::free(left), std::free(right); }
    };

    static Memory& memory() {
        thread_local Memory kept;
        return kept;
    }

    // Sixteen numbers of a row of which `count` are there.
    static __m512 row_of(const float* from, int64_t count) {
        return count >= LANES ? _mm512_loadu_ps(from) : count <= 0 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps((1u << count) - 1, from);
    }

    // Sixteen rows of 16 numbers, of a matrix that lies with `stride` numbers from row to row.
    static void square_of(const float* from, int64_t stride, int64_t rows, int64_t count, __m512i r[16]) {
        for (int i = 0; i < LANES; i++) r[i] = (__m512i)(i < rows ? row_of(from + i * stride, count) : _mm512_setzero_ps());
    }

    // Strips [depth, 8] of `rows` from `row` and `depth` from `from`.
    template <Order ORDER>
    void pack_left(int64_t row, int64_t rows, int64_t from, int64_t depth, float* to) const {
        for (int64_t strip = 0; strip < rows; strip += STRIP, to += depth * STRIP) {
            const int64_t there = least(rows - strip, STRIP);
            if (ORDER == TRANSPOSED) {
                const __mmask16 mask = (1u << there) - 1;
                for (int64_t i = 0; i < depth; i++)
                    _mm512_mask_storeu_ps(to + i * STRIP, 0xff, _mm512_maskz_loadu_ps(mask, left + (from + i) * m + row + strip));
            } else {
                for (int64_t i = 0; i < depth; i += LANES) {
                    __m512i r[16];
                    square_of(left + (row + strip) * k + from + i, k, there, depth - i, r);
                    transpose(r);
                    for (int64_t j = 0; j < least(depth - i, LANES); j++) _mm512_mask_storeu_epi32(to + (i + j) * STRIP, 0xff, r[j]);
                }
            }
        }
    }

    // A panel [depth, 32] of `columns` from `column`.
    template <Order ORDER>
    void pack_right(int64_t column, int64_t columns, int64_t from, int64_t depth, float* to) const {
        for (int64_t half = 0; half < PANEL; half += LANES, to += LANES)
            if (ORDER == PLAIN) {
                for (int64_t i = 0; i < depth; i++) _mm512_store_ps(to + i * PANEL, row_of(right + (from + i) * n + column + half, columns - half));
            } else {
                for (int64_t i = 0; i < depth; i += LANES) {
                    __m512i r[16];
                    square_of(right + (column + half) * k + from + i, k, columns - half, depth - i, r);
                    transpose(r);
                    for (int64_t j = 0; j < least(depth - i, LANES); j++) _mm512_store_si512(to + (i + j) * PANEL, r[j]);
                }
            }
    }

    // c [8, 32] (+)= strip panel; `stride`: numbers from row to row of c.
    static INLINE void multiply(const float* strip, const float* panel, int64_t depth, float* c, int64_t stride, bool add) {
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

    // The same where fewer rows or columns are there.
    static void multiply_part(const float* strip, const float* panel, int64_t depth, float* c, int64_t stride, bool add, int64_t rows, int64_t columns) {
        alignas(64) float part[STRIP * PANEL] = {};
        for (int64_t row = 0; add && row < rows; row++) std::copy_n(c + row * stride, columns, part + row * PANEL);
        multiply(strip, panel, depth, part, PANEL, true);
        for (int64_t row = 0; row < rows; row++) std::copy_n(part + row * PANEL, columns, c + row * stride);
    }

    // By all threads of a region, which take `at_once` rows each; `packed` is theirs together.
    template <Order LEFT, Order RIGHT>
    void run(int64_t at_once, float* packed) const {
        float* strips = memory().left;
        for (int64_t column = 0; column < n; column += MOST_COLUMNS)
            for (int64_t from = 0; from < k; from += MOST_DEPTH) {
                const int64_t columns = least(n - column, MOST_COLUMNS), depth = least(k - from, MOST_DEPTH);
#pragma omp for schedule(static)
                for (int64_t panel = 0; panel < columns; panel += PANEL)
                    pack_right<RIGHT>(column + panel, least(columns - panel, PANEL), from, depth, packed + panel * depth);
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
                                multiply_part(a, b, depth, c, n, add || from > 0, least(rows - strip, STRIP), least(columns - panel, PANEL));
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

// Whether `Product` is used: MKL, torch's BLAS, is made for Intel's processors.
bool has_own_products() {
#ifdef __AVX512F__
    return !__builtin_cpu_is("intel");
#else
    return false;
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// An expert's block of rows in float
// ---------------------------------------------------------------------------------------------------------------------

// Consecutive rows of one expert; `add`: its gradients are to be added to what is there.
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

    // One of the stacked ones.
    Expert(int64_t i, int64_t kind, int64_t size, int64_t width, const T* fc1, const T* fc1_bias, const T* fc2, const T* fc2_bias)
        : size(size), width(width), outer(kind == SWIGLU ? 2 * width : width), fc1(at(fc1, i, outer * size)), fc1_bias(at(fc1_bias, i, outer)),
          fc2(at(fc2, i, size * width)), fc2_bias(at(fc2_bias, i, size)) {}
};

typedef void (*Gemm)(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*, const float*, const int*, const float*,
                     float*, const int*);

struct Host {  // what multiplies
    Gemm gemm;
    int threads;

    // out [m, n] (+)= left [m, k] right [k, n], of which a transposed one lies as [k, m] or [n, k].
    void multiply(Order left_order, Order right_order, int64_t m, int64_t n, int64_t k, const float* left, const float* right, float* out, bool add) const {
#ifdef __AVX512F__
        if (has_own_products() && std::min({m, n, k}) >= Product::LEAST) return Product{left, right, out, m, n, k, add}.run(left_order, right_order, threads);
#endif
        // BLAS counts by columns: to it every matrix here is its transpose.
        const int columns = n, rows = m, depth = k, left_stride = left_order == PLAIN ? k : m, right_stride = right_order == PLAIN ? n : k;
        const float one = 1.0f, factor = add;
        gemm(right_order == PLAIN ? "N" : "T", left_order == PLAIN ? "N" : "T", &columns, &rows, &depth, &one, right, &right_stride, left, &left_stride, &factor,
             out, &columns);
    }

    void gather(const float* source, const int64_t* rows, int64_t n, int64_t columns, float* out) const {
#pragma omp parallel for num_threads(threads) schedule(static) if (n * columns > 16384)
        for (int64_t i = 0; i < n; i++) std::memcpy(out + i * columns, source + rows[i] * columns, columns * sizeof(float));
    }

    void add_bias(const float* bias, int64_t n, int64_t columns, float* out) const {
        for (int64_t i = 0; bias != nullptr && i < n; i++)
            for (int64_t column = 0; column < columns; column++) out[i * columns + column] += bias[column];
    }

    void hidden_of(const Expert<float>& e, const float* x, int64_t n, float* hidden) const {
        multiply(PLAIN, TRANSPOSED, n, e.outer, e.size, x, e.fc1, hidden, false);
        add_bias(e.fc1_bias, n, e.outer, hidden);
    }

    void forward_block(int kind, const Expert<float>& e, const float* source, const int64_t* rows, int64_t n, float* hidden, float* output, float* scratch) const {
        float *x = scratch, *activated = x + n * e.size;
        hidden = hidden == nullptr ? activated + n * e.width : hidden;
        gather(source, rows, n, e.size, x);
        hidden_of(e, x, n, hidden);
        activate_any(kind, hidden, n, e.width, activated, threads);
        multiply(PLAIN, TRANSPOSED, n, e.size, e.width, activated, e.fc2, output, false);
        add_bias(e.fc2_bias, n, e.size, output);
    }

    void backward_block(int kind, const Expert<float>& e, const float* source, const int64_t* rows, const float* output_grad, const int64_t* output_rows,
                        const float* pair_weights, int64_t n, const float* hidden, float* hidden_grad, float* activated, float* weight_grad, float* input_grad,
                        float* fc1_grad, float* fc2_grad, bool add, float* scratch) const {
        float *dy = scratch, *grad = dy + n * e.size, *x = grad + n * e.width, *again = x + n * e.size;
        if (hidden == nullptr || fc1_grad != nullptr) gather(source, rows, n, e.size, x);
        if (hidden == nullptr) hidden_of(e, x, n, again);
        gather(output_grad, output_rows, n, e.size, dy);
        multiply(PLAIN, PLAIN, n, e.width, e.size, dy, e.fc2, grad, false);
        activate_backward_any(kind, hidden == nullptr ? again : hidden, grad, pair_weights, n, e.width, hidden_grad, activated, weight_grad, threads);
        for (int64_t i = 0; e.fc2_bias != nullptr && i < n; i++) {  // the weight also multiplies the bias
            V products = V{};
            int64_t h = 0;
            for (; h + LANES <= e.size; h += LANES) products += load(dy + i * e.size + h) * load(e.fc2_bias + h);
            if (h < e.size) products += load_part(dy + i * e.size + h, e.size - h) * load_part(e.fc2_bias + h, e.size - h);
            weight_grad[i] += sum(products);
        }
        multiply(PLAIN, PLAIN, n, e.size, e.outer, hidden_grad, e.fc1, input_grad, false);
        if (fc1_grad != nullptr) weight_gradients(e.size, e.width, e.outer, n, hidden_grad, x, dy, activated, fc1_grad, fc2_grad, add);
    }

    void weight_gradients(int64_t size, int64_t width, int64_t outer, int64_t n, const float* hidden_grad, const float* x, const float* dy, const float* activated,
                          float* fc1_grad, float* fc2_grad, bool add) const {
        multiply(TRANSPOSED, PLAIN, outer, size, n, hidden_grad, x, fc1_grad, add);
        multiply(TRANSPOSED, PLAIN, size, width, n, dy, activated, fc2_grad, add);
    }
};

#ifdef HAS_TILES

// ---------------------------------------------------------------------------------------------------------------------
// Products by tiles. The left factor lies in tiles of 16 rows x 32 columns, one after the other along a row of tiles. The right one
// lies in panels of 32 columns, each a list of steps of 32 rows: two tiles of 16 columns, in which two rows are interleaved, as
// the instructions want them.
// ---------------------------------------------------------------------------------------------------------------------

constexpr int64_t TILE = 16, DEPTH = 32, PANEL = 32;               // rows and columns of a left tile; columns of a panel
constexpr int64_t TILE_BYTES = 1024, STEP_BYTES = 2 * TILE_BYTES;  // one tile; a panel's step
constexpr int64_t BLOCK = 2 * TILE, RESULT = BLOCK * PANEL;        // rows multiplied at once, and how many numbers they make
constexpr int64_t QUARTER = BLOCK / 4;
constexpr int64_t STEPS_AT_ONCE = 16;                              // of a panel: 32 KiB, which stay in the first-level cache
#ifdef HAS_AMX
constexpr int64_t MAX_BLOCKS = 4;                                  // that share what a panel's way there costs
#else
constexpr int64_t MAX_BLOCKS = 2;                                  // where products take longer than that way, and second-level caches are smaller
#endif
constexpr int64_t SECOND_LEVEL = 1 << 20;                          // bytes of right factors that the second-level cache holds beside the rest

// `Tiles` are the thread's registers, while it lives.
//
// multiply: c [32 x 32] (+)= left right over `depth` columns of the left factor, at least the first `rows` of c; `stride`: bytes from
// the first 16 rows to the second. What is beyond `depth` up to the next multiple of 32 is zeros, or not read.
// `between()` is called once a step, to do other work while the step multiplies.
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
INLINE void multiply(const char* left, int64_t stride, const char* right, int64_t depth, float* c, bool add, int64_t rows, const Between& between) {
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

// A quarter of a block's rows, with all of a panel's columns: 16 sums, enough to hide how long a product takes. Meanwhile a quarter of a
// step after the other is fetched to the second-level cache from `soon`.
template <class Between>
INLINE void multiply_quarter(const char* left, const char* right, int64_t depth, float* c, bool add, const char* soon, const Between& between) {
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
                const __m512bh former = (__m512bh)_mm512_load_si512(columns), latter = (__m512bh)_mm512_load_si512(columns + TILE_BYTES);
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
INLINE void multiply(const char* left, int64_t stride, const char* right, int64_t depth, float* c, bool add, int64_t rows, const Between& between) {
    const int64_t steps = divided_up(depth, DEPTH);
    const char* soon = right + steps * STEP_BYTES;  // mostly what multiplies next
    multiply_quarter(left, right, depth, c, add, soon, between);
    for (int64_t i = 1; i < 4 && i * QUARTER < rows; i++) {
        const char* rows_of_it = left + i / 2 * stride + i % 2 * (TILE_BYTES / 2);
        multiply_quarter(rows_of_it, right, depth, c + i * (RESULT / 4), add, soon + i * steps * (STEP_BYTES / 4), [] {});
    }
}

#endif

// Products of a left factor of at most MAX_BLOCKS * 32 rows and `depth` columns, and `groups` x FACTORS panels.
// `panel(group, factor)` is where one lies. `finish(group, row, c)` gets each row of each group's results, 32 numbers of every factor
// (RESULT * MAX_BLOCKS apart), in the order of groups; it runs while the next group multiplies.
template <int FACTORS, class Panel, class Finish>
INLINE void sweep(const char* left, int64_t rows, int64_t depth, int64_t groups, const Panel& panel, const Finish& finish) {
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
                    multiply(a, stride, panel(group, factor) + step * STEP_BYTES, least(depth - step * DEPTH, STEPS_AT_ONCE * DEPTH), c, step > 0,
                             rows - block * BLOCK, between);
                }
        while (next < rows) between();
        next = 0;
    }
    for (; next < rows; next++) finish(groups - 1, next, results[(groups + 1) % 2] + next * PANEL);
}

// Rows that a thread takes at once: more where the right factors come from far away, fewer where threads would be idle.
inline int64_t rows_at_once(int64_t rows, int64_t right_bytes, int64_t threads) {
    const int64_t fair = divided_up(divided_up(rows, threads), BLOCK) * BLOCK;
    return least(fair, BLOCK * (right_bytes > SECOND_LEVEL ? MAX_BLOCKS : 2));
}

// Bytes of a left factor.
inline int64_t left_bytes(int64_t rows, int64_t columns) { return divided_up(rows, BLOCK) * BLOCK * columns * 2; }

// Where 32 numbers of a left factor lie.
inline bf16* in_tiles(char* left, uint64_t steps, uint64_t row, uint64_t step) {
    return reinterpret_cast<bf16*>(left + ((row / TILE) * steps + step) * TILE_BYTES + (row % TILE) * 64);
}

// Thirty-two numbers: a panel's row, or a left tile's.
struct Row {
    V low, high;
    void operator+=(const Row& other) { low += other.low, high += other.high; }
};

inline __m512i rounded(const Row& row) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)row.high, (__m512)row.low); }
inline Row widened(__m512i half) { return {widened((H16)_mm512_castsi512_si256(half)), widened((H16)_mm512_extracti64x4_epi64(half, 1))}; }
inline Row load_row(const float* from) { return {load(from), load(from + TILE)}; }
inline Row load_row(const bf16* from) { return widened(_mm512_loadu_si512(from)); }
inline void store_row(bf16* to, __m512i half) { _mm512_storeu_si512(to, half); }
inline void store_row(bf16* to, const Row& row) { store_row(to, rounded(row)); }

template <int KIND>
struct ActivatedRow {
    Row value;
    ActivatedRow(const Row& x, const Row& up) : value{Activated<KIND>(x.low, up.low).value, Activated<KIND>(x.high, up.high).value} {}
};

// These rows of `source` [.., columns] as a left factor.
inline void gather(const bf16* source, const int64_t* rows, int64_t n, int64_t columns, char* left) {
    const int64_t steps = columns / DEPTH;
    for (int64_t i = 0; i < n; i++) {
        const bf16* from = source + rows[i] * columns;
        bf16* to = in_tiles(left, steps, i, 0);
        for (int64_t step = 0; step < steps; step++, to += TILE_BYTES / 2, from += DEPTH) _mm512_store_si512(to, _mm512_loadu_si512(from));
    }
}

// Rows that lie one after the other as a left factor, and back.
inline void to_tiles(const bf16* from, int64_t n, int64_t columns, char* left) {
    for (int64_t i = 0; i < n; i++) {
        bf16* to = in_tiles(left, columns / DEPTH, i, 0);
        for (int64_t column = 0; column < columns; column += DEPTH, to += TILE_BYTES / 2) _mm512_store_si512(to, _mm512_loadu_si512(from + i * columns + column));
    }
}

inline void from_tiles(char* left, int64_t n, int64_t columns, bf16* to) {
    for (int64_t i = 0; i < n; i++) {
        const bf16* from = in_tiles(left, columns / DEPTH, i, 0);
        for (int64_t column = 0; column < columns; column += DEPTH, from += TILE_BYTES / 2) store_row(to + i * columns + column, _mm512_load_si512(from));
    }
}

// The same to memory that is not needed soon: past the caches, if it lies as that requires.
inline void from_tiles_away(char* left, int64_t n, int64_t columns, bf16* to) {
    if (reinterpret_cast<uintptr_t>(to) % 64 != 0) return from_tiles(left, n, columns, to);
    for (int64_t i = 0; i < n; i++) {
        const bf16* from = in_tiles(left, columns / DEPTH, i, 0);
        for (int64_t column = 0; column < columns; column += DEPTH, from += TILE_BYTES / 2)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i * columns + column), _mm512_load_si512(from));
    }
}

// The transpose of `matrix` [columns, depth] as a right factor; by all threads of a region.
inline void pack_transposed(const bf16* matrix, int64_t columns, int64_t depth, char* right) {
#pragma omp for schedule(static)
    for (int64_t column = 0; column < columns; column += TILE)
        for (int64_t step = 0; step < depth / DEPTH; step++) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(matrix + (column + i) * depth + step * DEPTH);
            transpose(r);
            char* to = right + ((column / PANEL) * (depth / DEPTH) + step) * STEP_BYTES + (column % PANEL) / TILE * TILE_BYTES;
            for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 64, r[i]);
        }
}

inline __m512i interleaved(const bf16* even, const bf16* odd) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// One step of a right factor [.., columns] of `steps` steps; `at(row, column)` is where 32 numbers of one of its 32 rows are.
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

// `matrix` [depth, columns] as a right factor; by all threads of a region.
inline void pack(const bf16* matrix, int64_t depth, int64_t columns, char* right) {
#pragma omp for schedule(static)
    for (int64_t step = 0; step < depth / DEPTH; step++)
        pack_step([=](int64_t row, int64_t column) { return matrix + (step * DEPTH + row) * columns + column; }, columns, depth / DEPTH, step, right);
}

// One step of the transpose of a matrix [.., columns] as a left factor of `steps` steps; `at` as above.
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

// ---------------------------------------------------------------------------------------------------------------------
// An expert's block of rows in bfloat16
// ---------------------------------------------------------------------------------------------------------------------

// The factors of the weight gradients of n rows: transposed hidden and output gradients on the left, inputs and activations on the right.
struct Factors {
    int64_t n, steps, size, width, outer;
    char *hidden, *x, *dy, *activated;

    Factors(int64_t n, int64_t size, int64_t width, int64_t outer, char* memory) : n(n), steps(divided_up(n, DEPTH)), size(size), width(width), outer(outer) {
        const int64_t of_column = steps * DEPTH * 2;
        hidden = memory, x = hidden + outer * of_column, dy = x + size * of_column, activated = dy + size * of_column;
    }
    int64_t bytes() const { return steps * DEPTH * 2 * (outer + width + 2 * size); }
};

// How a pass over n rows divides its scratch memory: right factors that all threads share, and as much again for each thread.
struct Scratch {
    int64_t at_once, shared, own, fc2, fc1_transposed, factors;  // rows that a thread takes at once; bytes; and where shared parts begin

    Scratch(int64_t n, int64_t size, int64_t width, int64_t outer, bool backward, bool recompute, bool weights, int64_t threads) {
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

// gradient [rows, columns] (+)= left right over `depth`; by all threads of a region.
inline void gradient_of(const char* left, const char* right, int64_t rows, int64_t columns, int64_t depth, bf16* gradient, bool add) {
    const int64_t steps = divided_up(depth, DEPTH), at_once = rows_at_once(rows, columns * steps * DEPTH * 2, omp_get_num_threads());
#pragma omp for schedule(static)
    for (int64_t first = 0; first < rows; first += at_once)
        sweep<1>(
            left + first / TILE * steps * TILE_BYTES, least(rows - first, at_once), depth, columns / PANEL,
            [=](int64_t group, int) { return right + group * steps * STEP_BYTES; },
            [=](int64_t group, int64_t row, const float* c) {
                bf16* to = gradient + (first + row) * columns + group * PANEL;
                Row sums = load_row(c);
                if (add) {
                    _mm_prefetch(to + PANEL, _MM_HINT_T1);  // what the next group's sums are added to
                    sums += load_row(to);
                }
                store_row(to, sums);
            });
}

inline void weight_gradients(const Factors& f, bf16* fc1_grad, bf16* fc2_grad, bool add) {
    gradient_of(f.hidden, f.x, f.outer, f.size, f.n, fc1_grad, add);
    gradient_of(f.dy, f.activated, f.size, f.width, f.n, fc2_grad, add);
}

// What goes into the activation, for the rows `x` (a left factor): `use(row, group, value, up)` gets 32 numbers and, for SwiGLU, those of the
// second half.
template <int KIND, class Use>
INLINE void hidden_of(const Expert<bf16>& e, const char* x, int64_t rows, const char* packed_fc1, const Use& use) {
    constexpr int FACTORS = KIND == SWIGLU ? 2 : 1;
    const int64_t steps = e.size / DEPTH, groups = e.width / PANEL, width = e.width;
    const bf16* bias = e.fc1_bias;
    sweep<FACTORS>(
        x, rows, e.size, groups, [=](int64_t group, int factor) { return packed_fc1 + (factor * groups + group) * steps * STEP_BYTES; },
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

// Whether the block before this one is of the same expert, whose matrices then lie packed in the scratch memory.
inline bool same_expert(const Block* first, const Block& block) { return &block != first && (&block)[-1].expert == block.expert; }

template <int KIND>
void forward_block(const Expert<bf16>& e, bool packed, const bf16* source, const int64_t* rows, int64_t n, bf16* hidden, bf16* output, char* scratch,
                   int threads) {
    const int64_t size = e.size, width = e.width, outer = e.outer, width_steps = width / DEPTH, outer_steps = outer / DEPTH;
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
                // Of the rounded numbers, which a backward pass reads or computes again.
                store_row(in_tiles(activated, width_steps, row, group), ActivatedRow<KIND>(widened(value), widened(up)).value);
            });
            if (hidden != nullptr) from_tiles_away(hidden_tiles, now, outer, hidden + first * outer);
            sweep<1>(
                activated, now, width, size / PANEL, [=](int64_t group, int) { return fc2 + group * width_steps * STEP_BYTES; },
                [=](int64_t group, int64_t row, const float* c) {
                    Row sums = load_row(c);
                    if (fc2_bias != nullptr) sums += load_row(fc2_bias + group * PANEL);
                    store_row(output + (first + row) * size + group * PANEL, sums);
                });
        }
    }
}

template <int KIND>
void backward_block(const Expert<bf16>& e, bool packed, const bf16* source, const int64_t* rows, const bf16* output_grad, const int64_t* output_rows,
                    const float* pair_weights, int64_t n, const bf16* hidden, bf16* hidden_grad, bf16* activated, float* weight_grad, bf16* input_grad,
                    bf16* fc1_grad, bf16* fc2_grad, bool add, char* scratch, int threads) {
    const int64_t size = e.size, width = e.width, outer = e.outer, steps = size / DEPTH, width_steps = width / DEPTH, outer_steps = outer / DEPTH;
    const Scratch parts(n, size, width, outer, true, hidden == nullptr, fc1_grad != nullptr, threads);
    const Factors factors(n, size, width, outer, scratch + parts.factors);
    const int64_t at_once = parts.at_once;
    char *fc1 = scratch, *fc2 = scratch + parts.fc2, *fc1_transposed = scratch + parts.fc1_transposed;
#pragma omp parallel num_threads(threads)
    {
        char *dy = scratch + parts.shared + omp_get_thread_num() * parts.own, *grad = dy + left_bytes(at_once, size);
        char *hidden_tiles = grad + left_bytes(at_once, outer), *activated_tiles = hidden_tiles + left_bytes(at_once, outer);
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
                    const float weight = pair_weights[first + row];
                    const Row value = load_row(in_tiles(hidden_tiles, outer_steps, row, group)), gradient = load_row(c);
                    const Row up = KIND == SWIGLU ? load_row(in_tiles(hidden_tiles, outer_steps, row, width_steps + group)) : Row{};
                    const Backward<KIND> low(value.low, up.low, gradient.low, weight), high(value.high, up.high, gradient.high, weight);
                    store_row(in_tiles(grad, outer_steps, row, group), {low.hidden_grad, high.hidden_grad});
                    if (KIND == SWIGLU) store_row(in_tiles(grad, outer_steps, row, width_steps + group), {low.up_grad, high.up_grad});
                    store_row(in_tiles(activated_tiles, width_steps, row, group), {low.activated, high.activated});
                    totals[row] += low.product + high.product;
                });
            if (hidden_grad != nullptr) from_tiles(grad, now, outer, hidden_grad + first * outer);
            if (activated != nullptr) from_tiles(activated_tiles, now, width, activated + first * width);
            for (int64_t step = first / DEPTH; fc1_grad != nullptr && step * DEPTH < first + now; step++) {
                const int64_t skip = step * DEPTH - first;
                const auto in = [=](char* tiles, int64_t of_row) {
                    return [=](int64_t row, int64_t column) { return skip + row < now ? in_tiles(tiles, of_row, skip + row, column / DEPTH) : ZEROS; };
                };
                transpose_step(in(grad, outer_steps), outer, factors.steps, step, factors.hidden);
                transpose_step(in(dy, steps), size, factors.steps, step, factors.dy);
                pack_step(in(activated_tiles, width_steps), width, factors.steps, step, factors.activated);
                pack_step([=](int64_t row, int64_t column) { return skip + row < now ? source + rows[first + skip + row] * size + column : ZEROS; }, size,
                          factors.steps, step, factors.x);
            }
            sweep<1>(
                grad, now, outer, size / PANEL, [=](int64_t group, int) { return fc1 + group * outer_steps * STEP_BYTES; },
                [=](int64_t group, int64_t row, const float* c) { store_row(input_grad + (first + row) * size + group * PANEL, load_row(c)); });
            for (int64_t row = 0; row < now; row++) {
                V products = V{};  // the weight also multiplies the bias
                for (int64_t h = 0; e.fc2_bias != nullptr && h < size; h += LANES)
                    products += load(output_grad + output_rows[first + row] * size + h) * load(e.fc2_bias + h);
                weight_grad[first + row] = sum(totals[row] + products);
            }
        }
        if (fc1_grad != nullptr) weight_gradients(factors, fc1_grad, fc2_grad, add);
    }
}

void weights_block(int64_t size, int64_t width, int64_t outer, const bf16* source, const int64_t* rows, const bf16* output_grad,
                   const int64_t* output_rows, const bf16* hidden_grad, const bf16* activated, int64_t n, bf16* fc1_grad, bf16* fc2_grad, bool add,
                   char* scratch, int threads) {
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

// A router's logits: the products are exact, and added in float.
void gate(const bf16* x, int64_t n, int64_t size, const bf16* weight, int64_t experts, float* logits, char* scratch, int threads) {
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
                    std::memcpy(logits + (first + row) * experts + column, c, least(experts - column, PANEL) * sizeof(float));
                });
        }
    }
}

#endif  // HAS_TILES

}  // namespace

// The functions that Python calls: addresses and 64 bit integers; the last argument is the number of threads.
extern "C" {

// Whether the block functions work here: the compiler knew the instructions, and the system lets this process use them.
int mixtrain_has_tiles() {
#ifdef HAS_AMX
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl's ARCH_REQ_XCOMP_PERM and the feature's number
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#elif defined(HAS_TILES)
    return 1;
#else
    return 0;
#endif
}

void mixtrain_add_up_float(const float* source, int64_t columns, const int64_t* index, const int64_t* starts, int64_t num_sums, int64_t num_rows,
                           const float* weights, float* out, int64_t threads) {
    add_up(source, columns, index, starts, num_sums, num_rows, weights, out, threads);
}

void mixtrain_add_up_bf16(const bf16* source, int64_t columns, const int64_t* index, const int64_t* starts, int64_t num_sums, int64_t num_rows,
                          const float* weights, bf16* out, int64_t threads) {
    add_up(source, columns, index, starts, num_sums, num_rows, weights, out, threads);
}

void mixtrain_activate_float(int64_t kind, const float* hidden, int64_t n, int64_t width, float* out, int64_t threads) {
    activate_any(kind, hidden, n, width, out, threads);
}

void mixtrain_activate_bf16(int64_t kind, const bf16* hidden, int64_t n, int64_t width, bf16* out, int64_t threads) {
    activate_any(kind, hidden, n, width, out, threads);
}

void mixtrain_activate_backward_float(int64_t kind, const float* hidden, const float* grad, const float* weights, int64_t n, int64_t width,
                                      float* hidden_grad, float* activated, float* weight_grad, int64_t threads) {
    activate_backward_any(kind, hidden, grad, weights, n, width, hidden_grad, activated, weight_grad, threads);
}

void mixtrain_activate_backward_bf16(int64_t kind, const bf16* hidden, const bf16* grad, const float* weights, int64_t n, int64_t width,
                                     bf16* hidden_grad, bf16* activated, float* weight_grad, int64_t threads) {
    activate_backward_any(kind, hidden, grad, weights, n, width, hidden_grad, activated, weight_grad, threads);
}

// Whether `multiply_float` is there: out [m, n] (+)= left [m, k] right [k, n], which may lie transposed.
int mixtrain_has_products() {
#ifdef __AVX512F__
    return 1;
#else
    return 0;
#endif
}

#ifdef __AVX512F__
void mixtrain_multiply_float(int64_t left_order, int64_t right_order, int64_t m, int64_t n, int64_t k, const float* left, const float* right, float* out,
                             int64_t add, int64_t threads) {
    Product{left, right, out, m, n, k, add != 0}.run(static_cast<Order>(left_order), static_cast<Order>(right_order), static_cast<int>(threads));
}
#endif

void mixtrain_top_k(const float* scores, int64_t rows, int64_t columns, int64_t k, int64_t* indices, int64_t threads) {
    top_k(scores, rows, columns, k, indices, threads);
}

// The blocks of a call in float; `gemm` is sgemm's address. See the functions for bfloat16.
void mixtrain_forward_blocks_float(int64_t kind, const Block* blocks, int64_t num_blocks, Gemm gemm, const float* source, const int64_t* rows, int64_t size,
                                   int64_t width, const float* fc1, const float* fc1_bias, const float* fc2, const float* fc2_bias, float* hidden,
                                   float* output, float* scratch, int64_t threads) {
    const Host host{gemm, static_cast<int>(threads)};
    for (const Block& block : std::span(blocks, num_blocks)) {
        const Expert<float> expert(block.expert, kind, size, width, fc1, fc1_bias, fc2, fc2_bias);
        host.forward_block(kind, expert, source, rows + block.start, block.rows(), at(hidden, block.start, expert.outer), output + block.start * size, scratch);
    }
}

void mixtrain_backward_blocks_float(int64_t kind, const Block* blocks, int64_t num_blocks, Gemm gemm, const float* source, const int64_t* rows,
                                    const float* output_grad, const int64_t* output_rows, const float* pair_weights, int64_t size, int64_t width,
                                    const float* fc1, const float* fc1_bias, const float* fc2, const float* fc2_bias, const float* hidden,
                                    float* hidden_grad, float* activated, float* weight_grad, float* input_grad, float* fc1_grad, float* fc2_grad,
                                    float* scratch, int64_t threads) {
    const Host host{gemm, static_cast<int>(threads)};
    for (const Block& block : std::span(blocks, num_blocks)) {
        const Expert<float> expert(block.expert, kind, size, width, fc1, fc1_bias, fc2, fc2_bias);
        const int64_t start = block.start, first = fc1_grad == nullptr ? start : 0;
        host.backward_block(kind, expert, source, rows + start, output_grad, output_rows + start, pair_weights + start, block.rows(),
                            at(hidden, start, expert.outer), hidden_grad + first * expert.outer, activated + first * width, weight_grad + start,
                            input_grad + start * size, at(fc1_grad, block.expert, expert.outer * size), at(fc2_grad, block.expert, size * width),
                            block.add != 0, scratch);
    }
}

void mixtrain_weights_blocks_float(const Block* blocks, int64_t num_blocks, Gemm gemm, const float* source, const int64_t* rows, const float* output_grad,
                                   const int64_t* output_rows, const float* hidden_grad, const float* activated, int64_t size, int64_t width, int64_t outer,
                                   float* fc1_grad, float* fc2_grad, float* scratch, int64_t threads) {
    const Host host{gemm, static_cast<int>(threads)};
    for (const Block& block : std::span(blocks, num_blocks)) {
        const int64_t start = block.start, n = block.rows();
        float *x = scratch, *dy = x + n * size;
        host.gather(source, rows + start, n, size, x);
        host.gather(output_grad, output_rows + start, n, size, dy);
        host.weight_gradients(size, width, outer, n, hidden_grad + start * outer, x, dy, activated + start * width,
                              fc1_grad + block.expert * outer * size, fc2_grad + block.expert * size * width, block.add != 0);
    }
}

#ifdef HAS_TILES

int64_t mixtrain_gate_scratch_bytes(int64_t n, int64_t size, int64_t experts, int64_t threads) {
    const int64_t right_bytes = divided_up(experts, PANEL) * PANEL * size * 2;
    return right_bytes + threads * left_bytes(rows_at_once(n, right_bytes, threads), size);
}

// `weight` has a multiple of 32 rows.
void mixtrain_gate(const bf16* x, int64_t n, int64_t size, const bf16* weight, int64_t experts, float* logits, char* scratch, int64_t threads) {
    gate(x, n, size, weight, experts, logits, scratch, threads);
}

// Bytes of scratch memory that the block functions need.
int64_t mixtrain_scratch_bytes(int64_t backward, int64_t n, int64_t size, int64_t width, int64_t outer, int64_t recompute, int64_t weights,
                               int64_t threads) {
    const Scratch parts(n, size, width, outer, backward != 0, recompute != 0, weights != 0, threads);
    return parts.shared + threads * parts.own;
}

int64_t mixtrain_weights_scratch_bytes(int64_t n, int64_t size, int64_t width, int64_t outer, int64_t) {
    return Factors(n, size, width, outer, nullptr).bytes();
}

void mixtrain_forward_blocks_bf16(int64_t kind, const Block* blocks, int64_t num_blocks, Gemm, const bf16* source, const int64_t* rows, int64_t size, int64_t width,
                             const bf16* fc1, const bf16* fc1_bias, const bf16* fc2, const bf16* fc2_bias, bf16* hidden, bf16* output, char* scratch,
                             int64_t threads) {
    const auto run = kind == SWIGLU ? forward_block<SWIGLU> : kind == GELU ? forward_block<GELU> : forward_block<GELU_TANH>;
    for (const Block& block : std::span(blocks, num_blocks)) {
        const Expert<bf16> expert(block.expert, kind, size, width, fc1, fc1_bias, fc2, fc2_bias);
        run(expert, same_expert(blocks, block), source, rows + block.start, block.rows(), at(hidden, block.start, expert.outer), output + block.start * size,
            scratch, threads);
    }
}

// Without gradients of the matrices `hidden_grad` and `activated` are written for all blocks, with them only for the last one, if at all.
void mixtrain_backward_blocks_bf16(int64_t kind, const Block* blocks, int64_t num_blocks, Gemm, const bf16* source, const int64_t* rows, const bf16* output_grad,
                              const int64_t* output_rows, const float* pair_weights, int64_t size, int64_t width, const bf16* fc1, const bf16* fc1_bias,
                              const bf16* fc2, const bf16* fc2_bias, const bf16* hidden, bf16* hidden_grad, bf16* activated, float* weight_grad,
                              bf16* input_grad, bf16* fc1_grad, bf16* fc2_grad, char* scratch, int64_t threads) {
    const auto run = kind == SWIGLU ? backward_block<SWIGLU> : kind == GELU ? backward_block<GELU> : backward_block<GELU_TANH>;
    for (const Block& block : std::span(blocks, num_blocks)) {
        const Expert<bf16> expert(block.expert, kind, size, width, fc1, fc1_bias, fc2, fc2_bias);
        const int64_t start = block.start, first = fc1_grad == nullptr ? start : 0;
        run(expert, same_expert(blocks, block), source, rows + start, output_grad, output_rows + start, pair_weights + start, block.rows(),
            at(hidden, start, expert.outer), at(hidden_grad, first, expert.outer), at(activated, first, width), weight_grad + start, input_grad + start * size,
            at(fc1_grad, block.expert, expert.outer * size), at(fc2_grad, block.expert, size * width), block.add != 0, scratch, threads);
    }
}

void mixtrain_weights_blocks_bf16(const Block* blocks, int64_t num_blocks, Gemm, const bf16* source, const int64_t* rows, const bf16* output_grad,
                             const int64_t* output_rows, const bf16* hidden_grad, const bf16* activated, int64_t size, int64_t width, int64_t outer,
                             bf16* fc1_grad, bf16* fc2_grad, char* scratch, int64_t threads) {
    for (const Block& block : std::span(blocks, num_blocks)) {
        const int64_t start = block.start;
        weights_block(size, width, outer, source, rows + start, output_grad, output_rows + start, hidden_grad + start * outer, activated + start * width,
                      block.rows(), fc1_grad + block.expert * outer * size, fc2_grad + block.expert * size * width, block.add != 0, scratch, threads);
    }
}

#endif

}  // extern "C"
