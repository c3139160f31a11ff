// XXH3 with 64 bits, of no seed: the checksum of frames and files. Written from the description of the algorithm
// (xxHash, doc/xxhash_spec.md, "XXH3 Algorithm Overview"); the numbers here and in secret.h are the algorithm's.
//
// Its own code, so that bytes can be hashed between system calls, while they are in a cache (stream.h).
#ifndef KVC_HASH_H
#define KVC_HASH_H

#include "secret.h"

enum { HASH_HELD = 256, HASH_SHORT = 240 };

#define P32_2 0x85EBCA77U
#define P32_3 0xC2B2AE3DU
#define P64_1 0x9E3779B185EBCA87ULL
#define P64_2 0xC2B2AE3D27D4EB4FULL
#define P64_3 0x165667B19E3779F9ULL
#define P64_4 0x85EBCA77C2B2AE63ULL
#define P64_5 0x27D4EB2F165667C5ULL

// What was hashed so far; mirrored in hashing.py by its size alone. The last 1 to 256 bytes are held back, since what
// is done with them depends on whether more follow.
typedef struct {
    uint64_t sums[8], total;
    size_t at, held;                      // stripes taken of the current block; bytes in `bytes`
    uint8_t bytes[KVC_STRIPE + HASH_HELD]; // the last stripe that was taken, and what is held back
} kvc_hash;

static inline uint64_t hash_fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}
static inline uint64_t hash_avalanche(uint64_t h) {
    h = (h ^ h >> 37) * 0x165667919E3779F9ULL;
    return h ^ h >> 32;
}
static inline uint64_t hash_avalanche_old(uint64_t h) { // that of XXH64
    h = (h ^ h >> 33) * P64_2;
    h = (h ^ h >> 29) * P64_3;
    return h ^ h >> 32;
}
static inline uint64_t hash_secret_at(size_t i) { return kvc_u64(hash_secret + i); }
static inline uint64_t hash_mix(const uint8_t *p, size_t secret) {
    return hash_fold(kvc_u64(p) ^ hash_secret_at(secret), kvc_u64(p + 8) ^ hash_secret_at(secret + 8));
}

static uint64_t hash_upto16(const uint8_t *p, size_t n) {
    if (n > 8) {
        const uint64_t low = kvc_u64(p) ^ hash_secret_at(24) ^ hash_secret_at(32);
        const uint64_t high = kvc_u64(p + n - 8) ^ hash_secret_at(40) ^ hash_secret_at(48);
        return hash_avalanche(n + __builtin_bswap64(low) + high + hash_fold(low, high));
    }
    if (n >= 4) {
        const uint64_t joined = kvc_u32(p + n - 4) + ((uint64_t)kvc_u32(p) << 32);
        uint64_t h = joined ^ hash_secret_at(8) ^ hash_secret_at(16);
        h ^= (h << 49 | h >> 15) ^ (h << 24 | h >> 40);
        h *= 0x9FB21C651E98DF25ULL;
        h ^= (h >> 35) + n;
        h *= 0x9FB21C651E98DF25ULL;
        return h ^ h >> 28;
    }
    if (n == 0) return hash_avalanche_old(hash_secret_at(56) ^ hash_secret_at(64));
    const uint32_t joined = (uint32_t)p[0] << 16 | (uint32_t)p[n >> 1] << 24 | p[n - 1] | (uint32_t)n << 8;
    return hash_avalanche_old(joined ^ (uint64_t)(kvc_u32(hash_secret) ^ kvc_u32(hash_secret + 4)));
}

static uint64_t hash_short(const uint8_t *p, size_t n) { // up to HASH_SHORT
    if (n <= 16) return hash_upto16(p, n);
    uint64_t h = n * P64_1;
    if (n <= 128) {
        for (size_t i = (n - 1) / 32 + 1; i-- > 0;) {
            h += hash_mix(p + 16 * i, 32 * i);
            h += hash_mix(p + n - 16 * (i + 1), 32 * i + 16);
        }
        return hash_avalanche(h);
    }
    for (size_t i = 0; i < 8; i++) h += hash_mix(p + 16 * i, 16 * i);
    h = hash_avalanche(h);
    for (size_t i = 8; i < n / 16; i++) h += hash_mix(p + 16 * i, 16 * (i - 8) + 3);
    return hash_avalanche(h + hash_mix(p + n - 16, 136 - 17));
}

static void hash_begin(kvc_hash *s) {
    const uint64_t first[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, KVC_SCRAMBLE_PRIME};
    memcpy(s->sums, first, sizeof first);
    s->total = s->at = s->held = 0;
}

static void hash_update(kvc_hash *s, const uint8_t *p, size_t n, const kvc_kernels *k) {
    uint8_t *const held = s->bytes + KVC_STRIPE;
    s->total += n;
    if (n <= HASH_HELD - s->held) {
        if (n) memcpy(held + s->held, p, n);
        s->held += n;
        return;
    }
    if (s->held) { // fill it up; all of it can be taken, since more follow
        const size_t fill = HASH_HELD - s->held;
        memcpy(held + s->held, p, fill);
        p += fill;
        n -= fill;
        k->hash_stripes(s->sums, held, HASH_HELD / KVC_STRIPE, &s->at);
        memcpy(s->bytes, held + HASH_HELD - KVC_STRIPE, KVC_STRIPE);
    }
    if (n > HASH_HELD) {
        const size_t stripes = (n - 1) / KVC_STRIPE;
        k->hash_stripes(s->sums, p, stripes, &s->at);
        p += stripes * KVC_STRIPE;
        n -= stripes * KVC_STRIPE;
        memcpy(s->bytes, p - KVC_STRIPE, KVC_STRIPE);
    }
    memcpy(held, p, n);
    s->held = n;
}

static uint64_t hash_end(const kvc_hash *s, const kvc_kernels *k) { // more may follow
    const uint8_t *const held = s->bytes + KVC_STRIPE;
    if (s->total <= HASH_SHORT) return hash_short(held, (size_t)s->total);
    uint64_t sums[8];
    size_t at = s->at;
    memcpy(sums, s->sums, sizeof sums);
    k->hash_stripes(sums, held, (s->held - 1) / KVC_STRIPE, &at);
    const uint8_t *const last = held + s->held - KVC_STRIPE; // 64 bytes, some of them once more, with other ones of the secret
    for (size_t i = 0; i < 8; i++) {
        const uint64_t d = kvc_u64(last + 8 * i), x = d ^ hash_secret_at(KVC_SECRET - KVC_STRIPE - 7 + 8 * i);
        sums[i ^ 1] += d;
        sums[i] += (x & 0xffffffff) * (x >> 32);
    }
    uint64_t h = s->total * P64_1;
    for (size_t i = 0; i < 4; i++)
        h += hash_fold(sums[2 * i] ^ hash_secret_at(11 + 16 * i), sums[2 * i + 1] ^ hash_secret_at(19 + 16 * i));
    return hash_avalanche(h);
}

static uint64_t hash_whole(const uint8_t *p, size_t n, const kvc_kernels *k) {
    if (n <= HASH_SHORT) return hash_short(p, n);
    kvc_hash s;
    hash_begin(&s);
    hash_update(&s, p, n, k);
    return hash_end(&s, k);
}

#endif
