// The short ways of a channel: one frame sent, one received up to its payload, and its payload, each in one call, in
// which no Python runs between a wake-up and the last byte. What is unusual (another header than expected, bytes of
// two frames at once) is left to Python, which takes its long way and says what is wrong. Used by wire/short.py.
#ifndef KVC_CHANNEL_H
#define KVC_CHANNEL_H

#include <poll.h>
#include <pthread.h>
#include <stdlib.h>

#include "look.h"
#include "python.h"
#include "stream.h"

enum { CHANNEL_HEADER = 32, CHANNEL_TRAILER = 8, CHANNEL_HEAD = 4096, CHANNEL_SMALL = 8 << 10 };
// Before a payload of so many bytes its head is sent alone: the receiver wakes up while the payload is copied.
enum { CHANNEL_LARGE = 48 << 10 };
// Results: Python's None for the long way, a tuple, or a number: an errno as a negative one, or of these, mirrored in short.py.
enum { CHANNEL_DONE = 1, CHANNEL_ENDED = 0, CHANNEL_STRAY = -100000, CHANNEL_LATE = -100001, CHANNEL_DAMAGED = -100002 };
enum { CHANNEL_RAISED = -100003, CHANNEL_LONG_WAY = -100004 };
enum { CHANNEL_LANES = 16, CHANNEL_SENT = 0, CHANNEL_RECEIVED = 1 };
#define CHANNEL_LOOK_S 0.5 // as in lanes.py: how long to wait for one lane before a look at the others,
#define CHANNEL_LOST_S 1.0 // and for the lane that is due once another is lost
#ifndef POLLRDHUP
#define POLLRDHUP 0x2000
#endif

// One socket of a connection: see kvferry.transports.guard.
typedef struct {
    PyObject *guard, *inside, *connection;
    int fd;
} channel_lane;

// One connection. Everything but the calls of the system happens with the GIL held.
typedef struct {
    PyObject *held;                              // the tuple that keeps the others alive
    channel_lane lanes[CHANNEL_LANES];           // the stream is dealt to them in stripes, see kvferry.transports.lanes
    uint64_t count, stripe, room;                // lanes; bytes of a stripe, and of it before the frame that is received
    Py_buffer positions;                         // bytes that were sent, and received
    PyObject *kinds, *numbers, *carriers;        // number to class, class to number, classes that may carry a payload
    PyObject *encode, *decode;
    Py_buffer place;                             // for what is received ahead
    size_t usual;                                // how much of it is asked for: what the last frame had
    size_t head, have;                           // of the frame whose payload is due: bytes before it, bytes in `place`
    uint64_t pending;                            // bytes of that payload
    uint64_t max_meta, max_payload, progress[2]; // what an error is about: bytes moved and all, or two hashes
    uint64_t flags;                              // of every frame
    kvc_look look;                               // before waiting for a frame
    uint64_t since;                              // when a wait began that has looked in vain, and is to sleep; else 0
    int receive_flags;
    unsigned forks;
} kvc_channel;

// The parts of one payload.
typedef struct {
    Py_buffer buffers[STREAM_PARTS];
    struct iovec parts[STREAM_PARTS];
    int number;
    uint64_t nbytes;
} channel_parts;

static const char channel_name[] = "kvferry.channel";
static PyObject *channel_closed, *channel_leave, *channel_limits[2]; // names of attributes, made once
static unsigned channel_forks;                                      // another one in each forked child
static void channel_forked(void) { channel_forks++; }

static double channel_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}
static PyObject *channel_none(void) {
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}
static PyObject *channel_result(long code) {
    return code == CHANNEL_RAISED ? NULL : code == CHANNEL_LONG_WAY ? channel_none() : PyLong_FromLong(code);
}

// ---- who is inside, and until when -----------------------------------------------------------------------------------

static uint64_t *channel_position(const kvc_channel *c, int which) { return (uint64_t *)c->positions.buf + which; }

// The lane that is due, and how many bytes it has before the next one is.
static const channel_lane *channel_at(const kvc_channel *c, int which) {
    return &c->lanes[*channel_position(c, which) / c->stripe % c->count];
}
static uint64_t channel_room(const kvc_channel *c, int which) { return c->stripe - *channel_position(c, which) % c->stripe; }

static int channel_is_closed(const channel_lane *l) {
    PyObject *value = PyObject_GetAttr(l->guard, channel_closed);
    const int closed = !value || PyObject_IsTrue(value) != 0;
    if (value) Py_DecRef(value);
    return closed;
}

