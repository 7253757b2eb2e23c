/* copying.c: copies that are as fast wherever the two sides lie.
 *
 * Where a processor says that `rep movsb` is fast, memcpy uses it for copies of some kilobytes to some megabytes. On AMD's
 * Zen 3 and 4 it takes twelve times as long if the target begins 1 to 31 bytes behind the source, counted within a page: 2
 * instead of 25 GB/s. NumPy's large arrays begin 16 bytes into a page and what lies in a segment at its start, so this is the
 * usual case. A loop of vectors has no such bad place, and is as fast as the best of the others.
 */
#include "copying.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

enum { VECTOR = 16, LINE = 64, WITHIN_PAGE = 4095, LEAST = 2048 }; /* below LEAST memcpy uses vectors itself */

/* Copies whole lines to a target that begins at a vector's boundary; how many bytes that were. */
static inline size_t copy_lines(char *to, const char *from, size_t bytes, int stream) {
    size_t done = 0;
    for (; bytes - done >= LINE; done += LINE) {
        const __m128i *source = (const void *)(from + done);
        __m128i *target = (void *)(to + done), line[LINE / VECTOR];
        for (int i = 0; i < LINE / VECTOR; i++) line[i] = _mm_loadu_si128(source + i);
        for (int i = 0; i < LINE / VECTOR; i++) {
            if (stream) _mm_stream_si128(target + i, line[i]);
            else _mm_store_si128(target + i, line[i]);
        }
    }
    return done;
}

static inline void copy_by_vectors(char *to, const char *from, size_t bytes, int stream) {
    const size_t head = -(uintptr_t)to & (VECTOR - 1);
    memcpy(to, from, head);
    const size_t done = head + copy_lines(to + head, from + head, bytes - head, stream);
    memcpy(to + done, from + done, bytes - done);
}

int is_slow(const void *from, const void *to, size_t bytes) {
    const size_t behind = ((uintptr_t)to - (uintptr_t)from) & WITHIN_PAGE;
    return bytes >= LEAST && behind && behind < LINE;
}

void copy_bytes(void *to, const void *from, size_t bytes) {
    if (is_slow(from, to, bytes)) copy_by_vectors(to, from, bytes, 0);
    else memcpy(to, from, bytes);
}

void copy_streamed(void *to, const void *from, size_t bytes) {
    if (bytes < 4 * LINE) memcpy(to, from, bytes);
    else copy_by_vectors(to, from, bytes, 1);
}

void finish_streaming(void) {
    _mm_sfence();
}
#else
int is_slow(const void *from, const void *to, size_t bytes) {
    (void)from, (void)to, (void)bytes;
    return 0;
}

void copy_bytes(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

void copy_streamed(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

void finish_streaming(void) {
}
#endif
