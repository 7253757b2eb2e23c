/* carrier.c: see carrier.h. */
#define _GNU_SOURCE
#include "carrier.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "copying.h"

_Static_assert(sizeof(struct told_order) == 16 && sizeof(struct told_run) == 48, "orders are as the worker packs them");
_Static_assert(sizeof(struct told_link) == 16, "with those that bring links");
_Static_assert(sizeof(struct told_move) == 96 && sizeof(struct told_answer) == 88, "so are moves and answers");

enum { THREAD_STACK = 256 << 10, ORDER_BYTES = 256 << 10 /* at most */, STAGED_AT_ONCE = 1 << 20 };

static int is_stopped(const struct carrier *c) {
    return atomic_load(&c->closing) || atomic_load(&c->cancelled) || c->is_alone;
}

/* ---- Orders and answers ---- */

void carrier_sleep(struct carrier *c, struct pollfd *polls, int count, short of_orders) {
    eventfd_t rings;
    polls[WAKE] = (struct pollfd){c->wake, POLLIN, 0};
    polls[ORDERS] = (struct pollfd){c->is_alone ? -1 : c->orders, of_orders, 0};
    if (poll(polls, (nfds_t)count, -1) < 0) return;
    if (polls[WAKE].revents) eventfd_read(c->wake, &rings);
    /* The end of the worker is reported also where orders are not read; else what it has sent before is read first. */
    if (!c->is_attentive && polls[ORDERS].revents & (POLLHUP | POLLERR)) c->is_alone = 1;
}

