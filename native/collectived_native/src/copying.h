/* copying.h: copies between memory that does not overlap. */
#ifndef COLLECTIVED_COPYING_H
#define COLLECTIVED_COPYING_H

#include <stddef.h>

/* As memcpy, but not slow where `is_slow_copy` says that memcpy is. */
void copy_bytes(void *to, const void *from, size_t bytes);
/* Whether memcpy, or the kernel, takes many times as long because of where the two lie. */
int is_slow_copy(const void *to, const void *from, size_t bytes);
/* Copies past the caches what is too large to be found there later. */
void copy_streamed(void *to, const void *from, size_t bytes);
/* Makes what this thread has streamed visible before its later stores (x86: sfence; elsewhere nothing is streamed). */
void finish_streaming(void);

#endif
