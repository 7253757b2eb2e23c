/* A libnccl that carries nothing: it writes down how it was called and answers as a test has told it to.
 *
 * Built by library.py. A test drives it through `fake_set` and reads `fake_log`; everything else has NCCL's own names
 * and types, so that bindings find what they look for.
 */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int result;
typedef struct { int size, rank, polls_left; } *comm;
typedef struct { char internal[128]; } unique_id;
typedef struct { size_t size; unsigned magic, version; int blocking; } config; /* how NCCL's own begins */

enum { SUCCESS = 0, IN_PROGRESS = 7 };
enum { CALL_RESULT, ASYNC_RESULT, INIT_POLLS, INIT_HANGS, ABORT_HANGS, SETTINGS };

static volatile int settings[SETTINGS];
static char text[1 << 16];
static size_t length;
static int minted;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fake_set(int setting, int value) { settings[setting] = value; }

const char *fake_log(void) { return text; }

void fake_forget(void) {
  pthread_mutex_lock(&lock);
  length = 0;
  text[0] = 0;
  pthread_mutex_unlock(&lock);
}

static void note(const char *format, ...) {
  va_list values;
  va_start(values, format);
  pthread_mutex_lock(&lock);
  if (length < sizeof text - 256) length += vsnprintf(text + length, 256, format, values);
  pthread_mutex_unlock(&lock);
  va_end(values);
}

static void wait_while(int setting) {
  while (settings[setting]) usleep(500);
}

result ncclGetVersion(int *version) { *version = 22809; return SUCCESS; }

const char *ncclGetErrorString(result code) {
  static const char *said[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                               "invalid argument", "invalid usage", "remote process exited or there was a network error",
                               "NCCL operation in progress", "timeout"};
  return code >= 0 && code < 9 ? said[code] : "unknown result code";
}

const char *ncclGetLastError(comm c) { return "the fake says why"; }

result ncclGetUniqueId(unique_id *id) {
  if (settings[CALL_RESULT]) return settings[CALL_RESULT];
  memset(id->internal, 0x5a, 128);
  memcpy(id->internal + 120, &minted, sizeof minted);
  minted++;
  return SUCCESS;
}

static result begin(comm *made, int size, unique_id id, int rank, int blocking) {
  note("init size=%d rank=%d id=%02x..%02x blocking=%d\n", size, rank, (unsigned char)id.internal[0],
       (unsigned char)id.internal[119], blocking);
  if (settings[CALL_RESULT] && settings[CALL_RESULT] != IN_PROGRESS) return settings[CALL_RESULT];
  if (blocking) wait_while(INIT_HANGS);
  *made = calloc(1, sizeof **made);
  (*made)->size = size;
  (*made)->rank = rank;
  (*made)->polls_left = blocking ? 0 : settings[INIT_POLLS];
  return blocking ? SUCCESS : IN_PROGRESS;
}

result ncclCommInitRank(comm *made, int size, unique_id id, int rank) { return begin(made, size, id, rank, 1); }

result ncclCommInitRankConfig(comm *made, int size, unique_id id, int rank, config *how) {
  return begin(made, size, id, rank, how == NULL || how->blocking != 0);
}

result ncclCommInitAll(comm *made, int count, const int *devices) { return 5; }
result ncclCommSplit(comm c, int color, int key, comm *made, config *how) { return 5; }

result ncclCommGetAsyncError(comm c, result *state) {
  if (c->polls_left) {
    if (c->polls_left > 0) c->polls_left--;
    *state = IN_PROGRESS;
  } else {
    *state = settings[ASYNC_RESULT];
  }
  return SUCCESS;
}

result ncclCommAbort(comm c) {
  note("abort rank=%d\n", c->rank);
  wait_while(ABORT_HANGS);
  return settings[CALL_RESULT];
}

result ncclCommDestroy(comm c) {
  note("destroy rank=%d\n", c->rank);
  return settings[CALL_RESULT];
}

result ncclCommFinalize(comm c) { return SUCCESS; }
result ncclCommCount(comm c, int *count) { *count = c->size; return SUCCESS; }
result ncclCommCuDevice(comm c, int *device) { *device = 0; return SUCCESS; }
result ncclCommUserRank(comm c, int *rank) { *rank = c->rank; return SUCCESS; }

result ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, comm c, void *stream) {
  note("all_reduce %p %p count=%zu type=%d op=%d rank=%d stream=%p\n", send, receive, count, type, op, c->rank, stream);
  return settings[CALL_RESULT];
}

result ncclReduce(const void *send, void *receive, size_t count, int type, int op, int root, comm c, void *stream) {
  note("reduce %p %p count=%zu type=%d op=%d root=%d rank=%d stream=%p\n", send, receive, count, type, op, root,
       c->rank, stream);
  return settings[CALL_RESULT];
}

result ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, comm c, void *stream) {
  note("broadcast %p %p count=%zu type=%d root=%d rank=%d stream=%p\n", send, receive, count, type, root, c->rank,
       stream);
  return settings[CALL_RESULT];
}

result ncclAllGather(const void *send, void *receive, size_t count, int type, comm c, void *stream) {
  note("all_gather %p %p count=%zu type=%d rank=%d stream=%p\n", send, receive, count, type, c->rank, stream);
  return settings[CALL_RESULT];
}

result ncclReduceScatter(const void *send, void *receive, size_t count, int type, int op, comm c, void *stream) {
  note("reduce_scatter %p %p count=%zu type=%d op=%d rank=%d stream=%p\n", send, receive, count, type, op, c->rank,
       stream);
  return settings[CALL_RESULT];
}

result ncclSend(const void *send, size_t count, int type, int peer, comm c, void *stream) {
  note("send %p count=%zu type=%d peer=%d rank=%d stream=%p\n", send, count, type, peer, c->rank, stream);
  return settings[CALL_RESULT];
}

result ncclRecv(void *receive, size_t count, int type, int peer, comm c, void *stream) {
  note("recv %p count=%zu type=%d peer=%d rank=%d stream=%p\n", receive, count, type, peer, c->rank, stream);
  return settings[CALL_RESULT];
}

result ncclGroupStart(void) {
  note("group_start\n");
  return settings[CALL_RESULT];
}

result ncclGroupEnd(void) {
  note("group_end\n");
  return settings[CALL_RESULT];
}

/* Bindings look for this when they are loaded; nobody calls it here. */
result ncclBcast(void *buffer, size_t count, int type, int root, comm c, void *stream) { return 5; }
