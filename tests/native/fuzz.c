// Coverage-guided fuzzing of the decoders (libFuzzer): the first bytes choose codec and shape, the rest is what is decoded.
// What encodes again from the result must decode to the same.
#include "kvc.h"

#include <stdlib.h>

int64_t kvc_encode(const kvc_piece *, size_t, const uint8_t *, size_t, size_t, uint8_t *, size_t);
int64_t kvc_decode(const kvc_piece *, size_t, uint8_t *, size_t, size_t, const uint8_t *, size_t);

#include "frames.h"

size_t kvc_encode_frames(kvc_frame *, size_t, int);
size_t kvc_decode_frames(kvc_frame *, size_t, int);

static const struct { int operation, first, second; } kinds[] = {
    {KVC_EBP, 0, 0}, {KVC_EBP, 3, 0}, {KVC_SPLIT, 0, 0}, {KVC_QUANT, 8, KVC_TOKEN}, {KVC_QUANT, 8, KVC_CHANNEL},
    {KVC_QUANT, 4, KVC_TOKEN}, {KVC_QUANT, 4, KVC_CHANNEL}, {KVC_QUANT, 1, KVC_TOKEN}, {KVC_QUANT, 1, KVC_CHANNEL},
    {KVC_QUANT, 2, KVC_TOKEN}, {KVC_QUANT, 9, KVC_CHANNEL}, {KVC_KEEP, 0, 0},
};

// Two frames in a row: as they are found, and as they are written.
static void in_a_row(const kvc_piece *piece, size_t count, size_t stride, const uint8_t *src, size_t nbytes, uint8_t *dst, int odd) {
    uint8_t header[64] = {'K', 'V', 'c', 1};
    kvc_put64(header + 16, count * stride);
    const size_t room = count * stride + 16, whole = 2 * frame_aligned(64 + room);
    const kvc_form form = {piece, 1, count, stride, header, 64, room};
    uint8_t *found = malloc(64 + nbytes), *made = malloc(whole), *back = malloc(count * stride + 1);
    memcpy(found, header, 64);
    memcpy(found + 64, src, nbytes);
    kvc_put64(found + FRAME_BODY, odd & 1 ? ~(uint64_t)63 : nbytes - (odd & 4 && nbytes > 99 ? 99 : 0));
    found[FRAME_FLAGS] = odd & 2;
    kvc_frame read[2] = {{&form, back, found, 64 + nbytes, 0, 0}, {&form, back, 0, 0, 0, 0}};
    kvc_decode_frames(read, 2, !(odd & 8));
    kvc_frame written[2] = {{&form, dst, made, whole, 0, 0}, {&form, dst, 0, 0, 0, 0}};
    if (kvc_encode_frames(written, 2, 1) != 2) abort();
    kvc_frame again[2] = {{&form, back, made, whole, 0, 0}, {&form, back, 0, 0, 0, 0}};
    if (kvc_decode_frames(again, 2, 1) != 2 || again[1].nbytes != written[1].nbytes) abort();
    free(found);
    free(made);
    free(back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 6) return 0;
    const size_t rows = data[1] % 40, heads = 1 + data[2] % 3, last = 1 + data[3] % 80, count = 1 + data[4] % 4;
    const int kind = data[0] % (int)(sizeof kinds / sizeof *kinds);
    kvc_piece piece = {0, 2 * rows * heads * last, rows, heads * last, last, 1 + data[5] % 127, data[5] >> 7,
                       kinds[kind].operation, kinds[kind].first, kinds[kind].second};
    const size_t stride = piece.nbytes + data[4] % 64, nbytes = size - 6, room = 8 + count * piece.nbytes;
    uint8_t *src = malloc(nbytes ? nbytes : 1), *dst = calloc(1, count * stride + 1);
    uint8_t *again = malloc(room), *back = calloc(1, count * stride + 1);
    memcpy(src, data + 6, nbytes);
    if (kvc_decode(&piece, 1, dst, count, stride, src, nbytes) < 0 && stride) // else: any bytes are elements
        for (size_t i = 0; i < count * stride; i++) dst[i] = nbytes ? src[i % nbytes] : 0;
    const int64_t used = kvc_encode(&piece, 1, dst, count, stride, again, room);
    if (used < 0 || kvc_decode(&piece, 1, back, count, stride, again, (size_t)used) != used) abort();
    if (piece.operation != KVC_QUANT)
        for (size_t i = 0; i < count; i++)
            if (memcmp(dst + i * stride, back + i * stride, piece.nbytes)) abort();
    if (stride) in_a_row(&piece, count, stride, src, nbytes, dst, data[5] & 15);
    free(src);
    free(dst);
    free(again);
    free(back);
    return 0;
}
