// Which of two ways to move a message, by what the last ones took: what is best changes while a process runs, as the
// host of a virtual machine moves its CPUs. The other way is tried seldom, but for some messages in a row: the first of
// them are slow, since nothing that this way uses is in a cache.
#ifndef KVC_WAYS_H
#define KVC_WAYS_H

#include <stdint.h>

enum { WAYS_KEPT = 3, WAYS_SHY = 20, WAYS_TRIED = 2, WAYS_WARM = 2 << 20 };

// Of messages of about one size, as a short one has another pace.
typedef struct {
    uint64_t paces[2][WAYS_KEPT]; // ns a MiB of the last messages of each way; 0: there was none yet
    uint64_t count[2];            // messages of each
    uint64_t spent, cost;         // ns that messages took since the other way was tried, and those that tried it
    int best, trying;             // the better way; messages that are still to try the other
} kvc_ways;

// The best of the last: one that was slow because its process had to wait says nothing.
static uint64_t ways_pace(const kvc_ways *w, int way) {
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < WAYS_KEPT; i++)
        if (w->paces[way][i] && w->paces[way][i] < best) best = w->paces[way][i];
    return best;
}

// The way, 0 or 1, of a message of `nbytes`.
static int ways_next(kvc_ways *w, uint64_t nbytes) {
    const uint64_t row = WAYS_TRIED + WAYS_WARM / nbytes;
    if (!w->trying && w->spent > WAYS_SHY * w->cost && w->count[0] >= row) {
        w->trying = (int)row;
        w->spent = w->cost = 0;
    }
    return w->trying ? !w->best : w->best;
}

// A message of `nbytes` took `ns` on the way that was next.
static void ways_took(kvc_ways *w, uint64_t nbytes, uint64_t ns) {
    const int way = w->trying ? !w->best : w->best;
    w->paces[way][w->count[way]++ % WAYS_KEPT] = (ns << 20) / nbytes + 1;
    *(w->trying ? &w->cost : &w->spent) += ns;
    if (w->trying && --w->trying) return;
    if (ways_pace(w, !w->best) < ways_pace(w, w->best)) w->best = !w->best;
}

#endif
