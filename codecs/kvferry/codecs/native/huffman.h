// Canonical Huffman codes of at most HUFF_BITS bits over bytes. In a stream codes stand with their first bit lowest.
#ifndef KVC_HUFFMAN_H
#define KVC_HUFFMAN_H

#include "simd.h"

enum { HUFF_BITS = 10, HUFF_TABLE = 1 << HUFF_BITS };

static inline uint32_t reversed(uint32_t code, int length) {
    uint32_t r = 0;
    for (int i = 0; i < length; i++) r |= (code >> i & 1) << (length - 1 - i);
    return r;
}

// Canonical codes from lengths, first bit lowest. 0 if the lengths are no complete prefix code.
static int huff_codes(const uint8_t length[256], uint16_t code[256]) {
    uint32_t count[HUFF_BITS + 2] = {0}, next[HUFF_BITS + 2], at = 0, left = 0;
    for (int s = 0; s < 256; s++) {
        if (length[s] > HUFF_BITS) return 0;
        count[length[s]]++;
    }
    count[0] = 0;
    for (int b = 1; b <= HUFF_BITS; b++) {
        at = (at + count[b - 1]) << 1;
        next[b] = at;
        left += count[b] << (HUFF_BITS - b);
    }
    if (left != HUFF_TABLE) return 0;
    for (int s = 0; s < 256; s++) if (length[s]) code[s] = (uint16_t)reversed(next[length[s]]++, length[s]);
    return 1;
}

// Code lengths for the counts: Huffman's, then those that are too long cut and the sum of Kraft mended.
static void huff_lengths(const uint32_t counts[256], uint8_t length[256]) {
    struct { uint64_t weight; int symbol; } leaf[256];
    int n = 0;
    memset(length, 0, 256);
    for (int s = 0; s < 256; s++) if (counts[s]) {
        int i = n++;
        for (; i > 0 && leaf[i - 1].weight > counts[s]; i--) leaf[i] = leaf[i - 1];
        leaf[i].weight = counts[s];
        leaf[i].symbol = s;
    }
    if (n == 0) return;
    if (n == 1) { // two codes of one bit, one of them unused: a complete code
        length[leaf[0].symbol] = 1;
        length[(leaf[0].symbol + 1) & 255] = 1;
        return;
    }
    uint64_t weight[512];
    int parent[512], next_leaf = 0, next_node = n;
    for (int i = 0; i < n; i++) weight[i] = leaf[i].weight;
    for (int made = n; made < 2 * n - 1; made++) {
        weight[made] = 0;
        for (int k = 0; k < 2; k++) {
            const int take_leaf = next_leaf < n && (next_node >= made || weight[next_leaf] <= weight[next_node]);
            const int child = take_leaf ? next_leaf++ : next_node++;
            weight[made] += weight[child];
            parent[child] = made;
        }
    }
    uint8_t depth[512];
    depth[2 * n - 2] = 0;
    uint32_t kraft = 0;
    for (int i = 2 * n - 3; i >= 0; i--) {
        depth[i] = (uint8_t)(depth[parent[i]] + 1);
        if (i < n) {
            if (depth[i] > HUFF_BITS) depth[i] = HUFF_BITS;
            kraft += 1u << (HUFF_BITS - depth[i]);
        }
    }
    for (int i = 0; kraft > HUFF_TABLE; i = (i + 1) % n) // lengthen the rarest that can be
        if (depth[i] < HUFF_BITS) { kraft -= 1u << (HUFF_BITS - depth[i] - 1); depth[i]++; }
    for (int i = n - 1; i >= 0; i--) // shorten the commonest that can be
        while (depth[i] > 1 && kraft + (1u << (HUFF_BITS - depth[i])) <= HUFF_TABLE) {
            kraft += 1u << (HUFF_BITS - depth[i]);
            depth[i]--;
        }
    for (int i = 0; i < n; i++) length[leaf[i].symbol] = depth[i];
}

// ---- encoding: two symbols at a time. Entry of a pair (second symbol in the upper byte) = joined code in the lower 20 bits,
// joined length above. Only pairs of symbols that have a code have an entry; the rest of the table is not touched.
enum { HUFF_PAIRS = 1 << 16, HUFF_PAIR_BITS = 2 * HUFF_BITS };

