// What the library exports, and the choice of the instruction set at the first call.
#define _GNU_SOURCE // vmsplice and splice
#include "channel.h"
#include "copy.h"
#include "files.h"
#include "hash.h"
#include "kvc.h"
#include "pages.h"
#include "replies.h"
#include "stream.h"
#include "ucx.h"
#include "values.h"

#include <stdlib.h>

#define KVC_EXPORT __attribute__((visibility("default")))

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the formats are little-endian");

extern const kvc_kernels kvc_portable;
#if defined(__x86_64__)
extern const kvc_kernels kvc_avx2, kvc_avx512;
#elif defined(__aarch64__)
extern const kvc_kernels kvc_neon;
#endif

static const kvc_kernels *chosen(void) {
    // reading the same answer twice does no harm, so no lock
    static const kvc_kernels *found;
    if (found) return found;
    const kvc_kernels *k = &kvc_portable;
    const char *wanted = getenv("KVFERRY_NATIVE_ISA"); // the best one to take: "portable" or "avx2", for tests
    const int best = !wanted ? 2 : !strcmp(wanted, "portable") ? 0 : !strcmp(wanted, "avx2") ? 1 : 2;
#if defined(__x86_64__)
    if (best > 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) k = &kvc_avx2;
    if (best > 1 && k == &kvc_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"))
        k = &kvc_avx512;
#elif defined(__aarch64__)
    if (best > 0) k = &kvc_neon;
#endif
    found = k;
    return k;
}

KVC_EXPORT int kvc_abi(void) { return KVC_ABI; }
KVC_EXPORT const char *kvc_instructions(void) { return chosen()->name; }

// Bytes that are kept as they are: the header of a section, then those of each slice.
static int64_t keep(const kvc_piece *p, const uint8_t *data, size_t count, size_t stride, uint8_t *dst, size_t capacity) {
    const size_t n = KVC_SECTION + p->nbytes * count;
    if (capacity < n) return KVC_SPACE;
    kvc_header(dst, 0, 0, 0, 0);
    for (size_t i = 0; i < count; i++) memcpy(dst + KVC_SECTION + i * p->nbytes, data + i * stride, p->nbytes);
    return (int64_t)n;
}
static int64_t restore(const kvc_piece *p, uint8_t *data, size_t count, size_t stride, const uint8_t *src, size_t nbytes) {
    const size_t n = KVC_SECTION + p->nbytes * count;
    if (nbytes < n || src[0]) return KVC_CORRUPT;
    for (size_t i = 0; i < count; i++) memcpy(data + i * stride, src + KVC_SECTION + i * p->nbytes, p->nbytes);
    return (int64_t)n;
}

// Encode `count` slices to one section a piece. Returns the bytes of all sections.
KVC_EXPORT int64_t kvc_encode(
    const kvc_piece *pieces, size_t number, const uint8_t *src, size_t count, size_t stride, uint8_t *dst, size_t capacity) {
    const kvc_kernels *k = chosen();
    size_t at = 0;
    for (size_t i = 0; i < number; i++) {
        const kvc_piece *p = &pieces[i];
        const kvc_tensor t = {src + p->offset, count, stride, p->rows, p->cols, p->dtype, 0};
        int64_t used;
        switch (p->operation) {
        case KVC_EBP: used = k->ebp_encode(&t, p->first, dst + at, capacity - at); break;
        case KVC_SPLIT: used = k->split_encode(&t, dst + at, capacity - at); break;
        case KVC_QUANT: used = k->quant_encode(&t, p->first, p->second, p->last, p->group, dst + at, capacity - at); break;
        default: used = keep(p, t.data, count, stride, dst + at, capacity - at);
        }
        if (used < 0) return used;
        at += (size_t)used;
    }
    return (int64_t)at;
}

// What a call decodes that is more than a core's own cache holds is written past the caches: who reads it next has to fetch it
// from further away than that in any case, and memory is not asked for what is overwritten, which is what threads wait for.
static int decodes_past(size_t nbytes) { return nbytes >= (size_t)2 << 20; }

// Decode all of `src`, one section a piece, into `count` slices. Returns nbytes, or why not.
static int64_t decode_pieces(
    const kvc_piece *pieces, size_t number, uint8_t *dst, size_t count, size_t stride, const uint8_t *src, size_t nbytes, int past) {
    const kvc_kernels *k = chosen();
    size_t at = 0;
    for (size_t i = 0; i < number; i++) {
        const kvc_piece *p = &pieces[i];
        const kvc_tensor t = {dst + p->offset, count, stride, p->rows, p->cols, p->dtype, past};
        int64_t used;
        switch (p->operation) {
        case KVC_EBP: used = k->ebp_decode(&t, src + at, nbytes - at); break;
        case KVC_SPLIT: used = k->split_decode(&t, src + at, nbytes - at); break;
        case KVC_QUANT: used = k->quant_decode(&t, p->first, p->last, src + at, nbytes - at); break;
        default: used = restore(p, dst + p->offset, count, stride, src + at, nbytes - at);
        }
        if (used < 0) return used;
        at += (size_t)used;
    }
    return at == nbytes ? (int64_t)at : KVC_CORRUPT;
}

KVC_EXPORT int64_t kvc_decode(
    const kvc_piece *pieces, size_t number, uint8_t *dst, size_t count, size_t stride, const uint8_t *src, size_t nbytes) {
    const int64_t used = decode_pieces(pieces, number, dst, count, stride, src, nbytes, decodes_past(count * stride));
    copy_fence();
    return used;
}

#include "frames.h" // on top of these two

KVC_EXPORT size_t kvc_encode_frames(kvc_frame *frames, size_t count, int in_row) { return frames_encode(frames, count, in_row); }
KVC_EXPORT size_t kvc_decode_frames(kvc_frame *frames, size_t count, int in_row) { return frames_decode(frames, count, in_row); }

// The error of each piece, a tensor, over `tokens` rows of each slice at least; `work` has room for two numbers a column.
KVC_EXPORT void kvc_errors(
    const kvc_piece *pieces, size_t number, const uint8_t *before, const uint8_t *after, size_t count, size_t stride,
    size_t tokens, float *work, kvc_error *found) {
    for (size_t i = 0; i < number; i++) {
        const kvc_piece *p = &pieces[i];
        const kvc_tensor t = {before + p->offset, count, stride, p->rows, p->cols, p->dtype, 0};
        const size_t step = tokens && p->rows > tokens ? p->rows / tokens : 1;
        chosen()->slices_error(&t, after + p->offset, step, work, &found[i]);
    }
}
// dst and src do not overlap
KVC_EXPORT void kvc_copy(uint8_t *dst, const uint8_t *src, size_t nbytes) { copy_past_caches(dst, src, nbytes); }

// Blocks from their slots to the pages of an engine, or back; see pages.h
KVC_EXPORT size_t kvc_pages(
    const kvc_part *parts, size_t number, const uint64_t *ids, const uint64_t *slots, size_t count, int to_pages, int stream,
    const int32_t *stop) {
    return pages_move(parts, number, ids, slots, count, to_pages, stream, stop);
}

// XXH3 with 64 bits. A state is kvc_hash_nbytes() bytes of the caller's, used by one thread at a time.
KVC_EXPORT uint64_t kvc_hash_whole(const uint8_t *data, size_t nbytes) { return hash_whole(data, nbytes, chosen()); }
KVC_EXPORT size_t kvc_hash_nbytes(void) { return sizeof(kvc_hash); }
KVC_EXPORT void kvc_hash_begin(kvc_hash *state) { hash_begin(state); }
KVC_EXPORT void kvc_hash_update(kvc_hash *state, const uint8_t *data, size_t nbytes) {
    hash_update(state, data, nbytes, chosen());
}
KVC_EXPORT uint64_t kvc_hash_end(const kvc_hash *state) { return hash_end(state, chosen()); }

// Frames with a checksum over a stream socket. The caller has set everything but the hash, which begins with `start`.
KVC_EXPORT size_t kvc_stream_nbytes(void) { return sizeof(kvc_stream); }
KVC_EXPORT int kvc_stream_send(kvc_stream *stream) {
    hash_begin(&stream->hash);
    stream->room = UINT64_MAX;
    return stream_send(stream, chosen());
}
KVC_EXPORT int kvc_stream_receive(kvc_stream *stream, const uint8_t *start, size_t nbytes) {
    hash_begin(&stream->hash);
    hash_update(&stream->hash, start, nbytes, chosen());
    stream->room = UINT64_MAX;
    return stream_receive(stream, chosen());
}
KVC_EXPORT int kvc_stream_go_on(kvc_stream *stream, int sending) {
    return sending ? stream_send(stream, chosen()) : stream_receive(stream, chosen());
}
KVC_EXPORT uint64_t kvc_stream_hash(const kvc_stream *stream) { return hash_end(&stream->hash, chosen()); }

// Values for a store, sent with their checksums. All behind `tail` in the state is the library's.
KVC_EXPORT size_t kvc_values_nbytes(void) { return sizeof(kvc_values); }
KVC_EXPORT int kvc_values_send(kvc_values *values) { return values_send(values, chosen()); }

// Values from a store, received with their checksums. All behind `got` in the state is the library's.
KVC_EXPORT size_t kvc_replies_nbytes(void) { return sizeof(kvc_replies); }
KVC_EXPORT int kvc_replies_receive(kvc_replies *replies) { return replies_receive(replies, chosen()); }

// The short ways of a channel, for the running Python, with its GIL held; see channel.h.
#define CHANNEL_CALL(function, arguments, call) \
    static PyObject *function(PyObject *self, PyObject *const *args, ssize_t count) { \
        kvc_channel *c = PyCapsule_GetPointer(self, channel_name); \
        (void)args; \
        return c && count == arguments ? call : channel_none(); \
    }
CHANNEL_CALL(call_send, 5, channel_send(c, args, chosen()))
CHANNEL_CALL(call_receive, 2, channel_receive(c, args, chosen()))
CHANNEL_CALL(call_payload, 2, channel_payload(c, args, chosen()))
CHANNEL_CALL(call_hand_over, 0, channel_hand_over(c))
CHANNEL_CALL(call_progress, 0, channel_pair(c->progress[0], c->progress[1]))
CHANNEL_CALL(call_sent, 0, channel_pair(c->sent[0], c->sent[1]))
CHANNEL_CALL(call_head, 3, channel_head_of(c, args))
CHANNEL_CALL(call_message, 1, channel_came(c, args, chosen()))
CHANNEL_CALL(call_placed, 1, channel_placed(c, args, chosen()))
CHANNEL_CALL(call_looked, 0, PyLong_FromUnsignedLongLong(c->look.looked))

KVC_EXPORT PyObject *kvc_channel_make(PyObject *of) {
    static PyMethodDef methods[] = {
        {"send", call_send, PY_FASTCALL, NULL},           {"receive", call_receive, PY_FASTCALL, NULL},
        {"receive_payload", call_payload, PY_FASTCALL, NULL}, {"hand_over", call_hand_over, PY_FASTCALL, NULL},
        {"progress", call_progress, PY_FASTCALL, NULL},   {"looked", call_looked, PY_FASTCALL, NULL},
        {"sent", call_sent, PY_FASTCALL, NULL},
    };
    return channel_make(of, methods, sizeof methods / sizeof *methods);
}

// Those of a channel whose connection is no socket.
KVC_EXPORT PyObject *kvc_messages_make(PyObject *of) {
    static PyMethodDef methods[] = {
        {"head", call_head, PY_FASTCALL, NULL}, {"message", call_message, PY_FASTCALL, NULL},
        {"payload", call_placed, PY_FASTCALL, NULL}, {"hand_over", call_hand_over, PY_FASTCALL, NULL},
    };
    return channel_make(of, methods, sizeof methods / sizeof *methods);
}

// The short ways of a connection over UCX, likewise; see ucx.h.
#define UCX_CALL(function, call) \
    static PyObject *function(PyObject *self, PyObject *const *args, ssize_t count) { \
        kvc_ucx *u = PyCapsule_GetPointer(self, ucx_name); \
        return u && count == 4 ? call(u, args) : channel_none(); \
    }
UCX_CALL(call_ucx_send, ucx_send)
UCX_CALL(call_ucx_receive, ucx_receive)

KVC_EXPORT PyObject *kvc_ucx_make(PyObject *of) {
    static PyMethodDef methods[] = {{"send", call_ucx_send, PY_FASTCALL, NULL}, {"receive", call_ucx_receive, PY_FASTCALL, NULL}};
    return ucx_make(of, methods, sizeof methods / sizeof *methods);
}

KVC_EXPORT size_t kvc_ways_nbytes(void) { return sizeof(kvc_ways); }
KVC_EXPORT int kvc_ways_next(kvc_ways *ways, uint64_t nbytes) { return ways_next(ways, nbytes); }
KVC_EXPORT void kvc_ways_took(kvc_ways *ways, uint64_t nbytes, uint64_t ns) { ways_took(ways, nbytes, ns); }

KVC_EXPORT size_t kvc_file_nbytes(void) { return sizeof(kvc_file); }
KVC_EXPORT size_t kvc_turns_nbytes(void) { return sizeof(files_turns); }
KVC_EXPORT void kvc_turns_begin(files_turns *turns, size_t count) { turns_begin(turns, count); }
KVC_EXPORT size_t kvc_write_files(
    kvc_file *files, size_t count, int64_t nbytes, int create, int reuse, int sync, double deadline, files_turns *turns) {
    return files_write(files, count, nbytes, create, reuse, sync, deadline, turns, chosen());
}
KVC_EXPORT size_t kvc_read_files(kvc_file *files, size_t count, int64_t nbytes, int flags, double deadline) {
    return files_read(files, count, nbytes, flags, deadline, chosen());
}
