// Several values at a time (LANES), by the vector extension of gcc and clang: one source for every instruction set, and for
// the elements that are left over the same functions on one value. Exact, to nearest even, for finite values; no sum
// is contracted, so numpy gives the same bits.
#ifndef KVC_FLOATS_H
#define KVC_FLOATS_H

#include "simd.h"

#if defined(KVC_AVX512)
#define LANES 16
#else
#define LANES 8
#endif
typedef float fx __attribute__((vector_size(4 * LANES)));
typedef uint32_t ux __attribute__((vector_size(4 * LANES)));
typedef int32_t ix __attribute__((vector_size(4 * LANES)));
typedef uint16_t hx __attribute__((vector_size(2 * LANES)));
typedef uint8_t bx __attribute__((vector_size(LANES)));
typedef int8_t cx __attribute__((vector_size(LANES)));

#define KVC_INLINE static inline __attribute__((always_inline))

KVC_INLINE uint32_t f_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
KVC_INLINE float f_from(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
KVC_INLINE ux fx_bits(fx f) { return (ux)f; }
KVC_INLINE fx fx_from(ux u) { return (fx)u; }
KVC_INLINE ux fx_where(ux a_below_b, ux yes, ux no) { return (yes & a_below_b) | (no & ~a_below_b); }

// ---- bfloat16 and float16

KVC_INLINE float bf16_value(uint16_t v) { return f_from((uint32_t)v << 16); }
KVC_INLINE uint16_t bf16_of(float f) {
    const uint32_t u = f_bits(f);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
// The next bfloat16 that is not below f, which is positive.
KVC_INLINE uint16_t bf16_above(float f) { return (uint16_t)((f_bits(f) + 0xffff) >> 16); }

KVC_INLINE float fp16_value(uint16_t v) { // the multiplication also puts subnormals right
    return f_from(f_bits(f_from((uint32_t)(v & 0x7fff) << 13) * 0x1p112f) | (uint32_t)(v & 0x8000) << 16);
}
KVC_INLINE uint16_t fp16_of(float f) { // what is too large becomes the largest
    const uint32_t u = f_bits(f), sign = u >> 16 & 0x8000;
    uint32_t a = u & 0x7fffffff;
    a = a < 0x477fe000 ? a : 0x477fe000;                                  // 65504
    const uint32_t below = f_bits(f_from(a) + 0.5f) - 0x3f000000;         // subnormals have the step of floats at 0.5
    const uint32_t normal = (a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13;
    return (uint16_t)(sign | (a < 0x38800000 ? below : normal));
}
KVC_INLINE float value_of(uint16_t v, int fp16) { return fp16 ? fp16_value(v) : bf16_value(v); }
KVC_INLINE uint16_t of_value(float f, int fp16) { return fp16 ? fp16_of(f) : bf16_of(f); }

// Widening and narrowing, which compilers do not do well by themselves.
#if defined(KVC_AVX512)
KVC_INLINE ux load_halves(const uint8_t *p) { return (ux)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)p)); }
KVC_INLINE void store_halves(uint8_t *p, ux u) { _mm256_storeu_si256((__m256i_u *)p, _mm512_cvtepi32_epi16((__m512i)u)); }
KVC_INLINE ux load_bytes(const uint8_t *p) { return (ux)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i_u *)p)); }
KVC_INLINE ix load_signed(const uint8_t *p) { return (ix)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i_u *)p)); }
KVC_INLINE void store_bytes(uint8_t *p, ux u) { _mm_storeu_si128((__m128i_u *)p, _mm512_cvtepi32_epi8((__m512i)u)); }
#elif defined(KVC_AVX2)
KVC_INLINE ux load_halves(const uint8_t *p) { return (ux)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i_u *)p)); }
KVC_INLINE void store_halves(uint8_t *p, ux u) {
    const __m256i h = _mm256_packus_epi32((__m256i)u, (__m256i)u);
    _mm_storeu_si128((__m128i_u *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(h, 0xd8)));
}
KVC_INLINE ux load_bytes(const uint8_t *p) { return (ux)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i_u *)p)); }
KVC_INLINE ix load_signed(const uint8_t *p) { return (ix)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i_u *)p)); }
KVC_INLINE void store_bytes(uint8_t *p, ux u) {
    const __m256i low = _mm256_shuffle_epi8((__m256i)u, _mm256_setr_epi8(
        0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    _mm_storel_epi64((__m128i_u *)p, _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
}
#else
KVC_INLINE ux load_halves(const uint8_t *p) { hx h; memcpy(&h, p, sizeof h); return __builtin_convertvector(h, ux); }
KVC_INLINE void store_halves(uint8_t *p, ux u) { const hx h = __builtin_convertvector(u, hx); memcpy(p, &h, sizeof h); }
KVC_INLINE ux load_bytes(const uint8_t *p) { bx b; memcpy(&b, p, sizeof b); return __builtin_convertvector(b, ux); }
KVC_INLINE ix load_signed(const uint8_t *p) { cx b; memcpy(&b, p, sizeof b); return __builtin_convertvector(b, ix); }
KVC_INLINE void store_bytes(uint8_t *p, ux u) { const bx b = __builtin_convertvector(u, bx); memcpy(p, &b, sizeof b); }
#endif

KVC_INLINE fx fx_values(ux u, int fp16) {
    if (!fp16) return fx_from(u << 16);
    const fx magnitude = fx_from((u & 0x7fff) << 13) * 0x1p112f;
    return fx_from(fx_bits(magnitude) | (u & 0x8000) << 16);
}
KVC_INLINE ux fx_halves(fx f, int fp16) {
    const ux u = fx_bits(f);
    if (!fp16) return (u + 0x7fff + (u >> 16 & 1)) >> 16;
    ux a = u & 0x7fffffff;
    const ux most = a * 0 + 0x477fe000;
    a = fx_where((ux)((ix)a < (ix)most), a, most);
    const ux below = fx_bits(fx_from(a) + 0.5f) - 0x3f000000;
    const ux normal = (a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13;
    return (u >> 16 & 0x8000) | fx_where((ux)((ix)a < 0x38800000), below, normal);
}
KVC_INLINE fx load_values(const uint8_t *p, int fp16) { return fx_values(load_halves(p), fp16); }
KVC_INLINE void store_values(uint8_t *p, fx f, int fp16) { store_halves(p, fx_halves(f, fp16)); }

// Twice as many elements, the even and the odd ones apart, which costs no narrowing or widening.
KVC_INLINE void load_pairs(const uint8_t *p, int fp16, fx *even, fx *odd) {
    ux u;
    memcpy(&u, p, sizeof u);
    *even = fx_values(fp16 ? u & 0xffff : u, fp16);
    *odd = fp16 ? fx_values(u >> 16, fp16) : fx_from(u & 0xffff0000);
}
KVC_INLINE void store_pairs(uint8_t *p, fx even, fx odd, int fp16) {
    const ux u = fx_halves(even, fp16) | fx_halves(odd, fp16) << 16;
    memcpy(p, &u, sizeof u);
}

// ---- codes. Scales are rounded up, and the lowest value of a group is exact, so no code needs to be clipped.

// To the nearest integer, halves to even, for |f| < 2^22.
KVC_INLINE int32_t nearest(float f) { return (int32_t)(f_bits(f + 0x1.8p23f) - 0x4b400000); }
KVC_INLINE ux fx_nearest(fx f) { return fx_bits(f + 0x1.8p23f) - 0x4b400000; }

// float8 e4m3fn, of magnitudes up to 448.
KVC_INLINE uint8_t fp8_of(float f) {
    const uint32_t u = f_bits(f), a = u & 0x7fffffff;
    const uint32_t below = f_bits(f_from(a) + 0x1p14f) - 0x46800000; // subnormals have the step of floats at 2^14
    const uint32_t normal = ((a + 0x7ffff + (a >> 20 & 1)) >> 20) - (120 << 3);
    return (uint8_t)((u >> 24 & 0x80) | (a < 0x3c800000 ? below : normal));
}
KVC_INLINE ux fx_fp8(fx f) {
    const ux u = fx_bits(f), a = u & 0x7fffffff;
    const ux below = fx_bits(fx_from(a) + 0x1p14f) - 0x46800000;
    const ux normal = ((a + 0x7ffff + (a >> 20 & 1)) >> 20) - (120 << 3);
    return (u >> 24 & 0x80) | fx_where((ux)((ix)a < 0x3c800000), below, normal);
}
KVC_INLINE float fp8_value(uint8_t v) {
    return f_from((uint32_t)(v & 0x80) << 24 | (uint32_t)(v & 0x7f) << 20) * 0x1p120f;
}
// Values of codes, and of the lower and upper half of bytes.
KVC_INLINE fx fx_int8(const uint8_t *q) { return __builtin_convertvector(load_signed(q), fx); }
KVC_INLINE fx fx_byte(const uint8_t *q) { return __builtin_convertvector((ix)load_bytes(q), fx); }
KVC_INLINE fx fx_lower(const uint8_t *q) { return __builtin_convertvector((ix)(load_bytes(q) & 15), fx); }
KVC_INLINE fx fx_upper(const uint8_t *q) { return __builtin_convertvector((ix)(load_bytes(q) >> 4), fx); }
KVC_INLINE fx fx_fp8_value(ux u) {
    return fx_from((u & 0x80) << 24 | (u & 0x7f) << 20) * 0x1p120f;
}

// ---- order

// An order of the bits that is that of the values, as a signed number.
KVC_INLINE int16_t sortable(uint16_t v) { return (int16_t)(v ^ (((int16_t)v >> 15) & 0x7fff)); }
KVC_INLINE uint16_t unsortable(int16_t s) { return (uint16_t)(s ^ ((s >> 15) & 0x7fff)); }

// Largest magnitude of n elements.
KVC_INLINE uint16_t top_of(const uint8_t *p, size_t n) {
    s16x top = s_load(p) ^ s_load(p);
    uint16_t most = 0;
    size_t i = 0;
    for (; i + 16 <= n; i += 16) top = s_max(top, s_load(p + 2 * i) & 0x7fff);
    if (i) most = (uint16_t)s_highest(top);
    for (; i < n; i++) {
        const uint16_t a = kvc_u16(p + 2 * i) & 0x7fff;
        most = a > most ? a : most;
    }
    return most;
}
// Lowest and highest of n elements, sortable.
KVC_INLINE void range_of(const uint8_t *p, size_t n, int16_t *low, int16_t *high) {
    int16_t lowest = INT16_MAX, highest = INT16_MIN;
    size_t i = 0;
    if (n >= 16) {
        s16x x = s_sortable(s_load(p)), a = x, b = x;
        for (i = 16; i + 16 <= n; i += 16) {
            x = s_sortable(s_load(p + 2 * i));
            a = s_min(a, x);
            b = s_max(b, x);
        }
        lowest = (int16_t)~s_highest(~a);
        highest = s_highest(b);
    }
    for (; i < n; i++) {
        const int16_t s = sortable(kvc_u16(p + 2 * i));
        lowest = s < lowest ? s : lowest;
        highest = s > highest ? s : highest;
    }
    *low = lowest;
    *high = highest;
}

#endif
