// Values for a store that takes them by name, each as a command with a checksum behind its data, sent in one call. From some
// size on data is not copied but lent to the kernel (see stream.h); its owner leaves it as it is until the store has answered.
// The socket blocks, with limits of its own; what has to be decided is decided in Python (kvferry.transports.values), which
// calls again.
#ifndef KVC_VALUES_H
#define KVC_VALUES_H

#include "stream.h"

enum { VALUES_WINDOW = 256 << 10, VALUES_LENT = 64 << 10, VALUES_TAIL = 64 };

// Mirrored in values.py.
typedef struct {
    const uint8_t *head, *data; // the head is no part of what is hashed
    uint64_t head_nbytes, nbytes;
} kvc_value;

// Those of one call; mirrored in values.py up to `tail`.
typedef struct {
    const kvc_value *values;
    uint64_t count;
    const uint8_t *end;           // what stands behind each checksum
    uint64_t end_nbytes;          // at most VALUES_TAIL - 8
    double until;                 // on CLOCK_MONOTONIC: no system call begins later, it could wait beyond the deadline
    int32_t fd, flags;            // flags of the system call
    int32_t pipe[2];              // by which data is lent to the kernel; -1: it is copied
    uint64_t lent;                // bytes that were
    uint64_t moved;               // bytes sent
    uint64_t index, head_at, at;  // the value under way, and how much of its head and its data has gone
    uint64_t window, piped;       // of the data: bytes that go by the pipe now, and those of them still in it
    uint64_t hashed;              // and those that are hashed
    uint64_t tail_at, tail_nbytes; // of the checksum and the end of the value before
    uint8_t tail[VALUES_TAIL];
    kvc_hash hash;
} kvc_values;

static void values_hash(kvc_values *v, const kvc_value *value, uint64_t end, const kvc_kernels *k) {
    if (!v->hashed) hash_begin(&v->hash);
    if (end > v->hashed) hash_update(&v->hash, value->data + v->hashed, end - v->hashed, k);
    v->hashed = end;
}

// All data of a value has gone: what stands behind it is due, and then the next one.
static void values_next(kvc_values *v, const kvc_kernels *k) {
    const uint64_t checksum = hash_end(&v->hash, k);
    memcpy(v->tail, &checksum, sizeof checksum);
    memcpy(v->tail + sizeof checksum, v->end, v->end_nbytes);
    v->tail_nbytes = sizeof checksum + v->end_nbytes;
    v->tail_at = v->head_at = v->at = v->hashed = 0;
    v->index++;
}

// Whether data goes by the pipe; if no more, what is in it is due again.
static int values_lends(kvc_values *v) {
    if (v->pipe[0] < 0) return 0;
    if (stream_lends(v->pipe, v->piped, v->flags)) return 1;
    if (v->piped) v->at += v->window - v->piped;
    v->piped = 0;
    return 0;
}

// The next bytes of the data, by reference, and hashed behind that, while the store reads them. 0, or a code.
static int values_lend(kvc_values *v, const kvc_value *value, const kvc_kernels *k) {
    if (!v->piped) {
        const struct iovec next = {(void *)(value->data + v->at), stream_least(value->nbytes - v->at, VALUES_WINDOW)};
        const ssize_t taken = vmsplice(v->pipe[1], &next, 1, SPLICE_F_NONBLOCK);
        if (taken <= 0) { // the system has no way to, or not for this memory
            v->pipe[0] = v->pipe[1] = -1;
            return STREAM_DONE;
        }
        v->window = v->piped = (uint64_t)taken;
        v->lent += v->window;
    }
    const ssize_t moved = stream_splice(v->pipe[0], v->fd, v->piped, v->until);
    if (moved < 0) return errno;
    v->piped -= (uint64_t)moved;
    v->moved += (uint64_t)moved;
    if (v->piped) return STREAM_SHORT;
    v->at += v->window;
    values_hash(v, value, v->at, k);
    if (v->at == value->nbytes) values_next(v, k);
    return STREAM_DONE;
}

// `nbytes` of the tail, the head and the data have gone.
static void values_advance(kvc_values *v, const kvc_value *value, uint64_t nbytes, const kvc_kernels *k) {
    v->moved += nbytes;
    const uint64_t tail = stream_least(nbytes, v->tail_nbytes - v->tail_at);
    v->tail_at += tail;
    if (!value) return;
    const uint64_t head = stream_least(nbytes - tail, value->head_nbytes - v->head_at);
    v->head_at += head;
    v->at += nbytes - tail - head;
    if (v->head_at == value->head_nbytes && v->at == value->nbytes) values_next(v, k);
}

// What is due by copy: what is left of a tail, the head behind it, and data that is not lent.
static int values_copy(kvc_values *v, const kvc_value *value, int lends, const kvc_kernels *k) {
    struct iovec parts[3];
    struct msghdr message = {.msg_iov = parts};
    uint64_t wanted = v->tail_nbytes - v->tail_at;
    int n = 0;
    if (wanted) parts[n++] = (struct iovec){v->tail + v->tail_at, wanted};
    if (value && v->head_at < value->head_nbytes) {
        parts[n++] = (struct iovec){(void *)(value->head + v->head_at), value->head_nbytes - v->head_at};
        wanted += value->head_nbytes - v->head_at;
    }
    if (value && !lends) { // hashed first: that brings it into a cache
        const uint64_t most = stream_least(value->nbytes - v->at, VALUES_WINDOW);
        values_hash(v, value, v->at + most > v->hashed ? v->at + most : v->hashed, k);
        parts[n++] = (struct iovec){(void *)(value->data + v->at), most};
        wanted += most;
    }
    message.msg_iovlen = (size_t)n;
    const ssize_t sent = sendmsg(v->fd, &message, v->flags | (value ? MSG_MORE : 0));
    if (sent < 0) return errno;
    values_advance(v, value, (uint64_t)sent, k);
    return (uint64_t)sent < wanted ? STREAM_SHORT : STREAM_DONE;
}

// Send all values; the codes are those of a stream.
static int values_send(kvc_values *v, const kvc_kernels *k) {
    while (v->index < v->count || v->tail_at < v->tail_nbytes) {
        const kvc_value *value = v->index < v->count ? &v->values[v->index] : NULL;
        const int lends = value && value->nbytes >= VALUES_LENT && values_lends(v);
        const int due = v->tail_at < v->tail_nbytes || !value || v->head_at < value->head_nbytes;
        if (stream_past(v->until)) return STREAM_SHORT;
        const int code = lends && !due ? values_lend(v, value, k) : values_copy(v, value, lends, k);
        if (code) return code;
    }
    return STREAM_DONE;
}

#endif
