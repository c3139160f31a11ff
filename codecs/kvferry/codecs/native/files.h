// The system calls of a few small files in one call: for the disk tier, which else gives the GIL away, and takes it
// back, around each of them. What is written and read, under which names, and what follows from a failure is decided
// in Python (kvferry.store.disk.runs), which does the same one call at a time where this library is not.
#ifndef KVC_FILES_H
#define KVC_FILES_H

#include "aio.h"
#include "hash.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define KVC_PARTS 3

// How far a file came: the step that failed, KVC_DONE if none did. Mirrored in runs.py.
enum { KVC_NOT_BEGUN = 0, KVC_SPARE = 1, KVC_OPEN = 2, KVC_WRITE = 3, KVC_RENAME = 4, KVC_SYNC_FOLDER = 5, KVC_DONE = 6 };

// One file; mirrored in runs.py. Names end with a zero byte.
typedef struct {
    struct iovec parts[KVC_PARTS]; // in order; those of no bytes are passed over
    const int32_t *ended;          // may be NULL; else it is not begun once this is not 0, which may be at any time
    int32_t folder, flags;         // flags beside those of the call, as O_DIRECT
    int32_t spare_folder;          // of the file that is written over; negative: a new one is made
    int32_t step, error;           // out; error is an errno
    int32_t reused;                // out: whether the spare has left its place
    int32_t rest;                  // bytes of the data in the last part; the others are in the one before it
    int32_t sum_at;                // when writing: where 16 digits for the checksum are in the first part
    int64_t nbytes;                // out: bytes that were written, or that the file to be read has
    int64_t size, blocks;          // out: of the file, as fstat tells
    int64_t folder_blocks;         // out: of its folder, after the file came into it
    uint64_t checksum;             // out: of the data
    char name[80], temporary[96], spare[80];
} kvc_file;

static int files_due(const kvc_file *f, double deadline) {
    struct timespec now;
    if (f->ended && __atomic_load_n(f->ended, __ATOMIC_ACQUIRE)) return 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9 < deadline;
}

static int files_open(int folder, const char *name, int flags) {
    int fd;
    do fd = openat(folder, name, flags, 0600);
    while (fd < 0 && errno == EINTR);
    return fd;
}

static int files_close(int fd) { // some file systems tell only here that a write failed
    return close(fd) < 0 && errno != EINTR ? -1 : 0;
}

static int files_fail(kvc_file *f, int step) {
    f->step = step;
    f->error = errno;
    return -1;
}

// A file to write to under its temporary name: the spare one if that is there and nobody else's, or a new one.
static int files_take(kvc_file *f, int create, int reuse, int64_t nbytes) {
    if (f->spare_folder >= 0) {
        struct stat found;
        if (renameat(f->spare_folder, f->spare, f->folder, f->temporary) < 0) return files_fail(f, KVC_SPARE);
        f->reused = 1;
        const int fd = files_open(f->folder, f->temporary, reuse | f->flags);
        if (fd < 0) return files_fail(f, KVC_WRITE);
        if (fstat(fd, &found) < 0) {
            files_fail(f, KVC_WRITE);
            files_close(fd);
            return -1;
        }
        if (found.st_nlink == 1 && found.st_size == nbytes) return fd;
        files_close(fd); // somebody keeps it by another name, or has changed it
        if (unlinkat(f->folder, f->temporary, 0) < 0) return files_fail(f, KVC_WRITE);
    }
    const int fd = files_open(f->folder, f->temporary, create | f->flags);
    return fd < 0 ? files_fail(f, KVC_OPEN) : fd;
}

static int files_put(kvc_file *f, int fd, int64_t nbytes) {
    struct iovec parts[KVC_PARTS];
    size_t at = 0;
    memcpy(parts, f->parts, sizeof parts);
    while (f->nbytes < nbytes) {
        ssize_t put = pwritev(fd, parts + at, (int)(KVC_PARTS - at), (off_t)f->nbytes);
        if (put < 0 && errno == EINTR) continue;
        if (put == 0) errno = ENOSPC; // it takes no more, and does not say why
        if (put <= 0) return -1;
        f->nbytes += put;
        for (; at < KVC_PARTS && (size_t)put >= parts[at].iov_len; at++) put -= (ssize_t)parts[at].iov_len;
        if (at < KVC_PARTS) {
            parts[at].iov_base = (char *)parts[at].iov_base + put;
            parts[at].iov_len -= (size_t)put;
        }
    }
    return 0;
}

