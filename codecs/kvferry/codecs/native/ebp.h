// Exponent packing: for each channel (column) a base, the largest exponent of at most 32 sampled rows; each element
// keeps its sign and mantissa and 3 or 4 bits that say how far its exponent lies below the base. An exponent that
// is out of reach escapes: its bits are all ones, and it stands as a byte at the end.
//
// Section: header (mode 3 or 4 = bits, number = escapes) | base[cols] | low bytes[count * n] | float16 only: three
// bits of the mantissa, packed | offsets, packed | escapes. Packed planes hold groups of 32 elements, the
// last one of a slice filled up; n = rows * cols.
#include "simd.h"

enum { EBP_SAMPLES = 32 };

static inline v32 exponents(v32 hi, int dtype) { return dtype == KVC_FP16 ? v_shr3(hi) : hi; }

static inline uint8_t exponent_of(const uint8_t *p, int dtype) {
    const uint16_t v = kvc_u16(p);
    return dtype == KVC_FP16 ? (v >> 10) & 31 : (v >> 7) & 255;
}

static inline size_t ebp_sampled(const kvc_tensor *t, size_t j, size_t samples) {
    const size_t rows = t->rows * t->count;
    return (j * rows + rows / 2) / samples;
}

static void ebp_bases(const kvc_tensor *t, size_t samples, uint8_t *base) {
    memset(base, 0, t->cols);
    for (size_t j = 0; j < samples; j++) {
        const uint8_t *q = kvc_row(t, ebp_sampled(t, j, samples));
        size_t c = 0;
        for (; c + 32 <= t->cols; c += 32) {
            v32 hi, lo;
            v_split(q + 2 * c, &hi, &lo);
            v_store(base + c, v_max(v_load(base + c), exponents(hi, t->dtype)));
        }
        for (; c < t->cols; c++) {
            const uint8_t e = exponent_of(q + 2 * c, t->dtype);
            if (e > base[c]) base[c] = e;
        }
    }
}

// 3 or 4 bits, whichever the samples say is smaller.
static int ebp_choose(const kvc_tensor *t, size_t samples, const uint8_t *base) {
    size_t out3 = 0, out4 = 0;
    for (size_t j = 0; j < samples; j++) {
        const uint8_t *q = kvc_row(t, ebp_sampled(t, j, samples));
        size_t c = 0;
        for (; c + 32 <= t->cols; c += 32) {
            v32 hi, lo;
            v_split(q + 2 * c, &hi, &lo);
            const v32 k = v_sub(v_load(base + c), exponents(hi, t->dtype));
            const v32 k3 = v_min(k, v_set(7)), k4 = v_min(k, v_set(15));
            out3 += (size_t)__builtin_popcount(v_equal(k3, v_set(7)));
            out4 += (size_t)__builtin_popcount(v_equal(k4, v_set(15)));
        }
        for (; c < t->cols; c++) {
            const uint8_t k = (uint8_t)(base[c] - exponent_of(q + 2 * c, t->dtype));
            out3 += k >= 7;
            out4 += k >= 15;
        }
    }
    // in eighths of a byte, for the sampled elements
    const size_t seen = samples * t->cols;
    return 3 * seen + 8 * out3 <= 4 * seen + 8 * out4 ? 3 : 4;
}

// 32 bases that begin at column c; `wrapped` is what to use where the row ends within them.
static inline v32 bases_at(const uint8_t *base, size_t cols, size_t c) {
    if (c + 32 <= cols) return v_load(base + c);
    uint8_t wrapped[32];
    for (int i = 0; i < 32; i++) {
        wrapped[i] = base[c];
        if (++c == cols) c = 0;
    }
    return v_load(wrapped);
}

static inline size_t ebp_groups(const kvc_tensor *t) { return (kvc_elements(t) + 31) / 32; }

static inline size_t ebp_planes(const kvc_tensor *t, int bits) {
    const size_t small = t->dtype == KVC_FP16 ? 12 : 0;
    return kvc_elements(t) * t->count + ebp_groups(t) * t->count * (small + (size_t)bits * 4);
}

