/* copying.c: copies that are equally fast wherever the two sides lie.
 *
 * Where a processor says that `rep movsb` is fast, glibc's memcpy uses it for copies of some kilobytes to some megabytes, and
 * so does the kernel for all. On AMD's Zen 3 that takes over ten times as long if the target begins 1 to 31 bytes behind the
 * source, counted within a page: 2 instead of 30 GB/s (`benchmarks/copies.py`). (Bug 30994 of glibc says the same of Zen 4.) NumPy's large
 * arrays begin 16 bytes into a page and what lies in a segment at its start, so this is the usual case. There a loop of vectors
 * is as fast as memcpy is elsewhere. On other processors memcpy is left to choose.
 */
#include "copying.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>

enum {
    VECTOR = 16,
    LINE = 64,
    WITHIN_PAGE = 4095,
    SLOW_BEHIND = 32,
    LEAST = 2048, /* below, glibc uses vectors itself, and the kernel has little to copy */
};
static int is_of_amd;

__attribute__((constructor)) static void find_maker(void) {
    unsigned highest = 0, b = 0, c = 0, d = 0; /* compilers with sanitizers do not see that they are written */
    is_of_amd = __get_cpuid(0, &highest, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
}

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

int is_slow_copy(const void *to, const void *from, size_t bytes) {
    const size_t behind = ((uintptr_t)to - (uintptr_t)from) & WITHIN_PAGE;
    return is_of_amd && bytes >= LEAST && behind && behind < SLOW_BEHIND;
}

void copy_bytes(void *to, const void *from, size_t bytes) {
    if (is_slow_copy(to, from, bytes)) copy_by_vectors(to, from, bytes, 0);
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
int is_slow_copy(const void *to, const void *from, size_t bytes) {
    (void)to, (void)from, (void)bytes;
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
