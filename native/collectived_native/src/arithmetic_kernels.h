/* arithmetic_kernels.h: the inner loops of arithmetic.c, which includes this once for each kind of processor.
 *
 * Before: TARGET, the attribute of every function; VARIANT(name), its name; HAS_AVX2, whether halves are converted by
 * its instructions and those of F16C. After: `static const struct kernels VARIANT(kernels)`.
 * Each loop is written for the vectoriser: one expression per element, no branch. It may run in place, for an element is
 * read before it is written; INDEPENDENT says so to the compiler.
 */

#define PAIR(name, T, expression)                                                                                      \
    TARGET static void VARIANT(name##_##T)(void *out, const void *left, const void *right, size_t n) {                 \
        T##_at *o = out;                                                                                               \
        const T##_at *x = left, *y = right;                                                                            \
        INDEPENDENT for (size_t i = 0; i < n; i++) {                                                                   \
            const T a = x[i], b = y[i];                                                                                \
            o[i] = (T)(expression);                                                                                    \
        }                                                                                                              \
    }

PAIR(sum, u8, a + b)
PAIR(sum, u16, a + b)
PAIR(sum, u32, a + b)
PAIR(sum, u64, a + b)
PAIR(sum, f32, a + b)
PAIR(sum, f64, a + b)
PAIR(product, u8, a * b)
PAIR(product, u16, (u32)a * b) /* in int it could overflow */
PAIR(product, u32, a * b)
PAIR(product, u64, a * b)
PAIR(product, f32, a * b)
PAIR(product, f64, a * b)
PAIR(band, u8, a & b)
PAIR(bor, u8, a | b)
PAIR(bxor, u8, a ^ b)

#define EXTREMES(T, keep)                                                                                              \
    PAIR(min, T, (a < b keep) ? a : b)                                                                                 \
    PAIR(max, T, (a > b keep) ? a : b)
EXTREMES(i8, )
EXTREMES(i16, )
EXTREMES(i32, )
EXTREMES(i64, )
EXTREMES(u8, )
EXTREMES(u16, )
EXTREMES(u32, )
EXTREMES(u64, )
EXTREMES(f32, || a != a) /* a NaN on the left stays; one on the right comes by being no less and no more */
EXTREMES(f64, || a != a)

#define COMPLEX(T)                                                                                                     \
    TARGET static void VARIANT(product_complex_##T)(void *out, const void *left, const void *right, size_t n) {        \
        T##_at *o = out;                                                                                               \
        const T##_at *x = left, *y = right;                                                                            \
        INDEPENDENT for (size_t i = 0; i < 2 * n; i += 2) {                                                            \
            const T ar = x[i], ai = x[i + 1], br = y[i], bi = y[i + 1];                                                \
            o[i] = ar * br - ai * bi;                                                                                  \
            o[i + 1] = ar * bi + ai * br;                                                                              \
        }                                                                                                              \
    }                                                                                                                  \
    /* The quotient of (r, i) and (n, 0) by Smith's rule, as NumPy divides. */                                         \
    TARGET static void VARIANT(mean_complex_##T)(void *out, const void *partial, size_t n, double divisor) {           \
        T##_at *o = out;                                                                                               \
        const T##_at *x = partial;                                                                                     \
        const T ratio = (T)0 / (T)divisor, scale = (T)1 / (T)divisor;                                                  \
        INDEPENDENT for (size_t i = 0; i < 2 * n; i += 2) {                                                            \
            const T r = x[i], c = x[i + 1];                                                                            \
            o[i] = (r + c * ratio) * scale;                                                                            \
            o[i + 1] = (c - r * ratio) * scale;                                                                        \
        }                                                                                                              \
    }
COMPLEX(f32)
COMPLEX(f64)

#if HAS_AVX2
/* ---- Eight or sixteen halves at once ---- */

TARGET static inline __m256 load_f32(const void *from) {
    return _mm256_loadu_ps(from);
}

