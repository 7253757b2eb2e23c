/* segment.c: making, mapping and unmapping segments. */
#define _GNU_SOURCE
#include "word.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAGIC = 0x6c6c6f63, SMALLEST_SHARE = 1024, LARGEST_SHARE = 16 << 20 };

_Static_assert(sizeof(struct seat) <= PAGE, "a seat's words fit into its first page");
_Static_assert(sizeof(struct record) == 2 * CACHE_LINE, "the part of a record that is always read is one cache line");
_Static_assert(offsetof(struct letter, source) == CACHE_LINE, "the part that is read of all letters is one cache line");
_Static_assert(sizeof(struct total) == CACHE_LINE, "a total is one cache line");
_Static_assert(TOTALS * sizeof(struct total) % PAGE == 0, "the part after the totals begins a page");
_Static_assert(HISTORY * sizeof(struct past) % PAGE == 0, "and so does what follows the history");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "words shared by processes need no lock");

/* A page that reads 0 in forked children. It holds a number that no ancestor of this process has used, so that what the
 * parent mapped stays strange to a child even when the child maps segments of its own. */
static _Atomic(a64 *) epoch_page;
static u64 last_epoch, last_serial;
static struct segment *segments; /* guarded by the GIL */

static u64 current_epoch(void) {
    a64 *page = atomic_load(&epoch_page);
    if (!page) {
        void *made = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (made == MAP_FAILED) return 0;
        if (madvise(made, PAGE, MADV_WIPEONFORK)) {
            munmap(made, PAGE);
            errno = ENOSYS; /* a kernel before 4.14, or one that only looks like Linux */
            return 0;
        }
        page = made;
        atomic_store(&epoch_page, page);
    }
    if (!atomic_load_explicit(page, memory_order_relaxed)) atomic_store(page, ++last_epoch);
    return atomic_load_explicit(page, memory_order_relaxed);
}

int segment_is_ours(u64 epoch) {
    a64 *page = atomic_load_explicit(&epoch_page, memory_order_relaxed);
    return page && atomic_load_explicit(page, memory_order_relaxed) == epoch;
}

static u64 round_up(u64 bytes, u64 to) {
    return (bytes + to - 1) / to * to;
}

static u64 digest_geometry(const struct geometry *g) { /* FNV-1a: it tells accidents apart, not forgeries */
    const unsigned char *byte = (const unsigned char *)g;
    u64 digest = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof *g; i++) digest = (digest ^ byte[i]) * 0x100000001b3u;
    return digest;
}

int segment_lay_out(struct segment *s, const void *geometry, size_t bytes) {
    memset(s, 0, sizeof *s);
    struct geometry *g = &s->geometry;
    if (bytes == sizeof *g) memcpy(g, geometry, sizeof *g);
    if (bytes != sizeof *g || g->version != SCHEDULE_VERSION || g->seats < 1 || g->seats > MAX_SEATS ||
        g->operated > 1 ||
        g->start >> (63 - TICK_BITS) || g->start >> (64 - WORD_BITS - 1) || g->share < SMALLEST_SHARE || g->share > LARGEST_SHARE ||
        g->share % CACHE_LINE || g->small > LARGEST_SHARE || g->mail >> 40) {
        errno = EINVAL;
        return -1;
    }
    s->geometry_digest = digest_geometry(g);
    s->front = round_up(sizeof(struct head) + g->seats * sizeof(struct meeting_place), PAGE);
    u64 columns = g->share * g->seats, whole = MAX_BLOB + g->small;
    s->part = round_up(columns > whole ? columns : whole, PAGE);
    s->results = PAGE + PARTS * s->part;
    s->letters = round_up(s->results + PARTS * g->share, PAGE);
    s->receipts = s->letters + LETTERS * sizeof(struct letter);
    s->totals = round_up(s->receipts + g->seats * LETTERS * sizeof(struct receipt), PAGE);
    s->history = s->totals + TOTALS * sizeof(struct total);
    s->slots = s->history + HISTORY * sizeof(struct past);
    s->mail = s->slots + LETTERS * LETTER_SLOT;
    s->seat_bytes = round_up(s->mail + g->mail, PAGE);
    s->bytes = s->front + g->seats * s->seat_bytes;
    return 0;
}

