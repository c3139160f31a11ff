// Fewer bits a value: int8 and fp8 (a scale a group), int4 and int8 over a range (a step and a lowest value a group).
//
// A group is, by token, up to `group` neighbours of the last axis (`last` elements long), and by channel one column
// of up to `group` rows. Section: header (mode = kind, parameter = axis, u16 = group, number = groups kept as they
// are) | parameters | codes | elements of the groups kept as they are.
// Parameters: for each group a bfloat16 scale, or a bfloat16 step and the lowest value in the type of the
// tensor; by channel, for each block of rows the scales of all columns, then their lowest values. 0xffff instead of a scale: the
// group has values that are not finite or too small or large to scale, and is kept as it is; its codes are 0.
// Codes: bytes in the order of the elements, unsigned over a range, which is by channel only. int4: two in a byte, the
// lower one of the first half of the group, the upper one of the second; by channel the halves are rows.
#include "floats.h"

enum { INT8 = 8, INT8_RANGE = 9, INT4 = 4, FP8 = 1, FP8_PLAIN = 2 }; // FP8_PLAIN: no scale
enum { KEPT = 0xffff, TILE = 128, BATCH = 64 };
typedef struct { uint8_t *parameter, *code, *kept, *end; uint32_t count; } quant_out;

KVC_INLINE int has_lowest(int kind) { return kind == INT4 || kind == INT8_RANGE; }
// A largest magnitude that can be scaled: finite, and far enough from both ends of float32.
KVC_INLINE int scalable(uint16_t magnitude, int fp16) {
    return fp16 ? magnitude < 0x7c00 : magnitude == 0 || (magnitude >= 0x0880 && magnitude < 0x7e80);
}
// Scale and its inverse for the largest magnitude of a group; KEPT if it cannot be scaled.
KVC_INLINE uint16_t scale_of(uint16_t top, int kind, int fp16, float *inverse) {
    if (!scalable(top, fp16)) { *inverse = 0; return KEPT; }
    const uint16_t scale = top ? bf16_above(value_of(top, fp16) / (kind == INT8 ? 127.f : 448.f)) : 0;
    *inverse = top ? 1.f / bf16_value(scale) : 0.f;
    return scale;
}
// The same for `n` groups; all arrays have room for a multiple of LANES.
KVC_INLINE void scales_of(const uint16_t *top, int n, int kind, int fp16, uint16_t *scale, float *inverse) {
    for (int g = 0; g < n; g += LANES) {
        const ux t = load_halves((const uint8_t *)(top + g)), nothing = t * 0, one = nothing + 1;
        const ux small = fp16 ? nothing : (ux)((ix)t < 0x0880) & (ux)(t != 0);
        const ux kept = (ux)((ix)t >= (fp16 ? 0x7c00 : 0x7e80)) | small, zero = kept | (ux)(t == 0);
        const ux s = (fx_bits(fx_values(t, fp16) / (kind == INT8 ? 127.f : 448.f)) + 0xffff) >> 16;
        const fx k = __builtin_convertvector((ix)one, fx) / fx_from(s << 16);
        const ux bits = fx_where(zero, nothing, fx_bits(k));
        store_halves((uint8_t *)(scale + g), fx_where(kept, nothing + KEPT, fx_where(zero, nothing, s)));
        memcpy(inverse + g, &bits, sizeof bits);
    }
}
// The same for the range of a group. With 256 codes the step is rounded up: rounded down, the highest value had none.
KVC_INLINE uint16_t step_of(int16_t low, int16_t high, int kind, int fp16, float *inverse) {
    const uint16_t limit = fp16 ? 0x7c00 : 0x7e80;
    *inverse = 0;
    if ((unsortable(low) & 0x7fff) >= limit || (unsortable(high) & 0x7fff) >= limit) return KEPT;
    const float range = value_of(unsortable(high), fp16) - value_of(unsortable(low), fp16);
    if (range < 0x1p-100f) return range == 0 ? 0 : KEPT;
    const uint16_t step = kind == INT4 ? bf16_of(range / 15.f) : bf16_above(range / 255.f);
    *inverse = 1.f / bf16_value(step);
    return step;
}

