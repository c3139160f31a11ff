// Fewer bits a value: int8 and fp8 (a scale a group), int4 (a step and a lowest value a group).
//
// A group is, by token, up to `group` neighbours of the last axis (`last` elements long), and by channel one column
// of up to `group` rows. Section: header (mode = kind, parameter = axis, u16 = group, number = groups kept as they
// are) | parameters | codes | elements of the groups kept as they are.
// Parameters: for each group a bfloat16 scale, or a bfloat16 step and the lowest value in the type of the
// tensor; by channel, for each block of rows the scales of all columns, then their lowest values. 0xffff instead of a scale: the
// group has values that are not finite or too small or large to scale, and is kept as it is; its codes are 0.
// Codes: bytes in the order of the elements. int4: two in a byte, the lower one of the first half of the group, the
// upper one of the second; by channel the halves are rows.
#include "floats.h"
#include "simd.h"

enum { INT8 = 8, INT4 = 4, FP8 = 1, FP8_PLAIN = 2 }; // FP8_PLAIN: no scale
enum { KEPT = 0xffff, TILE = 128 };

#define QUANT_INLINE static inline __attribute__((always_inline))

QUANT_INLINE uint16_t infinity(int fp16) { return fp16 ? 0x7c00 : 0x7f80; }

// A largest magnitude that can be scaled: finite, and far enough from both ends of float32.
QUANT_INLINE int scalable(uint16_t magnitude, int fp16) {
    return fp16 ? magnitude < 0x7c00 : magnitude == 0 || (magnitude >= 0x0880 && magnitude < 0x7e80);
}
QUANT_INLINE float levels(int kind) { return kind == INT8 ? 127.f : 448.f; }

QUANT_INLINE uint8_t code_of(float scaled, int kind) {
    if (kind != INT8) return fp8_of(scaled);
    int32_t q = nearest(scaled);
    q = q > 127 ? 127 : q < -127 ? -127 : q;
    return (uint8_t)(int8_t)q;
}
QUANT_INLINE float code_value(uint8_t q, int kind) { return kind == INT8 ? (float)(int8_t)q : fp8_value(q); }

// ---- by token ----------------------------------------------------------------------------------------------------

// One group of int8 or fp8; 0 if it is to be kept.
QUANT_INLINE int scaled_encode(const uint8_t *p, size_t n, int kind, int fp16, uint8_t *parameter, uint8_t *q) {
    uint16_t top = 0;
    for (size_t i = 0; i < n; i++) {
        const uint16_t a = kvc_u16(p + 2 * i) & 0x7fff;
        top = a > top ? a : top;
    }
    if (!scalable(top, fp16)) return 0;
    const uint16_t scale = top ? bf16_above(value_of(top, fp16) / levels(kind)) : 0;
    const float k = top ? 1.f / bf16_value(scale) : 0.f;
    kvc_put16(parameter, scale);
    for (size_t i = 0; i < n; i++) q[i] = code_of(value_of(kvc_u16(p + 2 * i), fp16) * k, kind);
    return 1;
}
QUANT_INLINE void scaled_decode(uint8_t *d, size_t n, int kind, int fp16, const uint8_t *parameter, const uint8_t *q) {
    const float scale = bf16_value(kvc_u16(parameter));
    for (size_t i = 0; i < n; i++) kvc_put16(d + 2 * i, of_value(code_value(q[i], kind) * scale, fp16));
}

