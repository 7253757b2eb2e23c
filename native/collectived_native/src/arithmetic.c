/* arithmetic.c: see arithmetic.h. Spans are folded block by block, so that partials stay in the first cache. */
#include "arithmetic.h"

#include "copying.h"
#include "float_bits.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { BLOCK = 8192 }; /* bytes of partials on the stack; a multiple of the largest partial */

typedef void (*Pair)(void *out, const void *left, const void *right, size_t n);
typedef void (*Widen)(void *out, const void *input, size_t n);
typedef void (*Finish)(void *out, const void *partial, size_t n, double divisor);

struct kernels {
    Pair pair[OP_COUNT][DT_COUNT], sum_two[DT_COUNT]; /* sum_two: two halves in one go */
    Widen widen_half[DT_COUNT], widen_mean[DT_COUNT];
    Finish narrow[DT_COUNT], mean[DT_COUNT];
};

/* ---- Halves without instructions for them: no branches, and the same bits as F16C, NaNs included ---- */

static inline u32 f16_to_f32(u16 half) {
    const u32 magnitude = (u32)(half & 0x7fff) << 13, sign = (u32)(half & 0x8000) << 16;
    const u32 normal = magnitude + (112u << 23); /* from a bias of 15 to one of 127 */
    const u32 quiet = select(magnitude > 0x0f800000, 0x00400000, 0);
    const u32 special = (magnitude + (224u << 23)) | quiet;
    /* A subnormal is so many 2**-24: put behind the point of 2**-14, which is then taken away. */
    const u32 tiny = bits_of(value_of(magnitude + (113u << 23)) - value_of(113u << 23));
    return sign | select(magnitude >= 0x0f800000, special, select(magnitude < 0x00800000, tiny, normal));
}

static inline u16 f32_to_f16(u32 bits) {
    const u32 sign = bits & 0x80000000, magnitude = bits ^ sign;
    /* Ties to even; may carry to infinity. */
    const u32 normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const u32 tiny = bits_of(value_of(magnitude) + 0.5f) - (126u << 23); /* the sum rounds to a multiple of 2**-24 */
    const u32 special = select(magnitude > 0x7f800000, 0x7e00 | (magnitude >> 13 & 0x3ff), 0x7c00);
    return (u16)(sign >> 16 | select(magnitude >= 143u << 23, special, select(magnitude < 113u << 23, tiny, normal)));
}

/* The same number, exactly up to 2**51, which sums of 32-bit integers do not reach below 2**19 contributions: added to
 * the bits of 1.5 * 2**52 it lands in the mantissa. Only AVX-512 has an instruction that converts vectors of these. */
static inline f64 f64_of(i64 value) {
    const u64 bits = (u64)value + 0x4338000000000000u;
    f64 shifted;
    memcpy(&shifted, &bits, sizeof shifted);
    return shifted - 6755399441055744.0;
}

/* ---- One set of loops for each kind of processor ---- */

#define TARGET
#define VARIANT(name) name##_baseline
#define HAS_AVX2 0
#include "arithmetic_kernels.h"

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,f16c")))
#define VARIANT(name) name##_avx2
#define HAS_AVX2 1
#include "arithmetic_kernels.h"

/* Not __builtin_cpu_supports nor target_clones: they need a runtime and a C library that not every compiler brings. */
static int has_avx2(void) {
    u32 a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (bit_OSXSAVE | bit_F16C)) != (bit_OSXSAVE | bit_F16C)) return 0;
    u32 low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 6) != 6) return 0; /* the system keeps the wide registers of a thread */
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}
#endif

static const struct kernels *chosen;

/* Threads that come here together choose the same. */
static const struct kernels *kernels(void) {
    const struct kernels *found = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (found) return found;
    found = &kernels_baseline;
#if defined(__x86_64__)
    if (has_avx2()) found = &kernels_avx2;
#endif
    __atomic_store_n(&chosen, found, __ATOMIC_RELAXED);
    return found;
}

int runs_avx2(void) {
    return kernels() != &kernels_baseline;
}

const char *arithmetic_variant(void) {
    return runs_avx2() ? "avx2" : "baseline";
}

int choose_arithmetic(const char *name) {
    const struct kernels *wanted = NULL;
    if (!strcmp(name, "baseline")) wanted = &kernels_baseline;
#if defined(__x86_64__)
    if (!strcmp(name, "avx2") && has_avx2()) wanted = &kernels_avx2;
#endif
    if (wanted) __atomic_store_n(&chosen, wanted, __ATOMIC_RELAXED);
    return wanted != NULL;
}

/* ---- Sizes ---- */

static int is_half(int dtype) {
    return dtype == DT_F16 || dtype == DT_BF16;
}

static int is_integer(int dtype) {
    return dtype >= DT_I8 && dtype <= DT_U64;
}

static int is_defined(int dtype, int op) {
    return dtype > 0 && dtype < DT_COUNT && op > 0 && op < OP_COUNT && kernels_baseline.pair[op][dtype];
}

