// Runs the kernels on requests from standard input: for builds that Python cannot load, as those for another processor
// or with sanitizers. Every buffer is exactly as large as it says, so that a sanitizer sees each byte beyond.
//
// Request: u32 operation (0 encode, 1 decode), u32 pieces, u64 count, stride, capacity, bytes; the pieces; the bytes.
// Answer: i64 result; encode: that many bytes; decode: count * stride bytes, which began as 0xa5.
#include "kvc.h"

#include <stdio.h>
#include <stdlib.h>

int64_t kvc_encode(const kvc_piece *, size_t, const uint8_t *, size_t, size_t, uint8_t *, size_t);
int64_t kvc_decode(const kvc_piece *, size_t, uint8_t *, size_t, size_t, const uint8_t *, size_t);
const char *kvc_instructions(void);

static int take(void *to, size_t nbytes) { return fread(to, 1, nbytes, stdin) == nbytes; }
static void *exactly(size_t nbytes) {
    void *p = malloc(nbytes ? nbytes : 1);
    if (!p) abort();
    return p;
}

int main(void) {
    struct { uint32_t operation, pieces; uint64_t count, stride, capacity, nbytes; } r;
    fprintf(stderr, "%s\n", kvc_instructions());
    while (take(&r, sizeof r)) {
        kvc_piece *pieces = exactly(r.pieces * sizeof *pieces);
        uint8_t *src = exactly(r.nbytes);
        if (!take(pieces, r.pieces * sizeof *pieces) || !take(src, r.nbytes)) return 1;
        const size_t room = r.operation ? r.count * r.stride : r.capacity;
        uint8_t *dst = exactly(room);
        memset(dst, 0xa5, room);
        const int64_t result = r.operation ? kvc_decode(pieces, r.pieces, dst, r.count, r.stride, src, r.nbytes)
                                           : kvc_encode(pieces, r.pieces, src, r.count, r.stride, dst, r.capacity);
        fwrite(&result, 1, sizeof result, stdout);
        fwrite(dst, 1, r.operation ? room : result > 0 ? (size_t)result : 0, stdout);
        free(pieces);
        free(src);
        free(dst);
    }
    return 0;
}