typedef struct { uint8_t *low, *small, *packed, *escape, *end; } ebp_planes_of;

static inline __attribute__((always_inline)) int ebp_encode_group(
    const uint8_t *q, v32 base, int fp16, int bits, size_t valid, ebp_planes_of *p) {
    v32 hi, lo;
    v_split(q, &hi, &lo);
    const v32 e = fp16 ? v_shr3(hi) : hi, out = v_set((uint8_t)((1 << bits) - 1));
    const v32 k = v_min(v_sub(base, e), out);
    uint32_t escaped = v_equal(k, out);
    if (valid == 32) {
        v_store(p->low, lo);
    } else {
        uint8_t t[32];
        v_store(t, lo);
        memcpy(p->low, t, valid);
        escaped &= (1u << valid) - 1;
    }
    p->low += valid;
    if (p->end - p->escape >= 32) v_compress(e, escaped, p->escape);
    else if (escaped) return KVC_SPACE;
    p->escape += __builtin_popcount(escaped);
    if (fp16) {
        v_pack3(v_and(hi, v_set(7)), p->small);
        p->small += 12;
    }
    if (bits == 3) v_pack3(k, p->packed); else v_pack4(k, p->packed);
    p->packed += 4 * bits;
    return 0;
}

static inline __attribute__((always_inline)) int ebp_encode_slices(
    const kvc_tensor *t, const uint8_t *base, int fp16, int bits, ebp_planes_of *p) {
    const size_t n = kvc_elements(t), cols = t->cols;
    for (size_t s = 0; s < t->count; s++) {
        const uint8_t *q = kvc_slice(t, s);
        size_t i = 0, c = 0;
        for (; i + 32 <= n; i += 32) {
            if (ebp_encode_group(q + 2 * i, bases_at(base, cols, c), fp16, bits, 32, p)) return KVC_SPACE;
            c += 32;
            while (c >= cols) c -= cols;
        }
        if (i < n) {
            uint8_t last[64] = {0}, bases[32]; // what fills up the group has offset 0
            memcpy(last, q + 2 * i, 2 * (n - i));
            v_store(bases, bases_at(base, cols, c));
            memset(bases + (n - i), 0, 32 - (n - i));
            if (ebp_encode_group(last, v_load(bases), fp16, bits, n - i, p)) return KVC_SPACE;
        }
    }
    return 0;
}

static int64_t ebp_encode(const kvc_tensor *t, int bits, uint8_t *dst, size_t capacity) {
    const size_t n = kvc_elements(t), rows = t->rows * t->count, raw = KVC_SECTION + 2 * n * t->count;
    if (capacity < raw) return KVC_SPACE;
    const size_t samples = rows < EBP_SAMPLES ? rows : EBP_SAMPLES;
    uint8_t *base = dst + KVC_SECTION;
    if (!rows || !t->cols || KVC_SECTION + t->cols > raw) return kvc_store_raw(t, dst, capacity);
    ebp_bases(t, samples, base);
    if (!bits) bits = ebp_choose(t, samples, base);
    const size_t fixed = KVC_SECTION + t->cols + ebp_planes(t, bits);
    if (fixed > raw) return kvc_store_raw(t, dst, capacity);
    const int fp16 = t->dtype == KVC_FP16;
    ebp_planes_of p;
    p.low = base + t->cols;
    p.small = p.low + n * t->count;
    p.packed = p.small + (fp16 ? ebp_groups(t) * t->count * 12 : 0);
    p.escape = dst + fixed;
    p.end = dst + raw;
    int failed;
    if (fp16) failed = bits == 3 ? ebp_encode_slices(t, base, 1, 3, &p) : ebp_encode_slices(t, base, 1, 4, &p);
    else failed = bits == 3 ? ebp_encode_slices(t, base, 0, 3, &p) : ebp_encode_slices(t, base, 0, 4, &p);
    if (failed) return kvc_store_raw(t, dst, capacity);
    kvc_header(dst, (uint8_t)bits, 0, 0, (uint32_t)(p.escape - (dst + fixed)));
    return p.escape - dst;
}