int segment_create(const void *geometry, size_t bytes) {
    struct segment s;
    if (segment_lay_out(&s, geometry, bytes)) return -1;
    int descriptor = memfd_create("collectived-segment", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor < 0) return -1;
    char *base = MAP_FAILED;
    if (!ftruncate(descriptor, (off_t)s.bytes)) base = mmap(NULL, s.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (base == MAP_FAILED || fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
        int why = errno;
        if (base != MAP_FAILED) munmap(base, s.bytes);
        close(descriptor);
        errno = why;
        return -1;
    }
    s.base = base;
    struct head *head = head_of(&s);
    head->magic = MAGIC, head->version = SCHEDULE_VERSION, head->seats = s.geometry.seats;
    atomic_store(&head->decided, make_word(s.geometry.start, 0, 0, 0));
    atomic_store(&head->limit, ~(u64)0);
    for (int i = 0; i < (int)s.geometry.seats; i++) {
        struct seat *seat = seat_of(&s, i);
        atomic_store(&seat->progress, s.geometry.start << TICK_BITS);
        atomic_store(&seat->record[0].instance, ~(u64)0);
        atomic_store(&seat->record[1].instance, ~(u64)0);
    }
    munmap(base, s.bytes);
    return descriptor;
}

static struct segment *map_anew(int descriptor, const void *geometry, size_t bytes, const struct stat *about) {
    struct segment *s = malloc(sizeof *s);
    if (!s || segment_lay_out(s, geometry, bytes) || !(s->epoch = current_epoch())) goto failed;
    int seals = fcntl(descriptor, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || (u64)about->st_size != s->bytes) { /* or touching it might be SIGBUS */
        errno = EINVAL;
        goto failed;
    }
    s->base = mmap(NULL, s->bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    if (s->base == MAP_FAILED) goto failed;
    if (madvise(s->base, s->bytes, MADV_DONTFORK) || mprotect(s->base, s->front, PROT_READ | PROT_WRITE)) {
        int why = errno;
        munmap(s->base, s->bytes);
        errno = why;
        goto failed;
    }
    s->device = about->st_dev, s->inode = about->st_ino, s->serial = ++last_serial, s->knock = -1;
    return s;
failed:
    free(s);
    return NULL;
}

struct segment *segment_map(int descriptor, const void *geometry, size_t bytes, int seat) {
    struct stat about;
    if (fstat(descriptor, &about)) return NULL;
    struct segment *s = segments;
    while (s && !(s->device == (u64)about.st_dev && s->inode == (u64)about.st_ino && segment_is_ours(s->epoch))) s = s->next;
    if (!s) {
        s = map_anew(descriptor, geometry, bytes, &about);
        if (!s) return NULL;
        s->next = segments, segments = s;
    } else if (bytes != sizeof s->geometry || memcmp(&s->geometry, geometry, bytes)) {
        errno = EINVAL;
        return NULL;
    }
    s->users++;
    int refused = 0;
    if (seat >= (int)s->geometry.seats) errno = EINVAL, refused = 1;
    else if (seat >= 0) refused = mprotect(seat_of(s, seat), s->seat_bytes, PROT_READ | PROT_WRITE);
    else if (seat == -2) refused = mprotect(s->base, s->bytes, PROT_READ | PROT_WRITE);
    if (refused) {
        int why = errno;
        segment_unmap(s);
        errno = why;
        return NULL;
    }
    return s;
}

void segment_unmap(struct segment *s) {
    if (--s->users) return;
    struct segment **link = &segments;
    while (*link && *link != s) link = &(*link)->next;
    if (*link) *link = s->next;
    if (segment_is_ours(s->epoch)) { /* in a child something else may lie there by now */
        munmap(s->base, s->bytes);
        if (s->knock >= 0) close(s->knock);
    }
    free(s);
}
