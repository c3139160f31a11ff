// Split planes: the low byte of each element (mantissa and sign) as it is, the high byte (exponent) by a canonical
// Huffman code of at most 11 bits, in four streams or a multiple of them, each an equal part of the elements.
//
// Section: header (mode 1, u16 = streams, number = bytes of all streams) | code length of each of 256 symbols, four
// bits each: 128 bytes | low bytes[count * n] | bytes of each stream, u32 | streams | 8 zeros.
// In a stream codes stand with their first bit lowest; a stream ends on a byte. Mode 2, which only the code
// without native kernels writes, has zstd in place of the streams; mode 0 is raw.
#include "simd.h"

enum { HUFF_BITS = 11, HUFF_TABLE = 1 << HUFF_BITS, HUFF_LENGTHS = 128, HUFF_STREAM = 1 << 14, HUFF_PAD = 8 };

static inline size_t split_streams(size_t elements) {
    const size_t want = (elements + HUFF_STREAM - 1) / HUFF_STREAM;
    const size_t four = (want + 3) / 4 * 4;
    return four < 4 ? 4 : four;
}
// Elements of each stream but the last ones.
static inline size_t split_part(size_t total, size_t streams) { return (total + streams - 1) / streams; }

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

// The planes of the elements [from, from + n) of all slices together; `lo` is that of the whole tensor.
static void split_range(const kvc_tensor *t, size_t from, size_t n, uint8_t *hi, uint8_t *lo) {
    const size_t elements = kvc_elements(t);
    size_t done = 0;
    while (done < n) {
        const size_t slice = (from + done) / elements, at = (from + done) % elements;
        const size_t take = n - done < elements - at ? n - done : elements - at;
        const uint8_t *q = kvc_slice(t, slice) + 2 * at;
        uint8_t *h = hi + done, *l = lo + from + done;
        size_t i = 0;
        for (; i + 32 <= take; i += 32) {
            v32 x, y;
            v_split(q + 2 * i, &x, &y);
            v_store(h + i, x);
            v_store(l + i, y);
        }
        for (; i < take; i++) {
            const uint16_t v = kvc_u16(q + 2 * i);
            h[i] = (uint8_t)(v >> 7);
            l[i] = (uint8_t)(v << 1 | v >> 15);
        }
        done += take;
    }
}

static void merge_range(const kvc_tensor *t, size_t from, size_t n, const uint8_t *hi, const uint8_t *lo) {
    const size_t elements = kvc_elements(t);
    size_t done = 0;
    while (done < n) {
        const size_t slice = (from + done) / elements, at = (from + done) % elements;
        const size_t take = n - done < elements - at ? n - done : elements - at;
        uint8_t *d = (uint8_t *)kvc_slice(t, slice) + 2 * at;
        const uint8_t *h = hi + done, *l = lo + from + done;
        size_t i = 0;
        for (; i + 32 <= take; i += 32) v_merge(v_load(h + i), v_load(l + i), d + 2 * i);
        for (; i < take; i++) kvc_put16(d + 2 * i, (uint16_t)((l[i] & 1) << 15 | h[i] << 7 | l[i] >> 1));
        done += take;
    }
}

static void histogram(const uint8_t *p, size_t n, uint32_t part[8][256]) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) // eight tables, so that equal neighbours do not wait for each other
        for (int k = 0; k < 8; k++) part[k][p[i + k]]++;
    for (; i < n; i++) part[0][p[i]]++;
}

// Encoding takes two symbols at a time: entry of a pair (second symbol in the upper byte) = joined code in the lower
// 22 bits, joined length above. Only pairs of symbols that occur have an entry; the rest of the table is not touched.
enum { HUFF_PAIRS = 1 << 16, HUFF_PAIR_BITS = 2 * HUFF_BITS };

static void huff_pairs(const uint8_t length[256], const uint16_t code[256], uint32_t *pairs) {
    uint8_t used[256];
    int n = 0;
    for (int s = 0; s < 256; s++) if (length[s]) used[n++] = (uint8_t)s;
    for (int j = 0; j < n; j++) {
        const uint32_t b = used[j], high = (uint32_t)length[b] << HUFF_PAIR_BITS;
        for (int i = 0; i < n; i++) {
            const uint32_t a = used[i];
            pairs[b << 8 | a] = (code[a] | (uint32_t)code[b] << length[a]) | (high + ((uint32_t)length[a] << HUFF_PAIR_BITS));
        }
    }
}

typedef struct { uint64_t bits; uint32_t held; uint8_t *at; } huff_writer;

static inline __attribute__((always_inline)) void huff_put2(huff_writer *w, const uint32_t *pairs, const uint8_t *p) {
    const uint32_t e = pairs[kvc_u16(p)];
    w->bits |= (uint64_t)(e & ((1u << HUFF_PAIR_BITS) - 1)) << w->held;
    w->held += e >> HUFF_PAIR_BITS;
}
static inline __attribute__((always_inline)) void huff_flush(huff_writer *w) {
    kvc_put64(w->at, w->bits);
    w->at += w->held >> 3;
    w->bits >>= w->held & 56;
    w->held &= 7;
}

