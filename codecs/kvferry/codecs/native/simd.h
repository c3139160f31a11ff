// 32 bytes at a time: one interface, three implementations (AVX2, NEON, plain C). The kernels are written over it.
#ifndef KVC_SIMD_H
#define KVC_SIMD_H

#include "kvc.h"

// Elements of two bytes are turned left by one bit: the upper byte is then the exponent (bfloat16) or the
// exponent and three bits of the mantissa (float16), the lower one the rest, with the sign as its last bit.

#if defined(KVC_AVX2)
#include <immintrin.h>
typedef __m256i v32;
static inline v32 v_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i_u *)p); }
static inline void v_store(uint8_t *p, v32 a) { _mm256_storeu_si256((__m256i_u *)p, a); }
static inline v32 v_set(uint8_t x) { return _mm256_set1_epi8((char)x); }
static inline v32 v_sub(v32 a, v32 b) { return _mm256_sub_epi8(a, b); }
static inline v32 v_min(v32 a, v32 b) { return _mm256_min_epu8(a, b); }
static inline v32 v_max(v32 a, v32 b) { return _mm256_max_epu8(a, b); }
static inline v32 v_and(v32 a, v32 b) { return _mm256_and_si256(a, b); }
static inline v32 v_or(v32 a, v32 b) { return _mm256_or_si256(a, b); }
static inline v32 v_shr3(v32 a) { return _mm256_and_si256(_mm256_srli_epi16(a, 3), _mm256_set1_epi8(31)); }
static inline v32 v_shl3(v32 a) { return _mm256_slli_epi16(_mm256_and_si256(a, _mm256_set1_epi8(31)), 3); }
static inline uint32_t v_equal(v32 a, v32 b) { return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b)); }
static inline __m256i rol1(__m256i a) { return _mm256_or_si256(_mm256_slli_epi16(a, 1), _mm256_srli_epi16(a, 15)); }
static inline __m256i ror1(__m256i a) { return _mm256_or_si256(_mm256_srli_epi16(a, 1), _mm256_slli_epi16(a, 15)); }
static inline void v_split(const uint8_t *q, v32 *hi, v32 *lo) {
    const __m256i m = _mm256_set1_epi16(0xff);
    const __m256i a = rol1(v_load(q)), b = rol1(v_load(q + 32));
    *hi = _mm256_permute4x64_epi64(_mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)), 0xd8);
    *lo = _mm256_permute4x64_epi64(_mm256_packus_epi16(_mm256_and_si256(a, m), _mm256_and_si256(b, m)), 0xd8);
}
static inline void v_merge(v32 hi, v32 lo, uint8_t *d) {
    hi = _mm256_permute4x64_epi64(hi, 0xd8);
    lo = _mm256_permute4x64_epi64(lo, 0xd8);
    v_store(d, ror1(_mm256_unpacklo_epi8(lo, hi)));
    v_store(d + 32, ror1(_mm256_unpackhi_epi8(lo, hi)));
}
// Past the caches; d is a multiple of 64.
static inline void v_merge_past(v32 hi, v32 lo, uint8_t *d) {
    hi = _mm256_permute4x64_epi64(hi, 0xd8);
    lo = _mm256_permute4x64_epi64(lo, 0xd8);
    _mm256_stream_si256((__m256i *)d, ror1(_mm256_unpacklo_epi8(lo, hi)));
    _mm256_stream_si256((__m256i *)(d + 32), ror1(_mm256_unpackhi_epi8(lo, hi)));
}
static inline void v_pack4(v32 k, uint8_t *d) {
    const __m128i lo = _mm256_castsi256_si128(k), hi = _mm256_extracti128_si256(k, 1);
    _mm_storeu_si128((__m128i_u *)d, _mm_or_si128(lo, _mm_slli_epi16(hi, 4)));
}
static inline v32 v_unpack4(const uint8_t *s) {
    const __m128i p = _mm_loadu_si128((const __m128i_u *)s), f = _mm_set1_epi8(15);
    return _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(p, 4), f), _mm_and_si128(p, f));
}
#elif defined(KVC_NEON)
#include <arm_neon.h>
typedef struct { uint8x16_t a, b; } v32;
static inline v32 v_load(const uint8_t *p) { return (v32){vld1q_u8(p), vld1q_u8(p + 16)}; }
static inline void v_store(uint8_t *p, v32 x) { vst1q_u8(p, x.a); vst1q_u8(p + 16, x.b); }
static inline v32 v_set(uint8_t x) { return (v32){vdupq_n_u8(x), vdupq_n_u8(x)}; }
static inline v32 v_sub(v32 x, v32 y) { return (v32){vsubq_u8(x.a, y.a), vsubq_u8(x.b, y.b)}; }
static inline v32 v_min(v32 x, v32 y) { return (v32){vminq_u8(x.a, y.a), vminq_u8(x.b, y.b)}; }
static inline v32 v_max(v32 x, v32 y) { return (v32){vmaxq_u8(x.a, y.a), vmaxq_u8(x.b, y.b)}; }
static inline v32 v_and(v32 x, v32 y) { return (v32){vandq_u8(x.a, y.a), vandq_u8(x.b, y.b)}; }
static inline v32 v_or(v32 x, v32 y) { return (v32){vorrq_u8(x.a, y.a), vorrq_u8(x.b, y.b)}; }
static inline v32 v_shr3(v32 x) { return (v32){vshrq_n_u8(x.a, 3), vshrq_n_u8(x.b, 3)}; }
static inline v32 v_shl3(v32 x) { return (v32){vshlq_n_u8(x.a, 3), vshlq_n_u8(x.b, 3)}; }
static inline uint32_t mask16(uint8x16_t equal) {
    static const uint8_t bits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t m = vandq_u8(equal, vld1q_u8(bits));
    return (uint32_t)vaddv_u8(vget_low_u8(m)) | (uint32_t)vaddv_u8(vget_high_u8(m)) << 8;
}
static inline uint32_t v_equal(v32 x, v32 y) {
    return mask16(vceqq_u8(x.a, y.a)) | mask16(vceqq_u8(x.b, y.b)) << 16;
}
static inline uint16x8_t rol1(uint16x8_t a) { return vsriq_n_u16(vshlq_n_u16(a, 1), a, 15); }
static inline uint16x8_t ror1(uint16x8_t a) { return vsliq_n_u16(vshrq_n_u16(a, 1), a, 15); }
static inline void v_split(const uint8_t *q, v32 *hi, v32 *lo) {
    uint8x16_t r[4];
    for (int i = 0; i < 4; i++) r[i] = vreinterpretq_u8_u16(rol1(vreinterpretq_u16_u8(vld1q_u8(q + 16 * i))));
    *lo = (v32){vuzp1q_u8(r[0], r[1]), vuzp1q_u8(r[2], r[3])};
    *hi = (v32){vuzp2q_u8(r[0], r[1]), vuzp2q_u8(r[2], r[3])};
}
static inline void v_merge(v32 hi, v32 lo, uint8_t *d) {
    const uint8x16_t r[4] = {vzip1q_u8(lo.a, hi.a), vzip2q_u8(lo.a, hi.a), vzip1q_u8(lo.b, hi.b), vzip2q_u8(lo.b, hi.b)};
    for (int i = 0; i < 4; i++) vst1q_u8(d + 16 * i, vreinterpretq_u8_u16(ror1(vreinterpretq_u16_u8(r[i]))));
}
static inline void v_pack4(v32 k, uint8_t *d) { vst1q_u8(d, vsliq_n_u8(k.a, k.b, 4)); }
static inline v32 v_unpack4(const uint8_t *s) {
    const uint8x16_t p = vld1q_u8(s);
    return (v32){vandq_u8(p, vdupq_n_u8(15)), vshrq_n_u8(p, 4)};
}
#else
typedef struct { uint8_t x[32]; } v32;
#define KVC_EACH for (int i = 0; i < 32; i++)
static inline v32 v_load(const uint8_t *p) { v32 r; memcpy(r.x, p, 32); return r; }
static inline void v_store(uint8_t *p, v32 a) { memcpy(p, a.x, 32); }
static inline v32 v_set(uint8_t x) { v32 r; memset(r.x, x, 32); return r; }
static inline v32 v_sub(v32 a, v32 b) { KVC_EACH a.x[i] = (uint8_t)(a.x[i] - b.x[i]); return a; }
static inline v32 v_min(v32 a, v32 b) { KVC_EACH a.x[i] = a.x[i] < b.x[i] ? a.x[i] : b.x[i]; return a; }
static inline v32 v_max(v32 a, v32 b) { KVC_EACH a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]; return a; }
static inline v32 v_and(v32 a, v32 b) { KVC_EACH a.x[i] &= b.x[i]; return a; }
static inline v32 v_or(v32 a, v32 b) { KVC_EACH a.x[i] |= b.x[i]; return a; }
static inline v32 v_shr3(v32 a) { KVC_EACH a.x[i] >>= 3; return a; }
static inline v32 v_shl3(v32 a) { KVC_EACH a.x[i] = (uint8_t)(a.x[i] << 3); return a; }
static inline uint32_t v_equal(v32 a, v32 b) { uint32_t m = 0; KVC_EACH m |= (uint32_t)(a.x[i] == b.x[i]) << i; return m; }
static inline void v_split(const uint8_t *q, v32 *hi, v32 *lo) {
    KVC_EACH {
        const uint16_t v = kvc_u16(q + 2 * i);
        hi->x[i] = (uint8_t)(v >> 7);
        lo->x[i] = (uint8_t)(v << 1 | v >> 15);
    }
}
static inline void v_merge(v32 hi, v32 lo, uint8_t *d) {
    KVC_EACH kvc_put16(d + 2 * i, (uint16_t)((lo.x[i] & 1) << 15 | hi.x[i] << 7 | lo.x[i] >> 1));
}
static inline void v_pack4(v32 k, uint8_t *d) {
    for (int i = 0; i < 16; i++) d[i] = (uint8_t)(k.x[i] | k.x[i + 16] << 4);
}
static inline v32 v_unpack4(const uint8_t *s) {
    v32 r;
    for (int i = 0; i < 16; i++) { r.x[i] = s[i] & 15; r.x[i + 16] = s[i] >> 4; }
    return r;
}
#endif

