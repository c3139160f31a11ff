// The short ways of a connection over UCX, on one host: parts sent as messages, or messages received into their places,
// each in one call in which no Python runs between the first look for progress and the last. What is unusual (bytes of the
// socket, the end of either side, a deadline, errors, a message that does not fit) is left to Python, which goes on with
// what is under way. Used by transports/ucx/short.py; which messages there are says transports/ucx/frames.py.
#ifndef KVC_UCX_H
#define KVC_UCX_H

#include "channel.h"
#include "ways.h"

// Mirrored in transports/ucx: lane.py, outgoing.py, frames.py.
enum { UCX_WINDOW = 32, UCX_SMALL = 8 << 10, UCX_HALVED = 16 << 10, UCX_JOINED = 1 << 20, UCX_CHUNK = 4 << 20, UCX_LENGTH_BITS = 23 };
enum { UCX_LONGEST = UCX_CHUNK + (64 << 10), UCX_LOOK_EVERY = 256, UCX_YIELD_EVERY = 8, UCX_POLL_EVERY = 32, UCX_PARAM = 256 };
enum { UCX_IN_TWO = 0, UCX_IN_ONE = 1, UCX_SIZES = 64 }; // ways to receive a message into one place
enum { UCX_IN_PROGRESS = 1, UCX_FIRST_ERROR = -100 }; // of ucs_status_t
// What a turn of waiting found: nothing, or why Python has to go on.
enum { UCX_ON = 0, UCX_LEFT = 1, UCX_FAILED = 2 };
#define UCX_HELLO (1ull << 63)
#define UCX_POSITION ((1ull << 63) - (1ull << UCX_LENGTH_BITS))

typedef struct {
    uint64_t tag;
    size_t length;
} ucx_info; // ucp_tag_recv_info_t

// Functions of the libucp that is loaded, in the order in which short.py gives them.
typedef struct {
    void *(*send)(void *endpoint, const void *data, size_t count, uint64_t tag, const void *param);
    void *(*receive)(void *worker, void *data, size_t count, uint64_t tag, uint64_t mask, const void *param);
    void *(*probe)(void *worker, uint64_t tag, uint64_t mask, int remove, ucx_info *info);
    unsigned (*progress)(void *worker);
    int8_t (*status)(void *request);
    void (*release)(void *request);
    void *(*flush)(void *worker, const void *param);
} ucx_calls;

// One direction of a connection; one thread at a time.
typedef struct {
    ucx_calls of;
    void *worker, *endpoint;
    int socket;
    uint64_t inline_nbytes; // smaller parts are no messages of their own
    uint64_t spin_ns;       // how long to look for progress before Python sleeps
    uint8_t none[UCX_PARAM], scattered[UCX_PARAM]; // ucp_request_param_t: without options, and for several places
    struct iovec places[STREAM_PARTS + 1];         // ucp_dt_iov_t, of the message that is received
    uint8_t small[UCX_SMALL];                      // parts that are sent as one
    kvc_ways ways[UCX_SIZES];                      // of received messages, by the bits of their size
} kvc_ucx;

// A call that waits.
typedef struct {
    uint64_t until, since; // on CLOCK_MONOTONIC, in ns: the deadline; since when there was no progress, 0: there was
    unsigned rounds, polled; // and that in which it last looked at the socket
    short events;          // of the socket, that end it
} ucx_wait;

// What is sent by one call.
typedef struct {
    ucx_wait wait;
    void *handles[UCX_WINDOW]; // [first, last) are not known to be over, modulo the window
    unsigned first, last;
    uint64_t position, posted, skip; // of the first byte; bytes that were posted, and those that an earlier call had
    int status;
} ucx_burst;

static const char ucx_name[] = "kvferry.ucx";

static uint64_t ucx_tag(uint64_t position, uint64_t nbytes) { return (position << UCX_LENGTH_BITS & UCX_POSITION) | nbytes; }
static int ucx_is_error(const void *request) { return (uintptr_t)request >= (uintptr_t)UCX_FIRST_ERROR; }

static ucx_wait ucx_wait_until(double deadline, short events) {
    return (ucx_wait){.until = deadline < 1e9 ? (uint64_t)(deadline * 1e9) : INT64_MAX, .events = events};
}

