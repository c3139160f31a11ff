// The native kernels of kvferry's codecs: what every translation unit shares.
//
// A kernel works on one tensor of `count` layer slices: slice i has the tensor's `rows` x `cols` elements of two
// bytes (bfloat16 or float16, little-endian) at data + i * stride. It writes or reads one section of an encoded
// frame; docs/codecs.md describes the sections. No pointer needs an alignment. Every function returns the size of
// the section, or a negative number: KVC_CORRUPT, KVC_SPACE. Nothing outside [dst, dst + capacity) is touched.
//
// The exported functions take a whole layer at once: a list of pieces, each a tensor or bytes that are kept.
#ifndef KVC_H
#define KVC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KVC_ABI 11
#define KVC_CORRUPT (-1)
#define KVC_SPACE (-2)
#define KVC_OTHER (-3) // a section that the code without native kernels wrote, and only it reads
#define KVC_SECTION 8 // bytes of a section's header: mode u8, parameter u8, u16, number u32

enum { KVC_BF16 = 0, KVC_FP16 = 1 };
enum { KVC_TOKEN = 1, KVC_CHANNEL = 2 };
enum { KVC_KEEP = 0, KVC_EBP = 1, KVC_SPLIT = 2, KVC_QUANT = 3 };

// One part of a layer slice and what to do with it; mirrored in kernels.py.
typedef struct {
    uint64_t offset, nbytes, rows, cols, last, group; // bytes inside the slice; the others count elements
    int32_t dtype, operation, first, second;          // EBP: bits; QUANT: kind, axis
} kvc_piece;

typedef struct {
    const uint8_t *data; // of the first slice; cast away const where it is the destination
    size_t count, stride, rows, cols;
    int dtype;
    int past; // of a destination: elements may be written past the caches, and the caller fences
} kvc_tensor;

// Sums of squares: of the difference, of the elements, and of these without what sticks out; the largest difference.
// Mirrored in kernels.py.
typedef struct { double square, whole, capped, largest; } kvc_error;

typedef struct {
    const char *name;
    int64_t (*ebp_encode)(const kvc_tensor *, int bits, uint8_t *dst, size_t capacity);
    int64_t (*ebp_decode)(const kvc_tensor *, const uint8_t *src, size_t nbytes);
    int64_t (*split_encode)(const kvc_tensor *, uint8_t *dst, size_t capacity);
    int64_t (*split_decode)(const kvc_tensor *, const uint8_t *src, size_t nbytes);
    int64_t (*quant_encode)(const kvc_tensor *, int kind, int axis, size_t last, size_t group, uint8_t *dst, size_t capacity);
    int64_t (*quant_decode)(const kvc_tensor *, int kind, size_t last, const uint8_t *src, size_t nbytes);
    void (*hash_stripes)(uint64_t sums[8], const uint8_t *data, size_t count, size_t *at);
    void (*slices_error)(const kvc_tensor *, const uint8_t *after, size_t step, float *work, kvc_error *);
} kvc_kernels;

static inline uint16_t kvc_u16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static inline uint32_t kvc_u32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline uint64_t kvc_u64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static inline void kvc_put16(uint8_t *p, uint16_t v) { memcpy(p, &v, 2); }
static inline void kvc_put32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }
static inline void kvc_put64(uint8_t *p, uint64_t v) { memcpy(p, &v, 8); }

static inline size_t kvc_elements(const kvc_tensor *t) { return t->rows * t->cols; }
static inline const uint8_t *kvc_slice(const kvc_tensor *t, size_t i) { return t->data + i * t->stride; }
// row r of all slices together
static inline const uint8_t *kvc_row(const kvc_tensor *t, size_t r) {
    return kvc_slice(t, r / t->rows) + (r % t->rows) * t->cols * 2;
}
static inline void kvc_header(uint8_t *d, uint8_t mode, uint8_t parameter, uint16_t small, uint32_t number) {
    d[0] = mode; d[1] = parameter; kvc_put16(d + 2, small); kvc_put32(d + 4, number);
}

// A section that holds the elements as they are (mode 0).
static inline int64_t kvc_store_raw(const kvc_tensor *t, uint8_t *dst, size_t capacity) {
    const size_t n = kvc_elements(t) * 2;
    if (capacity < KVC_SECTION + n * t->count) return KVC_SPACE;
    kvc_header(dst, 0, 0, 0, 0);
    for (size_t i = 0; i < t->count; i++) memcpy(dst + KVC_SECTION + i * n, kvc_slice(t, i), n);
    return (int64_t)(KVC_SECTION + n * t->count);
}
static inline int64_t kvc_load_raw(const kvc_tensor *t, const uint8_t *src, size_t nbytes) {
    const size_t n = kvc_elements(t) * 2;
    if (nbytes < KVC_SECTION + n * t->count) return KVC_CORRUPT;
    for (size_t i = 0; i < t->count; i++)
        memcpy((uint8_t *)kvc_slice(t, i), src + KVC_SECTION + i * n, n);
    return (int64_t)(KVC_SECTION + n * t->count);
}

#endif