// Hash the data, and write that into the header.
static void files_seal(kvc_file *f, const kvc_kernels *k) {
    uint8_t *digits = (uint8_t *)f->parts[0].iov_base + f->sum_at;
    kvc_hash hash;
    hash_begin(&hash);
    hash_update(&hash, f->parts[1].iov_base, f->parts[1].iov_len, k);
    hash_update(&hash, f->parts[2].iov_base, (size_t)f->rest, k);
    f->checksum = hash_end(&hash, k);
    for (int i = 0; i < 16; i++) digits[i] = (uint8_t)"0123456789abcdef"[f->checksum >> (60 - 4 * i) & 15];
}

static int files_write_one(
    kvc_file *f, int64_t nbytes, int create, int reuse, int sync, const kvc_kernels *k) {
    struct stat found;
    const int fd = files_take(f, create, reuse, nbytes);
    if (fd < 0) return -1;
    if (!f->flags) files_seal(f, k); // now: what this processor copies next is in its cache then
    if (files_put(f, fd, nbytes) < 0 || (sync && fdatasync(fd) < 0) || fstat(fd, &found) < 0) {
        files_fail(f, KVC_WRITE);
        files_close(fd);
        return -1;
    }
    if (files_close(fd) < 0) return files_fail(f, KVC_WRITE);
    f->size = (int64_t)found.st_size;
    f->blocks = (int64_t)found.st_blocks;
    if (renameat(f->folder, f->temporary, f->folder, f->name) < 0) return files_fail(f, KVC_RENAME);
    if (sync > 1 && fsync(f->folder) < 0) return files_fail(f, KVC_SYNC_FOLDER);
    f->folder_blocks = fstat(f->folder, &found) < 0 ? -1 : (int64_t)found.st_blocks;
    f->step = KVC_DONE;
    return 0;
}

// How many threads write at once, whoever calls: the others are ready to go on the moment one is done.
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t given;
    size_t left;
} files_turns;

static void turns_begin(files_turns *t, size_t count) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->given, &attributes);
    pthread_condattr_destroy(&attributes);
    t->left = count;
}

static int turns_take(files_turns *t, double deadline) { // whether there was one before the deadline
    const double most = deadline < 1e9 ? deadline : 1e9;
    const struct timespec until = {(time_t)most, (long)((most - (double)(time_t)most) * 1e9)};
    int late = !(deadline > 0);
    pthread_mutex_lock(&t->lock);
    while (!t->left && !late) late = pthread_cond_timedwait(&t->given, &t->lock, &until) != 0;
    const int taken = t->left > 0;
    if (taken) t->left--;
    pthread_mutex_unlock(&t->lock);
    return taken;
}

static void turns_give(files_turns *t) {
    pthread_mutex_lock(&t->lock);
    t->left++;
    pthread_cond_signal(&t->given);
    pthread_mutex_unlock(&t->lock);
}

// Write files of `nbytes` each, one after another, up to the first that fails or is not begun by the deadline
// (seconds of CLOCK_MONOTONIC). A file gets its name when it is whole; one that failed lies there under its temporary
// name from KVC_WRITE on, under its name from KVC_SYNC_FOLDER on. sync: 0 none, 1 its data, 2 its name too.
// Returns how many were written.
static size_t files_write(
    kvc_file *files, size_t count, int64_t nbytes, int create, int reuse, int sync, double deadline, files_turns *turns,
    const kvc_kernels *k) {
    size_t done = 0;
    // what the device fetches by itself is hashed while others write
    for (size_t i = 0; i < count && files_due(&files[i], deadline); i++)
        if (files[i].flags) files_seal(&files[i], k);
    if (!turns_take(turns, deadline)) return 0;
    while (done < count && files_due(&files[done], deadline) &&
           !files_write_one(&files[done], nbytes, create, reuse, sync, k))
        done++;
    turns_give(turns);
    return done;
}

// ---- reading --------------------------------------------------------------------------------------------------------

#define FILES_PIECE ((size_t)2 << 20) // bytes of one read: what was read before is hashed while it is under way

// A file that is being read: in pieces, each of which is a slot of a ring.
typedef struct {
    kvc_file *file;
    kvc_hash hash;
    int fd;
    size_t sent, taken; // bytes of the data for which a read was sent, and that were hashed
} files_reading;