QUANT_INLINE int32_t int4_code(float f) {
    const int32_t q = nearest(f);
    return q > 15 ? 15 : q < 0 ? 0 : q;
}
// Step and its inverse for a range; 0 if the group is to be kept.
QUANT_INLINE int int4_step(int16_t low, int16_t high, int fp16, uint16_t *step, float *inverse) {
    const uint16_t a = unsortable(low) & 0x7fff, b = unsortable(high) & 0x7fff;
    if (a >= (fp16 ? 0x7c00 : 0x7e80) || b >= (fp16 ? 0x7c00 : 0x7e80)) return 0;
    const float range = value_of(unsortable(high), fp16) - value_of(unsortable(low), fp16);
    if (range != 0 && range < 0x1p-100f) return 0;
    *step = bf16_of(range / 15.f);
    *inverse = range != 0 ? 1.f / bf16_value(*step) : 0.f;
    return 1;
}
QUANT_INLINE int int4_encode(const uint8_t *p, size_t n, int fp16, uint8_t *parameter, uint8_t *q) {
    int16_t low = sortable(kvc_u16(p)), high = low;
    for (size_t i = 0; i < n; i++) {
        const int16_t s = sortable(kvc_u16(p + 2 * i));
        low = s < low ? s : low;
        high = s > high ? s : high;
    }
    uint16_t step;
    float k;
    if (!int4_step(low, high, fp16, &step, &k)) return 0;
    kvc_put16(parameter, step);
    kvc_put16(parameter + 2, unsortable(low));
    const float lowest = value_of(unsortable(low), fp16);
    const size_t half = (n + 1) / 2;
    int32_t code[TILE];
    for (size_t i = 0; i < n; i++) code[i] = int4_code((value_of(kvc_u16(p + 2 * i), fp16) - lowest) * k);
    if (n & 1) code[n] = 0;
    for (size_t i = 0; i < half; i++) q[i] = (uint8_t)(code[i] | code[half + i] << 4);
    return 1;
}
QUANT_INLINE void int4_decode(uint8_t *d, size_t n, int fp16, const uint8_t *parameter, const uint8_t *q) {
    const float step = bf16_value(kvc_u16(parameter)), lowest = value_of(kvc_u16(parameter + 2), fp16);
    const size_t half = (n + 1) / 2;
    for (size_t i = 0; i < half; i++) kvc_put16(d + 2 * i, of_value((float)(q[i] & 15) * step + lowest, fp16));
    for (size_t i = half; i < n; i++) kvc_put16(d + 2 * i, of_value((float)(q[i - half] >> 4) * step + lowest, fp16));
}

QUANT_INLINE int token_encode1(const uint8_t *p, size_t n, int kind, int fp16, uint8_t *parameter, uint8_t *q) {
    if (kind == INT4) return n == 32 ? int4_encode(p, 32, fp16, parameter, q)
                           : n == 64 ? int4_encode(p, 64, fp16, parameter, q) : int4_encode(p, n, fp16, parameter, q);
    return n == 64 ? scaled_encode(p, 64, kind, fp16, parameter, q)
         : n == 128 ? scaled_encode(p, 128, kind, fp16, parameter, q) : scaled_encode(p, n, kind, fp16, parameter, q);
}
QUANT_INLINE void token_decode1(uint8_t *d, size_t n, int kind, int fp16, const uint8_t *parameter, const uint8_t *q) {
    if (kind == INT4) {
        if (n == 32) int4_decode(d, 32, fp16, parameter, q);
        else if (n == 64) int4_decode(d, 64, fp16, parameter, q);
        else int4_decode(d, n, fp16, parameter, q);
    } else if (n == 64) scaled_decode(d, 64, kind, fp16, parameter, q);
    else if (n == 128) scaled_decode(d, 128, kind, fp16, parameter, q);
    else scaled_decode(d, n, kind, fp16, parameter, q);
}

typedef struct { uint8_t *parameter, *code, *kept, *end; uint32_t count; } quant_out;