// ---- sixteen signed numbers of two bytes

typedef int16_t s16x __attribute__((vector_size(32)));
static inline s16x s_load(const uint8_t *p) { s16x s; memcpy(&s, p, 32); return s; }
static inline s16x s_sortable(s16x s) { return s ^ ((s >> 15) & 0x7fff); }
#if defined(KVC_AVX2)
static inline s16x s_max(s16x a, s16x b) { return (s16x)_mm256_max_epi16((__m256i)a, (__m256i)b); }
static inline s16x s_min(s16x a, s16x b) { return (s16x)_mm256_min_epi16((__m256i)a, (__m256i)b); }
static inline int16_t s_highest(s16x a) {
    const __m128i m = _mm_max_epi16(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
    // the one horizontal instruction finds the lowest unsigned number
    return (int16_t)(_mm_extract_epi16(_mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(0x7fff), m)), 0) ^ 0x7fff);
}
#elif defined(KVC_NEON)
static inline s16x s_each(int16x8_t a, int16x8_t b) { s16x s; memcpy(&s, &a, 16); memcpy((char *)&s + 16, &b, 16); return s; }
static inline int16x8_t s_half(s16x a, int k) { int16x8_t h; memcpy(&h, (char *)&a + 16 * k, 16); return h; }
static inline s16x s_max(s16x a, s16x b) {
    return s_each(vmaxq_s16(s_half(a, 0), s_half(b, 0)), vmaxq_s16(s_half(a, 1), s_half(b, 1)));
}
static inline s16x s_min(s16x a, s16x b) {
    return s_each(vminq_s16(s_half(a, 0), s_half(b, 0)), vminq_s16(s_half(a, 1), s_half(b, 1)));
}
static inline int16_t s_highest(s16x a) { return vmaxvq_s16(vmaxq_s16(s_half(a, 0), s_half(a, 1))); }
#else
static inline s16x s_max(s16x a, s16x b) { const s16x m = a > b; return (a & m) | (b & ~m); }
static inline s16x s_min(s16x a, s16x b) { const s16x m = a < b; return (a & m) | (b & ~m); }
static inline int16_t s_highest(s16x a) {
    int16_t r = a[0];
    for (int i = 1; i < 16; i++) r = a[i] > r ? a[i] : r;
    return r;
}
#endif