static void answer(struct carrier *c, enum answer kind, u32 peer, int error, u64 number) {
    struct told_answer told = {.kind = (unsigned char)kind, .peer = peer, .error = error, .number = number};
    if (kind == ANSWER_BROKEN) memcpy(told.header, c->odd_header, HEADER_BYTES);
    struct pollfd polls[OWN_POLLS];
    while (send(c->orders, &told, sizeof told, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno == EAGAIN && !is_stopped(c))
        carrier_sleep(c, polls, OWN_POLLS, POLLOUT);
}

int carrier_attend(struct carrier *c) {
    while (c->is_attentive && !c->is_alone) {
        struct told_order told;
        ssize_t n = recv(c->orders, &told, sizeof told, MSG_DONTWAIT | MSG_PEEK | MSG_TRUNC);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
        if (n <= 0) c->is_alone = 1;
        else if (n != sizeof told || told.kind != ORDER_PING) c->is_attentive = 0; /* it stays there for later */
        else if (recv(c->orders, &told, sizeof told, MSG_DONTWAIT) == sizeof told) answer(c, ANSWER_PONG, NOBODY, 0, told.number);
    }
    return is_stopped(c);
}

void carrier_break(struct carrier *c, u32 peer, int error) {
    c->is_broken = 1, c->broken_peer = peer, c->broken_errno = error;
}

struct link *carrier_find_link(struct carrier *c, u32 peer) {
    for (int i = 0; i < c->links; i++)
        if (c->link[i].peer == peer) return &c->link[i];
    return NULL;
}

/* ---- The thread ---- */

static struct offer *find_offer(struct carrier *c, u64 instance) { /* under the lock */
    struct offer *offer = c->offers;
    while (offer && offer->instance != instance) offer = offer->next;
    return offer;
}

static struct offer *begin(struct carrier *c, u64 instance) {
    pthread_mutex_lock(&c->lock);
    c->busy = find_offer(c, instance);
    pthread_mutex_unlock(&c->lock);
    return c->busy;
}

/* From here on the memory may be withdrawn: what is answered is said after that. */
static void end(struct carrier *c) {
    pthread_mutex_lock(&c->lock);
    c->busy = NULL;
    atomic_store(&c->cancelled, 0);
    pthread_cond_broadcast(&c->idle);
    pthread_mutex_unlock(&c->lock);
}

static void run_order(struct carrier *c, const struct told_run *told, const struct offer *offer) {
    u32 peer = NOBODY;
    int refused = carrier_run(c, told, offer, &peer), failed = c->is_broken;
    end(c);
    if (refused) answer(c, ANSWER_REFUSED, peer, refused, told->instance);
    else if (!failed) answer(c, ANSWER_DONE, NOBODY, 0, told->instance);
    else answer(c, ANSWER_BROKEN, c->broken_peer, c->broken_errno, told->instance);
}

static void stage(struct carrier *c, const struct offer *offer) {
    const struct span *value = &offer->memory[PARTIALS], *staging = &offer->staging;
    u64 instance = offer->instance, bytes = value->bytes;
    int is_offered = !value->start || staging->start, failed = 0; /* without a value there is nothing to do */
    for (u64 at = 0; is_offered && !failed && at < bytes; at += STAGED_AT_ONCE) {
        copy_bytes(staging->start + at, value->start + at, least(bytes - at, STAGED_AT_ONCE));
        failed = carrier_attend(c);
    }
    if (failed) carrier_break(c, NOBODY, ECANCELED);
    end(c);
    if (!is_offered) answer(c, ANSWER_REFUSED, NOBODY, EINVAL, instance);
    else if (!failed) answer(c, ANSWER_STAGED, NOBODY, 0, instance);
    else answer(c, ANSWER_BROKEN, c->broken_peer, c->broken_errno, instance);
}

static void close_one(int *descriptor) {
    if (*descriptor >= 0) close(*descriptor);
    *descriptor = -1;
}

static void drop_ahead(struct link *link) {
    free(link->ahead);
    link->ahead = NULL, link->ahead_bytes = link->ahead_taken = 0;
}

static void drop_links(struct carrier *c) {
    for (int i = 0; i < c->links; i++) close_one(&c->link[i].descriptor), drop_ahead(&c->link[i]);
    c->links = 0;
}

/* Takes over a link, or more bytes of one that is known. Where it cannot, the next order that needs it is refused. */
static void take_link(struct carrier *c, const struct told_link *told, int descriptor) {
    struct link *link = carrier_find_link(c, told->peer);
    if (!link && descriptor >= 0 && c->links < MOST_LINKS) {
        link = &c->link[c->links];
        *link = (struct link){.peer = told->peer, .descriptor = -1};
        c->links++; /* last: a child that is forked meanwhile closes those that are counted */
    }
    if (descriptor < 0 && !told->bytes) return carrier_break(c, told->peer, EMFILE); /* it was lost on its way here */
    if (!link) return close_one(&descriptor);
    if (descriptor >= 0) close_one(&link->descriptor), drop_ahead(link), link->descriptor = descriptor;
    u64 left = link->ahead_bytes - link->ahead_taken;
    char *ahead = told->bytes ? malloc(left + told->bytes) : NULL;
    if (!told->bytes) return;
    if (!ahead) { /* later bytes of this link make no sense without these */
        carrier_break(c, told->peer, ENOMEM);
        return;
    }
    if (left) memcpy(ahead, link->ahead + link->ahead_taken, left);
    memcpy(ahead + left, told + 1, told->bytes);
    drop_ahead(link);
    link->ahead = ahead, link->ahead_bytes = left + told->bytes;
}

/* The next order, with the descriptor that rides along, or -1; its length. */
static ssize_t take_order(struct carrier *c, int *descriptor) {
    union { struct cmsghdr header; char bytes[CMSG_SPACE(sizeof(int))]; } control;
    struct iovec part = {c->order, ORDER_BYTES};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_LEN(sizeof(int))};
    ssize_t n = recvmsg(c->orders, &message, MSG_DONTWAIT | MSG_TRUNC | MSG_CMSG_CLOEXEC);
    const struct cmsghdr *first = n < 0 ? NULL : CMSG_FIRSTHDR(&message);
    *descriptor = -1;
    if (first && first->cmsg_level == SOL_SOCKET && first->cmsg_type == SCM_RIGHTS) memcpy(descriptor, CMSG_DATA(first), sizeof *descriptor);
    return n;
}

