/* compression_kernels.h: the inner loops of compression.c, which includes this once for each kind of processor.
 *
 * Before: TARGET, the attribute of every function; VARIANT(name), its name. After: `static const struct codec
 * VARIANT(codecs)[]`. Each loop is written for the vectoriser: one expression per value, no branch.
 */

#define EACH INDEPENDENT for (int i = 0; i < BLOCK_VALUES; i++)

/* MOST: the largest code; ENCODE(value / scale) and DECODE(code). */
#define SCALED(name, MOST, ENCODE, DECODE)                                                                             \
    TARGET static void VARIANT(compress_##name)(void *out, const void *values, size_t blocks) {                        \
        u8 *o = out;                                                                                                   \
        const f32_at *x = values;                                                                                      \
        for (; blocks; blocks--, o += SCALED_BYTES, x += BLOCK_VALUES) {                                               \
            const i32_at *bits = (const void *)x;                                                                      \
            i32 most = 0;                                                                                              \
            for (int i = 0; i < BLOCK_VALUES; i++) {                                                                   \
                const i32 magnitude = bits[i] & 0x7fffffff;                                                            \
                most = magnitude > most ? magnitude : most;                                                            \
            }                                                                                                          \
            if (most >= INFINITE) {                                                                                    \
                compress_special(&name##_codes, o, x);                                                                 \
                continue;                                                                                              \
            }                                                                                                          \
            const f32 scale = choose_scale(value_of((u32)most), MOST), inverse = 1.0f / scale;                         \
            u8 *codes = o + sizeof scale;                                                                              \
            memcpy(o, &scale, sizeof scale);                                                                           \
            EACH codes[i] = ENCODE(x[i] * inverse);                                                                    \
        }                                                                                                              \
    }                                                                                                                  \
    TARGET static void VARIANT(expand_##name)(void *out, const void *compressed, size_t blocks) {                      \
        f32_at *o = out;                                                                                               \
        const u8 *c = compressed;                                                                                      \
        for (; blocks; blocks--, o += BLOCK_VALUES, c += SCALED_BYTES) {                                               \
            const u8 *codes = c + sizeof(f32);                                                                         \
            const f32 scale = *(const f32_at *)c;                                                                      \
            if (bits_of(scale) >> 31) expand_special(&name##_codes, o, c);                                             \
            else EACH o[i] = DECODE(codes[i]) * scale;                                                                 \
        }                                                                                                              \
    }                                                                                                                  \
    TARGET static void VARIANT(add_##name)(void *out, const void *mine, const void *compressed, size_t blocks) {       \
        f32_at *o = out;                                                                                               \
        const f32_at *x = mine;                                                                                        \
        const u8 *c = compressed;                                                                                      \
        for (; blocks; blocks--, o += BLOCK_VALUES, x += BLOCK_VALUES, c += SCALED_BYTES) {                            \
            const u8 *codes = c + sizeof(f32);                                                                         \
            const f32 scale = *(const f32_at *)c;                                                                      \
            if (bits_of(scale) >> 31) {                                                                                \
                f32 expanded[BLOCK_VALUES];                                                                            \
                expand_special(&name##_codes, expanded, c);                                                            \
                EACH o[i] = x[i] + expanded[i];                                                                        \
            } else EACH o[i] = x[i] + DECODE(codes[i]) * scale;                                                        \
        }                                                                                                              \
    }
SCALED(i8, I8_MOST, f32_to_i8, i8_to_f32)
SCALED(f8, F8_MOST, f32_to_f8, f8_to_f32)

TARGET static void VARIANT(compress_bf16)(void *out, const void *values, size_t blocks) {
    u16_at *o = out;
    const u32_at *x = values;
    INDEPENDENT for (size_t i = 0; i < blocks * BLOCK_VALUES; i++) o[i] = f32_to_bf16(x[i]);
}

TARGET static void VARIANT(expand_bf16)(void *out, const void *compressed, size_t blocks) {
    u32_at *o = out;
    const u16_at *c = compressed;
    INDEPENDENT for (size_t i = 0; i < blocks * BLOCK_VALUES; i++) o[i] = (u32)c[i] << 16;
}

TARGET static void VARIANT(add_bf16)(void *out, const void *mine, const void *compressed, size_t blocks) {
    f32_at *o = out;
    const f32_at *x = mine;
    const u16_at *c = compressed;
    INDEPENDENT for (size_t i = 0; i < blocks * BLOCK_VALUES; i++) o[i] = x[i] + value_of((u32)c[i] << 16);
}

static const struct codec VARIANT(codecs)[FORMAT_COUNT] = {
    [FORMAT_BF16] = {VARIANT(compress_bf16), VARIANT(expand_bf16), VARIANT(add_bf16)},
    [FORMAT_F8] = {VARIANT(compress_f8), VARIANT(expand_f8), VARIANT(add_f8)},
    [FORMAT_I8] = {VARIANT(compress_i8), VARIANT(expand_i8), VARIANT(add_i8)},
};

#undef EACH
#undef SCALED
#undef TARGET
#undef VARIANT
