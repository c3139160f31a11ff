// A copy past the caches: the destination is neither read first nor kept in them, which a plain memcpy of this size
// does. For bytes that nobody reads soon, as those of a block that is saved.
#ifndef KVC_COPY_H
#define KVC_COPY_H

#include "kvc.h"

#if defined(__x86_64__)
#include <emmintrin.h> // SSE2, which every x86-64 has; wider stores are no faster

// Without the fence, which comes behind the last of several. `ahead`: bytes that are fetched before they are needed, which
// pays where runs are so short that the processor does not see where reading goes on.
static inline void copy_streamed(uint8_t *dst, const uint8_t *src, size_t nbytes, size_t ahead) {
    size_t head = (size_t)(-(uintptr_t)dst & 63); // whole cache lines only
    if (head > nbytes) head = nbytes;
    memcpy(dst, src, head);
    dst += head, src += head, nbytes -= head;
    for (; nbytes >= 64; nbytes -= 64, dst += 64, src += 64) {
        if (ahead) _mm_prefetch((const char *)src + ahead, _MM_HINT_T0);
        const __m128i a = _mm_loadu_si128((const __m128i *)src);
        const __m128i b = _mm_loadu_si128((const __m128i *)(src + 16));
        const __m128i c = _mm_loadu_si128((const __m128i *)(src + 32));
        const __m128i d = _mm_loadu_si128((const __m128i *)(src + 48));
        _mm_stream_si128((__m128i *)dst, a);
        _mm_stream_si128((__m128i *)(dst + 16), b);
        _mm_stream_si128((__m128i *)(dst + 32), c);
        _mm_stream_si128((__m128i *)(dst + 48), d);
    }
    memcpy(dst, src, nbytes);
}
static void copy_fence(void) { _mm_sfence(); } // whoever is told of the bytes afterwards sees all of them
#else
static inline void copy_streamed(uint8_t *dst, const uint8_t *src, size_t nbytes, size_t ahead) {
    (void)ahead;
    memcpy(dst, src, nbytes);
}
static void copy_fence(void) {}
#endif

static void copy_past_caches(uint8_t *dst, const uint8_t *src, size_t nbytes) {
    copy_streamed(dst, src, nbytes, 0);
    copy_fence();
}

#endif
