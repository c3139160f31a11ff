// Reads that are in flight together, by the kernel's own AIO: asynchronous for files opened with O_DIRECT, which is
// where it pays. Without it, and for other files, the same reads one after another.
#ifndef KVC_AIO_H
#define KVC_AIO_H

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define AIO_DEPTH 8 // reads in flight of one thread

typedef struct {
    struct iovec parts[3];
    int fd, sent; // whether the kernel has it
    int64_t at, result;
} aio_read; // result: bytes or -errno, once it is over; AIO_PENDING before that

#define AIO_PENDING INT64_MIN

static void aio_read_now(aio_read *r) {
    ssize_t got;
    do got = preadv(r->fd, r->parts, 3, (off_t)r->at);
    while (got < 0 && errno == EINTR);
    r->result = got < 0 ? -(int64_t)errno : (int64_t)got;
}

#if defined(__linux__)
#include <linux/aio_abi.h>
#include <sys/syscall.h>

// Contexts are slow to make and to destroy, so they are kept: as many as threads have read at once. 0: none there.
static aio_context_t aio_kept[64];

static aio_context_t aio_take(void) {
    aio_context_t made = 0;
    for (size_t i = 0; i < sizeof aio_kept / sizeof *aio_kept; i++) {
        const aio_context_t found = __atomic_exchange_n(&aio_kept[i], 0, __ATOMIC_ACQ_REL);
        if (found) return found;
    }
    return syscall(SYS_io_setup, AIO_DEPTH, &made) < 0 ? 0 : made;
}

static void aio_give_back(aio_context_t context) {
    for (size_t i = 0; context && i < sizeof aio_kept / sizeof *aio_kept; i++) {
        aio_context_t none = 0;
        if (__atomic_compare_exchange_n(&aio_kept[i], &none, context, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return;
    }
    if (context) syscall(SYS_io_destroy, context);
}

static void aio_send(aio_context_t context, aio_read *r) {
    struct iocb call, *calls[1] = {&call};
    r->result = AIO_PENDING;
    memset(&call, 0, sizeof call);
    call.aio_data = (uint64_t)(uintptr_t)r;
    call.aio_lio_opcode = IOCB_CMD_PREADV;
    call.aio_fildes = (uint32_t)r->fd;
    call.aio_buf = (uint64_t)(uintptr_t)r->parts;
    call.aio_nbytes = 3;
    call.aio_offset = r->at;
    r->sent = context && syscall(SYS_io_submit, context, 1, calls) == 1;
}

// Wait until a read is over that was sent, or do it now.
static void aio_wait(aio_context_t context, aio_read *r) {
    struct io_event over[AIO_DEPTH];
    while (r->result == AIO_PENDING) {
        if (!r->sent) {
            aio_read_now(r);
            return;
        }
        const long count = syscall(SYS_io_getevents, context, 1, AIO_DEPTH, over, NULL); // EINTR: once more
        for (long i = 0; i < count; i++) ((aio_read *)(uintptr_t)over[i].data)->result = over[i].res;
    }
}

#else
typedef int aio_context_t;
static aio_context_t aio_take(void) { return 0; }
static void aio_give_back(aio_context_t context) { (void)context; }
static void aio_send(aio_context_t context, aio_read *r) { (void)context, r->result = AIO_PENDING, r->sent = 0; }
static void aio_wait(aio_context_t context, aio_read *r) { (void)context, aio_read_now(r); }
#endif

#endif
