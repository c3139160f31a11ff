// Frames over a stream socket with their checksum, in one call: bytes are hashed right after they were copied to or
// from the kernel, while they are in a cache. The socket blocks, with limits of its own; what has to be decided (a
// deadline, a signal, a stream that ended) is decided in Python (kvferry.transports.hashed), which calls again.
#ifndef KVC_STREAM_H
#define KVC_STREAM_H

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "hash.h"
#include "look.h"

// Bytes of a call, and hashed at once: two windows are a stripe (lanes.py), else the end of each would cost a call of its own.
enum { STREAM_WINDOW = 514 << 10, STREAM_LAST = 16 << 10, STREAM_PARTS = 132, STREAM_LOOK_NS = 100000 };
// Fewer bytes at once are copied, which costs no more; what the pipe has room for; what is in 16 pages at most.
enum { STREAM_LENT = 64 << 10, STREAM_PIPE = 1 << 20, STREAM_SPLICED = 15 * 4096 };
// Or an errno; mirrored in hashed.py. CROSSED: another socket is due, which never is for who gave all the room there is.
enum { STREAM_DONE = 0, STREAM_ENDED = -1, STREAM_STRAY = -2, STREAM_SHORT = -3, STREAM_CROSSED = -4 };

// One direction of a connection; mirrored in hashed.py.
typedef struct {
    const struct iovec *parts; // those of no bytes are allowed
    uint64_t count;
    uint64_t left;             // bytes of all parts that did not move yet
    uint64_t index, offset;    // where they begin
    double until;              // on CLOCK_MONOTONIC: no system call begins later, it could wait beyond the deadline
    int32_t fd, flags;         // flags of the system call
    uint32_t trailer_done;     // bytes of the trailer that moved
    int32_t sealed;            // whether the trailer holds the hash of all parts
    uint64_t trailer;
    uint64_t plain;            // whether there is no hash and no trailer
    uint64_t first;            // so many bytes are sent by a call of their own before the others; 0: none
    uint64_t room;             // so many bytes, trailer included, go over this socket before another one is due
    uint64_t ahead;            // so many of the bytes that are sent next are hashed already
    const int *pipe;           // by which parts are lent to the kernel, not copied; none: they are copied
    uint64_t piped;            // so many of the bytes that are sent next are in it
    kvc_hash hash;
} kvc_stream;

// The next `most` bytes, or fewer if they are in many parts; how many.
static uint64_t stream_window(const kvc_stream *s, struct iovec *window, int *number, uint64_t most) {
    uint64_t index = s->index, offset = s->offset, nbytes = 0;
    int n = 0;
    for (; n < STREAM_PARTS && nbytes < most && index < s->count; index++, offset = 0) {
        uint64_t take = s->parts[index].iov_len - offset;
        if (take == 0) continue;
        if (take > most - nbytes) take = most - nbytes;
        window[n].iov_base = (uint8_t *)s->parts[index].iov_base + offset;
        window[n++].iov_len = take;
        nbytes += take;
    }
    *number = n;
    return nbytes;
}

// Hash `nbytes` from `data` on that are about to move or have moved, but for those that were hashed ahead.
static void stream_hash(kvc_stream *s, const uint8_t *data, uint64_t nbytes, const kvc_kernels *k) {
    const uint64_t skip = s->ahead < nbytes ? s->ahead : nbytes;
    s->ahead -= skip;
    hash_update(&s->hash, data + skip, nbytes - skip, k);
}

// `nbytes` have moved: go on behind them, and hash them if asked.
static void stream_advance(kvc_stream *s, uint64_t nbytes, int hashes, const kvc_kernels *k) {
    s->left -= nbytes;
    while (nbytes) {
        const struct iovec *part = &s->parts[s->index];
        uint64_t take = part->iov_len - s->offset;
        if (take > nbytes) take = nbytes;
        if (hashes) stream_hash(s, (const uint8_t *)part->iov_base + s->offset, take, k);
        s->offset += take;
        nbytes -= take;
        if (s->offset == part->iov_len) s->index++, s->offset = 0;
    }
}

static int stream_past(double until) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9 > until;
}

static int stream_late(const kvc_stream *s) { return stream_past(s->until); }

static uint64_t stream_least(uint64_t a, uint64_t b) { return a < b ? a : b; }

// The trailer behind the last `nbytes` of the parts, as far as there is room; how many bytes of it.
static uint64_t stream_add_trailer(kvc_stream *s, struct iovec *window, int *number, uint64_t nbytes) {
    const uint64_t take = stream_least(sizeof s->trailer - s->trailer_done, s->room - nbytes);
    window[*number].iov_base = (uint8_t *)&s->trailer + s->trailer_done;
    window[*number].iov_len = take;
    *number += take > 0;
    return take;
}

