// What the library exports, and the choice of the instruction set at the first call.
#include "copy.h"
#include "kvc.h"

#include <stdlib.h>

#define KVC_EXPORT __attribute__((visibility("default")))

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the formats are little-endian");

extern const kvc_kernels kvc_portable;
#if defined(__x86_64__)
extern const kvc_kernels kvc_avx2;
#elif defined(__aarch64__)
extern const kvc_kernels kvc_neon;
#endif

static const kvc_kernels *chosen(void) {
    // reading the same answer twice does no harm, so no lock
    static const kvc_kernels *found;
    if (found) return found;
    const kvc_kernels *k = &kvc_portable;
    const char *wanted = getenv("KVFERRY_NATIVE_ISA"); // "portable" for tests
    if (!wanted || strcmp(wanted, "portable")) {
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma") &&
            __builtin_cpu_supports("f16c"))
            k = &kvc_avx2;
#elif defined(__aarch64__)
        k = &kvc_neon;
#endif
    }
    found = k;
    return k;
}

KVC_EXPORT int kvc_abi(void) { return KVC_ABI; }
KVC_EXPORT const char *kvc_instructions(void) { return chosen()->name; }

#define KVC_TENSOR ((kvc_tensor){data, count, stride, rows, cols, dtype})
#define KVC_WHAT const uint8_t *data, size_t count, size_t stride, size_t rows, size_t cols, int dtype

KVC_EXPORT int64_t kvc_ebp_encode(KVC_WHAT, int bits, uint8_t *dst, size_t capacity) {
    return chosen()->ebp_encode(&KVC_TENSOR, bits, dst, capacity);
}
KVC_EXPORT int64_t kvc_ebp_decode(KVC_WHAT, const uint8_t *src, size_t nbytes) {
    return chosen()->ebp_decode(&KVC_TENSOR, src, nbytes);
}
KVC_EXPORT int64_t kvc_split_encode(KVC_WHAT, uint8_t *dst, size_t capacity) {
    return chosen()->split_encode(&KVC_TENSOR, dst, capacity);
}
KVC_EXPORT int64_t kvc_split_decode(KVC_WHAT, const uint8_t *src, size_t nbytes) {
    return chosen()->split_decode(&KVC_TENSOR, src, nbytes);
}
KVC_EXPORT int64_t kvc_quant_encode(
    KVC_WHAT, int kind, int axis, size_t last, size_t group, uint8_t *dst, size_t capacity) {
    return chosen()->quant_encode(&KVC_TENSOR, kind, axis, last, group, dst, capacity);
}
KVC_EXPORT int64_t kvc_quant_decode(KVC_WHAT, int kind, size_t last, const uint8_t *src, size_t nbytes) {
    return chosen()->quant_decode(&KVC_TENSOR, kind, last, src, nbytes);
}
// dst and src do not overlap
KVC_EXPORT void kvc_copy(uint8_t *dst, const uint8_t *src, size_t nbytes) { copy_past_caches(dst, src, nbytes); }