typedef struct {
    uint8_t length[256];
    uint16_t code[256];
    uint32_t pairs[HUFF_PAIRS];
    int wide, from; // whether huff_wide takes them, which then needs no pairs
    uint8_t wide_length[64], wide_low[64], wide_high[64];
} huff_encoder;

static void huff_pairs(huff_encoder *h) {
    uint8_t used[256];
    int n = 0;
    for (int s = 0; s < 256; s++) if (h->length[s]) used[n++] = (uint8_t)s;
    for (int j = 0; j < n; j++) {
        const uint32_t b = used[j], high = (uint32_t)h->length[b] << HUFF_PAIR_BITS;
        for (int i = 0; i < n; i++) {
            const uint32_t a = used[i], length = h->length[a];
            h->pairs[b << 8 | a] = (h->code[a] | (uint32_t)h->code[b] << length) | (high + (length << HUFF_PAIR_BITS));
        }
    }
}

typedef struct { uint64_t bits; uint32_t held; uint8_t *at; } huff_writer;

// `length` bits, at most 56 of them; eight bytes are touched.
static inline __attribute__((always_inline)) void huff_put(huff_writer *w, uint64_t bits, uint32_t length) {
    w->bits |= bits << w->held;
    w->held += length;
    kvc_put64(w->at, w->bits);
    w->at += w->held >> 3;
    w->bits >>= w->held & 56;
    w->held &= 7;
}

// Bytes that a stream of n symbols can take, with what writing it touches beyond.
#define HUFF_MOST(n) ((n) * HUFF_BITS / 8 + 16)

#if defined(KVC_AVX512)
// Symbols within 63 of each other, and 0: codes and lengths by permutation, joined to those of eight symbols in registers.
enum { HUFF_WINDOW = 63, HUFF_PUT = 56 };

static inline __m512i huff_join(__m512i a, __m512i b, __m512i length) { return _mm512_or_si512(a, _mm512_sllv_epi64(b, length)); }

// Codes (or lengths) of 16-bit lanes joined to those of four symbols in 64-bit lanes.
static inline __attribute__((always_inline)) void huff_fours(__m512i *code, __m512i *length) {
    const __m512i half = _mm512_set1_epi32(0xffff), word = _mm512_set1_epi64(0xffffffff);
    const __m512i n0 = _mm512_and_si512(*length, half), n1 = _mm512_srli_epi32(*length, 16), n = _mm512_add_epi32(n0, n1);
    const __m512i c = _mm512_or_si512(_mm512_and_si512(*code, half), _mm512_sllv_epi32(_mm512_srli_epi32(*code, 16), n0));
    const __m512i m0 = _mm512_and_si512(n, word), m1 = _mm512_srli_epi64(n, 32);
    *code = huff_join(_mm512_and_si512(c, word), _mm512_srli_epi64(c, 32), m0);
    *length = _mm512_add_epi64(m0, m1);
}

static int huff_window(huff_encoder *h) {
    int from = 1, to = 255;
    while (from < 256 && !h->length[from]) from++;
    while (to > 0 && !h->length[to]) to--;
    if (to - from >= HUFF_WINDOW || from > 256 - HUFF_WINDOW) return 0;
    h->from = from;
    for (int k = 0; k <= HUFF_WINDOW; k++) {
        const int s = k == HUFF_WINDOW ? 0 : from + k; // that of no symbol has length 0
        h->wide_length[k] = h->length[s];
        h->wide_low[k] = (uint8_t)h->code[s];
        h->wide_high[k] = (uint8_t)(h->code[s] >> 8);
    }
    return 1;
}

