/* compression.c: see compression.h. */
#include "compression.h"

#include <float.h>

#include "arithmetic.h"
#include "float_bits.h"

enum { SCALED_BYTES = sizeof(f32) + BLOCK_VALUES, INFINITE = 0x7f800000 };

struct codec {
    void (*compress)(void *out, const void *values, size_t blocks);
    void (*expand)(void *out, const void *compressed, size_t blocks);
    void (*add)(void *out, const void *mine, const void *compressed, size_t blocks);
};

/* ---- Codes ---- */

#define I8_MOST 127.0f
#define F8_MOST 448.0f

/* Rounded to nearest, ties to even: the sum has no bits behind the point, and its lowest byte is the number's. */
static inline u8 f32_to_i8(f32 value) {
    return (u8)bits_of(value + 12582912.0f); /* 1.5 * 2**23 */
}

static inline f32 i8_to_f32(u8 code) {
    return (f32)(i8)code;
}

static inline u8 f32_to_f8(f32 value) {
    const u32 bits = bits_of(value), sign = bits & 0x80000000, magnitude = bits ^ sign;
    /* From a bias of 127 to one of 7; ties to even. */
    const u32 normal = (magnitude - (120u << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    const u32 tiny = bits_of(value_of(magnitude) + 16384.0f) - (141u << 23); /* the sum rounds to a multiple of 2**-9 */
    return (u8)(sign >> 24 | select(magnitude < 121u << 23, tiny, normal));
}

static inline f32 f8_to_f32(u8 code) {
    const u32 magnitude = (u32)(code & 0x7f) << 20, sign = (u32)(code & 0x80) << 24;
    const u32 normal = magnitude + (120u << 23);
    /* A subnormal is so many 2**-9: put behind the point of 2**-6, which is then taken away. */
    const u32 tiny = bits_of(value_of(magnitude + (121u << 23)) - value_of(121u << 23));
    return value_of(sign | select(magnitude < 1u << 23, tiny, normal));
}

/* ---- Blocks with values that are not finite: rare, and so one value after the other ---- */

struct codes {
    f32 most; /* of finite values */
    u8 (*encode)(f32);
    f32 (*decode)(u8);
    u8 infinity, minus_infinity, nan;
};
static const struct codes i8_codes = {126.0f, f32_to_i8, i8_to_f32, 127, (u8)-127, (u8)-128};
static const struct codes f8_codes = {416.0f, f32_to_f8, f8_to_f32, 0x7e, 0xfe, 0x7f};

/* As small as it may be: no code is beyond the largest one, and what that stands for is finite. */
static f32 choose_scale(f32 most, f32 most_code) {
    const f32 scale = most / most_code;
    if (scale < FLT_MIN) return FLT_MIN;
    return scale * most_code > FLT_MAX ? value_of(bits_of(scale) - 1) : scale;
}

static void compress_special(const struct codes *codes, u8 *out, const f32_at *values) {
    u32 most = 0;
    for (int i = 0; i < BLOCK_VALUES; i++) {
        const u32 magnitude = bits_of(values[i]) & 0x7fffffff;
        if (magnitude < INFINITE && magnitude > most) most = magnitude;
    }
    const f32 scale = choose_scale(value_of(most), codes->most), inverse = 1.0f / scale, marked = -scale;
    memcpy(out, &marked, sizeof marked);
    out += sizeof marked;
    for (int i = 0; i < BLOCK_VALUES; i++) {
        const u32 bits = bits_of(values[i]), magnitude = bits & 0x7fffffff;
        if (magnitude > INFINITE) out[i] = codes->nan;
        else if (magnitude == INFINITE) out[i] = bits == magnitude ? codes->infinity : codes->minus_infinity;
        else out[i] = codes->encode(values[i] * inverse);
    }
}

static void expand_special(const struct codes *codes, f32_at *out, const u8 *compressed) {
    const f32 scale = -*(const f32_at *)compressed;
    compressed += sizeof scale;
    for (int i = 0; i < BLOCK_VALUES; i++) {
        const u8 code = compressed[i];
        if (code == codes->nan) out[i] = value_of(0x7fc00000);
        else if (code == codes->infinity) out[i] = value_of(INFINITE);
        else if (code == codes->minus_infinity) out[i] = -value_of(INFINITE);
        else out[i] = codes->decode(code) * scale;
    }
}

/* ---- One set of loops for each kind of processor ---- */

#define TARGET
#define VARIANT(name) name##_baseline
#include "compression_kernels.h"

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2")))
#define VARIANT(name) name##_avx2
#include "compression_kernels.h"
#endif

static const struct codec *codec_of(int format) {
#if defined(__x86_64__)
    if (runs_avx2()) return &codecs_avx2[format];
#endif
    return &codecs_baseline[format];
}

size_t block_bytes(int format) {
    if (format == FORMAT_BF16) return BLOCK_VALUES * sizeof(u16);
    return format == FORMAT_F8 || format == FORMAT_I8 ? SCALED_BYTES : 0;
}

void compress_blocks(int format, void *out, const void *values, size_t blocks) {
    codec_of(format)->compress(out, values, blocks);
}

void expand_blocks(int format, void *out, const void *compressed, size_t blocks) {
    codec_of(format)->expand(out, compressed, blocks);
}

void add_expanded_blocks(int format, void *out, const void *mine, const void *compressed, size_t blocks) {
    codec_of(format)->add(out, mine, compressed, blocks);
}