// Eight values of three bits: value i in the bits 3 i to 3 i + 2.
static inline uint32_t pack3(uint64_t x) {
#if defined(KVC_AVX2)
    return (uint32_t)_pext_u64(x, 0x0707070707070707ULL);
#else
    x = (x | x >> 5) & 0x003f003f003f003fULL;
    x = (x | x >> 10) & 0x00000fff00000fffULL;
    return (uint32_t)((x | x >> 20) & 0xffffff);
#endif
}
static inline uint64_t unpack3(uint32_t v) {
#if defined(KVC_AVX2)
    return _pdep_u64(v, 0x0707070707070707ULL);
#else
    uint64_t x = v & 0xffffff;
    x = (x | x << 20) & 0x00000fff00000fffULL;
    x = (x | x << 10) & 0x003f003f003f003fULL;
    return (x | x << 5) & 0x0707070707070707ULL;
#endif
}
static inline void v_pack3(v32 k, uint8_t *d) { // 12 bytes
    uint8_t t[32];
    v_store(t, k);
    const uint64_t a = pack3(kvc_u64(t)), b = pack3(kvc_u64(t + 8)), c = pack3(kvc_u64(t + 16)), e = pack3(kvc_u64(t + 24));
    kvc_put64(d, a | b << 24 | c << 48);
    kvc_put32(d + 8, (uint32_t)(c >> 16 | e << 8));
}
#if defined(KVC_AVX512)
static inline v32 v_unpack3(const uint8_t *s) {
    const __m128i x = _mm_set_epi64x((int64_t)kvc_u32(s + 8), (int64_t)kvc_u64(s)); // no byte behind the twelve is read
    const __m256i three = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(x), _mm256_setr_epi8(
        0, 1, 2, -1, -1, -1, -1, -1, 3, 4, 5, -1, -1, -1, -1, -1, 6, 7, 8, -1, -1, -1, -1, -1, 9, 10, 11, -1, -1, -1, -1, -1));
    const __m256i at = _mm256_set1_epi64x(0x15120f0c09060300); // byte i takes the bits from 3 i on
    return _mm256_and_si256(_mm256_multishift_epi64_epi8(at, three), _mm256_set1_epi8(7));
}
#else
static inline v32 v_unpack3(const uint8_t *s) {
    const uint64_t x = kvc_u64(s), y = kvc_u32(s + 8);
#if defined(KVC_AVX2)
    return _mm256_setr_epi64x(
        (int64_t)unpack3((uint32_t)x), (int64_t)unpack3((uint32_t)(x >> 24)),
        (int64_t)unpack3((uint32_t)(x >> 48 | y << 16)), (int64_t)unpack3((uint32_t)(y >> 8)));
#else
    uint8_t t[32];
    kvc_put64(t, unpack3((uint32_t)x));
    kvc_put64(t + 8, unpack3((uint32_t)(x >> 24)));
    kvc_put64(t + 16, unpack3((uint32_t)(x >> 48 | y << 16)));
    kvc_put64(t + 24, unpack3((uint32_t)(y >> 8)));
    return v_load(t);
#endif
}
#endif