static void obey(struct carrier *c) {
    int descriptor;
    ssize_t n = take_order(c, &descriptor);
    const struct told_order *told = (const void *)c->order;
    const struct told_run *run = (const void *)c->order;
    const struct told_link *link = (const void *)c->order;
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) c->is_alone = 1;
    if (n <= 0) return close_one(&descriptor);
    u64 bytes = (u64)n, number = bytes < sizeof *told ? 0 : told->number; /* a run has its instance there, too */
    int is_short = bytes == sizeof *told, runs = bytes >= sizeof *run && bytes <= ORDER_BYTES && run->kind == ORDER_RUN;
    if (runs) runs = bytes == sizeof *run + run->moves * sizeof(struct told_move);
    if (bytes >= sizeof *link && bytes <= ORDER_BYTES && link->kind == ORDER_LINK && bytes == sizeof *link + link->bytes)
        return take_link(c, link, descriptor);
    close_one(&descriptor);
    if (is_short && told->kind == ORDER_PING) return answer(c, ANSWER_PONG, NOBODY, 0, number);
    if (!runs && !(is_short && told->kind == ORDER_STAGE)) return answer(c, ANSWER_REFUSED, NOBODY, EBADMSG, number);
    if (c->is_broken) return answer(c, ANSWER_BROKEN, c->broken_peer, c->broken_errno, number);
    const struct offer *offer = begin(c, number);
    if (!offer) return answer(c, ANSWER_REFUSED, NOBODY, ENOENT, number);
    if (runs) run_order(c, run, offer);
    else stage(c, offer);
}

static void *run(void *argument) {
    struct carrier *c = argument;
    struct pollfd polls[OWN_POLLS];
    while (!atomic_load(&c->closing)) {
        c->is_attentive = 1;
        carrier_sleep(c, polls, OWN_POLLS, POLLIN);
        if (polls[ORDERS].revents) obey(c);
        if (c->is_alone) drop_links(c); /* the other ends must see that the worker is gone */
    }
    return NULL;
}

static int start_thread(struct carrier *c) {
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, THREAD_STACK);
    sigfillset(&all); /* signals are for the threads of Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&c->thread, &attributes, run, c);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

/* ---- What other threads call ---- */

struct carrier *carrier_open(int orders) {
    int type = 0, error;
    socklen_t length = sizeof type;
    void *bounce = NULL, *order = NULL;
    if (getsockopt(orders, SOL_SOCKET, SO_TYPE, &type, &length)) return NULL;
    if (type != SOCK_SEQPACKET) return errno = EPROTOTYPE, NULL;
    struct carrier *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->orders = orders, c->owner = getpid();
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->idle, NULL);
    c->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    error = c->wake < 0 ? errno : posix_memalign(&bounce, PAGE, PIECE + WIDEST);
    if (!error) error = posix_memalign(&order, PAGE, ORDER_BYTES);
    c->bounce = bounce, c->order = order;
    if (!error) error = start_thread(c);
    if (!error) return c;
    if (c->wake >= 0) close(c->wake);
    carrier_free(c);
    return errno = error, NULL;
}

int carrier_offer(struct carrier *c, struct offer *offer) {
    pthread_mutex_lock(&c->lock);
    int is_known = find_offer(c, offer->instance) || (c->busy && c->busy->instance == offer->instance);
    if (!is_known) offer->next = c->offers, c->offers = offer;
    pthread_mutex_unlock(&c->lock);
    return is_known ? -1 : 0;
}

struct offer *carrier_withdraw(struct carrier *c, u64 instance) {
    pthread_mutex_lock(&c->lock);
    struct offer **link = &c->offers;
    while (*link && (*link)->instance != instance) link = &(*link)->next;
    struct offer *offer = *link;
    if (offer) *link = offer->next; /* first: no further order finds it */
    if (c->busy && c->busy->instance == instance) atomic_store(&c->cancelled, 1), eventfd_write(c->wake, 1);
    while (c->busy && c->busy->instance == instance) pthread_cond_wait(&c->idle, &c->lock);
    pthread_mutex_unlock(&c->lock);
    return offer;
}

void carrier_stop(struct carrier *c) {
    atomic_store(&c->closing, 1);
    eventfd_write(c->wake, 1);
    pthread_join(c->thread, NULL);
}

void carrier_close_descriptors(struct carrier *c) {
    close_one(&c->orders), close_one(&c->wake);
    for (int i = 0; i < c->links; i++) close_one(&c->link[i].descriptor); /* a child frees nothing: that may be half done */
}

void carrier_free(struct carrier *c) {
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->idle);
    drop_links(c);
    free(c->scratch.start), free(c->bounce), free(c->order);
    free(c);
}
