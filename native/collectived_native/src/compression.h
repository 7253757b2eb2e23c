/* compression.h: float32 values as fewer bytes, for the way between hosts.
 *
 * A *block* is BLOCK_VALUES neighbouring values. Its compressed form has block_bytes(format) bytes:
 *   - bfloat16: each value rounded to the nearest one, ties to even;
 *   - int8 and float8 (e4m3 without infinities): a scale, as float32, and one code of a byte per value, which stands for
 *     code * scale. The scale is the largest magnitude of the block divided by the largest code (127; 448), and at
 *     least 2**-126, so that codes are rounded to nearest and never cut off.
 * A block with values that are not finite has a scale with a minus sign. The largest code then stands for infinity, so
 * that finite values reach to the code before (126; 416), and -128, or float8's NaN, for NaN. All of them come back as
 * what they were, and the others as in any block.
 * The same bits come out on every processor and from every compiler, NaNs apart.
 */
#ifndef COLLECTIVED_COMPRESSION_H
#define COLLECTIVED_COMPRESSION_H

#include <stddef.h>

/* Numbered as on the wire (CommunicationOptions.Compression of common.proto). */
enum format { FORMAT_BF16 = 1, FORMAT_F8, FORMAT_I8, FORMAT_COUNT };
enum { BLOCK_VALUES = 128 };

/* Bytes of a compressed block; 0: no such format. */
size_t block_bytes(int format);

/* Memory may lie at any address; `out` overlaps nothing that is read, but may be `mine`. */
void compress_blocks(int format, void *out, const void *values, size_t blocks);
void expand_blocks(int format, void *out, const void *compressed, size_t blocks);
/* out = `mine` + the values of the compressed blocks, in float32. */
void add_expanded_blocks(int format, void *out, const void *mine, const void *compressed, size_t blocks);

#endif