// As recvmsg that does not wait, but looks again for some microseconds, while others may run: the rest of a message is often
// there sooner than a sleep and a wake-up take.
static ssize_t stream_look(int fd, struct msghdr *message, int flags) {
    errno = EAGAIN;
    if (flags & MSG_DONTWAIT) return -1;
    const long switches = look_switches();
    const uint64_t start = look_now();
    for (uint64_t last = start, now = start; last - start < STREAM_LOOK_NS && !look_crowded(now); now = look_yield()) {
        const ssize_t got = recvmsg(fd, message, (flags & ~MSG_WAITALL) | MSG_DONTWAIT);
        const int came = got >= 0 || errno != EAGAIN, error = errno;
        look_away(now - last, now, came, switches);
        errno = error;
        if (came) return got;
        last = now;
    }
    errno = EAGAIN;
    return -1;
}

// As recvmsg, which waits, but in the midst of a message it looks first. `waited`: whether it waited in the kernel.
static ssize_t stream_take(const kvc_stream *s, struct msghdr *message, int *waited) {
    const ssize_t got = stream_look(s->fd, message, s->flags);
    *waited = got < 0 && errno == EAGAIN;
    return *waited ? recvmsg(s->fd, message, s->flags) : got;
}

// Move all parts as they are: one call of the system, if the kernel takes or has them all.
static int stream_plain(kvc_stream *s, int sending, const kvc_kernels *k) {
    struct iovec window[STREAM_PARTS];
    while (s->left) {
        struct msghdr message = {.msg_iov = window};
        int number = 0;
        if (!s->room) return STREAM_CROSSED;
        if (stream_late(s)) return STREAM_SHORT;
        const uint64_t wanted = stream_window(s, window, &number, stream_least(s->first ? s->first : s->left, s->room));
        s->first = 0;
        message.msg_iovlen = (size_t)number;
        int waited = 1;
        const ssize_t moved = sending ? sendmsg(s->fd, &message, s->flags) : stream_take(s, &message, &waited);
        if (moved < 0) return errno;
        if (!sending && message.msg_flags & MSG_CTRUNC) return STREAM_STRAY;
        if (!sending && moved == 0) return STREAM_ENDED;
        stream_advance(s, (uint64_t)moved, 0, k);
        s->room -= (uint64_t)moved;
        if (waited && (uint64_t)moved < wanted) return STREAM_SHORT;
    }
    return STREAM_DONE;
}

// Hash what is sent next before it is sent, which takes no longer than behind it. Its head has just left alone: meanwhile
// the receiver wakes up and finds a place, and then reads while the bytes are sent, not behind them.
static void stream_look_ahead(kvc_stream *s, const kvc_kernels *k) {
    struct iovec window[STREAM_PARTS];
    int number = 0;
    if (s->left <= STREAM_WINDOW) return;
    const uint64_t nbytes = stream_window(s, window, &number, STREAM_WINDOW);
    for (int i = 0; i < number; i++) hash_update(&s->hash, window[i].iov_base, window[i].iov_len, k);
    s->ahead = nbytes;
}

// Put the next bytes into the pipe, by reference, and hash them; false if the system has no way to, or not for this memory.
static int stream_lend(kvc_stream *s, const struct iovec *window, int number, const kvc_kernels *k) {
    const ssize_t taken = vmsplice(s->pipe[1], window, (size_t)number, SPLICE_F_NONBLOCK);
    if (taken <= 0) return 0;
    s->piped = (uint64_t)taken;
    uint64_t left = s->piped;
    for (int i = 0; left; i++) {
        const uint64_t take = stream_least(window[i].iov_len, left);
        stream_hash(s, window[i].iov_base, take, k);
        left -= take;
    }
    return 1;
}

// As sendmsg, which waits, of what is in the pipe that ends in `from`; no signal comes of it. The limit of the socket holds for
// each 16 pages that the system sends of it: no more of them go by one call, and none begins later than `until`.
static ssize_t stream_splice(int from, int to, uint64_t nbytes, double until) {
    sigset_t broken, before, due;
    sigemptyset(&broken);
    sigaddset(&broken, SIGPIPE);
    sigpending(&due);
    pthread_sigmask(SIG_BLOCK, &broken, &before);
    ssize_t moved;
    uint64_t all = 0, most;
    do {
        most = stream_least(nbytes - all, STREAM_SPLICED);
        moved = splice(from, NULL, to, NULL, most, SPLICE_F_MORE);
        if (moved > 0) all += (uint64_t)moved;
    } while (moved == (ssize_t)most && all < nbytes && !stream_past(until));
    const int error = errno;
    const struct timespec now = {0, 0};
    if (moved < 0 && error == EPIPE && !sigismember(&due, SIGPIPE)) sigtimedwait(&broken, NULL, &now);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = error;
    return all ? (ssize_t)all : moved;
}

