/* float_bits.h: numbers as bits, without branches, for loops that the vectoriser takes. */
#ifndef COLLECTIVED_FLOAT_BITS_H
#define COLLECTIVED_FLOAT_BITS_H

#include <stdint.h>
#include <string.h>

typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef float f32;
typedef double f64;
/* The same at any address, whatever else it is seen as. */
#define AT_ANY_ADDRESS(T) typedef T T##_at __attribute__((aligned(1), may_alias))
AT_ANY_ADDRESS(i8);
AT_ANY_ADDRESS(i16);
AT_ANY_ADDRESS(i32);
AT_ANY_ADDRESS(i64);
AT_ANY_ADDRESS(u8);
AT_ANY_ADDRESS(u16);
AT_ANY_ADDRESS(u32);
AT_ANY_ADDRESS(u64);
AT_ANY_ADDRESS(f32);
AT_ANY_ADDRESS(f64);

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

static inline u32 bits_of(f32 value) {
    u32 bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline f32 value_of(u32 bits) {
    f32 value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Where `condition` holds, `yes`; by masks, for a branch around a float operation keeps the vectoriser away. */
static inline u32 select(int condition, u32 yes, u32 no) {
    const u32 mask = -(u32)condition;
    return (yes & mask) | (no & ~mask);
}

static inline u16 f32_to_bf16(u32 bits) {
    const u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* ties to even; may carry to inf */
    return (u16)select((bits & 0x7fffffff) > 0x7f800000, bits >> 16 | 0x40, rounded);
}

#endif
