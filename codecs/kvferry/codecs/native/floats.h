// Conversions that a compiler turns into vector code; exact, to nearest even, for finite values.
#ifndef KVC_FLOATS_H
#define KVC_FLOATS_H

#include "kvc.h"

static inline uint32_t f_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static inline float f_from(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

static inline float bf16_value(uint16_t v) { return f_from((uint32_t)v << 16); }
static inline uint16_t bf16_of(float f) {
    const uint32_t u = f_bits(f);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
// The next bfloat16 that is not below f, which is positive.
static inline uint16_t bf16_above(float f) { return (uint16_t)((f_bits(f) + 0xffff) >> 16); }

static inline float fp16_value(uint16_t v) { // the multiplication also puts subnormals right
    return f_from(f_bits(f_from((uint32_t)(v & 0x7fff) << 13) * 0x1p112f) | (uint32_t)(v & 0x8000) << 16);
}
static inline uint16_t fp16_of(float f) { // what is too large becomes the largest
    const uint32_t u = f_bits(f), sign = u >> 16 & 0x8000;
    uint32_t a = u & 0x7fffffff;
    a = a < 0x477fe000 ? a : 0x477fe000; // 65504
    const uint32_t below = f_bits(f_from(a) + 0.5f) - 0x3f000000; // subnormals have the step of floats at 0.5
    const uint32_t normal = (a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13;
    return (uint16_t)(sign | (a < 0x38800000 ? below : normal));
}

static inline float value_of(uint16_t v, int fp16) { return fp16 ? fp16_value(v) : bf16_value(v); }
static inline uint16_t of_value(float f, int fp16) { return fp16 ? fp16_of(f) : bf16_of(f); }

// To the nearest integer, halves to even, for |f| < 2^22.
static inline int32_t nearest(float f) { return (int32_t)(f_bits(f + 0x1.8p23f) - 0x4b400000); }

// float8 e4m3fn; saturates at 448.
static inline uint8_t fp8_of(float f) {
    const uint32_t u = f_bits(f), sign = u >> 24 & 0x80, a = u & 0x7fffffff;
    const uint32_t below = f_bits(f_from(a) + 0x1p14f) - 0x46800000; // subnormals have the step of floats at 2^14
    uint32_t normal = ((a + 0x7ffff + (a >> 20 & 1)) >> 20) - (120 << 3);
    normal = normal < 0x7e ? normal : 0x7e;
    return (uint8_t)(sign | (a < 0x3c800000 ? below : normal));
}
static inline float fp8_value(uint8_t v) {
    return f_from((uint32_t)(v & 0x80) << 24 | (uint32_t)(v & 0x7f) << 20) * 0x1p120f;
}

// An order of the bits that is that of the values, as a signed number.
static inline int16_t sortable(uint16_t v) { return (int16_t)(v ^ (((int16_t)v >> 15) & 0x7fff)); }
static inline uint16_t unsortable(int16_t s) { return (uint16_t)(s ^ ((s >> 15) & 0x7fff)); }

#endif
