// int8, int4 and fp8 by channel: a group is one column of a block of rows; quant.h has the section and what groups share.
#ifndef KVC_TILES_H
#define KVC_TILES_H

// One block of rows, one tile of columns.
typedef struct { const kvc_tensor *t; size_t row, rows, col, cols; } quant_tile;
typedef struct { const kvc_tensor *t; uint8_t *p; size_t slice, row; } quant_row; // row within the slice

KVC_INLINE quant_row tile_row(const quant_tile *b, size_t r) {
    quant_row at = {b->t, NULL, (b->row + r) / b->t->rows, (b->row + r) % b->t->rows};
    at.p = (uint8_t *)kvc_slice(b->t, at.slice) + (at.row * b->t->cols + b->col) * 2;
    return at;
}
KVC_INLINE void next_row(quant_row *at) {
    at->p += at->t->cols * 2;
    if (++at->row < at->t->rows) return;
    at->row = 0; // what p was moved by, less the rows of this slice
    at->slice++;
    at->p += at->t->stride - at->t->rows * at->t->cols * 2;
}

KVC_INLINE int tile_keep(const quant_tile *b, size_t c, quant_out *o) {
    if ((size_t)(o->end - o->kept) < 2 * b->rows) return KVC_SPACE;
    quant_row at = tile_row(b, 0);
    for (size_t r = 0; r < b->rows; r++, o->kept += 2, next_row(&at)) memcpy(o->kept, at.p + 2 * c, 2);
    o->count++;
    return 0;
}
KVC_INLINE int tile_restore(const quant_tile *b, const uint8_t *parameters, quant_out *o) {
    for (size_t c = 0; c < b->cols; c++) {
        if (kvc_u16(parameters + 2 * c) != KEPT) continue;
        if ((size_t)(o->end - o->kept) < 2 * b->rows) return KVC_CORRUPT;
        quant_row at = tile_row(b, 0);
        for (size_t r = 0; r < b->rows; r++, o->kept += 2, next_row(&at)) memcpy(at.p + 2 * c, o->kept, 2);
    }
    return 0;
}
// Columns that are kept have codes of 0.
KVC_INLINE void tile_blank(const quant_tile *b, size_t rows, size_t width, const quant_out *o) {
    for (size_t c = 0; c < b->cols; c++)
        if (kvc_u16(o->parameter + 2 * c) == KEPT)
            for (size_t r = 0; r < rows; r++) o->code[r * width + c] = 0;
}
KVC_INLINE fx load_floats(const float *p) { fx f; memcpy(&f, p, sizeof f); return f; }

KVC_INLINE int tile_encode8(const quant_tile *b, int kind, int fp16, size_t width, quant_out *o) {
    uint16_t top[TILE] = {0};
    float k[TILE];
    quant_row at = tile_row(b, 0);
    for (size_t r = 0; r < b->rows; r++, next_row(&at)) {
        size_t c = 0;
        for (; c + 16 <= b->cols; c += 16) {
            const s16x x = s_max(s_load((uint8_t *)(top + c)), s_load(at.p + 2 * c) & 0x7fff);
            memcpy(top + c, &x, 32);
        }
        for (; c < b->cols; c++) {
            const uint16_t a = kvc_u16(at.p + 2 * c) & 0x7fff;
            top[c] = a > top[c] ? a : top[c];
        }
    }
    for (size_t c = 0; c < b->cols; c++) {
        const uint16_t scale = scale_of(top[c], kind, fp16, &k[c]);
        kvc_put16(o->parameter + 2 * c, scale);
        if (scale == KEPT && tile_keep(b, c, o)) return KVC_SPACE;
    }
    at = tile_row(b, 0);
    for (size_t r = 0; r < b->rows; r++, next_row(&at)) {
        uint8_t *q = o->code + r * width;
        size_t c = 0;
        for (; c + LANES <= b->cols; c += LANES)
            store_bytes(q + c, fx_codes(load_values(at.p + 2 * c, fp16) * load_floats(k + c), kind));
        for (; c < b->cols; c++) q[c] = code_of(value_of(kvc_u16(at.p + 2 * c), fp16) * k[c], kind);
    }
    tile_blank(b, b->rows, width, o);
    return 0;
}
KVC_INLINE int tile_decode8(const quant_tile *b, int kind, int fp16, size_t width, quant_out *o) {
    float scale[TILE];
    for (size_t c = 0; c < b->cols; c++) scale[c] = bf16_value(kvc_u16(o->parameter + 2 * c));
    quant_row at = tile_row(b, 0);
    for (size_t r = 0; r < b->rows; r++, next_row(&at)) {
        const uint8_t *q = o->code + r * width;
        size_t c = 0;
        for (; c + LANES <= b->cols; c += LANES)
            store_values(at.p + 2 * c, fx_code_values(q + c, kind) * load_floats(scale + c), fp16);
        for (; c < b->cols; c++) kvc_put16(at.p + 2 * c, of_value(code_value(q[c], kind) * scale[c], fp16));
    }
    return tile_restore(b, o->parameter, o);
}