// Bytes that a stream of n symbols can take, with what writing it touches beyond.
#define HUFF_MOST(n) ((n) * HUFF_BITS / 8 + 16)

static inline size_t huff_end(
    huff_writer *w, const uint8_t *p, size_t i, size_t n, const uint8_t *length, const uint16_t *code, const uint8_t *out) {
    for (; i < n; i++) {
        w->bits |= (uint64_t)code[p[i]] << w->held;
        w->held += length[p[i]];
        huff_flush(w);
    }
    return (size_t)(w->at - out) + (w->held + 7) / 8;
}

// Two streams side by side, since each symbol of one waits for the one before it. Returns how many symbols of each
// were taken, a multiple of four.
static size_t huff_streams2(huff_writer *w0, const uint8_t *p0, huff_writer *w1, const uint8_t *p1, size_t n, const uint32_t *pairs) {
    huff_writer a = *w0, b = *w1;
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        huff_put2(&a, pairs, p0 + i);
        huff_put2(&b, pairs, p1 + i);
        huff_put2(&a, pairs, p0 + i + 2);
        huff_put2(&b, pairs, p1 + i + 2);
        huff_flush(&a);
        huff_flush(&b);
    }
    *w0 = a;
    *w1 = b;
    return i;
}

static int64_t split_encode(const kvc_tensor *t, uint8_t *dst, size_t capacity) {
    const size_t total = kvc_elements(t) * t->count, raw = KVC_SECTION + 2 * total;
    const size_t streams = split_streams(total), fixed = KVC_SECTION + HUFF_LENGTHS + total + 4 * streams + HUFF_PAD;
    if (capacity < raw) return KVC_SPACE;
    if (fixed >= raw || streams > UINT16_MAX) return kvc_store_raw(t, dst, capacity);
    uint8_t *lo = dst + KVC_SECTION + HUFF_LENGTHS, *sizes = lo + total, *out = sizes + 4 * streams, *first = out;
    uint8_t hi[2][HUFF_STREAM], length[256];
    uint32_t part[8][256] = {{0}}, counts[256], pairs[HUFF_PAIRS];
    uint16_t code[256];
    uint64_t bits = 0;
    for (size_t from = 0; from < total; from += HUFF_STREAM) {
        const size_t n = total - from < HUFF_STREAM ? total - from : HUFF_STREAM;
        split_range(t, from, n, hi[0], lo);
        histogram(hi[0], n, part);
    }
    for (int s = 0; s < 256; s++) {
        counts[s] = 0;
        for (int k = 0; k < 8; k++) counts[s] += part[k][s];
    }
    huff_lengths(counts, length);
    for (int s = 0; s < 256; s++) bits += (uint64_t)counts[s] * length[s];
    // each stream ends on a byte, and writing touches up to eight bytes beyond it
    if (fixed + bits / 8 + streams + 16 > raw) return kvc_store_raw(t, dst, capacity);
    huff_codes(length, code);
    huff_pairs(length, code, pairs);
    for (int s = 0; s < 256; s += 2) dst[KVC_SECTION + s / 2] = (uint8_t)(length[s] | length[s + 1] << 4);
    const size_t each = split_part(total, streams);
    for (size_t s = 0; s < streams; s += 2) {
        uint8_t second[HUFF_MOST(HUFF_STREAM)];
        size_t from[2], n[2], used[2];
        for (int k = 0; k < 2; k++) {
            from[k] = (s + k) * each < total ? (s + k) * each : total;
            n[k] = total - from[k] < each ? total - from[k] : each;
            split_range(t, from[k], n[k], hi[k], lo);
        }
        huff_writer a = {0, 0, out}, b = {0, 0, second};
        const size_t done = huff_streams2(&a, hi[0], &b, hi[1], n[0] < n[1] ? n[0] : n[1], pairs);
        used[0] = huff_end(&a, hi[0], done, n[0], length, code, out);
        used[1] = huff_end(&b, hi[1], done, n[1], length, code, second);
        out += used[0];
        memcpy(out, second, used[1]);
        out += used[1];
        kvc_put32(sizes + 4 * s, (uint32_t)used[0]);
        kvc_put32(sizes + 4 * s + 4, (uint32_t)used[1]);
    }
    kvc_put64(out, 0);
    kvc_header(dst, 1, 0, (uint16_t)streams, (uint32_t)(out - first));
    return out + HUFF_PAD - dst;
}

// Decoding looks up 11 bits and finds one or two symbols. Entry: bits of all its symbols in 0-5, how many symbols
// in 6-7, the symbols in 8-15 and 16-23, bits of the first alone in 24-27.
static int huff_table(const uint8_t length[256], uint32_t table[HUFF_TABLE]) {
    uint16_t code[256];
    uint32_t single[HUFF_TABLE];
    if (!huff_codes(length, code)) return 0;
    for (uint32_t s = 0; s < 256; s++)
        if (length[s])
            for (uint32_t i = code[s]; i < HUFF_TABLE; i += 1u << length[s]) single[i] = s | (uint32_t)length[s] << 8;
    for (uint32_t i = 0; i < HUFF_TABLE; i++) {
        const uint32_t a = single[i], na = a >> 8, b = single[i >> na], nb = b >> 8;
        const int two = na + nb <= HUFF_BITS;
        table[i] = (two ? na + nb : na) | (two ? 2u : 1u) << 6 | (a & 255) << 8 | (two ? (b & 255) << 16 : 0) | na << 24;
    }
    return 1;
}

