// The sockets of a channel: who is inside of them, until when, and a frame moved over them, from one to the next where
// its stripe ends. For the short ways of channel.h.
#ifndef KVC_LANES_H
#define KVC_LANES_H

#include <poll.h>
#include <pthread.h>
#include <stdlib.h>

#include "look.h"
#include "python.h"
#include "stream.h"

// Results: Python's None for the long way, a tuple, or a number: an errno as a negative one, or of these, mirrored in short.py.
enum { CHANNEL_DONE = 1, CHANNEL_DUE = 2, CHANNEL_ENDED = 0 };
enum { CHANNEL_STRAY = -100000, CHANNEL_LATE = -100001, CHANNEL_DAMAGED = -100002 };
enum { CHANNEL_RAISED = -100003, CHANNEL_LONG_WAY = -100004, CHANNEL_CROSSED = -100005 }; // the last two stay inside
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
    channel_lane lanes[CHANNEL_LANES];           // each frame is dealt to them in stripes, see kvferry.transports.lanes
    uint64_t count, stripe;                      // lanes; bytes of a stripe
    Py_buffer positions;                         // bytes of the frame that were sent, and received
    PyObject *kinds, *numbers, *carriers;        // number to class, class to number, classes that may carry a payload
    PyObject *encode, *decode;
    Py_buffer place;                             // for what is received ahead
    size_t usual;                                // how much of it is asked for: what the last frame had
    size_t head, have;                           // of the frame whose payload is due: bytes before it, bytes in `place`
    uint64_t pending;                            // bytes of that payload
    uint64_t max_meta, max_payload, progress[2]; // what an error is about: bytes moved and all, or two hashes;
    uint64_t sent[2];                            // that of sending, which another thread may do
    uint64_t flags;                              // of every frame
    kvc_look look;                               // before waiting for a frame
    uint64_t since;                              // when a wait began that has looked in vain, and is to sleep; else 0
    int receive_flags;
    int pipe[2];                                 // for payloads that are lent to the kernel; -1: there is none,
    unsigned without;                            // and so many more are sent before another try to make one
    unsigned forks;
} kvc_channel;

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
static double channel_limit(const kvc_channel *c, const channel_lane *l, double deadline, int which) {
    PyObject *value = PyObject_GetAttr(l->connection, channel_limits[which]);
    const double limit = value ? PyFloat_AsDouble(value) : -1, left = deadline - channel_now();
    if (value) Py_DecRef(value);
    if (c->count > 1 && which == CHANNEL_RECEIVED) return limit <= left && limit <= CHANNEL_LOOK_S ? limit : -1;
    return limit <= left && (limit >= 1.0 || left <= limit + limit) ? limit : -1;
}

// That of the lane that is due, if those of all lanes that have some of the next `nbytes` fit; else a negative number.
static double channel_limits_of(const kvc_channel *c, uint64_t nbytes, double deadline, int which) {
    const uint64_t position = *channel_position(c, which), first = position / c->stripe;
    const uint64_t last = nbytes ? (position + nbytes - 1) / c->stripe : first;
    const double limit = channel_limit(c, channel_at(c, which), deadline, which);
    for (uint64_t i = first + 1; limit >= 0 && i <= last && i < first + c->count; i++)
        if (channel_limit(c, &c->lanes[i % c->count], deadline, which) < 0) return -1;
    return limit;
}

// ---- moving bytes ----------------------------------------------------------------------------------------------------

// Whether one of the lanes has ended, whatever it still holds.
static int channel_lost(const kvc_channel *c) {
    struct pollfd lanes[CHANNEL_LANES];
    for (uint64_t i = 0; i < c->count; i++) lanes[i] = (struct pollfd){.fd = c->lanes[i].fd, .events = POLLRDHUP};
    return poll(lanes, c->count, 0) > 0;
}

// Whether to wait no longer for a lane: another one is lost, and this one gave nothing since. `lost_at`: 0, or since when.
static int channel_gives_up(const kvc_channel *c, int gave, double *lost_at) {
    const double now = channel_now();
    if (gave || !channel_lost(c)) *lost_at = 0;
    else if (*lost_at == 0) *lost_at = now;
    else return now - *lost_at >= CHANNEL_LOST_S;
    return 0;
}

static void channel_poll(const channel_lane *l, double seconds, int which) {
    struct pollfd one = {.fd = l->fd, .events = which == CHANNEL_SENT ? POLLOUT : POLLIN};
    PyThreadState *thread = PyEval_SaveThread();
    poll(&one, 1, seconds > CHANNEL_LOOK_S ? (int)(CHANNEL_LOOK_S * 1e3) : (int)(seconds * 1e3) + 1);
    PyEval_RestoreThread(thread);
}

// As much of a stream as one lane has: its calls wait in the kernel while the limit of these allows it, else by poll.
static long channel_move_over(const kvc_channel *c, const channel_lane *l, kvc_stream *s, double deadline, double limit,
                              int which, const kvc_kernels *k) {
    const int flags = s->flags;
    double left = deadline - channel_now(), lost_at = 0;
    for (;;) {
        const uint64_t before = s->room;
        const int waits = limit >= 0 && limit <= left;
        s->fd = l->fd;
        s->flags = waits ? flags : (flags & ~MSG_WAITALL) | MSG_DONTWAIT;
        s->until = waits ? deadline - limit : deadline;
        PyThreadState *thread = PyEval_SaveThread();
        const int code = which == CHANNEL_SENT ? stream_send(s, k) : stream_receive(s, k);
        PyEval_RestoreThread(thread);
        s->flags = flags;
        if (channel_is_closed(l)) return CHANNEL_ENDED; // what comes may lie behind bytes that close() took and dropped
        if (code == STREAM_DONE) return CHANNEL_DONE;
        if (code == STREAM_CROSSED) return CHANNEL_CROSSED;
        if (code == STREAM_ENDED) return CHANNEL_ENDED;
        if (code == STREAM_STRAY) return CHANNEL_STRAY;
        if (code != STREAM_SHORT && code != EAGAIN && code != EINTR) return -code;
        if (PyErr_CheckSignals()) return CHANNEL_RAISED;
        left = deadline - channel_now();
        if (left <= 0) return CHANNEL_LATE;
        if (c->count > 1 && which == CHANNEL_RECEIVED && channel_gives_up(c, s->room < before, &lost_at)) return CHANNEL_ENDED;
        if (!waits) channel_poll(l, left, which);
    }
}

// All of a stream by the deadline, one lane after the other where the ends of stripes lie in it; the position moves with it.
// `limit`: of the first lane. For the long way if nothing was begun.
static long channel_move(const kvc_channel *c, kvc_stream *s, double deadline, double limit, int which, const kvc_kernels *k) {
    long code = CHANNEL_LONG_WAY;
    for (const channel_lane *l = channel_at(c, which); channel_enter(c, l); l = channel_at(c, which)) {
        const uint64_t room = s->room = channel_room(c, which);
        code = channel_move_over(c, l, s, deadline, limit, which, k);
        channel_exit(l);
        *channel_position(c, which) += room - s->room;
        if (code != CHANNEL_CROSSED) return code;
        limit = channel_limit(c, channel_at(c, which), deadline, which);
    }
    return code == CHANNEL_CROSSED ? CHANNEL_ENDED : code;
}

#endif