static void channel_exit(const channel_lane *l) {
    const ssize_t n = PyList_Size(l->inside);
    if (!channel_is_closed(l)) {
        PyList_SetSlice(l->inside, n - 1, n, NULL);
        return;
    }
    PyObject *result = PyObject_CallMethodObjArgs(l->guard, channel_leave, NULL); // the last one out closes the descriptor
    if (result) Py_DecRef(result);
    else PyErr_Clear();
}

// As GuardedSocket.enter; false if that would raise.
static int channel_enter(const kvc_channel *c, const channel_lane *l) {
    if (c->forks != channel_forks || PyList_Append(l->inside, &_Py_NoneStruct)) return 0;
    if (!channel_is_closed(l)) return 1;
    channel_exit(l);
    return 0;
}

// The limit that the kernel was told, if a call that it ends fits before the deadline; else a negative number.
static double channel_limit(const kvc_channel *c, const channel_lane *l, double deadline, int sending) {
    PyObject *value = PyObject_GetAttr(l->connection, channel_limits[sending]);
    const double limit = value ? PyFloat_AsDouble(value) : -1, left = deadline - channel_now();
    if (value) Py_DecRef(value);
    if (c->count > 1 && !sending) return limit <= left && limit <= CHANNEL_LOOK_S ? limit : -1;
    return limit <= left && (limit >= 1.0 || left <= limit + limit) ? limit : -1;
}

// ---- moving bytes ----------------------------------------------------------------------------------------------------

// Whether one of the lanes has ended, whatever it still holds.
static int channel_lost(const kvc_channel *c) {
    struct pollfd lanes[CHANNEL_LANES];
    for (uint64_t i = 0; i < c->count; i++) lanes[i] = (struct pollfd){.fd = c->lanes[i].fd, .events = POLLRDHUP};
    return poll(lanes, c->count, 0) > 0;
}

// All of a stream by the deadline: the call waits in the kernel while its limit allows it, then by poll.
static long channel_move(const kvc_channel *c, const channel_lane *l, kvc_stream *s, double deadline, double limit, int sending,
                         const kvc_kernels *k) {
    const int waiting = s->flags;
    uint64_t before = s->left;
    double lost_at = 0;
    s->fd = l->fd;
    s->until = deadline - limit;
    for (;;) {
        PyThreadState *thread = PyEval_SaveThread();
        int code = sending ? stream_send(s, k) : stream_receive(s, k);
        PyEval_RestoreThread(thread);
        if (channel_is_closed(l)) return CHANNEL_ENDED; // what comes may lie behind bytes that close() took and dropped
        if (code == STREAM_DONE) return CHANNEL_DONE;
        if (code == STREAM_ENDED) return CHANNEL_ENDED;
        if (code == STREAM_STRAY) return CHANNEL_STRAY;
        if (code != STREAM_SHORT && code != EAGAIN && code != EINTR) return -code;
        if (PyErr_CheckSignals()) return CHANNEL_RAISED;
        const double left = deadline - channel_now();
        if (left <= 0) return CHANNEL_LATE;
        if (c->count > 1 && !sending) {
            const int still = s->left == before && channel_lost(c);
            before = s->left;
            if (!still) lost_at = 0;
            else if (lost_at == 0) lost_at = channel_now();
            else if (channel_now() - lost_at >= CHANNEL_LOST_S) return CHANNEL_ENDED;
        }
        if (left >= limit) continue;
        struct pollfd one = {.fd = l->fd, .events = sending ? POLLOUT : POLLIN};
        thread = PyEval_SaveThread();
        poll(&one, 1, left > 3600 ? 3600000 : (int)(left * 1e3) + 1);
        PyEval_RestoreThread(thread);
        s->flags = (waiting & ~MSG_WAITALL) | MSG_DONTWAIT;
        s->until = deadline;
    }
}

static void channel_release(channel_parts *p) {
    while (p->number) PyBuffer_Release(&p->buffers[--p->number]);
}

// The buffers of a sequence; false, with none held, if that is for the long way.
static int channel_take(channel_parts *p, PyObject *sequence, int flags) {
    const ssize_t count = PySequence_Size(sequence);
    p->number = 0;
    p->nbytes = 0;
    for (ssize_t i = 0; i < count && count <= STREAM_PARTS - 1; i++) {
        PyObject *part = PySequence_GetItem(sequence, i);
        Py_buffer *b = &p->buffers[p->number];
        const int failed = !part || PyObject_GetBuffer(part, b, flags);
        if (part) Py_DecRef(part);
        if (failed) goto refused;
        p->parts[p->number++] = (struct iovec){b->buf, (size_t)b->len};
        p->nbytes += (uint64_t)b->len;
    }
    if (count >= 0 && count <= STREAM_PARTS - 1) return 1;
refused:
    PyErr_Clear();
    channel_release(p);
    return 0;
}