QUANT_INLINE int token_encode(const kvc_tensor *t, int kind, int fp16, size_t last, size_t group, quant_out *o) {
    const size_t size = kind == INT4 ? 4 : 2, n = kvc_elements(t);
    for (size_t s = 0; s < t->count; s++)
        for (size_t run = 0; run < n; run += last)
            for (size_t at = 0; at < last; at += group) {
                const uint8_t *p = kvc_slice(t, s) + 2 * (run + at);
                const size_t len = last - at < group ? last - at : group, codes = kind == INT4 ? (len + 1) / 2 : len;
                if (!token_encode1(p, len, kind, fp16, o->parameter, o->code)) {
                    if ((size_t)(o->end - o->kept) < 2 * len) return KVC_SPACE;
                    memset(o->code, 0, codes);
                    memset(o->parameter, 0, size);
                    kvc_put16(o->parameter, KEPT);
                    memcpy(o->kept, p, 2 * len);
                    o->kept += 2 * len;
                    o->count++;
                }
                o->parameter += size;
                o->code += codes;
            }
    return 0;
}
QUANT_INLINE int token_decode(const kvc_tensor *t, int kind, int fp16, size_t last, size_t group, quant_out *o) {
    const size_t size = kind == INT4 ? 4 : 2, n = kvc_elements(t);
    for (size_t s = 0; s < t->count; s++)
        for (size_t run = 0; run < n; run += last)
            for (size_t at = 0; at < last; at += group) {
                uint8_t *d = (uint8_t *)kvc_slice(t, s) + 2 * (run + at);
                const size_t len = last - at < group ? last - at : group;
                if (kvc_u16(o->parameter) == KEPT) {
                    if ((size_t)(o->end - o->kept) < 2 * len) return KVC_CORRUPT;
                    memcpy(d, o->kept, 2 * len);
                    o->kept += 2 * len;
                } else {
                    token_decode1(d, len, kind, fp16, o->parameter, o->code);
                }
                o->parameter += size;
                o->code += kind == INT4 ? (len + 1) / 2 : len;
            }
    return 0;
}

// ---- by channel: one block of rows, one tile of columns -----------------------------------------------------------

typedef struct { const kvc_tensor *t; size_t row, rows, col, cols; } quant_tile;

QUANT_INLINE uint8_t *tile_row(const quant_tile *b, size_t r) {
    return (uint8_t *)kvc_row(b->t, b->row + r) + 2 * b->col;
}

QUANT_INLINE int tile_keep(const quant_tile *b, size_t c, quant_out *o) {
    if ((size_t)(o->end - o->kept) < 2 * b->rows) return KVC_SPACE;
    for (size_t r = 0; r < b->rows; r++, o->kept += 2) memcpy(o->kept, tile_row(b, r) + 2 * c, 2);
    o->count++;
    return 0;
}
QUANT_INLINE int tile_restore(const quant_tile *b, size_t c, quant_out *o) {
    if ((size_t)(o->end - o->kept) < 2 * b->rows) return KVC_CORRUPT;
    for (size_t r = 0; r < b->rows; r++, o->kept += 2) memcpy(tile_row(b, r) + 2 * c, o->kept, 2);
    return 0;
}

QUANT_INLINE int tile_encode8(const quant_tile *b, int kind, int fp16, size_t width, quant_out *o) {
    uint16_t top[TILE] = {0};
    float k[TILE];
    for (size_t r = 0; r < b->rows; r++) {
        const uint8_t *p = tile_row(b, r);
        for (size_t c = 0; c < b->cols; c++) {
            const uint16_t a = kvc_u16(p + 2 * c) & 0x7fff;
            top[c] = a > top[c] ? a : top[c];
        }
    }
    for (size_t c = 0; c < b->cols; c++) {
        uint16_t scale = KEPT;
        k[c] = 0;
        if (scalable(top[c], fp16)) {
            scale = top[c] ? bf16_above(value_of(top[c], fp16) / levels(kind)) : 0;
            k[c] = top[c] ? 1.f / bf16_value(scale) : 0.f;
        } else if (tile_keep(b, c, o)) {
            return KVC_SPACE;
        }
        kvc_put16(o->parameter + 2 * c, scale);
    }
    for (size_t r = 0; r < b->rows; r++) {
        const uint8_t *p = tile_row(b, r);
        uint8_t *q = o->code + r * width;
        for (size_t c = 0; c < b->cols; c++) q[c] = code_of(value_of(kvc_u16(p + 2 * c), fp16) * k[c], kind);
    }
    for (size_t c = 0; c < b->cols; c++) // what is not finite has no code
        if (kvc_u16(o->parameter + 2 * c) == KEPT)
            for (size_t r = 0; r < b->rows; r++) o->code[r * width + c] = 0;
    return 0;
}
QUANT_INLINE int tile_decode8(const quant_tile *b, int kind, int fp16, size_t width, quant_out *o) {
    float scale[TILE];
    for (size_t c = 0; c < b->cols; c++) scale[c] = bf16_value(kvc_u16(o->parameter + 2 * c));
    for (size_t r = 0; r < b->rows; r++) {
        uint8_t *d = tile_row(b, r);
        const uint8_t *q = o->code + r * width;
        for (size_t c = 0; c < b->cols; c++) kvc_put16(d + 2 * c, of_value(code_value(q[c], kind) * scale[c], fp16));
    }
    for (size_t c = 0; c < b->cols; c++)
        if (kvc_u16(o->parameter + 2 * c) == KEPT && tile_restore(b, c, o)) return KVC_CORRUPT;
    return 0;
}

