// Looking for bytes for a moment before a thread sleeps for them: where the peer answers within that time a sleep and a
// wake-up take longer than the answer. Others may run in between. Only while answers come that fast, so that an idle
// connection, or one whose peer takes its time, costs nothing; and not where others want the processor, who would keep
// it for milliseconds, while a thread that slept is preferred when it wakes up. As kvferry.transports.spin.
#ifndef KVC_LOOK_H
#define KVC_LOOK_H

#include <sched.h>
#include <stdint.h>
#include <sys/resource.h>
#include <time.h>

enum { LOOK_LATER = 2, LOOK_FEWEST_SKIPPED = 8, LOOK_MOST_SKIPPED = 1024 };
enum { LOOK_GAP_NS = 100000, LOOK_PEER_NS = 1000000 };               // longer away means that others want the processor
static const uint64_t LOOK_OFF = 32, LOOK_MOST_OFF_NS = 3200000000;   // then nobody looks for so many times as long

// One direction of a connection; one thread at a time.
typedef struct {
    uint64_t most_ns;     // how long to look at most; 0: never
    uint64_t last_ns;     // how long the last wait took
    uint64_t looked;      // how many waits began with a look
    uint32_t skips, left; // after a look in vain so many waits go without, twice as many each time; and how many still do
} kvc_look;

// Of the process. Threads may set it at the same time: either is right.
static uint64_t look_crowded_until, look_off_ns;

static uint64_t look_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static int look_crowded(uint64_t now) { return now < __atomic_load_n(&look_crowded_until, __ATOMIC_RELAXED); }

// How often others ran on the processor of this thread, which would have gone on.
static long look_switches(void) {
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) ? -1 : usage.ru_nivcsw;
}

// Others ran for `gap`, until `after`. If that was long, nobody looks for a while: in proportion, so that who wants the
// processor now and then costs a small part of the looks, and twice as long as last time if that is over for no longer than
// it was, as of those who always want it. `came`: what was looked for is there now, so it may have been the peer, who is
// welcome to this processor. `switches`: when the look began; if there are no more, the host of a virtual machine took the processor away, and from a
// thread that sleeps it would have taken it, too.
static void look_away(uint64_t gap, uint64_t after, int came, long switches) {
    if (gap > (came ? LOOK_PEER_NS : LOOK_GAP_NS) && !look_crowded(after) && look_switches() != switches) {
        const uint64_t last = __atomic_load_n(&look_off_ns, __ATOMIC_RELAXED);
        const uint64_t over = after - __atomic_load_n(&look_crowded_until, __ATOMIC_RELAXED);
        uint64_t off = gap * LOOK_OFF;
        if (over <= last && off < last * 2) off = last * 2;
        if (off > LOOK_MOST_OFF_NS) off = LOOK_MOST_OFF_NS;
        __atomic_store_n(&look_off_ns, off, __ATOMIC_RELAXED);
        __atomic_store_n(&look_crowded_until, after + off, __ATOMIC_RELAXED);
    }
}

// Let others run; the time after it.
static uint64_t look_yield(void) {
    sched_yield();
    return look_now();
}

// Whether to look before this wait: the last one was short, with a sleep in it no longer than twice that.
static int look_begin(kvc_look *l, uint64_t now) {
    if (l->left) {
        l->left--;
        return 0;
    }
    return l->last_ns < LOOK_LATER * l->most_ns && !look_crowded(now);
}

// A wait is over that took `ns`.
static void look_end(kvc_look *l, int looked, uint64_t ns) {
    l->last_ns = ns;
    if (!looked) return;
    l->looked++;
    l->skips = ns < l->most_ns ? 0 : l->skips ? l->skips * 2 : LOOK_FEWEST_SKIPPED;
    if (l->skips > LOOK_MOST_SKIPPED) l->skips = LOOK_MOST_SKIPPED;
    l->left = l->skips;
}

#endif
