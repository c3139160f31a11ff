// Split planes: the low byte of each element (mantissa and sign) as it is, the high byte (exponent) by a canonical
// Huffman code of at most 10 bits, in four streams or a multiple of them, each an equal part of the elements.
//
// Section: header (mode 1, u16 = streams, number = bytes of all streams) | code length of each of 256 symbols, four
// bits each: 128 bytes | low bytes[count * n] | bytes of each stream, u32 | streams | 8 zeros.
// In a stream codes stand with their first bit lowest; a stream ends on a byte. Mode 2, which only the code
// without native kernels writes, has zstd in place of the streams; mode 0 is raw.
#include "huffman.h"

enum { SPLIT_LENGTHS = 128, SPLIT_STREAM = 1 << 14, SPLIT_PAD = 8, SPLIT_SAMPLED = 4 };

static inline size_t split_streams(size_t elements) {
    const size_t want = (elements + SPLIT_STREAM - 1) / SPLIT_STREAM;
    const size_t four = (want + 3) / 4 * 4;
    return four < 4 ? 4 : four;
}
// Elements of each stream but the last ones.
static inline size_t split_part(size_t total, size_t streams) { return (total + streams - 1) / streams; }

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

// n is a multiple of 8; eight tables, so that equal neighbours do not wait for each other.
static void split_count(const uint8_t *p, size_t n, uint32_t part[8][256]) {
    for (size_t i = 0; i < n; i += 8)
        for (int k = 0; k < 8; k++) part[k][p[i + k]]++;
}

// How often each symbol occurs, by every fourth group of 32; at least once those that may occur elsewhere: all from
// the smallest to the largest, and 0, which stands apart.
static void split_counts(const kvc_tensor *t, uint32_t counts[256]) {
    const size_t n = kvc_elements(t);
    uint32_t part[8][256] = {{0}};
    uint8_t sample[SPLIT_STREAM];
    v32 low = v_set(255), high = v_set(0), least = v_set(255);
    size_t group = 0, held = 0;
    for (size_t s = 0; s < t->count; s++) {
        const uint8_t *q = kvc_slice(t, s);
        for (size_t i = 0; i < n; i += 32, group++) {
            uint8_t last[64];
            v32 hi, lo;
            if (i + 32 <= n) {
                v_split(q + 2 * i, &hi, &lo);
            } else {
                for (int k = 0; k < 64; k += 2) memcpy(last + k, q + 2 * i, 2); // what fills up changes no range
                memcpy(last, q + 2 * i, 2 * (n - i));
                v_split(last, &hi, &lo);
            }
            least = v_min(least, hi);
            low = v_min(low, v_sub(hi, v_set(1)));
            high = v_max(high, hi);
            if (group % SPLIT_SAMPLED) continue;
            v_store(sample + held, hi);
            held += 32;
            if (held < SPLIT_STREAM) continue;
            split_count(sample, held, part);
            held = 0;
        }
    }
    split_count(sample, held, part);
    uint8_t a[32], b[32], c[32];
    v_store(a, low);
    v_store(b, high);
    v_store(c, least);
    int from = 255, to = 0, zero = 0;
    for (int k = 0; k < 32; k++) {
        from = a[k] < from ? a[k] : from;
        to = b[k] > to ? b[k] : to;
        zero |= !c[k];
    }
    for (int x = 0; x < 256; x++) {
        counts[x] = 0;
        for (int k = 0; k < 8; k++) counts[x] += part[k][x];
        if (!counts[x] && (x ? x > from && x <= to : zero)) counts[x] = 1;
    }
}

static int64_t split_encode(const kvc_tensor *t, uint8_t *dst, size_t capacity) {
    const size_t total = kvc_elements(t) * t->count, raw = KVC_SECTION + 2 * total;
    const size_t streams = split_streams(total), fixed = KVC_SECTION + SPLIT_LENGTHS + total + 4 * streams + SPLIT_PAD;
    if (capacity < raw) return KVC_SPACE;
    if (fixed >= raw || streams > UINT16_MAX) return kvc_store_raw(t, dst, capacity);
    uint8_t *lo = dst + KVC_SECTION + SPLIT_LENGTHS, *sizes = lo + total, *first = sizes + 4 * streams, *out = first;
    uint8_t *length = dst + KVC_SECTION;
    huff_encoder h;
    uint32_t counts[256];
    uint64_t bits = 0, sampled = 0;
    split_counts(t, counts);
    huff_lengths(counts, h.length);
    for (int s = 0; s < 256; s++) {
        bits += (uint64_t)counts[s] * h.length[s];
        sampled += counts[s];
    }
    if (fixed + (double)bits / 8 / (double)sampled * (double)total > (double)raw) return kvc_store_raw(t, dst, capacity);
    huff_prepare(&h); // a sample's code is complete
    for (int s = 0; s < 256; s += 2) length[s / 2] = (uint8_t)(h.length[s] | h.length[s + 1] << 4);
    const size_t each = split_part(total, streams);
    for (size_t s = 0; s < streams; s++) {
        uint8_t hi[SPLIT_STREAM], stream[HUFF_MOST(SPLIT_STREAM)];
        const size_t from = s * each < total ? s * each : total, n = total - from < each ? total - from : each;
        split_range(t, from, n, hi, lo);
        const size_t used = huff_encode(&h, hi, n, stream);
        if ((size_t)(dst + raw - out) < used + SPLIT_PAD) return kvc_store_raw(t, dst, capacity);
        memcpy(out, stream, used);
        kvc_put32(sizes + 4 * s, (uint32_t)used);
        out += used;
    }
    kvc_put64(out, 0);
    kvc_header(dst, 1, 0, (uint16_t)streams, (uint32_t)(out - first));
    return out + SPLIT_PAD - dst;
}

static int64_t split_decode(const kvc_tensor *t, const uint8_t *src, size_t nbytes) {
    if (nbytes < KVC_SECTION) return KVC_CORRUPT;
    if (src[0] == 0) return kvc_load_raw(t, src, nbytes);
    if (src[0] == 2) return KVC_OTHER;
    const size_t total = kvc_elements(t) * t->count, streams = kvc_u16(src + 2), payload = kvc_u32(src + 4);
    const size_t fixed = KVC_SECTION + SPLIT_LENGTHS + total + 4 * streams;
    if (src[0] != 1 || !total || streams != split_streams(total) || nbytes < fixed + SPLIT_PAD) return KVC_CORRUPT;
    if (nbytes - fixed - SPLIT_PAD < payload) return KVC_CORRUPT;
    const uint8_t *lo = src + KVC_SECTION + SPLIT_LENGTHS, *sizes = lo + total, *start = sizes + 4 * streams;
    size_t at = 0;
    uint8_t length[256], hi[4][SPLIT_STREAM + 8];
    uint64_t table[HUFF_TABLE];
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
            if (payload - at < size) return KVC_CORRUPT;
            reader[k] = (huff_reader){8 * (uint64_t)at, 8 * (uint64_t)(at + size), hi[k], hi[k] + n};
            at += size;
        }
        const size_t next = s * each < total ? s * each : 0, n = kvc_elements(t);
        const uint8_t *to = kvc_slice(t, next / n) + 2 * (next % n);
        if (huff_decode4(reader, start, table, lo + next, to)) return KVC_CORRUPT;
        for (int k = 0; k < 4; k++) {
            const size_t from = (s + k) * each < total ? (s + k) * each : total;
            merge_range(t, from, (size_t)(reader[k].end - hi[k]), hi[k], lo);
        }
    }
    return at == payload ? (int64_t)(fixed + payload + SPLIT_PAD) : KVC_CORRUPT;
}