KVC_INLINE uint8_t code_of(float scaled, int kind) { return kind == INT8 ? (uint8_t)nearest(scaled) : fp8_of(scaled); }
KVC_INLINE ux fx_codes(fx scaled, int kind) { return kind == INT8 ? fx_nearest(scaled) : fx_fp8(scaled); }
KVC_INLINE float code_value(uint8_t q, int kind) { return kind == INT8 ? (float)(int8_t)q : fp8_value(q); }
KVC_INLINE fx fx_code_values(const uint8_t *q, int kind) { return kind == INT8 ? fx_int8(q) : fx_fp8_value(load_bytes(q)); }
// Codes of elements two by two, in the lower half of each lane.
KVC_INLINE ux fx_pair_codes(fx even, fx odd, int kind) {
    if (kind == INT8) return (fx_bits(even + 0x1.8p23f) & 255) | (fx_bits(odd + 0x1.8p23f) & 255) << 8;
    return fx_fp8(even) | fx_fp8(odd) << 8;
}
KVC_INLINE void fx_pair_values(ux codes, int kind, fx *even, fx *odd) {
    *even = kind == INT8 ? __builtin_convertvector((ix)(codes << 24) >> 24, fx) : fx_fp8_value(codes & 255);
    *odd = kind == INT8 ? __builtin_convertvector((ix)(codes << 16) >> 24, fx) : fx_fp8_value(codes >> 8);
}

// ---- by token: groups lie one behind the other, and are worked on in batches, so that their divisions overlap ------

KVC_INLINE void scaled_encode(const uint8_t *p, size_t n, int kind, int fp16, float k, uint8_t *q) {
    size_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        fx even, odd;
        load_pairs(p + 2 * i, fp16, &even, &odd);
        store_halves(q + i, fx_pair_codes(even * k, odd * k, kind));
    }
    for (; i + LANES <= n; i += LANES) store_bytes(q + i, fx_codes(load_values(p + 2 * i, fp16) * k, kind));
    for (; i < n; i++) q[i] = code_of(value_of(kvc_u16(p + 2 * i), fp16) * k, kind);
}
KVC_INLINE void scaled_decode(uint8_t *d, size_t n, int kind, int fp16, float scale, const uint8_t *q) {
    size_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        fx even, odd;
        fx_pair_values(load_halves(q + i), kind, &even, &odd);
        store_pairs(d + 2 * i, even * scale, odd * scale, fp16);
    }
    for (; i + LANES <= n; i += LANES) store_values(d + 2 * i, fx_code_values(q + i, kind) * scale, fp16);
    for (; i < n; i++) kvc_put16(d + 2 * i, of_value(code_value(q[i], kind) * scale, fp16));
}
KVC_INLINE void int4_encode(const uint8_t *p, size_t n, int fp16, float lowest, float k, uint8_t *q) {
    const size_t half = (n + 1) / 2, both = n / 2; // pairs; of an odd group the last one has no second half
    const uint8_t *p2 = p + 2 * half;
    size_t i = 0;
    for (; i + LANES <= both; i += LANES) {
        const ux a = fx_nearest((load_values(p + 2 * i, fp16) - lowest) * k);
        const ux b = fx_nearest((load_values(p2 + 2 * i, fp16) - lowest) * k);
        store_bytes(q + i, a | b << 4);
    }
    for (; i < half; i++) {
        const uint32_t a = (uint32_t)nearest((value_of(kvc_u16(p + 2 * i), fp16) - lowest) * k);
        const uint32_t b = i < both ? (uint32_t)nearest((value_of(kvc_u16(p2 + 2 * i), fp16) - lowest) * k) : 0;
        q[i] = (uint8_t)(a | b << 4);
    }
}
KVC_INLINE void int4_decode(uint8_t *d, size_t n, int fp16, float step, float lowest, const uint8_t *q) {
    const size_t half = (n + 1) / 2, both = n / 2;
    uint8_t *d2 = d + 2 * half;
    size_t i = 0;
    for (; i + LANES <= both; i += LANES) {
        store_values(d + 2 * i, fx_lower(q + i) * step + lowest, fp16);
        store_values(d2 + 2 * i, fx_upper(q + i) * step + lowest, fp16);
    }
    for (; i < half; i++) {
        kvc_put16(d + 2 * i, of_value((float)(q[i] & 15) * step + lowest, fp16));
        if (i < both) kvc_put16(d2 + 2 * i, of_value((float)(q[i] >> 4) * step + lowest, fp16));
    }
}

typedef struct { const uint8_t *p[BATCH]; uint32_t n[BATCH]; int held; } quant_batch;

