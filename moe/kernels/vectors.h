// Vectors of sixteen numbers in float and bfloat16, and functions for activations. They are vector types of the
// compiler, which splits them to the width of the machine's registers, so they work on any CPU.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace {

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
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half),
                                16);  // the code that compilers make of the other line takes three steps more
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
    return (V)_mm512_min_ps(
        (__m512)splat(high),
        _mm512_max_ps((__m512)splat(low), (__m512)x));  // compilers take four steps for the other lines
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

}  // namespace