QUANT_INLINE int tile_encode4(const quant_tile *b, int fp16, size_t width, quant_out *o) {
    int16_t low[TILE], high[TILE];
    float k[TILE], lowest[TILE];
    for (size_t c = 0; c < b->cols; c++) low[c] = high[c] = sortable(kvc_u16(tile_row(b, 0) + 2 * c));
    for (size_t r = 1; r < b->rows; r++) {
        const uint8_t *p = tile_row(b, r);
        for (size_t c = 0; c < b->cols; c++) {
            const int16_t s = sortable(kvc_u16(p + 2 * c));
            low[c] = s < low[c] ? s : low[c];
            high[c] = s > high[c] ? s : high[c];
        }
    }
    for (size_t c = 0; c < b->cols; c++) {
        uint16_t step = KEPT, first = unsortable(low[c]);
        k[c] = lowest[c] = 0;
        if (int4_step(low[c], high[c], fp16, &step, &k[c])) lowest[c] = value_of(first, fp16);
        else if (tile_keep(b, c, o)) return KVC_SPACE;
        else step = KEPT, first = 0;
        kvc_put16(o->parameter + 2 * c, step);
        kvc_put16(o->parameter + 2 * (width + c), first);
    }
    const size_t half = (b->rows + 1) / 2;
    for (size_t r = 0; r < half; r++) {
        const uint8_t *p = tile_row(b, r), *p2 = r + half < b->rows ? tile_row(b, r + half) : NULL;
        uint8_t *q = o->code + r * width;
        for (size_t c = 0; c < b->cols; c++)
            q[c] = (uint8_t)int4_code((value_of(kvc_u16(p + 2 * c), fp16) - lowest[c]) * k[c]);
        if (p2)
            for (size_t c = 0; c < b->cols; c++)
                q[c] |= (uint8_t)(int4_code((value_of(kvc_u16(p2 + 2 * c), fp16) - lowest[c]) * k[c]) << 4);
    }
    for (size_t c = 0; c < b->cols; c++)
        if (kvc_u16(o->parameter + 2 * c) == KEPT)
            for (size_t r = 0; r < half; r++) o->code[r * width + c] = 0;
    return 0;
}
QUANT_INLINE int tile_decode4(const quant_tile *b, int fp16, size_t width, quant_out *o) {
    float step[TILE], lowest[TILE];
    for (size_t c = 0; c < b->cols; c++) {
        step[c] = bf16_value(kvc_u16(o->parameter + 2 * c));
        lowest[c] = value_of(kvc_u16(o->parameter + 2 * (width + c)), fp16);
    }
    const size_t half = (b->rows + 1) / 2;
    for (size_t r = 0; r < b->rows; r++) {
        uint8_t *d = tile_row(b, r);
        const uint8_t *q = o->code + (r < half ? r : r - half) * width;
        const int shift = r < half ? 0 : 4;
        for (size_t c = 0; c < b->cols; c++)
            kvc_put16(d + 2 * c, of_value((float)(q[c] >> shift & 15) * step[c] + lowest[c], fp16));
    }
    for (size_t c = 0; c < b->cols; c++)
        if (kvc_u16(o->parameter + 2 * c) == KEPT && tile_restore(b, c, o)) return KVC_CORRUPT;
    return 0;
}

