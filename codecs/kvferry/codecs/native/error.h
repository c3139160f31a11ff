// How far decoded elements are from what was encoded, over every `step`-th row of each slice. What the bound of a lossy
// codec is compared with needs the energy of each channel; codecs/error.py says why.
#include "floats.h"

enum { ERROR_STICKS_OUT = 16 };

// As the kernels have them, but float16 that is not finite, which they keep as it is, is not finite here either.
KVC_INLINE fx true_values(const uint8_t *p, int fp16) {
    const ux u = load_halves(p), bits = fx_bits(fx_values(u, fp16));
    return fx_from(fp16 ? bits | ((ux)((ix)(u & 0x7fff) > 0x7bff) & 0x7f800000) : bits);
}
KVC_INLINE float true_value(const uint8_t *p, int fp16) {
    const uint16_t v = kvc_u16(p);
    return f_from(f_bits(value_of(v, fp16)) | (fp16 && (v & 0x7fff) > 0x7bff ? 0x7f800000 : 0));
}

KVC_INLINE void rows_error(
    const uint8_t *p, const uint8_t *q, size_t cols, int fp16, float *energy, fx *squares, ux *largest, kvc_error *e) {
    size_t c = 0;
    for (; c + LANES <= cols; c += LANES) {
        const fx x = true_values(p + 2 * c, fp16), d = x - true_values(q + 2 * c, fp16);
        const ux m = fx_bits(d) & 0x7fffffff;
        fx sum;
        memcpy(&sum, energy + c, sizeof sum);
        sum += x * x;
        memcpy(energy + c, &sum, sizeof sum);
        *squares += d * d;
        *largest = fx_where((ux)((ix)*largest < (ix)m), m, *largest);
    }
    for (; c < cols; c++) {
        const float x = true_value(p + 2 * c, fp16), d = x - true_value(q + 2 * c, fp16);
        energy[c] += x * x;
        e->square += d * d;
        e->largest = d > e->largest ? d : -d > e->largest ? -d : e->largest;
    }
}

// How many of `n` are below `limit`; positive floats are in the order of their bits.
KVC_INLINE size_t below(const float *values, size_t n, uint32_t limit) {
    uint32_t count = 0;
    for (size_t i = 0; i < n; i++) count += f_bits(values[i]) < limit;
    return count;
}
// The one of `n` positive numbers above `k` others, bit by bit: sorting them took a third of a check.
KVC_INLINE double smallest_but(const float *values, size_t n, size_t k) {
    uint32_t found = 0;
    for (int bit = 30; bit >= 0; bit--)
        if (below(values, n, found | 1u << bit) <= k) found |= 1u << bit;
    return f_from(found);
}
// 16 times the median of the channels that are not zero; what sticks out beyond counts no more.
KVC_INLINE double error_cap(const float *energy, size_t cols, float *live) {
    size_t n = 0;
    for (size_t c = 0; c < cols; c++) if (energy[c] > 0) live[n++] = energy[c];
    if (!n) return 0;
    const double upper = smallest_but(live, n, n / 2);
    return ERROR_STICKS_OUT * (upper + (n % 2 ? upper : smallest_but(live, n, n / 2 - 1))) / 2;
}

// `work` has room for two numbers a channel. Values that are not finite, or too large, make sums that are not.
static void slices_error(const kvc_tensor *t, const uint8_t *after, size_t step, float *work, kvc_error *e) {
    const size_t nbytes = 2 * t->cols;
    ux largest = {0};
    *e = (kvc_error){0, 0, 0, 0};
    memset(work, 0, t->cols * sizeof *work);
    for (size_t s = 0; s < t->count; s++) {
        fx squares = {0};
        for (size_t r = 0; r < t->rows; r += step) {
            const uint8_t *p = kvc_slice(t, s) + r * nbytes, *q = after + s * t->stride + r * nbytes;
            if (t->dtype == KVC_FP16) rows_error(p, q, t->cols, 1, work, &squares, &largest, e);
            else rows_error(p, q, t->cols, 0, work, &squares, &largest, e);
        }
        for (int i = 0; i < LANES; i++) e->square += squares[i];
    }
    for (int i = 0; i < LANES; i++) {
        const double m = f_from(largest[i]);
        e->largest = m > e->largest ? m : e->largest;
    }
    const double cap = error_cap(work, t->cols, work + t->cols);
    for (size_t c = 0; c < t->cols; c++) {
        e->whole += work[c];
        e->capped += work[c] < cap ? work[c] : cap;
    }
}
