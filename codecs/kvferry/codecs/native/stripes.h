// The inner loop of XXH3 over whole stripes of 64 bytes, for one instruction set. hash.h says what it is part of.
#ifndef KVC_STRIPES_H
#define KVC_STRIPES_H

#include "secret.h"

// Else the compiler reads the same bytes twice, which costs where they are not aligned.
#define KVC_LOADED(d) __asm__("" : "+v"(d))

// lanes_t: the eight sums; lanes_add: takes a stripe in; lanes_scramble: after each block of stripes.
#if defined(KVC_AVX512)
#include <immintrin.h>
typedef __m512i lanes_t;
static inline lanes_t lanes_load(const uint64_t *p) { return _mm512_loadu_si512(p); }
static inline void lanes_store(uint64_t *p, lanes_t a) { _mm512_storeu_si512(p, a); }
static inline lanes_t lanes_add(lanes_t a, const uint8_t *data, const uint8_t *secret) {
    __m512i d = _mm512_loadu_si512(data);
    KVC_LOADED(d);
    const __m512i k = _mm512_xor_si512(d, _mm512_loadu_si512(secret));
    const __m512i product = _mm512_mul_epu32(k, _mm512_srli_epi64(k, 32));
    return _mm512_add_epi64(a, _mm512_add_epi64(product, _mm512_shuffle_epi32(d, _MM_PERM_BADC)));
}
static inline lanes_t lanes_scramble(lanes_t a, const uint8_t *secret) {
    const __m512i prime = _mm512_set1_epi32((int)KVC_SCRAMBLE_PRIME);
    a = _mm512_xor_si512(_mm512_xor_si512(a, _mm512_srli_epi64(a, 47)), _mm512_loadu_si512(secret));
    const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), prime);
    return _mm512_add_epi64(_mm512_mul_epu32(a, prime), _mm512_slli_epi64(high, 32));
}
#elif defined(KVC_AVX2)
#include <immintrin.h>
typedef struct { __m256i half[2]; } lanes_t;
static inline __m256i lanes_get(const void *p, int k) { return _mm256_loadu_si256((const __m256i_u *)p + k); }
static inline lanes_t lanes_load(const uint64_t *p) { return (lanes_t){{lanes_get(p, 0), lanes_get(p, 1)}}; }
static inline void lanes_store(uint64_t *p, lanes_t a) {
    for (int k = 0; k < 2; k++) _mm256_storeu_si256((__m256i_u *)p + k, a.half[k]);
}
static inline lanes_t lanes_add(lanes_t a, const uint8_t *data, const uint8_t *secret) {
    for (int k = 0; k < 2; k++) {
        __m256i d = lanes_get(data, k);
        KVC_LOADED(d);
        const __m256i x = _mm256_xor_si256(d, lanes_get(secret, k));
        const __m256i product = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
        a.half[k] = _mm256_add_epi64(a.half[k], _mm256_add_epi64(product, _mm256_shuffle_epi32(d, 0x4e)));
    }
    return a;
}
static inline lanes_t lanes_scramble(lanes_t a, const uint8_t *secret) {
    const __m256i prime = _mm256_set1_epi32((int)KVC_SCRAMBLE_PRIME);
    for (int k = 0; k < 2; k++) {
        const __m256i s = a.half[k], x = _mm256_xor_si256(_mm256_xor_si256(s, _mm256_srli_epi64(s, 47)), lanes_get(secret, k));
        const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
        a.half[k] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
    }
    return a;
}
#elif defined(__SSE2__)
#include <emmintrin.h> // every x86-64 has it
typedef struct { __m128i part[4]; } lanes_t;
static inline __m128i lanes_get(const void *p, int k) { return _mm_loadu_si128((const __m128i_u *)p + k); }
static inline lanes_t lanes_load(const uint64_t *p) {
    return (lanes_t){{lanes_get(p, 0), lanes_get(p, 1), lanes_get(p, 2), lanes_get(p, 3)}};
}
static inline void lanes_store(uint64_t *p, lanes_t a) {
    for (int k = 0; k < 4; k++) _mm_storeu_si128((__m128i_u *)p + k, a.part[k]);
}
static inline lanes_t lanes_add(lanes_t a, const uint8_t *data, const uint8_t *secret) {
    for (int k = 0; k < 4; k++) {
        const __m128i d = lanes_get(data, k), x = _mm_xor_si128(d, lanes_get(secret, k));
        const __m128i product = _mm_mul_epu32(x, _mm_srli_epi64(x, 32));
        a.part[k] = _mm_add_epi64(a.part[k], _mm_add_epi64(product, _mm_shuffle_epi32(d, 0x4e)));
    }
    return a;
}
static inline lanes_t lanes_scramble(lanes_t a, const uint8_t *secret) {
    const __m128i prime = _mm_set1_epi32((int)KVC_SCRAMBLE_PRIME);
    for (int k = 0; k < 4; k++) {
        const __m128i s = a.part[k], x = _mm_xor_si128(_mm_xor_si128(s, _mm_srli_epi64(s, 47)), lanes_get(secret, k));
        const __m128i high = _mm_mul_epu32(_mm_srli_epi64(x, 32), prime);
        a.part[k] = _mm_add_epi64(_mm_mul_epu32(x, prime), _mm_slli_epi64(high, 32));
    }
    return a;
}
#elif defined(KVC_NEON)
#include <arm_neon.h>
typedef struct { uint64x2_t part[4]; } lanes_t;
static inline uint64x2_t lanes_get(const void *p, int k) { return vreinterpretq_u64_u8(vld1q_u8((const uint8_t *)p + 16 * k)); }
static inline lanes_t lanes_load(const uint64_t *p) {
    return (lanes_t){{lanes_get(p, 0), lanes_get(p, 1), lanes_get(p, 2), lanes_get(p, 3)}};
}
static inline void lanes_store(uint64_t *p, lanes_t a) {
    for (int k = 0; k < 4; k++) vst1q_u64(p + 2 * k, a.part[k]);
}
static inline lanes_t lanes_add(lanes_t a, const uint8_t *data, const uint8_t *secret) {
    for (int k = 0; k < 4; k++) {
        const uint64x2_t d = lanes_get(data, k), x = veorq_u64(d, lanes_get(secret, k));
        const uint64x2_t sum = vmlal_u32(a.part[k], vmovn_u64(x), vshrn_n_u64(x, 32));
        a.part[k] = vaddq_u64(sum, vextq_u64(d, d, 1));
    }
    return a;
}
static inline lanes_t lanes_scramble(lanes_t a, const uint8_t *secret) {
    const uint32x2_t prime = vdup_n_u32(KVC_SCRAMBLE_PRIME);
    for (int k = 0; k < 4; k++) {
        const uint64x2_t s = a.part[k], x = veorq_u64(veorq_u64(s, vshrq_n_u64(s, 47)), lanes_get(secret, k));
        const uint64x2_t high = vmull_u32(vshrn_n_u64(x, 32), prime);
        a.part[k] = vmlal_u32(vshlq_n_u64(high, 32), vmovn_u64(x), prime);
    }
    return a;
}
#else
typedef struct { uint64_t sum[8]; } lanes_t;
static inline lanes_t lanes_load(const uint64_t *p) { lanes_t a; memcpy(&a, p, sizeof a); return a; }
static inline void lanes_store(uint64_t *p, lanes_t a) { memcpy(p, &a, sizeof a); }
static inline lanes_t lanes_add(lanes_t a, const uint8_t *data, const uint8_t *secret) {
    for (int k = 0; k < 8; k++) {
        const uint64_t d = kvc_u64(data + 8 * k), x = d ^ kvc_u64(secret + 8 * k);
        a.sum[k ^ 1] += d;
        a.sum[k] += (x & 0xffffffff) * (x >> 32);
    }
    return a;
}
static inline lanes_t lanes_scramble(lanes_t a, const uint8_t *secret) {
    for (int k = 0; k < 8; k++)
        a.sum[k] = (a.sum[k] ^ a.sum[k] >> 47 ^ kvc_u64(secret + 8 * k)) * KVC_SCRAMBLE_PRIME;
    return a;
}
#endif

// Take `count` stripes at `data` into the sums; `*at` of the current block's stripes were taken before.
static void hash_stripes(uint64_t sums[8], const uint8_t *data, size_t count, size_t *at) {
    const uint8_t *const secret = hash_secret;
    lanes_t a = lanes_load(sums);
    size_t n = *at;
    for (; count >= KVC_STRIPES_A_BLOCK && n == 0; count -= KVC_STRIPES_A_BLOCK, data += KVC_STRIPES_A_BLOCK * KVC_STRIPE) {
        for (int i = 0; i < KVC_STRIPES_A_BLOCK; i++) a = lanes_add(a, data + i * KVC_STRIPE, secret + 8 * i);
        a = lanes_scramble(a, secret + KVC_SECRET - KVC_STRIPE);
    }
    for (; count; count--, data += KVC_STRIPE) {
        a = lanes_add(a, data, secret + 8 * n);
        if (++n == KVC_STRIPES_A_BLOCK) {
            a = lanes_scramble(a, secret + KVC_SECRET - KVC_STRIPE);
            n = 0;
        }
    }
    *at = n;
    lanes_store(sums, a);
}

#endif