// Whether there is a pipe for a call with these flags: where the socket's own limit is beyond the deadline a call must not wait,
// and there is no such splice. What is in the pipe, of which `piped` bytes are due, is taken out and will be copied.
static int stream_lends(const int *pipe, uint64_t piped, int send_flags) {
    char gone[4096];
    if (!(send_flags & MSG_DONTWAIT)) return 1;
    for (ssize_t n; piped; piped -= (uint64_t)n)
        if ((n = read(pipe[0], gone, stream_least(piped, sizeof gone))) <= 0) break;
    return 0;
}

// Send all parts and their hash behind them.
static int stream_send(kvc_stream *s, const kvc_kernels *k) {
    struct iovec window[STREAM_PARTS + 1];
    struct msghdr message = {.msg_iov = window};
    if (s->plain) return stream_plain(s, 1, k);
    while (s->left || s->trailer_done < sizeof s->trailer) {
        int number = 0;
        if (!s->room) return STREAM_CROSSED;
        if (stream_late(s)) return STREAM_SHORT;
        if (s->pipe && !stream_lends(s->pipe, s->piped, s->flags)) {
            s->ahead += s->piped; // they are hashed
            s->piped = 0;
            s->pipe = NULL;
        }
        if (s->piped) {
            const ssize_t moved = stream_splice(s->pipe[0], s->fd, s->piped, s->until);
            if (moved < 0) return errno;
            stream_advance(s, (uint64_t)moved, 0, k);
            s->piped -= (uint64_t)moved;
            s->room -= (uint64_t)moved;
            if (s->piped) return STREAM_SHORT;
            continue;
        }
        // the last bytes are hashed first, so that the hash leaves with them
        uint64_t most = s->left <= STREAM_LAST || s->sealed ? s->left : s->left - STREAM_LAST;
        if (most > STREAM_WINDOW) most = STREAM_WINDOW;
        const int alone = s->first && s->first < most;
        if (alone) most = s->first;
        s->first = 0;
        const uint64_t nbytes = stream_window(s, window, &number, stream_least(most, s->room));
        const int last = nbytes == s->left;
        if (s->pipe && !alone && !last && nbytes >= STREAM_LENT) {
            if (stream_lend(s, window, number, k)) continue;
            s->pipe = NULL;
        }
        if (last && !s->sealed) {
            for (int i = 0; i < number; i++) stream_hash(s, window[i].iov_base, window[i].iov_len, k);
            s->trailer = hash_end(&s->hash, k);
            s->sealed = 1;
        }
        const uint64_t wanted = nbytes + (last ? stream_add_trailer(s, window, &number, nbytes) : 0);
        message.msg_iovlen = (size_t)number;
        const ssize_t sent = sendmsg(s->fd, &message, s->flags);
        if (sent < 0) return errno;
        const uint64_t moved = (uint64_t)sent < nbytes ? (uint64_t)sent : nbytes;
        stream_advance(s, moved, !s->sealed, k);
        s->trailer_done += (uint32_t)((uint64_t)sent - moved);
        s->room -= (uint64_t)sent;
        if ((uint64_t)sent < wanted) return STREAM_SHORT;
        if (alone) stream_look_ahead(s, k);
    }
    return STREAM_DONE;
}

// Fill all parts, hash them, and take the trailer behind them.
static int stream_receive(kvc_stream *s, const kvc_kernels *k) {
    struct iovec window[STREAM_PARTS + 1];
    if (s->plain) return stream_plain(s, 0, k);
    while (s->left || s->trailer_done < sizeof s->trailer) {
        struct msghdr message = {.msg_iov = window};
        int number = 0;
        if (!s->room) return STREAM_CROSSED;
        if (stream_late(s)) return STREAM_SHORT;
        const uint64_t nbytes = stream_window(s, window, &number, stream_least(STREAM_WINDOW, s->room));
        const uint64_t wanted = nbytes + (nbytes == s->left ? stream_add_trailer(s, window, &number, nbytes) : 0);
        message.msg_iovlen = (size_t)number;
        int waited;
        const ssize_t got = stream_take(s, &message, &waited);
        if (got < 0) return errno;
        const uint64_t moved = (uint64_t)got < nbytes ? (uint64_t)got : nbytes;
        stream_advance(s, moved, 1, k);
        s->trailer_done += (uint32_t)((uint64_t)got - moved);
        s->room -= (uint64_t)got;
        if (message.msg_flags & MSG_CTRUNC) return STREAM_STRAY; // descriptors where none are due
        if (got == 0) return STREAM_ENDED;
        if (waited && (uint64_t)got < wanted) return STREAM_SHORT;
    }
    return STREAM_DONE;
}

#endif