// ---- sending ---------------------------------------------------------------------------------------------------------

// The head of a frame, at most CHANNEL_HEAD bytes; 0 if it is for the long way.
static size_t channel_head(const kvc_channel *c, PyObject *message, PyObject *request, uint64_t nbytes, uint8_t *head) {
    size_t found = 0;
    char *bytes;
    ssize_t n = 0;
    PyObject *cls = PyObject_Type(message), *meta = NULL;
    PyObject *number = PyDict_GetItemWithError(c->numbers, cls); // borrowed
    if (number && nbytes <= c->max_payload && (!nbytes || PySet_Contains(c->carriers, cls) == 1))
        meta = PyObject_CallFunctionObjArgs(c->encode, message, NULL);
    if (meta && !PyBytes_AsStringAndSize(meta, &bytes, &n) && (uint64_t)n <= c->max_meta && n <= CHANNEL_HEAD - CHANNEL_HEADER) {
        kvc_put64(head, PyLong_AsUnsignedLongLong(number));
        kvc_put32(head + 8, (uint32_t)c->flags);
        kvc_put64(head + 12, PyLong_AsUnsignedLongLong(request));
        kvc_put32(head + 20, (uint32_t)n);
        kvc_put64(head + 24, nbytes);
        memcpy(head + CHANNEL_HEADER, bytes, (size_t)n);
        if (!PyErr_Occurred()) found = CHANNEL_HEADER + (size_t)n;
    }
    PyErr_Clear();
    if (meta) Py_DecRef(meta);
    Py_DecRef(cls);
    return found;
}

// send(message, request_id, payload, deadline)
static PyObject *channel_send(kvc_channel *c, PyObject *const *args, const kvc_kernels *k) {
    uint8_t head[CHANNEL_HEAD];
    channel_parts payload;
    struct iovec parts[STREAM_PARTS];
    long code = CHANNEL_LONG_WAY;
    const channel_lane *l = channel_at(c, CHANNEL_SENT);
    const double deadline = PyFloat_AsDouble(args[3]), limit = channel_limit(c, l, deadline, 1);
    if (limit < 0 || !channel_take(&payload, args[2], 0)) return PyErr_Occurred() ? NULL : channel_none();
    const size_t nbytes = channel_head(c, args[0], args[1], payload.nbytes, head);
    const uint64_t whole = nbytes + payload.nbytes + (c->flags ? CHANNEL_TRAILER : 0);
    if (nbytes && whole <= channel_room(c, CHANNEL_SENT) && channel_enter(c, l)) {
        parts[0] = (struct iovec){head, nbytes};
        memcpy(parts + 1, payload.parts, (size_t)payload.number * sizeof *parts);
        kvc_stream s = {.parts = parts, .count = (uint64_t)payload.number + 1, .left = nbytes + payload.nbytes};
        s.flags = MSG_NOSIGNAL;
        s.first = payload.nbytes >= CHANNEL_LARGE ? nbytes : 0;
        s.plain = !c->flags;
        hash_begin(&s.hash);
        code = channel_move(c, l, &s, deadline, limit, 1, k);
        channel_exit(l);
        if (code == CHANNEL_DONE) *channel_position(c, CHANNEL_SENT) += whole;
    }
    channel_release(&payload);
    return channel_result(code);
}

// ---- receiving -------------------------------------------------------------------------------------------------------

// As much as there is of `most` bytes from `place` on, or all of it; as recvmsg, with -1 and errno.
static ssize_t channel_read(const kvc_channel *c, const channel_lane *l, size_t at, size_t end, int flags) {
    struct iovec part = {(uint8_t *)c->place.buf + at, end - at};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    const ssize_t n = recvmsg(l->fd, &message, (c->receive_flags & ~MSG_WAITALL) | flags);
    if (n >= 0 && message.msg_flags & MSG_CTRUNC) {
        errno = -CHANNEL_STRAY;
        return -1;
    }
    return n;
}

