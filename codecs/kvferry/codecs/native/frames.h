// Whole frames, many in one call: header, checks and kernels without a word of Python between them. What is unusual
// (another header than expected, damage) is left to the caller, who says what is wrong.
#ifndef KVC_FRAMES_H
#define KVC_FRAMES_H

#include "kvc.h"

enum { FRAME_FLAGS = 4, FRAME_BODY = 24, FRAME_FIXED = 32, FRAME_RAW = 2, FRAME_ALIGNMENT = 64 };

// How the frames of some slices look; mirrored in kernels.py.
typedef struct {
    const kvc_piece *pieces;
    uint64_t number, count, stride;
    const uint8_t *header; // of a frame that is encoded (not stored as it is) to a body of no bytes
    uint64_t header_nbytes, room; // `room`: of a body while it is encoded
} kvc_form;

// One frame. `frame` may be 0: it follows the one before, at a multiple of 64 bytes from its start. Mirrored in kernels.py.
typedef struct {
    const kvc_form *form;
    uint8_t *slices, *frame;
    uint64_t room;   // bytes at `frame`; decoding: exactly the frame, or in a row what is left
    uint64_t nbytes; // out: of the frame
    uint64_t flags;  // out: of the frame
} kvc_frame;

static inline uint64_t frame_aligned(uint64_t nbytes) { return (nbytes + FRAME_ALIGNMENT - 1) & ~(uint64_t)(FRAME_ALIGNMENT - 1); }

// Where frame i begins in a row, after the one before it is done; false if it cannot.
static inline int frame_follows(kvc_frame *f, size_t i) {
    if (f[i].frame) return 1;
    if (!i || frame_aligned(f[i - 1].nbytes) > f[i - 1].room) return 0;
    f[i].frame = f[i - 1].frame + frame_aligned(f[i - 1].nbytes);
    f[i].room = f[i - 1].room - frame_aligned(f[i - 1].nbytes);
    return 1;
}

static inline int frame_encode(kvc_frame *f) {
    const kvc_form *g = f->form;
    const uint64_t slices = g->count * g->stride, head = g->header_nbytes;
    if (f->room < head || f->room - head < g->room) return 0;
    int64_t body = kvc_encode(g->pieces, g->number, f->slices, g->count, g->stride, f->frame + head, g->room);
    if (body < 0) return 0;
    memcpy(f->frame, g->header, head);
    if ((uint64_t)body >= slices) {
        memcpy(f->frame + head, f->slices, slices);
        body = (int64_t)slices;
        f->frame[FRAME_FLAGS] = FRAME_RAW;
    }
    kvc_put64(f->frame + FRAME_BODY, (uint64_t)body);
    f->flags = f->frame[FRAME_FLAGS];
    f->nbytes = head + (uint64_t)body;
    return 1;
}

static inline int frame_decode(kvc_frame *f, int in_row, int past) {
    const kvc_form *g = f->form;
    const uint64_t slices = g->count * g->stride, head = g->header_nbytes;
    if (f->room < head) return 0;
    const uint8_t *p = f->frame, flags = p[FRAME_FLAGS];
    const uint64_t body = kvc_u64(p + FRAME_BODY);
    if (in_row ? body > f->room - head : body != f->room - head) return 0;
    if (memcmp(p, g->header, FRAME_FLAGS) || memcmp(p + FRAME_FLAGS + 1, g->header + FRAME_FLAGS + 1, FRAME_BODY - FRAME_FLAGS - 1) ||
        memcmp(p + FRAME_FIXED, g->header + FRAME_FIXED, head - FRAME_FIXED))
        return 0;
    if (flags == FRAME_RAW) {
        if (body != slices) return 0;
        memcpy(f->slices, p + head, slices);
    } else if (flags != g->header[FRAME_FLAGS] || decode_pieces(g->pieces, g->number, f->slices, g->count, g->stride, p + head, body, past) < 0)
        return 0;
    f->flags = flags;
    f->nbytes = head + body;
    return 1;
}

// Both return how many frames were done, from the first on; the next one was not, for whatever reason.
static inline size_t frames_encode(kvc_frame *f, size_t count, int in_row) {
    for (size_t i = 0; i < count; i++) {
        if (!frame_follows(f, i) || !frame_encode(&f[i])) return i;
        const uint64_t end = frame_aligned(f[i].nbytes);
        if (in_row && end > f[i].room) return i;
        if (in_row) memset(f[i].frame + f[i].nbytes, 0, end - f[i].nbytes);
    }
    return count;
}
static inline size_t frames_decode(kvc_frame *f, size_t count, int in_row) {
    size_t nbytes = 0, i = 0;
    for (; i < count; i++) nbytes += f[i].form->count * f[i].form->stride;
    const int past = decodes_past(nbytes);
    for (i = 0; i < count; i++)
        if (!frame_follows(f, i) || !frame_decode(&f[i], in_row, past)) break;
    copy_fence();
    return i;
}

#endif