typedef struct { const uint8_t *src; uint64_t at, limit; uint8_t *out, *end; } huff_reader; // at, limit in bits

static inline __attribute__((always_inline)) uint64_t huff_bits(const huff_reader *r) {
    return kvc_u64(r->src + (r->at >> 3)) >> (r->at & 7);
}
#define HUFF_STEP(r, b, e) \
    e = table[(b) & (HUFF_TABLE - 1)]; \
    kvc_put16((r).out, (uint16_t)(e >> 8)); \
    (r).out += e >> 6 & 3; \
    (r).at += e & 63; \
    (b) >>= e & 63;

static int huff_finish(huff_reader *r, const uint32_t *table) {
    while (r->out < r->end) {
        if (r->at > r->limit) return KVC_CORRUPT;
        const uint32_t e = table[huff_bits(r) & (HUFF_TABLE - 1)];
        *r->out++ = (uint8_t)(e >> 8);
        r->at += e >> 24;
    }
    return (r->at + 7) / 8 * 8 == r->limit ? 0 : KVC_CORRUPT;
}

// Four streams side by side, since each symbol waits for the one before it in its own stream.
static int huff_decode4(huff_reader reader[4], const uint32_t *table) {
    huff_reader r0 = reader[0], r1 = reader[1], r2 = reader[2], r3 = reader[3];
    while (r0.end - r0.out >= 10 && r1.end - r1.out >= 10 && r2.end - r2.out >= 10 && r3.end - r3.out >= 10) {
        if (r0.at > r0.limit || r1.at > r1.limit || r2.at > r2.limit || r3.at > r3.limit) return KVC_CORRUPT;
        uint64_t b0 = huff_bits(&r0), b1 = huff_bits(&r1), b2 = huff_bits(&r2), b3 = huff_bits(&r3);
        for (int k = 0; k < 5; k++) {
            uint32_t e0, e1, e2, e3;
            HUFF_STEP(r0, b0, e0)
            HUFF_STEP(r1, b1, e1)
            HUFF_STEP(r2, b2, e2)
            HUFF_STEP(r3, b3, e3)
        }
    }
    reader[0] = r0; reader[1] = r1; reader[2] = r2; reader[3] = r3;
    for (int k = 0; k < 4; k++) if (huff_finish(&reader[k], table)) return KVC_CORRUPT;
    return 0;
}

static int64_t split_decode(const kvc_tensor *t, const uint8_t *src, size_t nbytes) {
    if (nbytes < KVC_SECTION) return KVC_CORRUPT;
    if (src[0] == 0) return kvc_load_raw(t, src, nbytes);
    if (src[0] == 2) return KVC_OTHER;
    const size_t total = kvc_elements(t) * t->count, streams = kvc_u16(src + 2), payload = kvc_u32(src + 4);
    const size_t fixed = KVC_SECTION + HUFF_LENGTHS + total + 4 * streams;
    if (src[0] != 1 || !total || streams != split_streams(total) || nbytes < fixed + HUFF_PAD) return KVC_CORRUPT;
    if (nbytes - fixed - HUFF_PAD < payload) return KVC_CORRUPT;
    const uint8_t *lo = src + KVC_SECTION + HUFF_LENGTHS, *sizes = lo + total, *at = sizes + 4 * streams;
    const uint8_t *end = at + payload;
    uint8_t length[256], hi[4][HUFF_STREAM + 8];
    uint32_t table[HUFF_TABLE];
    for (int s = 0; s < 128; s++) {
        length[2 * s] = src[KVC_SECTION + s] & 15;
        length[2 * s + 1] = src[KVC_SECTION + s] >> 4;
    }
    if (!huff_table(length, table)) return KVC_CORRUPT;
    const size_t each = split_part(total, streams);
    for (size_t s = 0; s < streams; s += 4) {
        huff_reader reader[4];
        for (int k = 0; k < 4; k++) {
            const size_t from = (s + k) * each < total ? (s + k) * each : total;
            const size_t n = total - from < each ? total - from : each, size = kvc_u32(sizes + 4 * (s + k));
            if ((size_t)(end - at) < size) return KVC_CORRUPT;
            reader[k] = (huff_reader){at, 0, 8 * (uint64_t)size, hi[k], hi[k] + n};
            at += size;
        }
        if (huff_decode4(reader, table)) return KVC_CORRUPT;
        for (int k = 0; k < 4; k++) {
            const size_t from = (s + k) * each < total ? (s + k) * each : total;
            merge_range(t, from, (size_t)(reader[k].end - hi[k]), hi[k], lo);
        }
    }
    return at == end ? (int64_t)(fixed + payload + HUFF_PAD) : KVC_CORRUPT;
}