TARGET static inline __m256 load_f16(const void *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(from));
}

TARGET static inline void store_f16(void *to, __m256 values) {
    _mm_storeu_si128(to, _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

/* Eight float32 as bfloat16 in the lower half of eight lanes, as f32_to_bf16 does it. */
TARGET static inline __m256i round_to_bf16(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), last));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
    const __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_nan);
    return _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
}

TARGET static inline void store_bf16(void *to, __m256 first, __m256 second) {
    const __m256i mixed = _mm256_packus_epi32(round_to_bf16(first), round_to_bf16(second));
    _mm256_storeu_si256(to, _mm256_permute4x64_epi64(mixed, 0xd8)); /* packed within each half of the register */
}

TARGET static inline __m256 load_bf16(const void *from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
#endif

/* ---- Contributions as partials ---- */

#define WIDEN(FROM, TO, expression)                                                                                    \
    TARGET static void VARIANT(widen_##FROM)(void *out, const void *input, size_t n) {                                 \
        TO##_at *o = out;                                                                                              \
        const FROM##_at *x = input;                                                                                    \
        INDEPENDENT for (size_t i = 0; i < n; i++) {                                                                   \
            const FROM a = x[i];                                                                                       \
            o[i] = (TO)(expression);                                                                                   \
        }                                                                                                              \
    }
WIDEN(i8, i64, a)
WIDEN(u8, i64, a)
WIDEN(i16, i64, a)
WIDEN(u16, i64, a)
WIDEN(i32, i64, a)
WIDEN(u32, i64, a)

#define SPLIT(T)                                                                                                       \
    TARGET static void VARIANT(widen_##T)(void *out, const void *input, size_t n) {                                    \
        i64_at *o = out;                                                                                               \
        const T##_at *x = input;                                                                                       \
        INDEPENDENT for (size_t i = 0; i < n; i++) {                                                                   \
            const T a = x[i];                                                                                          \
            o[2 * i] = (i64)(a >> 32);                                                                                 \
            o[2 * i + 1] = (i64)(a & 0xffffffff);                                                                      \
        }                                                                                                              \
    }
SPLIT(i64)
SPLIT(u64)

TARGET static void VARIANT(widen_bf16)(void *out, const void *input, size_t n) {
    u32_at *o = out;
    const u16_at *x = input;
    INDEPENDENT for (size_t i = 0; i < n; i++) o[i] = (u32)x[i] << 16;
}

TARGET static void VARIANT(widen_f16)(void *out, const void *input, size_t n) {
    u32_at *o = out;
    const u16_at *x = input;
    size_t i = 0;
#if HAS_AVX2
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps((void *)(o + i), load_f16(x + i));
#endif
    INDEPENDENT for (; i < n; i++) o[i] = f16_to_f32(x[i]);
}

/* ---- Partials as results ---- */

#define FINISH(name, FROM, TO, expression)                                                                             \
    TARGET static void VARIANT(name)(void *out, const void *partial, size_t n, double divisor) {                       \
        TO##_at *o = out;                                                                                              \
        const FROM##_at *x = partial;                                                                                  \
        const FROM d = (FROM)divisor;                                                                                  \
        INDEPENDENT for (size_t i = 0; i < n; i++) {                                                                   \
            const FROM a = x[i];                                                                                       \
            o[i] = (TO)(expression);                                                                                   \
        }                                                                                                              \
    }
FINISH(mean_f32, f32, f32, a / d)
FINISH(mean_f64, f64, f64, a / d)
FINISH(mean_i64_to_f32, i64, f32, f64_of(a) / (f64)d)
FINISH(mean_i64_to_f64, i64, f64, f64_of(a) / (f64)d)

TARGET static void VARIANT(mean_split)(void *out, const void *partial, size_t n, double divisor) {
    f64_at *o = out;
    const i64_at *x = partial;
    INDEPENDENT for (size_t i = 0; i < n; i++)
        o[i] = (f64_of(x[2 * i]) * 4294967296.0 + f64_of(x[2 * i + 1])) / divisor;
}

TARGET static void VARIANT(narrow_bf16)(void *out, const void *partial, size_t n, double divisor) {
    u16_at *o = out;
    const u32_at *x = partial;
    size_t i = 0;
    (void)divisor;
#if HAS_AVX2
    for (; i + 16 <= n; i += 16)
        store_bf16(o + i, load_f32(x + i), load_f32(x + i + 8));
#endif
    INDEPENDENT for (; i < n; i++) o[i] = f32_to_bf16(x[i]);
}

TARGET static void VARIANT(narrow_f16)(void *out, const void *partial, size_t n, double divisor) {
    u16_at *o = out;
    const u32_at *x = partial;
    size_t i = 0;
    (void)divisor;
#if HAS_AVX2
    for (; i + 8 <= n; i += 8) store_f16(o + i, load_f32(x + i));
#endif
    INDEPENDENT for (; i < n; i++) o[i] = f32_to_f16(x[i]);
}

#define MEAN_OF_HALVES(T)                                                                                              \
    TARGET static void VARIANT(mean_##T)(void *out, const void *partial, size_t n, double divisor) {                   \
        f32 quotients[256];                                                                                            \
        for (size_t at = 0; at < n; at += 256) {                                                                       \
            const size_t m = n - at < 256 ? n - at : 256;                                                              \
            VARIANT(mean_f32)(quotients, (const f32_at *)partial + at, m, divisor);                                    \
            VARIANT(narrow_##T)((u16_at *)out + at, quotients, m, divisor);                                            \
        }                                                                                                              \
    }
MEAN_OF_HALVES(f16)
MEAN_OF_HALVES(bf16)

/* ---- Two halves from contribution to result ---- */

TARGET static void VARIANT(sum_two_bf16)(void *out, const void *left, const void *right, size_t n) {
    u16_at *o = out;
    const u16_at *x = left, *y = right;
    size_t i = 0;
#if HAS_AVX2
    for (; i + 16 <= n; i += 16)
        store_bf16(o + i, _mm256_add_ps(load_bf16(x + i), load_bf16(y + i)),
                   _mm256_add_ps(load_bf16(x + i + 8), load_bf16(y + i + 8)));
#endif
    INDEPENDENT for (; i < n; i++)
        o[i] = f32_to_bf16(bits_of(value_of((u32)x[i] << 16) + value_of((u32)y[i] << 16)));
}

TARGET static void VARIANT(sum_two_f16)(void *out, const void *left, const void *right, size_t n) {
    u16_at *o = out;
    const u16_at *x = left, *y = right;
    size_t i = 0;
#if HAS_AVX2
    for (; i + 8 <= n; i += 8) store_f16(o + i, _mm256_add_ps(load_f16(x + i), load_f16(y + i)));
#endif
    INDEPENDENT for (; i < n; i++)
        o[i] = f32_to_f16(bits_of(value_of(f16_to_f32(x[i])) + value_of(f16_to_f32(y[i]))));
}

#define INTEGERS(name)                                                                                                 \
    [DT_I8] = VARIANT(name##_i8), [DT_I16] = VARIANT(name##_i16), [DT_I32] = VARIANT(name##_i32),                      \
    [DT_I64] = VARIANT(name##_i64), [DT_U8] = VARIANT(name##_u8), [DT_U16] = VARIANT(name##_u16),                      \
    [DT_U32] = VARIANT(name##_u32), [DT_U64] = VARIANT(name##_u64)
#define UNSIGNED(name)                                                                                                 \
    [DT_I8] = VARIANT(name##_u8), [DT_I16] = VARIANT(name##_u16), [DT_I32] = VARIANT(name##_u32),                      \
    [DT_I64] = VARIANT(name##_u64), [DT_U8] = VARIANT(name##_u8), [DT_U16] = VARIANT(name##_u16),                      \
    [DT_U32] = VARIANT(name##_u32), [DT_U64] = VARIANT(name##_u64)
#define BYTES(name)                                                                                                    \
    [DT_I8] = VARIANT(name##_u8), [DT_I16] = VARIANT(name##_u8), [DT_I32] = VARIANT(name##_u8),                        \
    [DT_I64] = VARIANT(name##_u8), [DT_U8] = VARIANT(name##_u8), [DT_U16] = VARIANT(name##_u8),                        \
    [DT_U32] = VARIANT(name##_u8), [DT_U64] = VARIANT(name##_u8)
#define FLOATS(name)                                                                                                   \
    [DT_F16] = VARIANT(name##_f32), [DT_BF16] = VARIANT(name##_f32), [DT_F32] = VARIANT(name##_f32),                   \
    [DT_F64] = VARIANT(name##_f64)

static const struct kernels VARIANT(kernels) = {
    .pair = {
        [OP_SUM] = {UNSIGNED(sum), FLOATS(sum), [DT_C64] = VARIANT(sum_f32), [DT_C128] = VARIANT(sum_f64)},
        [OP_MEAN] = {[DT_I8] = VARIANT(sum_u64), [DT_I16] = VARIANT(sum_u64), [DT_I32] = VARIANT(sum_u64),
                     [DT_I64] = VARIANT(sum_u64), [DT_U8] = VARIANT(sum_u64), [DT_U16] = VARIANT(sum_u64),
                     [DT_U32] = VARIANT(sum_u64), [DT_U64] = VARIANT(sum_u64), FLOATS(sum),
                     [DT_C64] = VARIANT(sum_f32), [DT_C128] = VARIANT(sum_f64)},
        [OP_MIN] = {INTEGERS(min), FLOATS(min)},
        [OP_MAX] = {INTEGERS(max), FLOATS(max)},
        [OP_PRODUCT] = {UNSIGNED(product), FLOATS(product), [DT_C64] = VARIANT(product_complex_f32),
                        [DT_C128] = VARIANT(product_complex_f64)},
        [OP_BAND] = {BYTES(band)},
        [OP_BOR] = {BYTES(bor)},
        [OP_BXOR] = {BYTES(bxor)},
    },
    .sum_two = {[DT_F16] = VARIANT(sum_two_f16), [DT_BF16] = VARIANT(sum_two_bf16)},
    .widen_half = {[DT_F16] = VARIANT(widen_f16), [DT_BF16] = VARIANT(widen_bf16)},
    .widen_mean = {INTEGERS(widen)},
    .narrow = {[DT_F16] = VARIANT(narrow_f16), [DT_BF16] = VARIANT(narrow_bf16)},
    .mean = {[DT_I8] = VARIANT(mean_i64_to_f32), [DT_I16] = VARIANT(mean_i64_to_f32),
             [DT_U8] = VARIANT(mean_i64_to_f32), [DT_U16] = VARIANT(mean_i64_to_f32),
             [DT_I32] = VARIANT(mean_i64_to_f64), [DT_U32] = VARIANT(mean_i64_to_f64), [DT_I64] = VARIANT(mean_split),
             [DT_U64] = VARIANT(mean_split), [DT_F16] = VARIANT(mean_f16), [DT_BF16] = VARIANT(mean_bf16),
             [DT_F32] = VARIANT(mean_f32), [DT_F64] = VARIANT(mean_f64), [DT_C64] = VARIANT(mean_complex_f32),
             [DT_C128] = VARIANT(mean_complex_f64)},
};

#undef PAIR
#undef EXTREMES
#undef COMPLEX
#undef WIDEN
#undef SPLIT
#undef FINISH
#undef MEAN_OF_HALVES
#undef INTEGERS
#undef UNSIGNED
#undef BYTES
#undef FLOATS
#undef TARGET
#undef VARIANT
#undef HAS_AVX2