// Takes groups of 64 as long as they are whole and their codes short; how many symbols those were.
static size_t huff_wide(const huff_encoder *h, const uint8_t *p, size_t n, huff_writer *writer) {
    const __m512i lengths = _mm512_loadu_si512(h->wide_length), zero = _mm512_setzero_si512();
    const __m512i lows = _mm512_loadu_si512(h->wide_low), highs = _mm512_loadu_si512(h->wide_high);
    const __m512i base = _mm512_set1_epi8((char)h->from), last = _mm512_set1_epi8(HUFF_WINDOW);
    huff_writer w = *writer;
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const __m512i k = _mm512_min_epu8(_mm512_sub_epi8(_mm512_loadu_si512(p + i), base), last);
        const __m512i l = _mm512_permutexvar_epi8(k, lengths);
        const __m512i c0 = _mm512_permutexvar_epi8(k, lows), c1 = _mm512_permutexvar_epi8(k, highs);
        __m512i a = _mm512_unpacklo_epi8(c0, c1), na = _mm512_unpacklo_epi8(l, zero);
        __m512i b = _mm512_unpackhi_epi8(c0, c1), nb = _mm512_unpackhi_epi8(l, zero);
        huff_fours(&a, &na);
        huff_fours(&b, &nb);
        const __m512i n0 = _mm512_unpacklo_epi64(na, nb), n1 = _mm512_unpackhi_epi64(na, nb), both = _mm512_add_epi64(n0, n1);
        const __m512i e = huff_join(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b), n0);
        if (_mm512_cmpgt_epi64_mask(both, _mm512_set1_epi64(HUFF_PUT))) break;
        uint64_t codes[8], bits[8];
        _mm512_storeu_si512(codes, e);
        _mm512_storeu_si512(bits, both);
        for (int j = 0; j < 8; j++) huff_put(&w, codes[j], (uint32_t)bits[j]);
    }
    *writer = w;
    return i;
}
#else
static int huff_window(huff_encoder *h) { (void)h; return 0; }
static size_t huff_wide(const huff_encoder *h, const uint8_t *p, size_t n, huff_writer *w) {
    (void)h, (void)p, (void)n, (void)w;
    return 0;
}
#endif

// 0 if the lengths are no complete prefix code.
static int huff_prepare(huff_encoder *h) {
    if (!huff_codes(h->length, h->code)) return 0;
    h->wide = huff_window(h);
    if (!h->wide) huff_pairs(h);
    return 1;
}

// All n symbols as one stream, which ends on a byte; its size.
static size_t huff_encode(const huff_encoder *h, const uint8_t *p, size_t n, uint8_t *out) {
    const uint32_t *pairs = h->pairs, mask = (1u << HUFF_PAIR_BITS) - 1;
    huff_writer w = {0, 0, out};
    size_t i = 0;
    while (h->wide && n - i >= 64) {
        i += huff_wide(h, p + i, n - i, &w);
        for (const size_t end = n - i < 64 ? n : i + 64; i < end; i++) huff_put(&w, h->code[p[i]], h->length[p[i]]);
    }
    for (; !h->wide && i + 4 <= n; i += 4) {
        const uint32_t a = pairs[kvc_u16(p + i)], b = pairs[kvc_u16(p + i + 2)];
        const uint32_t na = a >> HUFF_PAIR_BITS, nb = b >> HUFF_PAIR_BITS;
        huff_put(&w, (a & mask) | (uint64_t)(b & mask) << na, na + nb);
    }
    for (; i < n; i++) huff_put(&w, h->code[p[i]], h->length[p[i]]);
    return (size_t)(w.at - out) + (w.held + 7) / 8;
}

// ---- decoding: each look at the next bits finds up to four symbols. Entry: the symbols in 0-31, bits of all of them in
// 32-39, how many in 40-47, bits of the first alone in 48-55.
static int huff_table(const uint8_t length[256], uint64_t table[HUFF_TABLE]) {
    uint16_t code[256], single[HUFF_TABLE];
    uint32_t pair[HUFF_TABLE]; // the symbols in 0-15, bits of both in 16-19, of the first in 20-23, whether there are two in 24
    if (!huff_codes(length, code)) return 0;
    for (uint32_t s = 0; s < 256; s++)
        if (length[s])
            for (uint32_t i = code[s]; i < HUFF_TABLE; i += 1u << length[s]) single[i] = (uint16_t)(s | (uint32_t)length[s] << 8);
    for (uint32_t i = 0; i < HUFF_TABLE; i++) {
        const uint32_t a = single[i], na = a >> 8, b = single[i >> na], nb = b >> 8, two = na + nb <= HUFF_BITS;
        pair[i] = (a & 255) | (b & 255) << 8 | (na + (nb & -two)) << 16 | na << 20 | two << 24;
    }
    for (uint32_t i = 0; i < HUFF_TABLE; i++) {
        const uint32_t a = pair[i], na = a >> 16 & 15, b = pair[i >> na];
        const uint32_t both = b >> 16 & 15, first = b >> 20 & 15, all = na + both <= HUFF_BITS, one = na + first <= HUFF_BITS;
        const uint32_t bits = na + (first & -one) + ((both - first) & -all), found = 1 + (a >> 24) + one + (b >> 24 & all);
        table[i] = (a & 0xffff) | (uint64_t)(b & 0xffff) << 16 | (uint64_t)(bits | found << 8 | (a >> 20 & 15) << 16) << 32;
    }
    return 1;
}