// As channel_read for the first bytes of a frame: waits for them, and looks for them before it sleeps if that is worth it.
// After a look in vain it is called again to sleep, with `since` set: signals that came meanwhile would not end the sleep.
static ssize_t channel_first(kvc_channel *c, const channel_lane *l, size_t end, int flags) {
    if (!c->look.most_ns) return channel_read(c, l, 0, end, flags);
    const int looked = c->since != 0;
    const uint64_t start = looked ? c->since : look_now();
    const int looks = !looked && look_begin(&c->look, start);
    ssize_t n = -1;
    int there = 0;
    for (uint64_t now = start; looks && now - start < c->look.most_ns && !look_crowded(now); now = look_yield(now)) {
        n = channel_read(c, l, 0, end, MSG_DONTWAIT);
        there = n >= 0 || errno != EAGAIN;
        if (there) break;
    }
    c->since = looks && !there ? start : 0;
    if (c->since) {
        errno = EINTR;
        return -1;
    }
    if (!there) n = channel_read(c, l, 0, end, flags);
    const int error = errno;
    look_end(&c->look, looks || looked, look_now() - start);
    errno = error;
    return n;
}

// How many bytes the frame in `place` has up to its payload, with its trailer if there is no payload, with both if they
// are few; 0 if it is for the long way, also as some of it is for the next lane. At least its header is there.
static size_t channel_goal(const kvc_channel *c) {
    const uint8_t *p = c->place.buf;
    const uint64_t meta = kvc_u32(p + 20), payload = kvc_u64(p + 24);
    if (kvc_u32(p + 8) != c->flags || !meta || meta > c->max_meta || payload > c->max_payload) return 0;
    const uint64_t trailer = c->flags ? CHANNEL_TRAILER : 0, head = CHANNEL_HEADER + meta;
    const uint64_t goal = payload > CHANNEL_SMALL ? head : head + payload + trailer;
    return goal <= (size_t)c->place.len && goal <= c->room ? (size_t)goal : 0;
}

// Without the GIL: a frame as far as channel_goal says, or an end. `have` says how much came, `errno` what went wrong.
static ssize_t channel_frame(kvc_channel *c, const channel_lane *l, int ahead) {
    size_t goal = CHANNEL_HEADER, first = ahead ? c->usual : CHANNEL_HEADER;
    if (goal > c->room) goal = (size_t)c->room;
    if (first > c->room) first = (size_t)c->room;
    c->have = 0;
    for (ssize_t n = channel_first(c, l, first, ahead ? 0 : MSG_WAITALL);; n = channel_read(c, l, c->have, goal, MSG_WAITALL)) {
        if (n <= 0) return n;
        c->have += (size_t)n;
        if (c->have >= CHANNEL_HEADER) goal = channel_goal(c);
        if (c->have >= goal) return 1;
    }
}

// What is in `place`, as (message, request_id, payload_nbytes); else how many bytes are there for the long way.
static PyObject *channel_message(kvc_channel *c, const kvc_kernels *k) {
    const uint8_t *p = c->place.buf;
    const uint64_t payload = c->have < CHANNEL_HEADER ? 0 : kvc_u64(p + 24);
    const size_t goal = c->have < CHANNEL_HEADER ? 0 : channel_goal(c), head = goal ? CHANNEL_HEADER + kvc_u32(p + 20) : 0;
    PyObject *found = NULL, *message = NULL, *cls = NULL, *key = NULL, *meta = NULL;
    if (!goal || c->have < goal || (!payload && c->have > goal)) goto done;
    if (!payload && c->flags && hash_whole(p, head, k) != kvc_u64(p + head)) goto done;
    key = PyLong_FromUnsignedLongLong(kvc_u64(p));
    PyObject *expected = PyDict_GetItemWithError(c->kinds, key); // borrowed
    if (!expected || (payload && PySet_Contains(c->carriers, expected) != 1)) goto done;
    meta = PyBytes_FromStringAndSize((const char *)p + CHANNEL_HEADER, (ssize_t)(head - CHANNEL_HEADER));
    message = meta ? PyObject_CallFunctionObjArgs(c->decode, meta, NULL) : NULL;
    cls = message ? PyObject_Type(message) : NULL;
    if (cls != expected) goto done;
    found = PyTuple_New(3);
    PyTuple_SetItem(found, 0, message);
    PyTuple_SetItem(found, 1, PyLong_FromUnsignedLongLong(kvc_u64(p + 12)));
    PyTuple_SetItem(found, 2, PyLong_FromUnsignedLongLong(payload));
    message = NULL;
    c->pending = payload;
    c->head = head;
    c->usual = goal;
done:
    PyErr_Clear();
    if (meta) Py_DecRef(meta);
    if (key) Py_DecRef(key);
    if (cls) Py_DecRef(cls);
    if (message) Py_DecRef(message);
    return found ? found : PyLong_FromLong((long)c->have);
}