static inline __attribute__((always_inline)) int ebp_decode_group(
    v32 base, int fp16, int bits, v32 lo, ebp_planes_of *p, uint8_t *d, size_t valid, int past) {
    const v32 out = v_set((uint8_t)((1 << bits) - 1));
    const v32 k = bits == 3 ? v_unpack3(p->packed) : v_unpack4(p->packed);
    p->packed += 4 * bits;
    v32 e = v_sub(base, k);
    uint32_t escaped = v_equal(k, out);
    if (valid < 32) escaped &= (1u << valid) - 1;
    const int number = __builtin_popcount(escaped);
    if (p->end - p->escape < number) return KVC_CORRUPT;
#if defined(KVC_AVX512)
    e = v_expand(e, escaped, p->escape, number);
#endif
    if (fp16) {
        e = v_or(v_shl3(e), v_unpack3(p->small));
        p->small += 12;
    }
#if defined(KVC_AVX512)
    if (past) v_merge_past(e, lo, d);
    else v_merge(e, lo, d);
#else
    (void)past; // the escapes are put into what was just written
    v_merge(e, lo, d);
    v_patch(d, escaped, p->escape, fp16 ? 0x83ff : 0x807f, fp16 ? 10 : 7);
#endif
    p->escape += number;
    return 0;
}

static inline __attribute__((always_inline)) int ebp_decode_slices(
    const kvc_tensor *t, const uint8_t *base, int fp16, int bits, ebp_planes_of *p) {
    const size_t n = kvc_elements(t), cols = t->cols;
    for (size_t s = 0; s < t->count; s++) {
        uint8_t *d = (uint8_t *)kvc_slice(t, s);
        const int past = t->past && !((uintptr_t)d & 63);
        size_t i = 0, c = 0;
        for (; i + 32 <= n; i += 32) {
            if (ebp_decode_group(bases_at(base, cols, c), fp16, bits, v_load(p->low), p, d + 2 * i, 32, past)) return KVC_CORRUPT;
            p->low += 32;
            c += 32;
            while (c >= cols) c -= cols;
        }
        if (i < n) {
            uint8_t low[32] = {0}, last[64];
            memcpy(low, p->low, n - i);
            if (ebp_decode_group(bases_at(base, cols, c), fp16, bits, v_load(low), p, last, n - i, 0)) return KVC_CORRUPT;
            p->low += n - i;
            memcpy(d + 2 * i, last, 2 * (n - i));
        }
    }
    return 0;
}

static int64_t ebp_decode(const kvc_tensor *t, const uint8_t *src, size_t nbytes) {
    if (nbytes < KVC_SECTION) return KVC_CORRUPT;
    const int bits = src[0], fp16 = t->dtype == KVC_FP16;
    if (bits == 0) return kvc_load_raw(t, src, nbytes);
    const size_t n = kvc_elements(t), escapes = kvc_u32(src + 4);
    const size_t fixed = KVC_SECTION + t->cols + ebp_planes(t, bits);
    if ((bits != 3 && bits != 4) || !n || nbytes < fixed || nbytes - fixed < escapes) return KVC_CORRUPT;
    ebp_planes_of p;
    p.low = (uint8_t *)src + KVC_SECTION + t->cols;
    p.small = p.low + n * t->count;
    p.packed = p.small + (fp16 ? ebp_groups(t) * t->count * 12 : 0);
    p.escape = (uint8_t *)src + fixed;
    p.end = p.escape + escapes;
    const uint8_t *base = src + KVC_SECTION;
    int failed;
    if (fp16) failed = bits == 3 ? ebp_decode_slices(t, base, 1, 3, &p) : ebp_decode_slices(t, base, 1, 4, &p);
    else failed = bits == 3 ? ebp_decode_slices(t, base, 0, 3, &p) : ebp_decode_slices(t, base, 0, 4, &p);
    if (failed || p.escape != p.end) return KVC_CORRUPT;
    return (int64_t)(fixed + escapes);
}