// ---- escapes: the elements that `mask` names, from v to bytes one behind the other and back. 32 bytes at `to` are
// touched, `from` has at least as many bytes as the mask has bits. Every other group has one, which no processor
// predicts: where no instruction does it, the first two are moved without a branch.
enum { KVC_BRANCHLESS = 2 };
#if defined(KVC_AVX512)
static inline void v_compress(v32 v, uint32_t mask, uint8_t *to) { v_store(to, _mm256_maskz_compress_epi8(mask, v)); }
static inline v32 v_expand(v32 v, uint32_t mask, const uint8_t *from, int number) {
    return _mm256_mask_expand_epi8(v, mask, _mm256_maskz_loadu_epi8(_bzhi_u32(0xffffffff, (unsigned)number), from));
}
#else
static inline void v_compress(v32 v, uint32_t mask, uint8_t *to) {
    uint8_t t[32];
    v_store(t, v);
    for (int k = 0; k < KVC_BRANCHLESS; k++, mask &= mask - 1) {
        *to = t[__builtin_ctz(mask | 1u << 31)];
        to += mask != 0;
    }
    for (; mask; mask &= mask - 1) *to++ = t[__builtin_ctz(mask)];
}
// Into the elements at d, of which `keep` are the bits that are no exponent: a vector that is put together from bytes
// in memory would wait for all of them.
static inline void v_patch(uint8_t *d, uint32_t mask, const uint8_t *from, uint16_t keep, int shift) {
    uint8_t nowhere[2] = {0};
    for (int k = 0; k < KVC_BRANCHLESS; k++, mask &= mask - 1) {
        uint8_t *to = mask ? d + 2 * __builtin_ctz(mask) : nowhere;
        const uint8_t *e = mask ? from : nowhere;
        kvc_put16(to, (uint16_t)((kvc_u16(to) & keep) | (uint16_t)*e << shift));
        from += mask != 0;
    }
    for (; mask; mask &= mask - 1, from++) {
        uint8_t *to = d + 2 * __builtin_ctz(mask);
        kvc_put16(to, (uint16_t)((kvc_u16(to) & keep) | (uint16_t)*from << shift));
    }
}
#endif
#endif
