/* arithmetic.h: how numbers are combined: one reduce operation on one element type, over spans of memory.
 *
 * A contribution is widened into partials, partials are folded left to right in order of ranks, and the last fold is
 * finished: rounded to the result type, divided by the number of contributions for a mean. Only that last step rounds
 * away from what the type promises:
 *   - float16 and bfloat16 fold in float32;
 *   - a mean of integers is exact until its one division: up to 32 bits fold in int64, 64-bit ones in two int64 per
 *     element (the upper and the lower 32 bits), which cannot overflow below 2**31 contributions; the result is
 *     float32 for 8 and 16 bits, else float64;
 *   - sums and products of integers wrap;
 *   - a minimum or maximum with a NaN is a NaN; of equal values (0.0 and -0.0) the right one is taken;
 *   - a mean of complex numbers is multiplied by 1/n, as NumPy does it.
 * The same bits come out on every processor and from every compiler, NaNs apart, of which only that they are NaNs is
 * promised. Element by element: how a span is cut does not matter.
 */
#ifndef COLLECTIVED_ARITHMETIC_H
#define COLLECTIVED_ARITHMETIC_H

#include <stddef.h>

/* Numbered as on the wire (DataType and ReduceOp of common.proto). */
enum dtype {
    DT_BOOL = 1, DT_I8, DT_I16, DT_I32, DT_I64, DT_U8, DT_U16, DT_U32, DT_U64, DT_F16, DT_BF16, DT_F32, DT_F64, DT_C64,
    DT_C128, DT_COUNT
};
enum op { OP_SUM = 1, OP_MEAN, OP_MIN, OP_MAX, OP_PRODUCT, OP_BAND, OP_BOR, OP_BXOR, OP_COUNT };

/* Bytes of one element; 0: no such type. */
size_t item_size(int dtype);
/* Bytes of one partial or result; 0: the operation is not defined on this type. */
size_t partial_size(int dtype, int op);
size_t result_size(int dtype, int op);

/* Whether contributions are partials as they are. */
int are_partials(int dtype, int op);

/* out = inputs[0] op inputs[1] op ... (n >= 1), `elements` of each. `final`: as the result, a mean divided by `divisor`;
 * else as partials. Spans may lie at any address. `out` may be one of the inputs where both have elements of one size;
 * else they must not overlap. `stream`: the result is written past the caches; call `finish_streaming` (copying.h) before the
 * result is announced to another processor. The operation must be defined on the type. */
void fold_inputs(int dtype, int op, void *out, const void *const *inputs, int n, size_t elements, int final,
                 long divisor, int stream);
/* The same of partials. */
void fold_partials(int dtype, int op, void *out, const void *const *partials, int n, size_t elements, int final,
                   long divisor, int stream);

/* The name of the variant of the loops that this processor runs: "avx2" or "baseline". */
const char *arithmetic_variant(void);
/* Whether that is "avx2"; loops of other files follow it. */
int runs_avx2(void);
/* Chooses the variant by name, for tests; whether this processor has it. */
int choose_arithmetic(const char *name);

#endif