// Make progress, or look for it for as long as `spin` allows. To sleep is Python's: so are signals that came meanwhile.
static int ucx_turn(kvc_ucx *u, ucx_wait *w) {
    w->rounds++;
    if (u->of.progress(u->worker)) {
        w->since = 0;
        if (w->rounds - w->polled < UCX_LOOK_EVERY) return UCX_ON; // towards a peer that is gone there may be progress for ever
    }
    const uint64_t now = look_now();
    if (now >= w->until) return UCX_LEFT;
    if (!w->since) w->since = now;
    if (now - w->since >= u->spin_ns) return UCX_LEFT;
    if (w->rounds % UCX_YIELD_EVERY == 0) sched_yield();
    if (w->rounds - w->polled < UCX_POLL_EVERY) return UCX_ON;
    w->polled = w->rounds;
    struct pollfd one = {.fd = u->socket, .events = w->events};
    return poll(&one, 1, 0) < 0 || one.revents ? UCX_LEFT : UCX_ON;
}

// ---- sending ---------------------------------------------------------------------------------------------------------

// Until at most `left` messages are under way.
static int ucx_drive(kvc_ucx *u, ucx_burst *b, unsigned left) {
    while (b->last - b->first > left) {
        void *request = b->handles[b->first % UCX_WINDOW];
        const int status = u->of.status(request);
        if (status == UCX_IN_PROGRESS) {
            const int code = ucx_turn(u, &b->wait);
            if (code != UCX_ON) return code;
            continue;
        }
        u->of.release(request);
        b->first++;
        if (status) {
            b->status = status;
            return UCX_FAILED;
        }
    }
    return UCX_ON;
}

static int ucx_post(kvc_ucx *u, ucx_burst *b, const uint8_t *data, uint64_t nbytes) {
    if (b->posted < b->skip || !nbytes) {
        b->posted += nbytes;
        return UCX_ON;
    }
    const int code = ucx_drive(u, b, UCX_WINDOW - 1);
    if (code != UCX_ON) return code;
    void *request = u->of.send(u->endpoint, data, nbytes, ucx_tag(b->position + b->posted, nbytes), u->none);
    if (ucx_is_error(request)) {
        b->status = (int)(intptr_t)request;
        return UCX_FAILED;
    }
    b->posted += nbytes;
    if (request) b->handles[b->last++ % UCX_WINDOW] = request;
    return UCX_ON;
}

// Parts from `from` on that are small: how many, and their bytes.
static int ucx_run(const kvc_ucx *u, const channel_parts *p, int from, uint64_t *nbytes) {
    int n = from;
    for (*nbytes = 0; n < p->number && p->parts[n].iov_len <= u->inline_nbytes; n++) *nbytes += p->parts[n].iov_len;
    return n - from;
}

// Whether all parts are messages: runs of small ones are few bytes.
static int ucx_all_messages(const kvc_ucx *u, const channel_parts *p) {
    uint64_t copied = 0, nbytes;
    for (int i = 0; i < p->number; i++) {
        const int run = ucx_run(u, p, i, &nbytes);
        if (!run) continue;
        if (run > 1) copied += nbytes;
        if (nbytes >= UCX_SMALL || copied > sizeof u->small) return 0;
        i += run - 1;
    }
    return 1;
}

// Small parts as one message; large ones that lie side by side too, and those that are too large in pieces.
static int ucx_send_all(kvc_ucx *u, ucx_burst *b, const channel_parts *p) {
    uint8_t *small = u->small;
    int code = UCX_ON;
    for (int i = 0; i < p->number && code == UCX_ON;) {
        uint64_t nbytes;
        const int run = ucx_run(u, p, i, &nbytes);
        const uint8_t *data = p->parts[i].iov_base;
        if (run) {
            if (run > 1) {
                data = small;
                for (int n = 0; n < run; n++) {
                    memcpy(small, p->parts[i + n].iov_base, p->parts[i + n].iov_len);
                    small += p->parts[i + n].iov_len;
                }
            }
            code = ucx_post(u, b, data, nbytes);
            i += run;
            continue;
        }
        nbytes = p->parts[i++].iov_len;
        while (i < p->number && p->parts[i].iov_len > u->inline_nbytes && p->parts[i].iov_base == data + nbytes &&
               nbytes + p->parts[i].iov_len <= UCX_JOINED)
            nbytes += p->parts[i++].iov_len;
        for (; nbytes > UCX_LONGEST && code == UCX_ON; nbytes -= UCX_CHUNK, data += UCX_CHUNK) code = ucx_post(u, b, data, UCX_CHUNK);
        if (code == UCX_ON) code = ucx_post(u, b, data, nbytes);
    }
    return code == UCX_ON ? ucx_drive(u, b, 0) : code;
}

static PyObject *ucx_tuple(const uint64_t *numbers, ssize_t count, int status) {
    PyObject *made = PyTuple_New(count + 1);
    PyTuple_SetItem(made, 0, PyLong_FromLong(status));
    for (ssize_t i = 0; i < count; i++) PyTuple_SetItem(made, i + 1, PyLong_FromUnsignedLongLong(numbers[i]));
    return made;
}