KVC_INLINE int batch_encode(const quant_batch *b, int kind, int fp16, quant_out *o) {
    uint16_t parameter[BATCH], first[BATCH], top[BATCH] = {0};
    float k[BATCH];
    for (int g = 0; g < b->held; g++) {
        if (kind == INT4) {
            int16_t low, high;
            range_of(b->p[g], b->n[g], &low, &high);
            parameter[g] = step_of(low, high, kind, fp16, &k[g]);
            first[g] = unsortable(low);
        } else {
            top[g] = top_of(b->p[g], b->n[g]);
        }
    }
    if (kind != INT4) scales_of(top, b->held, kind, fp16, parameter, k);
    for (int g = 0; g < b->held; g++) {
        const uint8_t *p = b->p[g];
        const size_t n = b->n[g], codes = kind == INT4 ? (n + 1) / 2 : n;
        if (parameter[g] == KEPT) {
            if ((size_t)(o->end - o->kept) < 2 * n) return KVC_SPACE;
            memset(o->code, 0, codes);
            memcpy(o->kept, p, 2 * n);
            o->kept += 2 * n;
            o->count++;
            first[g] = 0;
        } else if (kind == INT4) {
            int4_encode(p, n, fp16, value_of(first[g], fp16), k[g], o->code);
        } else {
            scaled_encode(p, n, kind, fp16, k[g], o->code);
        }
        o->code += codes;
        kvc_put16(o->parameter, parameter[g]);
        if (kind == INT4) kvc_put16(o->parameter + 2, first[g]);
        o->parameter += kind == INT4 ? 4 : 2;
    }
    return 0;
}

KVC_INLINE int token_encode(const kvc_tensor *t, int kind, int fp16, size_t last, size_t group, quant_out *o) {
    const size_t n = kvc_elements(t);
    quant_batch b;
    b.held = 0;
    for (size_t s = 0; s < t->count; s++)
        for (size_t run = 0; run < n; run += last)
            for (size_t at = 0; at < last; at += group) {
                b.p[b.held] = kvc_slice(t, s) + 2 * (run + at);
                b.n[b.held] = (uint32_t)(last - at < group ? last - at : group);
                if (++b.held < BATCH) continue;
                if (batch_encode(&b, kind, fp16, o)) return KVC_SPACE;
                b.held = 0;
            }
    return batch_encode(&b, kind, fp16, o);
}
KVC_INLINE int token_decode(const kvc_tensor *t, int kind, int fp16, size_t last, size_t group, quant_out *o) {
    const size_t n = kvc_elements(t);
    for (size_t s = 0; s < t->count; s++)
        for (size_t run = 0; run < n; run += last)
            for (size_t at = 0; at < last; at += group) {
                uint8_t *d = (uint8_t *)kvc_slice(t, s) + 2 * (run + at);
                const size_t len = last - at < group ? last - at : group;
                const uint16_t parameter = kvc_u16(o->parameter);
                if (parameter == KEPT) {
                    if ((size_t)(o->end - o->kept) < 2 * len) return KVC_CORRUPT;
                    memcpy(d, o->kept, 2 * len);
                    o->kept += 2 * len;
                } else if (kind == INT4) {
                    const float lowest = value_of(kvc_u16(o->parameter + 2), fp16);
                    int4_decode(d, len, fp16, bf16_value(parameter), lowest, o->code);
                } else {
                    scaled_decode(d, len, kind, fp16, bf16_value(parameter), o->code);
                }
                o->parameter += kind == INT4 ? 4 : 2;
                o->code += kind == INT4 ? (len + 1) / 2 : len;
            }
    return 0;
}

#include "tiles.h" // groups by channel, of the above

// ---- sections ----------------------------------------------------------------------------------------------------

static void quant_sizes(const kvc_tensor *t, int kind, int axis, size_t last, size_t group, size_t *parameters, size_t *codes) {
    const size_t n = kvc_elements(t) * t->count, rows = t->rows * t->count, size = has_lowest(kind) ? 4 : 2;
    if (axis == KVC_TOKEN) {
        const size_t full = last / group, rest = last % group, runs = n / last;
        *parameters = kind == FP8_PLAIN ? 0 : runs * (full + (rest != 0)) * size;
        *codes = kind == INT4 ? runs * (full * ((group + 1) / 2) + (rest + 1) / 2) : n;
    } else {
        const size_t full = rows / group, rest = rows % group;
        *parameters = (full + (rest != 0)) * t->cols * size;
        *codes = kind == INT4 ? (full * ((group + 1) / 2) + (rest + 1) / 2) * t->cols : n;
    }
}

static int quant_valid(const kvc_tensor *t, int kind, int axis, size_t last, size_t group) {
    const size_t most = axis == KVC_TOKEN && kind == INT4 ? 127 : UINT16_MAX;
    return (kind == INT8 || kind == INT8_RANGE || kind == INT4 || kind == FP8 || kind == FP8_PLAIN) && kvc_elements(t) &&
           t->count && ((axis == KVC_TOKEN && kind != INT8_RANGE) || (axis == KVC_CHANNEL && kind != FP8_PLAIN)) &&
           last && t->cols % last == 0 && group && group <= most;
}