KVC_INLINE void tile_range(const quant_tile *b, int16_t *low, int16_t *high) {
    quant_row at = tile_row(b, 0);
    for (size_t c = 0; c < b->cols; c++) low[c] = high[c] = sortable(kvc_u16(at.p + 2 * c));
    for (size_t r = 1; r < b->rows; r++) {
        next_row(&at);
        size_t c = 0;
        for (; c + 16 <= b->cols; c += 16) {
            const s16x x = s_sortable(s_load(at.p + 2 * c));
            const s16x l = s_min(s_load((uint8_t *)(low + c)), x), h = s_max(s_load((uint8_t *)(high + c)), x);
            memcpy(low + c, &l, 32);
            memcpy(high + c, &h, 32);
        }
        for (; c < b->cols; c++) {
            const int16_t s = sortable(kvc_u16(at.p + 2 * c));
            low[c] = s < low[c] ? s : low[c];
            high[c] = s > high[c] ? s : high[c];
        }
    }
}
// The lowest value of a column, moved by half a step at most, so that element x is all but exact, and no other one is off by more
// than half a step still, or an eighth more: as far as the lowest value may be off where elements are coarse. It stays if it were further.
KVC_INLINE uint16_t anchored(uint16_t first, uint16_t x, uint16_t step, float k, int fp16) {
    const float value = value_of(x, fp16), size = bf16_value(step);
    const float above = (float)nearest((value - value_of(first, fp16)) * k) * size;
    const uint16_t moved = of_value(value - above, fp16);
    const float off = value_of(moved, fp16) + above - value, most = size * 0.125f;
    return off <= most && -off <= most ? moved : first;
}
// Steps and lowest values of the columns: written, and as the codes need them.
KVC_INLINE int tile_measure(const quant_tile *b, int kind, int fp16, size_t width, quant_out *o, float *k, float *lowest) {
    int16_t low[TILE], high[TILE];
    tile_range(b, low, high);
    const uint8_t *anchor = tile_row(b, 0).p;
    for (size_t c = 0; c < b->cols; c++) {
        const uint16_t step = step_of(low[c], high[c], kind, fp16, &k[c]);
        uint16_t first = step == KEPT ? 0 : unsortable(low[c]);
        if (step == KEPT && tile_keep(b, c, o)) return KVC_SPACE;
        if (kind == INT4 && !b->row && step && step != KEPT) first = anchored(first, kvc_u16(anchor + 2 * c), step, k[c], fp16);
        lowest[c] = value_of(first, fp16);
        kvc_put16(o->parameter + 2 * c, step);
        kvc_put16(o->parameter + 2 * (width + c), first);
    }
    return 0;
}
KVC_INLINE uint32_t code4(float scaled, int clip) {
    const int32_t x = nearest(scaled);
    return (uint32_t)(!clip ? x : x < 0 ? 0 : x > 15 ? 15 : x);
}
KVC_INLINE ux fx_code4(fx scaled, int clip) {
    const ux x = fx_nearest(scaled), most = x * 0 + 15;
    if (!clip) return x;
    const ux above = x & ~(ux)((ix)x >> 31);
    return fx_where((ux)((ix)above > 15), most, above);
}
// `clip`: where the lowest value is not that of an element.
KVC_INLINE void tile_codes4(const quant_tile *b, int fp16, size_t width, quant_out *o, const float *k, const float *lowest, int clip) {
    const size_t half = (b->rows + 1) / 2, both = b->rows / 2;
    quant_row at = tile_row(b, 0), at2 = tile_row(b, both ? half : 0);
    for (size_t r = 0; r < half; r++, next_row(&at), next_row(&at2)) {
        uint8_t *q = o->code + r * width;
        const uint32_t second = r < both ? 15 : 0; // of an odd block the last row has no partner, and takes itself
        const uint8_t *p = at.p, *p2 = second ? at2.p : at.p;
        size_t c = 0;
        for (; c + LANES <= b->cols; c += LANES) {
            const fx l = load_floats(lowest + c), m = load_floats(k + c);
            const ux x = fx_code4((load_values(p + 2 * c, fp16) - l) * m, clip);
            const ux y = fx_code4((load_values(p2 + 2 * c, fp16) - l) * m, clip);
            store_bytes(q + c, x | (y & second) << 4);
        }
        for (; c < b->cols; c++) {
            const uint32_t x = code4((value_of(kvc_u16(p + 2 * c), fp16) - lowest[c]) * k[c], clip);
            const uint32_t y = code4((value_of(kvc_u16(p2 + 2 * c), fp16) - lowest[c]) * k[c], clip);
            q[c] = (uint8_t)(x | (y & second) << 4);
        }
    }
    tile_blank(b, half, width, o);
}
KVC_INLINE int tile_encode4(const quant_tile *b, int fp16, size_t width, quant_out *o) {
    float k[TILE], lowest[TILE];
    if (tile_measure(b, INT4, fp16, width, o, k, lowest)) return KVC_SPACE;
    if (b->row) tile_codes4(b, fp16, width, o, k, lowest, 0);
    else tile_codes4(b, fp16, width, o, k, lowest, 1);
    return 0;
}
KVC_INLINE void tile_steps(const quant_tile *b, int fp16, size_t width, const quant_out *o, float *step, float *lowest) {
    for (size_t c = 0; c < b->cols; c++) {
        step[c] = bf16_value(kvc_u16(o->parameter + 2 * c));
        lowest[c] = value_of(kvc_u16(o->parameter + 2 * (width + c)), fp16);
    }
}
KVC_INLINE int tile_decode4(const quant_tile *b, int fp16, size_t width, quant_out *o) {
    float step[TILE], lowest[TILE];
    tile_steps(b, fp16, width, o, step, lowest);
    const size_t half = (b->rows + 1) / 2;
    quant_row at = tile_row(b, 0);
    for (size_t r = 0; r < b->rows; r++, next_row(&at)) {
        const uint8_t *q = o->code + (r < half ? r : r - half) * width;
        const uint8_t shift = r < half ? 0 : 4;
        size_t c = 0;
        for (; c + LANES <= b->cols; c += LANES) {
            const fx x = shift ? fx_upper(q + c) : fx_lower(q + c);
            store_values(at.p + 2 * c, x * load_floats(step + c) + load_floats(lowest + c), fp16);
        }
        for (; c < b->cols; c++)
            kvc_put16(at.p + 2 * c, of_value((float)(q[c] >> shift & 15) * step[c] + lowest[c], fp16));
    }
    return tile_restore(b, o->parameter, o);
}

