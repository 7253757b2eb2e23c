/* direct.c: values that ranks read in each other's processes, where they lie.
 *
 * The kernel copies them once (process_vm_readv; twice where one copy would be slow), so that nothing passes the segment. It
 * permits that where a debugger of
 * the same user might attach. Whether it does, a seat finds out before each such instance, by reading of every other seat
 * a number of which that has said where it lies: so it reads the right process, too, though processes may be numbered
 * differently where each runs. A seat that takes what comes, which may be small, goes by what it has found out once. All
 * seats have to be ready, and say so in their records; else values move by ticks.
 *
 * A seat only ever reads. Were it to write into another process, it might do so after that has given up its call and
 * uses the memory for something else; a value read then is thrown away with the instance, which has failed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>

#include "copying.h"
#include "mailbox.h"

enum {
    STRETCH = 1 << 20,  /* bytes between two looks at the world */
    BOUNCE = 32 << 10,  /* of the bounce buffer, a multiple of a page */
};

static int read_at_once(u64 process, u64 address, void *to, u64 bytes) {
    while (bytes) {
        struct iovec own = {to, bytes}, other = {(void *)(uintptr_t)address, bytes};
        ssize_t n = process_vm_readv((pid_t)process, &own, 1, &other, 1, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = EFAULT;
        if (n <= 0) return -1;
        to = (char *)to + n, address += (u64)n, bytes -= (u64)n;
    }
    return 0;
}

/* Reads by a bounce buffer, to and from which no copy is slow. The kernel writes the result, too, for that may not be writable: then
   this is an error, and no signal. In a function of its own, for its frame is large. */
__attribute__((noinline)) static int read_by_bounce(u64 process, u64 address, char *to, u64 bytes) {
    _Alignas(PAGE) char memory[BOUNCE + PAGE];
    char *bounce = memory + (address + PAGE / 2) % PAGE;
    for (u64 done = 0, n; done < bytes; done += n) {
        n = bytes - done < BOUNCE ? bytes - done : BOUNCE;
        if (read_at_once(process, address + done, bounce, n)) return -1;
        if (read_at_once((u64)getpid(), (u64)(uintptr_t)bounce, to + done, n)) return -1;
    }
    return 0;
}

/* The kernel copies as memcpy does, and is as slow where that is. */
static int read_process(u64 process, u64 address, void *to, u64 bytes) {
    if (is_slow_copy(to, (const void *)(uintptr_t)address, bytes)) return read_by_bounce(process, address, to, bytes);
    return read_at_once(process, address, to, bytes);
}

void show_process(struct engine *e) {
    struct seat *own = seat_of(e->segment, e->seat);
    e->token = 1 | (now() * 0x9e3779b97f4a7c15u ^ (u64)(uintptr_t)e ^ (u64)getpid() << 32);
    atomic_store_explicit(&own->token, e->token, memory_order_release);
    atomic_store_explicit(&own->token_at, (u64)(uintptr_t)&e->token, memory_order_release);
    atomic_store_explicit(&own->process, (u64)getpid(), memory_order_release);
}

void hide_process(struct engine *e) {
    atomic_store_explicit(&seat_of(e->segment, e->seat)->process, 0, memory_order_release);
}

int is_readable(const struct engine *e, int seat) {
    const struct seat *other = seat_of(e->segment, seat);
    u64 process = load(&other->process), found = 0;
    return process && !read_process(process, load(&other->token_at), &found, sizeof found) && found == load(&other->token);
}

int read_seat(const struct engine *e, int seat, u64 address, void *to, u64 bytes) {
    return read_process(load(&seat_of(e->segment, seat)->process), address, to, bytes);
}

int can_be_read(const char *memory, u64 bytes) {
    char byte;
    u64 process = (u64)getpid(), first = (u64)(uintptr_t)memory;
    return !bytes || (!read_process(process, first, &byte, 1) && !read_process(process, first + bytes - 1, &byte, 1));
}

/* Whether a seat could be read when that was tried. */
static int was_readable(struct engine *e, int seat) {
    const struct seat *other = seat_of(e->segment, seat);
    u64 token = load(&other->token), bit = (u64)1 << seat % 64;
    if (e->tried[seat] != token) {
        e->tried[seat] = token;
        if (is_readable(e, seat)) e->could[seat / 64] |= bit;
        else e->could[seat / 64] &= ~bit;
    }
    return e->could[seat / 64] & bit && load(&other->process);
}

static int could_read_all(struct engine *e, int seats) {
    for (int i = 0; i < seats; i++)
        if (i != e->seat && !was_readable(e, i)) return 0;
    return 1;
}

int can_be_direct(struct engine *e, const struct job *job) {
    const struct plan *plan = job->plan;
    if (!e->token || plan->seats < 2) return 0;
    if (plan->open) return could_read_all(e, plan->seats);
    if (plan->whole || !is_for_direct(e->segment, plan, &job->values)) return 0;
    if (plan->leaves_in && !can_be_read(job->values.in[0], plan->phase->starts_in[1] * plan->phase->item)) return 0;
    for (int i = 0; i < plan->seats; i++)
        if (i != e->seat && !is_readable(e, i)) return 0;
    return 1;
}

int find_culprit(const struct engine *e, int seat, u64 address, u64 bytes) {
    const struct seat *other = seat_of(e->segment, seat);
    u64 process = load(&other->process), found = 0;
    char byte;
    if (!process || is_gone(e->segment, seat)) return -1;
    if (read_process(process, load(&other->token_at), &found, sizeof found)) return errno == EPERM ? e->seat : -1;
    if (found != load(&other->token)) return -1;
    for (u64 at = 0; at < bytes; at += PAGE)
        if (read_process(process, address + at, &byte, 1)) return seat;
    return e->seat; /* its result cannot be written */
}

int sources_are_there(const struct engine *e, const struct job *job, int *culprit) {
    struct piece piece;
    for (u64 done = 0; next_piece(job->plan, &job->values, done, &piece); done += piece.bytes)
        if (piece.from != e->seat && !is_readable(e, piece.from)) return *culprit = find_culprit(e, piece.from, 0, 0), 0;
    return 1;
}

int copy_directly(struct engine *e, struct job *job, int *culprit) {
    struct piece piece;
    u64 left = STRETCH;
    for (; left && next_piece(job->plan, &job->values, job->copied, &piece); job->copied += piece.bytes, left -= piece.bytes) {
        if (piece.bytes > left) piece.bytes = left;
        u64 value = load(&seat_of(e->segment, piece.from)->record[job->instance & 1].value);
        if (piece.from == e->seat) copy_piece(job->plan, &job->values, &piece);
        else if (read_seat(e, piece.from, value + piece.at, piece.to, piece.bytes))
            return *culprit = find_culprit(e, piece.from, value + piece.at, piece.bytes), -1;
    }
    return !left;
}
