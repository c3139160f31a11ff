// Values that a store answers with, one behind the other, taken in one call: each into its place and hashed while it is in a
// cache. All are expected to be of one form. What is not is left to Python (kvferry.transports.replies), as are deadlines: it
// calls again. No byte of data is copied; what stands before it is taken ahead, by the call that takes the data before.
#ifndef KVC_REPLIES_H
#define KVC_REPLIES_H

#include "stream.h"

enum { REPLIES_OTHER = -5, REPLIES_END = 10 }; // a reply of another form; the checksum behind the data, and two bytes

// Where one goes; mirrored in replies.py.
typedef struct {
    uint8_t *prefix, *data;
    uint64_t hashed, sent; // the checksum of the data, as it is and as it came
} kvc_place;

// Those of one call; mirrored in replies.py up to `got`.
typedef struct {
    kvc_place *places;
    uint64_t count, index;         // and the one that is due
    const uint8_t *start;          // how each begins
    uint64_t start_nbytes, prefix_nbytes, nbytes; // of that, of what stands between it and the data, and of the data
    uint8_t *ahead;                // for what is taken ahead: room for start and prefix at least
    uint64_t room, at, end;        // of that; and what lies there
    double until;                  // on CLOCK_MONOTONIC: no system call begins later, it could wait beyond the deadline
    int32_t fd, flags;             // flags of the system call
    uint64_t moved, came;          // bytes received; when the first of them were, on CLOCK_MONOTONIC, in ns
    uint64_t inside, got;          // whether start and prefix of the next one are taken; bytes of what follows
    uint8_t tail[REPLIES_END];
    kvc_hash hash;
} kvc_replies;

// Bytes into the first `sure` parts, which will come, and what is there of the others: those may never. Who calls has looked
// for the very first ones.
static ssize_t replies_take(kvc_replies *r, struct iovec *parts, int sure, int all, int *waited) {
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)all};
    *waited = 0;
    ssize_t got;
    if (!r->moved) {
        got = recvmsg(r->fd, &message, r->flags & ~MSG_WAITALL);
    } else if ((got = stream_look(r->fd, &message, r->flags)) < 0 && errno == EAGAIN) {
        *waited = 1;
        message.msg_iovlen = (size_t)sure;
        got = recvmsg(r->fd, &message, r->flags);
    }
    if (!r->moved) r->came = look_now();
    if (got > 0) r->moved += (uint64_t)got;
    return got;
}

// Start and prefix of the next one. 0, or a code.
static int replies_head(kvc_replies *r, const kvc_place *place) {
    const uint64_t wanted = r->start_nbytes + r->prefix_nbytes;
    for (;;) {
        const uint64_t have = r->end - r->at;
        if (memcmp(r->ahead + r->at, r->start, stream_least(have, r->start_nbytes))) return REPLIES_OTHER;
        if (have >= wanted) break;
        if (r->at + wanted > r->room) {
            memmove(r->ahead, r->ahead + r->at, have);
            r->at = 0;
            r->end = have;
        }
        if (stream_past(r->until)) return STREAM_SHORT;
        struct iovec parts[2] = {{r->ahead + r->end, 1}, {r->ahead + r->end + 1, wanted - have - 1}}; // a byte is sure to come
        int waited;
        const ssize_t got = replies_take(r, parts, 1, 2, &waited);
        if (got < 0) return errno;
        if (got == 0) return STREAM_ENDED;
        r->end += (uint64_t)got;
    }
    memcpy(place->prefix, r->ahead + r->at + r->start_nbytes, r->prefix_nbytes);
    r->at += wanted;
    r->inside = 1;
    r->got = 0;
    hash_begin(&r->hash);
    return STREAM_DONE;
}

// `nbytes` of data and end have come.
static void replies_advance(kvc_replies *r, kvc_place *place, uint64_t nbytes, const kvc_kernels *k) {
    const uint64_t data = r->got < r->nbytes ? stream_least(nbytes, r->nbytes - r->got) : 0;
    hash_update(&r->hash, place->data + r->got, data, k);
    r->got += nbytes;
    if (r->got < r->nbytes + REPLIES_END) return;
    place->hashed = hash_end(&r->hash, k);
    memcpy(&place->sent, r->tail, sizeof place->sent);
    r->inside = 0;
    r->index++;
}

// What was taken ahead of data and end: little, as a rule nothing.
static void replies_move(kvc_replies *r, kvc_place *place, const kvc_kernels *k) {
    const uint64_t most = r->got < r->nbytes ? r->nbytes - r->got : r->nbytes + REPLIES_END - r->got;
    const uint64_t take = stream_least(r->end - r->at, most);
    uint8_t *to = r->got < r->nbytes ? place->data + r->got : r->tail + (r->got - r->nbytes);
    memcpy(to, r->ahead + r->at, take);
    r->at += take;
    replies_advance(r, place, take, k);
}

// The next bytes of data and end, and with the last ones as much of the next head as is there. 0, or a code.
static int replies_body(kvc_replies *r, kvc_place *place, const kvc_kernels *k) {
    struct iovec parts[3];
    int n = 0, waited;
    uint64_t wanted = 0;
    if (r->got < r->nbytes) {
        wanted = stream_least(r->nbytes - r->got, STREAM_WINDOW);
        parts[n++] = (struct iovec){place->data + r->got, wanted};
    }
    if (r->got + wanted >= r->nbytes) {
        const uint64_t done = r->got + wanted - r->nbytes;
        parts[n++] = (struct iovec){r->tail + done, REPLIES_END - done};
        wanted += REPLIES_END - done;
    }
    const int last = r->got + wanted == r->nbytes + REPLIES_END && r->index + 1 < r->count;
    if (last) parts[n] = (struct iovec){r->ahead, r->start_nbytes + r->prefix_nbytes};
    if (stream_past(r->until)) return STREAM_SHORT;
    r->at = r->end = 0;
    const ssize_t got = replies_take(r, parts, n, n + last, &waited);
    if (got < 0) return errno;
    if (got == 0) return STREAM_ENDED;
    const uint64_t moved = stream_least((uint64_t)got, wanted);
    r->end = (uint64_t)got - moved;
    replies_advance(r, place, moved, k);
    return waited && moved < wanted ? STREAM_SHORT : STREAM_DONE;
}

// Take them all; the codes are those of a stream, or REPLIES_OTHER: the next one lies ahead, as far as it was taken.
static int replies_receive(kvc_replies *r, const kvc_kernels *k) {
    while (r->index < r->count) {
        kvc_place *place = &r->places[r->index];
        const int code = r->inside ? replies_body(r, place, k) : replies_head(r, place);
        if (code) return code;
        while (r->inside && r->at < r->end) replies_move(r, place, k);
    }
    return STREAM_DONE;
}

#endif