// A byte a value over the range of a column.
KVC_INLINE int range_encode(const quant_tile *b, int fp16, size_t width, quant_out *o) {
    float k[TILE], lowest[TILE];
    if (tile_measure(b, INT8_RANGE, fp16, width, o, k, lowest)) return KVC_SPACE;
    quant_row at = tile_row(b, 0);
    for (size_t r = 0; r < b->rows; r++, next_row(&at)) {
        uint8_t *q = o->code + r * width;
        size_t c = 0;
        for (; c + LANES <= b->cols; c += LANES)
            store_bytes(q + c, fx_nearest((load_values(at.p + 2 * c, fp16) - load_floats(lowest + c)) * load_floats(k + c)));
        for (; c < b->cols; c++) q[c] = (uint8_t)nearest((value_of(kvc_u16(at.p + 2 * c), fp16) - lowest[c]) * k[c]);
    }
    tile_blank(b, b->rows, width, o);
    return 0;
}
KVC_INLINE int range_decode(const quant_tile *b, int fp16, size_t width, quant_out *o) {
    float step[TILE], lowest[TILE];
    tile_steps(b, fp16, width, o, step, lowest);
    quant_row at = tile_row(b, 0);
    for (size_t r = 0; r < b->rows; r++, next_row(&at)) {
        const uint8_t *q = o->code + r * width;
        size_t c = 0;
        for (; c + LANES <= b->cols; c += LANES)
            store_values(at.p + 2 * c, fx_byte(q + c) * load_floats(step + c) + load_floats(lowest + c), fp16);
        for (; c < b->cols; c++) kvc_put16(at.p + 2 * c, of_value((float)q[c] * step[c] + lowest[c], fp16));
    }
    return tile_restore(b, o->parameter, o);
}

KVC_INLINE int channel_run(const kvc_tensor *t, int kind, int fp16, size_t group, quant_out *o, int encode) {
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
            else if (kind == INT8_RANGE) failed = encode ? range_encode(&b, fp16, width, &at) : range_decode(&b, fp16, width, &at);
            else failed = encode ? tile_encode8(&b, kind, fp16, width, &at) : tile_decode8(&b, kind, fp16, width, &at);
            if (failed) return failed;
            o->kept = at.kept;
            o->count = at.count;
        }
        o->parameter += width * (has_lowest(kind) ? 4 : 2);
        o->code += width * (kind == INT4 ? (len + 1) / 2 : len);
    }
    return 0;
}

#endif