// send(parts, position, deadline, skip): bytes of all, when they are sent and received; None for the long way, which has
// not begun; else (status, bytes that were posted, handles of those messages that are under way), the first `skip` of them
// by an earlier call.
static PyObject *ucx_send(kvc_ucx *u, PyObject *const *args) {
    channel_parts p;
    ucx_burst b = {.position = PyLong_AsUnsignedLongLong(args[1]), .skip = PyLong_AsUnsignedLongLong(args[3])};
    b.wait = ucx_wait_until(PyFloat_AsDouble(args[2]), POLLRDHUP);
    if (PyErr_Occurred()) return NULL;
    if (!channel_take(&p, args[0], 0)) return channel_none();
    if (!ucx_all_messages(u, &p)) {
        channel_release(&p);
        return channel_none();
    }
    PyThreadState *thread = PyEval_SaveThread();
    const int code = ucx_send_all(u, &b, &p);
    PyEval_RestoreThread(thread);
    channel_release(&p);
    if (code == UCX_ON) return PyLong_FromUnsignedLongLong(p.nbytes);
    uint64_t numbers[UCX_WINDOW + 1] = {b.posted};
    ssize_t count = 1;
    for (; b.first != b.last; b.first++) numbers[count++] = (uint64_t)(uintptr_t)b.handles[b.first % UCX_WINDOW];
    return ucx_tuple(numbers, count, b.status);
}

// ---- receiving -------------------------------------------------------------------------------------------------------

// What is received by one call.
typedef struct {
    ucx_wait wait;
    uint64_t position, got, least; // of the next byte; bytes that came, and have to
    int index;                     // the part that is next, and how much of it is filled
    uint64_t offset;
    uint64_t coming;               // bytes of the message that is being received
    void *request;
    int unproven, status;          // whether messages came whose sender may have given up
} ucx_taking;

// Wait for the message that is next: its bytes, or 0 and a code.
static uint64_t ucx_await(kvc_ucx *u, ucx_taking *t, int *code) {
    ucx_info info = {0};
    const uint64_t tag = ucx_tag(t->position, 0), mask = UCX_POSITION | UCX_HELLO;
    if (u->of.probe(u->worker, tag, mask, 0, &info)) return info.length;
    t->wait.since = 0;
    while (!u->of.probe(u->worker, tag, mask, 0, &info))
        if ((*code = ucx_turn(u, &t->wait)) != UCX_ON) break;
    return info.length;
}

// The places of the next `nbytes`; those side by side are one.
static size_t ucx_places(kvc_ucx *u, const channel_parts *p, ucx_taking *t, uint64_t nbytes) {
    size_t count = 0;
    while (nbytes) {
        const struct iovec *part = &p->parts[t->index];
        uint8_t *place = (uint8_t *)part->iov_base + t->offset;
        uint64_t take = part->iov_len - t->offset;
        if (take > nbytes) take = nbytes;
        struct iovec *last = count ? &u->places[count - 1] : NULL;
        if (last && (uint8_t *)last->iov_base + last->iov_len == place) last->iov_len += take;
        else if (take) u->places[count++] = (struct iovec){place, take};
        nbytes -= take;
        t->offset += take;
        if (t->offset == part->iov_len) t->index++, t->offset = 0;
    }
    return count;
}

// Start to receive a message into `count` places. What goes to one the kernel copies, page by page, at this end; what goes
// to several, UCX moves in pieces through shared memory, with both ends at work. So one may be given as two halves.
static void *ucx_begin(kvc_ucx *u, size_t count, uint64_t nbytes, uint64_t tag, int way) {
    struct iovec *one = &u->places[0], *other = &u->places[1];
    if (count == 1 && way == UCX_IN_TWO) {
        *other = (struct iovec){(uint8_t *)one->iov_base + nbytes / 2, nbytes - nbytes / 2};
        one->iov_len = nbytes / 2;
        count = 2;
    }
    return count == 1 ? u->of.receive(u->worker, one->iov_base, nbytes, tag, UINT64_MAX, u->none)
                      : u->of.receive(u->worker, u->places, count, tag, UINT64_MAX, u->scattered);
}