// receive(deadline, ahead): see channel_message; or nothing came (None), the end (0) or an error (negative).
static PyObject *channel_receive(kvc_channel *c, PyObject *const *args, const kvc_kernels *k) {
    const double deadline = PyFloat_AsDouble(args[0]);
    const int ahead = PyObject_IsTrue(args[1]);
    if (PyErr_Occurred()) return NULL;
    const channel_lane *l = channel_at(c, CHANNEL_RECEIVED);
    if (c->pending || channel_limit(c, l, deadline, 0) < 0 || !channel_enter(c, l)) return channel_none();
    c->room = channel_room(c, CHANNEL_RECEIVED);
    ssize_t n;
    int error;
    do {
        PyThreadState *thread = PyEval_SaveThread();
        n = channel_frame(c, l, ahead);
        error = n < 0 ? errno : 0;
        PyEval_RestoreThread(thread);
    } while (c->since && !PyErr_CheckSignals());
    if (c->since) {
        c->since = 0;
        channel_exit(l);
        return NULL;
    }
    const int closed = channel_is_closed(l);
    channel_exit(l);
    *channel_position(c, CHANNEL_RECEIVED) += c->have;
    if (error == EINTR && PyErr_CheckSignals()) return NULL;
    if (closed || (n == 0 && !c->have)) return PyLong_FromLong(CHANNEL_ENDED);
    if (error == -CHANNEL_STRAY) return PyLong_FromLong(CHANNEL_STRAY);
    if (n < 0 && error != EAGAIN && error != EINTR) return PyLong_FromLong(-error);
    return c->have ? channel_message(c, k) : channel_none();
}

// Give the parts what is in `place` of the payload; the rest is for the stream.
static void channel_fill(const kvc_channel *c, const channel_parts *p, kvc_stream *s, const kvc_kernels *k) {
    const uint8_t *from = (const uint8_t *)c->place.buf + c->head;
    uint64_t left = c->have - c->head;
    if (left > c->pending) {
        s->trailer_done = (uint32_t)(left - c->pending);
        memcpy(&s->trailer, from + c->pending, s->trailer_done);
        left = c->pending;
    }
    const uint64_t moves = left;
    for (int i = 0; left; i++) {
        const size_t n = p->parts[i].iov_len < left ? p->parts[i].iov_len : (size_t)left;
        memcpy(p->parts[i].iov_base, from, n);
        from += n;
        left -= n;
    }
    stream_advance(s, moves, !s->plain, k);
}

// receive_payload(views, deadline)
static PyObject *channel_payload(kvc_channel *c, PyObject *const *args, const kvc_kernels *k) {
    channel_parts payload;
    const channel_lane *l = channel_at(c, CHANNEL_RECEIVED);
    const double deadline = PyFloat_AsDouble(args[1]), limit = channel_limit(c, l, deadline, 0);
    const uint64_t whole = c->head + c->pending + (c->flags ? CHANNEL_TRAILER : 0);
    if (limit < 0 || !c->pending || c->have > whole || whole - c->have > channel_room(c, CHANNEL_RECEIVED) ||
        !channel_take(&payload, args[0], PY_WRITABLE))
        return PyErr_Occurred() ? NULL : channel_none();
    long code = CHANNEL_LONG_WAY;
    if (payload.nbytes == c->pending && channel_enter(c, l)) {
        kvc_stream s = {.parts = payload.parts, .count = (uint64_t)payload.number, .left = payload.nbytes};
        s.flags = c->receive_flags;
        s.plain = !c->flags;
        if (!s.plain) {
            hash_begin(&s.hash);
            hash_update(&s.hash, c->place.buf, c->head, k);
        }
        channel_fill(c, &payload, &s, k);
        const int all = !s.left && (s.plain || s.trailer_done == sizeof s.trailer);
        code = all ? CHANNEL_DONE : channel_move(c, l, &s, deadline, limit, 0, k);
        channel_exit(l);
        if (code == CHANNEL_DONE) *channel_position(c, CHANNEL_RECEIVED) += whole - c->have;
        const uint64_t trailer = s.plain ? 0 : CHANNEL_TRAILER;
        c->progress[0] = c->pending - s.left + (s.plain ? 0 : s.trailer_done);
        c->progress[1] = c->pending + trailer;
        c->pending = 0;
        const uint64_t found = s.plain ? 0 : hash_end(&s.hash, k);
        if (code == CHANNEL_DONE && trailer && found != s.trailer) {
            code = CHANNEL_DAMAGED;
            c->progress[0] = found;
            c->progress[1] = s.trailer;
        }
    }
    channel_release(&payload);
    return channel_result(code);
}