QUANT_INLINE int channel_run(const kvc_tensor *t, int kind, int fp16, size_t group, quant_out *o, int encode) {
    const size_t rows = t->rows * t->count, width = t->cols;
    for (size_t row = 0; row < rows; row += group) {
        const size_t len = rows - row < group ? rows - row : group;
        for (size_t col = 0; col < width; col += TILE) {
            const quant_tile b = {t, row, len, col, width - col < TILE ? width - col : TILE};
            quant_out at = *o;
            at.parameter += 2 * col;
            at.code += col;
            int failed;
            if (kind == INT4) failed = encode ? tile_encode4(&b, fp16, width, &at) : tile_decode4(&b, fp16, width, &at);
            else failed = encode ? tile_encode8(&b, kind, fp16, width, &at) : tile_decode8(&b, kind, fp16, width, &at);
            if (failed) return failed;
            o->kept = at.kept;
            o->count = at.count;
        }
        o->parameter += width * (kind == INT4 ? 4 : 2);
        o->code += width * (kind == INT4 ? (len + 1) / 2 : len);
    }
    return 0;
}

// ---- sections ----------------------------------------------------------------------------------------------------

static void quant_sizes(const kvc_tensor *t, int kind, int axis, size_t last, size_t group, size_t *parameters, size_t *codes) {
    const size_t n = kvc_elements(t) * t->count, rows = t->rows * t->count, size = kind == INT4 ? 4 : 2;
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
    const size_t most = axis == KVC_TOKEN && kind == INT4 ? TILE - 1 : UINT16_MAX;
    return (kind == INT8 || kind == INT4 || kind == FP8 || kind == FP8_PLAIN) && kvc_elements(t) && t->count &&
           (axis == KVC_TOKEN || (axis == KVC_CHANNEL && kind != FP8_PLAIN)) &&
           last && t->cols % last == 0 && group && group <= most;
}

// float8 without a scale: 0 if a value is not finite or above 448, so that the section is kept as it is.
QUANT_INLINE int plain_encode(const kvc_tensor *t, int fp16, uint8_t *q) {
    const uint16_t most = fp16 ? 0x5f00 : 0x43e0; // 448
    const size_t n = kvc_elements(t);
    for (size_t s = 0; s < t->count; s++, q += n) {
        const uint8_t *p = kvc_slice(t, s);
        uint16_t top = 0;
        for (size_t i = 0; i < n; i++) {
            const uint16_t a = kvc_u16(p + 2 * i) & 0x7fff;
            top = a > top ? a : top;
        }
        if (top > most) return 0;
        for (size_t i = 0; i < n; i++) q[i] = fp8_of(value_of(kvc_u16(p + 2 * i), fp16));
    }
    return 1;
}
QUANT_INLINE void plain_decode(const kvc_tensor *t, int fp16, const uint8_t *q) {
    const size_t n = kvc_elements(t);
    for (size_t s = 0; s < t->count; s++, q += n) {
        uint8_t *d = (uint8_t *)kvc_slice(t, s);
        for (size_t i = 0; i < n; i++) kvc_put16(d + 2 * i, of_value(fp8_value(q[i]), fp16));
    }
}

#define QUANT_EACH(f, ...) \
    (t->dtype == KVC_FP16 ? (kind == INT8 ? f(t, INT8, 1, __VA_ARGS__) : kind == INT4 ? f(t, INT4, 1, __VA_ARGS__) : f(t, FP8, 1, __VA_ARGS__)) \
                          : (kind == INT8 ? f(t, INT8, 0, __VA_ARGS__) : kind == INT4 ? f(t, INT4, 0, __VA_ARGS__) : f(t, FP8, 0, __VA_ARGS__)))

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
    else failed = QUANT_EACH(channel_run, group, &o, 1);
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
    else failed = QUANT_EACH(channel_run, group, &o, 0);
    return failed ? KVC_CORRUPT : o.kept - src;
}
