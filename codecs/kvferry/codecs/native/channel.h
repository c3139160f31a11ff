// The short ways of a channel: one frame sent, one received up to its payload, and its payload, each in one call, in
// which no Python runs between a wake-up and the last byte. What is unusual (another header than expected, bytes of
// two frames at once) is left to Python, which takes its long way and says what is wrong. Used by wire/short.py.
#ifndef KVC_CHANNEL_H
#define KVC_CHANNEL_H

#include "lanes.h"

enum { CHANNEL_HEADER = 32, CHANNEL_TRAILER = 8, CHANNEL_HEAD = 4096, CHANNEL_SMALL = 8 << 10 };
// Before a payload of so many bytes its head is sent alone: the receiver wakes up while the payload is copied.
enum { CHANNEL_LARGE = 48 << 10 };
// From so many bytes on a payload that stays as it is until it is answered is not copied but lent to the kernel.
enum { CHANNEL_LENT = 256 << 10 };
// Where no pipe could be made so many payloads are copied before the next try, which costs more than one saves.
enum { CHANNEL_WITHOUT = 256 };

// The parts of one payload.
typedef struct {
    Py_buffer buffers[STREAM_PARTS];
    struct iovec parts[STREAM_PARTS];
    int number;
    uint64_t nbytes;
} channel_parts;

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