// Open a file of `nbytes`; whether it is to be read. If it is not, that is said in it.
static int files_begin_read(files_reading *r, kvc_file *f, int64_t nbytes, int flags) {
    struct stat found;
    r->file = f;
    r->sent = r->taken = 0;
    hash_begin(&r->hash);
    r->fd = files_open(f->folder, f->name, flags | f->flags);
    if (r->fd < 0) return files_fail(f, KVC_OPEN), 0;
    if (fstat(r->fd, &found) < 0) files_fail(f, KVC_WRITE);
    else if (f->step = KVC_DONE, f->nbytes = (int64_t)found.st_size, f->nbytes == nbytes) return 1;
    files_close(r->fd);
    return 0;
}

// The next piece of a file. The first has the header, the last what is behind the whole pages of the data.
static void files_next_piece(files_reading *r, aio_read *piece) {
    const struct iovec *parts = r->file->parts;
    const size_t left = parts[1].iov_len - r->sent, nbytes = left < FILES_PIECE + FILES_PIECE / 2 ? left : FILES_PIECE;
    const struct iovec none = {NULL, 0};
    piece->fd = r->fd;
    piece->at = r->sent ? (int64_t)(parts[0].iov_len + r->sent) : 0;
    piece->parts[0] = r->sent ? none : parts[0];
    piece->parts[1] = (struct iovec){(char *)parts[1].iov_base + r->sent, nbytes};
    r->sent += nbytes;
    piece->parts[2] = r->sent == parts[1].iov_len ? parts[2] : none;
}

// A piece has been read.
static void files_take_piece(files_reading *r, const aio_read *piece, const kvc_kernels *k) {
    kvc_file *f = r->file;
    const struct iovec *parts = piece->parts;
    if (piece->result < 0) {
        f->step = KVC_WRITE;
        f->error = (int32_t)-piece->result;
    } else if ((size_t)piece->result != parts[0].iov_len + parts[1].iov_len + parts[2].iov_len) {
        f->nbytes = -1; // it has been cut since
    }
    if (f->step == KVC_DONE) {
        hash_update(&r->hash, parts[1].iov_base, parts[1].iov_len, k);
        if (parts[2].iov_len) hash_update(&r->hash, parts[2].iov_base, (size_t)f->rest, k);
    }
    r->taken += parts[1].iov_len;
    if (r->taken < f->parts[1].iov_len) return;
    f->checksum = hash_end(&r->hash, k);
    files_close(r->fd);
}

// Read files of `nbytes`, a few reads at a time, and hash their data, up to the first that is not begun by the
// deadline. Files of another size are not read: that is in their nbytes. Returns how many were begun; each has its own
// error.
static size_t files_read(
    kvc_file *files, size_t count, int64_t nbytes, int flags, double deadline, const kvc_kernels *k) {
    aio_read ring[AIO_DEPTH];
    files_reading open[AIO_DEPTH], *owners[AIO_DEPTH], *filling = NULL; // of pieces; the one whose pieces are being sent
    size_t first = 0, next = 0, begun = 0, opened = 0;                  // pieces taken and sent, files
    aio_context_t context = 0;
    for (int more = 1; more || first < next;) {
        while (more && next - first < AIO_DEPTH) {
            if (!filling) { // each open file has a piece under way: there is room for one more
                kvc_file *f = &files[begun];
                more = begun < count && files_due(f, deadline);
                if (!more) break;
                begun++;
                if (!files_begin_read(&open[opened % AIO_DEPTH], f, nbytes, flags)) continue;
                filling = &open[opened++ % AIO_DEPTH];
                if (!context && f->flags) context = aio_take();
            }
            aio_read *piece = &ring[next % AIO_DEPTH];
            owners[next++ % AIO_DEPTH] = filling;
            files_next_piece(filling, piece);
            aio_send(filling->file->flags ? context : 0, piece);
            if (filling->sent == filling->file->parts[1].iov_len) filling = NULL;
        }
        if (first == next) continue;
        aio_wait(context, &ring[first % AIO_DEPTH]);
        files_take_piece(owners[first % AIO_DEPTH], &ring[first % AIO_DEPTH], k);
        first++;
    }
    aio_give_back(context);
    return begun;
}

#endif