// float8 without a scale: 0 if a value is not finite or above 448, so that the section is kept as it is.
KVC_INLINE int plain_encode(const kvc_tensor *t, int fp16, uint8_t *q) {
    const size_t n = kvc_elements(t);
    for (size_t s = 0; s < t->count; s++, q += n) {
        const uint8_t *p = kvc_slice(t, s);
        if (top_of(p, n) > (fp16 ? 0x5f00 : 0x43e0)) return 0; // 448
        scaled_encode(p, n, FP8, fp16, 1, q);
    }
    return 1;
}
KVC_INLINE void plain_decode(const kvc_tensor *t, int fp16, const uint8_t *q) {
    const size_t n = kvc_elements(t);
    for (size_t s = 0; s < t->count; s++, q += n) scaled_decode((uint8_t *)kvc_slice(t, s), n, FP8, fp16, 1, q);
}

#define QUANT_EACH(f, ...) \
    (t->dtype == KVC_FP16 ? (kind == INT8 ? f(t, INT8, 1, __VA_ARGS__) : kind == INT4 ? f(t, INT4, 1, __VA_ARGS__) : f(t, FP8, 1, __VA_ARGS__)) \
                          : (kind == INT8 ? f(t, INT8, 0, __VA_ARGS__) : kind == INT4 ? f(t, INT4, 0, __VA_ARGS__) : f(t, FP8, 0, __VA_ARGS__)))

#define CHANNEL_EACH(...) \
    (kind != INT8_RANGE ? QUANT_EACH(channel_run, __VA_ARGS__) \
     : t->dtype == KVC_FP16 ? channel_run(t, INT8_RANGE, 1, __VA_ARGS__) : channel_run(t, INT8_RANGE, 0, __VA_ARGS__))

static int64_t quant_encode(
    const kvc_tensor *t, int kind, int axis, size_t last, size_t group, uint8_t *dst, size_t capacity) {
    const size_t raw = KVC_SECTION + 2 * kvc_elements(t) * t->count;
    size_t parameters, codes;
    if (capacity < raw) return KVC_SPACE;
    if (!quant_valid(t, kind, axis, last, group)) return kvc_store_raw(t, dst, capacity);
    quant_sizes(t, kind, axis, last, group, &parameters, &codes);
    const size_t fixed = KVC_SECTION + parameters + codes;
    if (fixed > raw) return kvc_store_raw(t, dst, capacity);
    quant_out o = {dst + KVC_SECTION, dst + KVC_SECTION + parameters, dst + fixed, dst + raw, 0};
    int failed;
    if (kind == FP8_PLAIN) failed = !(t->dtype == KVC_FP16 ? plain_encode(t, 1, o.code) : plain_encode(t, 0, o.code));
    else if (axis == KVC_TOKEN) failed = QUANT_EACH(token_encode, last, group, &o);
    else failed = CHANNEL_EACH(group, &o, 1);
    if (failed) return kvc_store_raw(t, dst, capacity);
    kvc_header(dst, (uint8_t)kind, (uint8_t)axis, (uint16_t)group, o.count);
    return o.kept - dst;
}

static int64_t quant_decode(const kvc_tensor *t, int kind, size_t last, const uint8_t *src, size_t nbytes) {
    if (nbytes < KVC_SECTION) return KVC_CORRUPT;
    if (src[0] == 0) return kvc_load_raw(t, src, nbytes);
    const int axis = src[1];
    const size_t group = kvc_u16(src + 2);
    size_t parameters, codes;
    if (src[0] != kind || !quant_valid(t, kind, axis, last, group)) return KVC_CORRUPT;
    quant_sizes(t, kind, axis, last, group, &parameters, &codes);
    const size_t fixed = KVC_SECTION + parameters + codes;
    if (nbytes < fixed) return KVC_CORRUPT;
    uint8_t *s = (uint8_t *)src;
    // the size of what was kept follows from the parameters, and is bounded by what is there
    quant_out o = {s + KVC_SECTION, s + KVC_SECTION + parameters, s + fixed, s + nbytes, 0};
    int failed = 0;
    if (kind == FP8_PLAIN) t->dtype == KVC_FP16 ? plain_decode(t, 1, o.code) : plain_decode(t, 0, o.code);
    else if (axis == KVC_TOKEN) failed = QUANT_EACH(token_decode, last, group, &o);
    else failed = CHANNEL_EACH(group, &o, 0);
    return failed ? KVC_CORRUPT : o.kept - src;
}
