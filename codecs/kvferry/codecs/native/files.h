// The system calls of a few small files in one call: for the disk tier, which else gives the GIL away, and takes it
// back, around each of them. What is written and read, under which names, and what follows from a failure is decided
// in Python (kvferry.store.disk.runs), which does the same one call at a time where this library is not.
#ifndef KVC_FILES_H
#define KVC_FILES_H

#include <errno.h>
#include <fcntl.h>
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
    int64_t nbytes;                // out: bytes that were read or written
    int64_t size, blocks;          // out: of the file, as fstat tells
    int64_t folder_blocks;         // out: of its folder, after the file came into it
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

static int files_write_one(kvc_file *f, int64_t nbytes, int create, int reuse, int sync) {
    struct stat found;
    const int fd = files_take(f, create, reuse, nbytes);
    if (fd < 0) return -1;
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

// Write files of `nbytes` each, one after another, up to the first that fails or is not begun by the deadline
// (seconds of CLOCK_MONOTONIC). A file gets its name when it is whole; one that failed lies there under its temporary
// name from KVC_WRITE on, under its name from KVC_SYNC_FOLDER on. sync: 0 none, 1 its data, 2 its name too.
// Returns how many were written.
static size_t files_write(kvc_file *files, size_t count, int64_t nbytes, int create, int reuse, int sync, double deadline) {
    size_t done = 0;
    while (done < count && files_due(&files[done], deadline) && !files_write_one(&files[done], nbytes, create, reuse, sync))
        done++;
    return done;
}

// Read files, one after another, each by one call into its parts, up to the first that is not begun by the deadline.
// What is behind the data must be in the last part. Returns how many were begun; each has its own error.
static size_t files_read(kvc_file *files, size_t count, int flags, double deadline) {
    size_t done = 0;
    for (; done < count && files_due(&files[done], deadline); done++) {
        kvc_file *f = &files[done];
        const int fd = files_open(f->folder, f->name, flags | f->flags);
        ssize_t got;
        if (fd < 0) {
            files_fail(f, KVC_OPEN);
            continue;
        }
        do got = preadv(fd, f->parts, KVC_PARTS, 0);
        while (got < 0 && errno == EINTR);
        if (got < 0) files_fail(f, KVC_WRITE);
        else f->step = KVC_DONE;
        f->nbytes = (int64_t)got;
        files_close(fd);
    }
    return done;
}

#endif