typedef struct { uint64_t at, limit; uint8_t *out, *end; } huff_reader; // at, limit: bits from the start of all streams

static inline __attribute__((always_inline)) uint64_t huff_bits(const uint8_t *src, uint64_t at) {
    return kvc_u64(src + (at >> 3)) >> (at & 7);
}

enum { HUFF_LOOKS = 5, HUFF_MORE = 4 * HUFF_LOOKS }; // looks at 57 bits, and the most symbols that they find

static inline __attribute__((always_inline)) int huff_done(const huff_reader *r) { return r->end - r->out < HUFF_MORE; }

// The sums of bits and symbols of the looks so far stand in t, one byte each.
#define HUFF_LOOK(r, b, t) { \
    const uint64_t e = table[(b) & (HUFF_TABLE - 1)]; \
    kvc_put32((r).out + (uint8_t)((t) >> 8), (uint32_t)e); \
    (t) += (uint32_t)(e >> 32); \
    (b) >>= (e >> 32) & 63; \
}
#define HUFF_ADVANCE(r, t) (r).at += (uint8_t)(t), (r).out += (uint8_t)((t) >> 8)

// What is left of one stream.
static int huff_finish(huff_reader *r, const uint8_t *src, const uint64_t *table) {
    while (!huff_done(r) && r->at <= r->limit) {
        uint64_t b = huff_bits(src, r->at);
        uint32_t t = 0;
        for (int k = 0; k < HUFF_LOOKS; k++) HUFF_LOOK(*r, b, t)
        HUFF_ADVANCE(*r, t);
    }
    while (r->out < r->end) {
        if (r->at > r->limit) return KVC_CORRUPT;
        const uint64_t e = table[huff_bits(src, r->at) & (HUFF_TABLE - 1)];
        *r->out++ = (uint8_t)e;
        r->at += e >> 48;
    }
    return (r->at + 7) / 8 * 8 == r->limit ? 0 : KVC_CORRUPT;
}

// Four streams side by side, since each symbol waits for the one before it in its own stream. Meanwhile what is read
// (`near`, a byte a symbol) and written (`to`, two) afterwards is fetched.
static int huff_decode4(
    huff_reader reader[4], const uint8_t *src, const uint64_t *table, const uint8_t *near, const uint8_t *to) {
    huff_reader r0 = reader[0], r1 = reader[1], r2 = reader[2], r3 = reader[3];
    size_t fetched = 0;
    while (!(huff_done(&r0) | huff_done(&r1) | huff_done(&r2) | huff_done(&r3))) {
        if ((r0.at > r0.limit) | (r1.at > r1.limit) | (r2.at > r2.limit) | (r3.at > r3.limit)) return KVC_CORRUPT;
        __builtin_prefetch(near + fetched, 0, 2);
        __builtin_prefetch(to + 2 * fetched, 1, 2);
        __builtin_prefetch(to + 2 * fetched + 64, 1, 2);
        fetched += 64;
        uint64_t b0 = huff_bits(src, r0.at), b1 = huff_bits(src, r1.at), b2 = huff_bits(src, r2.at), b3 = huff_bits(src, r3.at);
        uint32_t t0 = 0, t1 = 0, t2 = 0, t3 = 0;
        for (int k = 0; k < HUFF_LOOKS; k++) {
            HUFF_LOOK(r0, b0, t0)
            HUFF_LOOK(r1, b1, t1)
            HUFF_LOOK(r2, b2, t2)
            HUFF_LOOK(r3, b3, t3)
        }
        HUFF_ADVANCE(r0, t0);
        HUFF_ADVANCE(r1, t1);
        HUFF_ADVANCE(r2, t2);
        HUFF_ADVANCE(r3, t3);
    }
    reader[0] = r0; reader[1] = r1; reader[2] = r2; reader[3] = r3;
    for (int k = 0; k < 4; k++) if (huff_finish(&reader[k], src, table)) return KVC_CORRUPT;
    return 0;
}

#endif