// Receive a message that has come.
static int ucx_take(kvc_ucx *u, const channel_parts *p, ucx_taking *t, uint64_t nbytes) {
    const size_t count = ucx_places(u, p, t, nbytes);
    kvc_ways *ways = count == 1 && nbytes >= UCX_HALVED ? &u->ways[63 - __builtin_clzll(nbytes)] : NULL;
    const int way = ways ? ways_next(ways, nbytes) : UCX_IN_ONE;
    const uint64_t began = look_now();
    void *request = ucx_begin(u, count, nbytes, ucx_tag(t->position, nbytes), way);
    t->unproven |= nbytes >= UCX_SMALL; // smaller ones were copied before their sender went on
    int status = ucx_is_error(request) ? (int)(intptr_t)request : 0;
    if (request && !status) {
        t->request = request;
        t->coming = nbytes;
        t->wait.since = 0;
        while ((status = u->of.status(request)) == UCX_IN_PROGRESS) {
            const int code = ucx_turn(u, &t->wait);
            if (code != UCX_ON) return code;
        }
        t->request = NULL;
        u->of.release(request);
    }
    t->status = status;
    if (status) return UCX_FAILED;
    if (ways) ways_took(ways, nbytes, look_now() - began);
    t->coming = 0;
    t->got += nbytes;
    t->position += nbytes;
    return UCX_ON;
}

// Hand over what UCX holds back, and see that the sender has not said that it gives up; else it stays unproven.
static void ucx_prove(kvc_ucx *u, ucx_taking *t) {
    void *request = u->of.flush(u->worker, u->none);
    if (ucx_is_error(request)) return;
    if (request) {
        int status;
        t->wait.since = 0;
        while ((status = u->of.status(request)) == UCX_IN_PROGRESS && ucx_turn(u, &t->wait) == UCX_ON) continue;
        u->of.release(request);
        if (status) return;
    }
    struct pollfd one = {.fd = u->socket, .events = POLLIN};
    t->unproven = poll(&one, 1, 0) != 0;
}

// receive(views, position, least, deadline): bytes that came, `least` (0: all) or more; None if nothing was done; else for
// the long way (status, bytes that came, whether the sender may have given up, a handle or 0, bytes of its message, which is
// being received behind the others).
static PyObject *ucx_receive(kvc_ucx *u, PyObject *const *args) {
    channel_parts p;
    ucx_taking t = {.position = PyLong_AsUnsignedLongLong(args[1]), .least = PyLong_AsUnsignedLongLong(args[2])};
    t.wait = ucx_wait_until(PyFloat_AsDouble(args[3]), POLLIN | POLLRDHUP);
    if (PyErr_Occurred()) return NULL;
    if (!channel_take(&p, args[0], PY_WRITABLE)) return channel_none();
    if (!t.least) t.least = p.nbytes;
    int code = UCX_ON;
    PyThreadState *thread = PyEval_SaveThread();
    while (t.got < t.least && code == UCX_ON) {
        const uint64_t nbytes = ucx_await(u, &t, &code);
        if (code == UCX_ON) code = nbytes > p.nbytes - t.got ? UCX_LEFT : ucx_take(u, &p, &t, nbytes);
    }
    if (code == UCX_ON && t.unproven) ucx_prove(u, &t);
    PyEval_RestoreThread(thread);
    channel_release(&p);
    if (code == UCX_ON && !t.unproven) return PyLong_FromUnsignedLongLong(t.got);
    const uint64_t numbers[] = {t.got, (uint64_t)t.unproven, (uint64_t)(uintptr_t)t.request, t.coming};
    return ucx_tuple(numbers, 4, t.status);
}

// ---- made by Python --------------------------------------------------------------------------------------------------

static void ucx_destroy(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, ucx_name)); }

// From numbers (the functions; worker, endpoint or 0, descriptor of the socket, inline_nbytes, spin_ns): the functions in
// `methods`, on one capsule, as a tuple. Operations may use its memory until their worker has ended.
static PyObject *ucx_make(PyObject *of, PyMethodDef *methods, ssize_t count) {
    enum { CALLS = sizeof(ucx_calls) / sizeof(void *) };
    kvc_ucx *u = calloc(1, sizeof *u);
    if (!u) return channel_none();
    uint64_t numbers[CALLS + 5];
    for (int i = 0; i < CALLS + 5; i++) numbers[i] = channel_number(of, i);
    memcpy(&u->of, numbers, sizeof u->of);
    u->worker = (void *)(uintptr_t)numbers[CALLS];
    u->endpoint = (void *)(uintptr_t)numbers[CALLS + 1];
    u->socket = (int)numbers[CALLS + 2];
    u->inline_nbytes = numbers[CALLS + 3];
    u->spin_ns = numbers[CALLS + 4];
    // the mask (UCP_OP_ATTR_FIELD_DATATYPE), and as the datatype UCP_DATATYPE_IOV
    *(uint32_t *)u->scattered = 1 << 3;
    ((uint64_t *)u->scattered)[3] = 2;
    PyObject *capsule = PyCapsule_New(u, ucx_name, ucx_destroy), *made = PyTuple_New(count);
    for (ssize_t i = 0; i < count; i++) PyTuple_SetItem(made, i, PyCFunction_NewEx(&methods[i], capsule, NULL));
    Py_DecRef(capsule);
    return made;
}

#endif