size_t item_size(int dtype) {
    static const u8 sizes[DT_COUNT] = {
        [DT_BOOL] = 1, [DT_I8] = 1, [DT_I16] = 2, [DT_I32] = 4, [DT_I64] = 8, [DT_U8] = 1, [DT_U16] = 2, [DT_U32] = 4,
        [DT_U64] = 8, [DT_F16] = 2, [DT_BF16] = 2, [DT_F32] = 4, [DT_F64] = 8, [DT_C64] = 8, [DT_C128] = 16,
    };
    return dtype > 0 && dtype < DT_COUNT ? sizes[dtype] : 0;
}

size_t partial_size(int dtype, int op) {
    if (!is_defined(dtype, op)) return 0;
    if (is_half(dtype)) return sizeof(f32);
    if (op == OP_MEAN && is_integer(dtype)) return item_size(dtype) == 8 ? 2 * sizeof(i64) : sizeof(i64);
    return item_size(dtype);
}

int are_partials(int dtype, int op) {
    return is_defined(dtype, op) && !is_half(dtype) && !(op == OP_MEAN && is_integer(dtype));
}

size_t result_size(int dtype, int op) {
    if (!is_defined(dtype, op)) return 0;
    if (op == OP_MEAN && is_integer(dtype)) return item_size(dtype) <= 2 ? sizeof(f32) : sizeof(f64);
    return item_size(dtype);
}

/* The steps of a loop for one partial: numbers, or bytes. */
static size_t steps_per_partial(int dtype, int op) {
    if (op >= OP_BAND) return item_size(dtype);
    if (op == OP_MEAN && is_integer(dtype)) return partial_size(dtype, op) / sizeof(i64);
    return dtype >= DT_C64 && op != OP_PRODUCT ? 2 : 1;
}

static void copy(void *to, const void *from, size_t bytes, int stream) {
    if (to == from) return;
    if (stream) copy_streamed(to, from, bytes);
    else copy_bytes(to, from, bytes);
}

/* ---- Folding ---- */

struct fold {
    Pair pair, sum_two; /* sum_two: from two contributions to the result, or NULL */
    Widen widen;   /* NULL: contributions are partials as they are */
    Finish finish; /* NULL: partials are results as they are */
    size_t steps, in_size, partial_size, out_size;
    double divisor;
    int stream;
};

/* One block: out = the result of n spans at `from` bytes. Everything is read before the first byte is written. */
static void fold_block(const struct fold *f, char *out, const void *const *inputs, int n, size_t from,
                       size_t elements) {
    _Alignas(64) char sums[BLOCK], spare[BLOCK];
    const char *left = (const char *)inputs[0] + from;
    char *target = f->finish || f->stream ? sums : out; /* of the last fold */
    if (f->widen) {
        char *first = n == 1 ? target : sums;
        f->widen(first, left, elements);
        left = first;
    }
    for (int i = 1; i < n; i++) {
        const char *right = (const char *)inputs[i] + from;
        if (f->widen) {
            f->widen(spare, right, elements);
            right = spare;
        }
        char *into = i == n - 1 ? target : sums;
        f->pair(into, left, right, elements * f->steps);
        left = into;
    }
    if (f->finish) {
        char *into = f->stream ? spare : out;
        f->finish(into, left, elements, f->divisor);
        left = into;
    }
    if (left != out) copy(out, left, elements * f->out_size, f->stream);
}

static void fold_spans(const struct fold *f, void *out, const void *const *inputs, int n, size_t elements) {
    const int is_copied = n == 1 && !f->widen && !f->finish;
    if (is_copied) {
        copy(out, inputs[0], elements * f->out_size, f->stream);
        return;
    }
    const Pair one_go = n != 2 || f->stream ? NULL : f->sum_two ? f->sum_two : f->widen || f->finish ? NULL : f->pair;
    if (one_go) {
        one_go(out, inputs[0], inputs[1], elements * f->steps);
        return;
    }
    const size_t block = BLOCK / f->partial_size;
    for (size_t at = 0; at < elements; at += block) {
        const size_t m = elements - at < block ? elements - at : block;
        fold_block(f, (char *)out + at * f->out_size, inputs, n, at * f->in_size, m);
    }
}

static struct fold choose_fold(int dtype, int op, int final, long divisor, int stream) {
    const struct kernels *k = kernels();
    struct fold f = {.pair = k->pair[op][dtype], .steps = steps_per_partial(dtype, op), .stream = stream};
    f.divisor = (double)divisor;
    f.partial_size = f.in_size = partial_size(dtype, op);
    f.out_size = final ? result_size(dtype, op) : f.partial_size;
    if (final) f.finish = op == OP_MEAN ? k->mean[dtype] : k->narrow[dtype];
    return f;
}

void fold_inputs(int dtype, int op, void *out, const void *const *inputs, int n, size_t elements, int final,
                 long divisor, int stream) {
    struct fold f = choose_fold(dtype, op, final, divisor, stream);
    const struct kernels *k = kernels();
    f.widen = op == OP_MEAN && is_integer(dtype) ? k->widen_mean[dtype] : k->widen_half[dtype];
    f.sum_two = op == OP_SUM && final ? k->sum_two[dtype] : NULL;
    f.in_size = item_size(dtype);
    fold_spans(&f, out, inputs, n, elements);
}

void fold_partials(int dtype, int op, void *out, const void *const *partials, int n, size_t elements, int final,
                   long divisor, int stream) {
    const struct fold f = choose_fold(dtype, op, final, divisor, stream);
    fold_spans(&f, out, partials, n, elements);
}