// ---- made by Python --------------------------------------------------------------------------------------------------

static PyObject *channel_pair(uint64_t a, uint64_t b) {
    PyObject *pair = PyTuple_New(2);
    PyTuple_SetItem(pair, 0, PyLong_FromUnsignedLongLong(a));
    PyTuple_SetItem(pair, 1, PyLong_FromUnsignedLongLong(b));
    return pair;
}

// The long way takes over: bytes of the head of the frame whose payload is due (0: none is), and bytes in `place`.
static PyObject *channel_hand_over(kvc_channel *c) {
    const uint64_t head = c->pending ? c->head : 0;
    c->pending = 0;
    return channel_pair(head, head ? c->have : 0);
}

static void channel_destroy(PyObject *capsule) {
    kvc_channel *c = PyCapsule_GetPointer(capsule, channel_name);
    PyBuffer_Release(&c->place);
    PyBuffer_Release(&c->positions);
    Py_DecRef(c->held);
    free(c);
}

static uint64_t channel_number(PyObject *of, ssize_t index) { return PyLong_AsUnsignedLongLong(PyTuple_GetItem(of, index)); }

// From (lanes, kinds, numbers, carriers, encode, decode, place, positions, stripe, receive_flags, flags, max_meta, max_payload,
// look_ns), each lane as (guard, inside, connection, fd): the functions in `methods`, on one capsule, as a tuple.
static PyObject *channel_make(PyObject *of, PyMethodDef *methods, ssize_t count) {
    if (!channel_closed) {
        channel_closed = PyUnicode_InternFromString("closed");
        channel_leave = PyUnicode_InternFromString("leave");
        channel_limits[0] = PyUnicode_InternFromString("_recv_limit");
        channel_limits[1] = PyUnicode_InternFromString("_send_limit");
        pthread_atfork(NULL, NULL, channel_forked);
    }
    kvc_channel *c = calloc(1, sizeof *c);
    PyObject *lanes = PyTuple_GetItem(of, 0);
    if (!c || PySequence_Size(lanes) > CHANNEL_LANES || PyObject_GetBuffer(PyTuple_GetItem(of, 6), &c->place, PY_WRITABLE)) {
        free(c);
        return channel_none();
    }
    if (PyObject_GetBuffer(PyTuple_GetItem(of, 7), &c->positions, PY_WRITABLE)) {
        PyBuffer_Release(&c->place);
        free(c);
        return channel_none();
    }
    c->count = (uint64_t)PySequence_Size(lanes);
    for (uint64_t i = 0; i < c->count; i++) {
        PyObject *lane = PyTuple_GetItem(lanes, (ssize_t)i);
        c->lanes[i] = (channel_lane){PyTuple_GetItem(lane, 0), PyTuple_GetItem(lane, 1), PyTuple_GetItem(lane, 2), 0};
        c->lanes[i].fd = (int)channel_number(lane, 3);
    }
    PyObject **fields[] = {&c->kinds, &c->numbers, &c->carriers, &c->encode, &c->decode};
    for (ssize_t i = 0; i < 5; i++) *fields[i] = PyTuple_GetItem(of, i + 1);
    c->stripe = channel_number(of, 8);
    c->receive_flags = (int)channel_number(of, 9);
    c->flags = channel_number(of, 10);
    c->max_meta = channel_number(of, 11);
    c->max_payload = channel_number(of, 12);
    c->look.most_ns = channel_number(of, 13);
    c->look.last_ns = UINT64_MAX;
    c->usual = CHANNEL_HEADER;
    c->forks = channel_forks;
    c->held = of;
    Py_IncRef(of);
    PyObject *capsule = PyCapsule_New(c, channel_name, channel_destroy), *made = PyTuple_New(count);
    for (ssize_t i = 0; i < count; i++) PyTuple_SetItem(made, i, PyCFunction_NewEx(&methods[i], capsule, NULL));
    Py_DecRef(capsule);
    return made;
}

#endif