// What was given as a deadline; false if that is for the long way, which says why it is none.
static int channel_deadline(PyObject *given, double *deadline) {
    *deadline = PyFloat_AsDouble(given);
    if (!PyErr_Occurred()) return 1;
    PyErr_Clear();
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

// The pipe by which payloads are lent, made when it is first needed; NULL if there is none.
static const int *channel_pipe(kvc_channel *c) {
    if (c->pipe[0] >= 0) return c->pipe;
    if (c->without) {
        c->without--;
        return NULL;
    }
    if (!pipe2(c->pipe, O_CLOEXEC)) {
        if (fcntl(c->pipe[1], F_SETPIPE_SZ, STREAM_PIPE) >= STREAM_PIPE) return c->pipe;
        close(c->pipe[0]);
        close(c->pipe[1]);
    }
    c->pipe[0] = -1; // the user has too many, or this process too many files
    c->without = CHANNEL_WITHOUT;
    return NULL;
}

// send(message, request_id, payload, deadline, lent)
static PyObject *channel_send(kvc_channel *c, PyObject *const *args, const kvc_kernels *k) {
    uint8_t head[CHANNEL_HEAD];
    channel_parts payload;
    struct iovec parts[STREAM_PARTS];
    long code = CHANNEL_LONG_WAY;
    *channel_position(c, CHANNEL_SENT) = 0;
    double deadline;
    const int lent = PyObject_IsTrue(args[4]);
    if (!channel_deadline(args[3], &deadline) || !channel_take(&payload, args[2], 0)) return channel_none();
    const size_t nbytes = channel_head(c, args[0], args[1], payload.nbytes, head);
    const uint64_t whole = nbytes + payload.nbytes + (c->flags ? CHANNEL_TRAILER : 0);
    const double limit = nbytes ? channel_limits_of(c, whole, deadline, CHANNEL_SENT) : -1;
    if (limit >= 0) {
        parts[0] = (struct iovec){head, nbytes};
        memcpy(parts + 1, payload.parts, (size_t)payload.number * sizeof *parts);
        kvc_stream s = {.parts = parts, .count = (uint64_t)payload.number + 1, .left = nbytes + payload.nbytes};
        s.flags = MSG_NOSIGNAL;
        s.first = payload.nbytes >= CHANNEL_LARGE ? nbytes : 0;
        s.plain = !c->flags;
        s.pipe = lent && !s.plain && payload.nbytes >= CHANNEL_LENT ? channel_pipe(c) : NULL;
        hash_begin(&s.hash);
        code = channel_move(c, &s, deadline, limit, CHANNEL_SENT, k);
        c->sent[0] = *channel_position(c, CHANNEL_SENT);
        c->sent[1] = whole;
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
static ssize_t channel_first(kvc_channel *c, const channel_lane *l, size_t end, int flags, double deadline) {
    if (!c->look.most_ns) return channel_read(c, l, 0, end, flags);
    const int looked = c->since != 0;
    const uint64_t start = looked ? c->since : look_now();
    const int looks = !looked && look_begin(&c->look, start);
    ssize_t n = -1;
    int there = 0;
    const double left_ns = deadline * 1e9 - (double)start;
    const long switches = looks ? look_switches() : 0;
    const uint64_t most_ns = left_ns > (double)c->look.most_ns ? c->look.most_ns : left_ns > 0 ? (uint64_t)left_ns : 0;
    for (uint64_t last = start, now = start; looks && last - start < most_ns && !look_crowded(now); now = look_yield()) {
        n = channel_read(c, l, 0, end, MSG_DONTWAIT);
        there = n >= 0 || errno != EAGAIN;
        const int error = errno;
        look_away(now - last, now, there, switches);
        errno = error;
        if (there) break;
        last = now;
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
// are few; 0 if it is for the long way. At least its header is there.
static size_t channel_goal(const kvc_channel *c) {
    const uint8_t *p = c->place.buf;
    const uint64_t meta = kvc_u32(p + 20), payload = kvc_u64(p + 24);
    if (kvc_u32(p + 8) != c->flags || !meta || meta > c->max_meta || payload > c->max_payload) return 0;
    const uint64_t trailer = c->flags ? CHANNEL_TRAILER : 0, head = CHANNEL_HEADER + meta;
    const uint64_t all = head + payload + trailer, goal = payload > CHANNEL_SMALL ? head : all;
    return goal <= (size_t)c->place.len ? (size_t)goal : 0;
}

// Without the GIL: a frame as far as channel_goal says, or an end. `have` says how much came, `errno` what went wrong.
static ssize_t channel_frame(kvc_channel *c, const channel_lane *l, int ahead, double deadline) {
    size_t goal = CHANNEL_HEADER;
    c->have = 0;
    ssize_t n = channel_first(c, l, ahead ? c->usual : CHANNEL_HEADER, ahead ? 0 : MSG_WAITALL, deadline);
    for (;; n = channel_read(c, l, c->have, goal, MSG_WAITALL)) {
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
    double deadline;
    const int ahead = PyObject_IsTrue(args[1]);
    if (!channel_deadline(args[0], &deadline)) return channel_none();
    const channel_lane *l = &c->lanes[0]; // where frames begin
    if (c->pending || channel_limit(c, l, deadline, CHANNEL_RECEIVED) < 0 || !channel_enter(c, l)) return channel_none();
    ssize_t n;
    int error;
    do {
        PyThreadState *thread = PyEval_SaveThread();
        n = channel_frame(c, l, ahead, deadline);
        error = n < 0 ? errno : 0;
        PyEval_RestoreThread(thread);
    } while (c->since && !PyErr_CheckSignals() && channel_limit(c, l, deadline, CHANNEL_RECEIVED) >= 0);
    if (c->since) { // a handler raised, or a sleep would pass the deadline now
        look_end(&c->look, 1, look_now() - c->since);
        c->since = 0;
        channel_exit(l);
        return PyErr_Occurred() ? NULL : channel_none();
    }
    const int closed = channel_is_closed(l);
    channel_exit(l);
    *channel_position(c, CHANNEL_RECEIVED) = c->have;
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

// Fill the parts with the payload that is due, and compare its hash.
static long channel_place(kvc_channel *c, const channel_parts *p, double deadline, double limit, const kvc_kernels *k) {
    kvc_stream s = {.parts = p->parts, .count = (uint64_t)p->number, .left = p->nbytes};
    s.flags = c->receive_flags;
    s.plain = !c->flags;
    if (!s.plain) {
        hash_begin(&s.hash);
        hash_update(&s.hash, c->place.buf, c->head, k);
    }
    channel_fill(c, p, &s, k);
    const int all = !s.left && (s.plain || s.trailer_done == sizeof s.trailer);
    const long code = all ? CHANNEL_DONE : channel_move(c, &s, deadline, limit, CHANNEL_RECEIVED, k);
    if (code == CHANNEL_LONG_WAY) return code;
    c->progress[0] = c->pending - s.left + (s.plain ? 0 : s.trailer_done);
    c->progress[1] = c->pending + (s.plain ? 0 : CHANNEL_TRAILER);
    c->pending = 0;
    if (code != CHANNEL_DONE || s.plain) return code;
    const uint64_t found = hash_end(&s.hash, k);
    if (found == s.trailer) return code;
    c->progress[0] = found;
    c->progress[1] = s.trailer;
    return CHANNEL_DAMAGED;
}

// receive_payload(views, deadline)
static PyObject *channel_payload(kvc_channel *c, PyObject *const *args, const kvc_kernels *k) {
    channel_parts payload;
    double deadline;
    const uint64_t whole = c->head + c->pending + (c->flags ? CHANNEL_TRAILER : 0);
    if (!channel_deadline(args[1], &deadline) || !c->pending || c->have > whole) return channel_none();
    if (!channel_take(&payload, args[0], PY_WRITABLE)) return channel_none();
    const double limit = channel_limits_of(c, whole - c->have, deadline, CHANNEL_RECEIVED);
    const int fits = limit >= 0 && payload.nbytes == c->pending;
    const long code = fits ? channel_place(c, &payload, deadline, limit, k) : CHANNEL_LONG_WAY;
    channel_release(&payload);
    return channel_result(code);
}

// ---- of connections that are no sockets: their bytes are moved by Python, and have no trailers -----------------------

// head(message, request_id, payload): the head of a frame; None if it is for the long way.
static PyObject *channel_head_of(const kvc_channel *c, PyObject *const *args) {
    uint8_t head[CHANNEL_HEAD];
    channel_parts payload;
    if (!channel_take(&payload, args[2], 0)) return channel_none();
    const size_t nbytes = channel_head(c, args[0], args[1], payload.nbytes, head);
    channel_release(&payload);
    return nbytes ? PyBytes_FromStringAndSize((const char *)head, (ssize_t)nbytes) : channel_none();
}

// message(have): see channel_message, of so many bytes in `place`.
static PyObject *channel_came(kvc_channel *c, PyObject *const *args, const kvc_kernels *k) {
    c->have = PyLong_AsUnsignedLongLong(args[0]);
    return PyErr_Occurred() ? NULL : channel_message(c, k);
}

// payload(views): CHANNEL_DONE if they were given the payload, all of which is in `place`; CHANNEL_DUE if they fit, and all
// of it is still to come, which is taken for granted from then on; None for the long way.
static PyObject *channel_placed(kvc_channel *c, PyObject *const *args, const kvc_kernels *k) {
    channel_parts payload;
    long code = CHANNEL_LONG_WAY;
    if (!c->pending || !channel_take(&payload, args[0], PY_WRITABLE)) return channel_none();
    if (payload.nbytes == c->pending) {
        if (c->have == c->head) code = CHANNEL_DUE;
        else if (c->have == c->head + c->pending) code = channel_place(c, &payload, 0, 0, k);
    }
    if (code == CHANNEL_DUE) c->pending = 0;
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
    if (c->pipe[0] >= 0) {
        close(c->pipe[0]);
        close(c->pipe[1]);
    }
    free(c);
}

static uint64_t channel_number(PyObject *of, ssize_t index) { return PyLong_AsUnsignedLongLong(PyTuple_GetItem(of, index)); }

// From (lanes, kinds, numbers, carriers, encode, decode, place, positions, stripe, receive_flags, flags, max_meta, max_payload,
// look_ns), each lane as (guard, inside, connection, fd): the functions in `methods`, on one capsule, as a tuple.
static PyObject *channel_make(PyObject *of, PyMethodDef *methods, ssize_t count) {
    if (!channel_closed) {
        channel_closed = PyUnicode_InternFromString("closed");
        channel_leave = PyUnicode_InternFromString("leave");
        channel_limits[CHANNEL_SENT] = PyUnicode_InternFromString("_send_limit");
        channel_limits[CHANNEL_RECEIVED] = PyUnicode_InternFromString("_recv_limit");
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
    c->stripe = channel_number(of, 8); // longer than the place: what is received ahead is of the first one
    c->receive_flags = (int)channel_number(of, 9);
    c->flags = channel_number(of, 10);
    c->max_meta = channel_number(of, 11);
    c->max_payload = channel_number(of, 12);
    c->look.most_ns = channel_number(of, 13);
    c->look.last_ns = UINT64_MAX;
    c->usual = CHANNEL_HEADER;
    c->pipe[0] = -1;
    c->forks = channel_forks;
    c->held = of;
    Py_IncRef(of);
    PyObject *capsule = PyCapsule_New(c, channel_name, channel_destroy), *made = PyTuple_New(count);
    for (ssize_t i = 0; i < count; i++) PyTuple_SetItem(made, i, PyCFunction_NewEx(&methods[i], capsule, NULL));
    Py_DecRef(capsule);
    return made;
}

#endif
