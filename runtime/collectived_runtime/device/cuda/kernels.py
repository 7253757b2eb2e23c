"""The source of the kernels that fold on a GPU, one per fold and number of sources. Pure: a text.

They do what `device.arithmetic` does on the host, in the same order and with the same roundings (but for products and
means of complex numbers), so that a value does not depend on where it was folded. Half precision is converted by the
GPU's own instructions; a compiler for the host, as the tests use it, gets the same by integer arithmetic.
"""

from __future__ import annotations

from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.cuda.driver import FoldSpec

MOST_SOURCES = 256  # of one launch: the addresses of sources and outputs are its arguments, which may take 4 KiB
MOST_OUTPUTS = 128
PACK_BYTES = 16
KERNEL_NAME = "fold"

_STORED = {
    DType.FLOAT16: "unsigned short",
    DType.BFLOAT16: "unsigned short",
    DType.FLOAT32: "float",
    DType.FLOAT64: "double",
    DType.INT8: "signed char",
    DType.INT16: "short",
    DType.INT32: "int",
    DType.INT64: "long long",
    DType.UINT8: "unsigned char",
    DType.UINT16: "unsigned short",
    DType.UINT32: "unsigned int",
    DType.UINT64: "unsigned long long",
    DType.COMPLEX64: "Complex<float>",
    DType.COMPLEX128: "Complex<double>",
}
_SIZES = {
    "unsigned short": 2,
    "float": 4,
    "double": 8,
    "signed char": 1,
    "short": 2,
    "int": 4,
    "long long": 8,
    "unsigned char": 1,
    "unsigned int": 4,
    "unsigned long long": 8,
    "Complex<float>": 8,
    "Complex<double>": 16,
    "Wide": 16,
}
_HALVES = (DType.FLOAT16, DType.BFLOAT16)
_LONG = (DType.INT64, DType.UINT64)
_COMBINE = {
    ReduceOp.SUM: "a + b",
    ReduceOp.MEAN: "a + b",
    ReduceOp.PRODUCT: "a * b",
    ReduceOp.MIN: "least(a, b)",
    ReduceOp.MAX: "most(a, b)",
    ReduceOp.BAND: "a & b",
    ReduceOp.BOR: "a | b",
    ReduceOp.BXOR: "a ^ b",
}

_PRELUDE = """
template <class T> struct Complex { T re, im; };
template <class T> __device__ Complex<T> operator+(Complex<T> a, Complex<T> b) { return {a.re + b.re, a.im + b.im}; }
template <class T> __device__ Complex<T> operator*(Complex<T> a, Complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class T> __device__ Complex<T> operator/(Complex<T> a, T b) { return {a.re / b, a.im / b}; }

// A sum that no number of int64 overflows: the upper and the lower 32 bits, each in 64.
struct Wide { long long upper, lower; };
__device__ Wide operator+(Wide a, Wide b) { return {a.upper + b.upper, a.lower + b.lower}; }

// What is no number stays, as in NumPy.
template <class T> __device__ T least(T a, T b) { return a != a ? a : b != b ? b : b < a ? b : a; }
template <class T> __device__ T most(T a, T b) { return a != a ? a : b != b ? b : a < b ? b : a; }

__device__ unsigned int bits_of(float x) { unsigned int u; memcpy(&u, &x, 4); return u; }
__device__ float float_of(unsigned int u) { float x; memcpy(&x, &u, 4); return x; }

__device__ float from_float16(unsigned short h) {
#ifdef __CUDA_ARCH__
    float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h)); return x;
#else
    unsigned int sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ffu;
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    if (exponent) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    float small = fraction * (1.0f / 16777216.0f);
    return sign ? -small : small;
#endif
}

__device__ unsigned short to_float16(float x) {
#ifdef __CUDA_ARCH__
    unsigned short h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); return h;
#else
    unsigned int u = bits_of(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u) return sign | 0x7e00u | ((rest >> 13) & 0x3ffu);
    if (rest >= 0x477ff000u) return sign | 0x7c00u;
    if (rest < 0x38800000u) {
        float shifted = float_of(rest) + 0.5f;  // the sum's last bit is that of the smallest half: it rounds
        return sign | (bits_of(shifted) - 0x3f000000u);
    }
    return sign | ((rest + 0xfffu + ((rest >> 13) & 1)) - 0x38000000u) >> 13;
#endif
}

__device__ float from_bfloat16(unsigned short h) { return float_of((unsigned int)h << 16); }

__device__ unsigned short to_bfloat16(float x) {
    unsigned int u = bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return u >> 16 | 0x40u;
    return (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
}
"""

# Memory is at its fastest where a thread reads and writes 16 bytes at a time. Rows that do not lie so, and what is left
# of others, are folded element by element. A thread reads a pack of every source before it writes one, so an output
# may be a source.
_KERNEL = """
typedef {stored} Given;
typedef {partial} Partial;
typedef {out} Out;
typedef {source} Source;
typedef unsigned long long Count;
struct alignas(16) SourcePack {{ Source at[{width}]; }};
struct alignas({out_alignment}) OutPack {{ Out at[{width}]; }};
struct Rows {{ const Source *sources[{count}]; Out *outs[{outs}]; }};

__device__ Partial widen(Given given) {{ return {widened}; }}
__device__ Partial combine(Partial a, Partial b) {{ return {combined}; }}
__device__ Out finish(Partial sum, double contributions) {{ return {finished}; }}

extern "C" __global__ void fold(Rows rows, Count length, Count packs, double contributions) {{
    Count step = (Count)gridDim.x * blockDim.x;
    Count begin = (Count)blockIdx.x * blockDim.x + threadIdx.x;
    for (Count i = begin; i < packs; i += step) {{
        Partial sum[{width}];
        SourcePack given = ((const SourcePack *)rows.sources[0])[i];
        for (int k = 0; k < {width}; k++) sum[k] = {take_pack};
#pragma unroll 8
        for (int n = 1; n < {count}; n++) {{
            given = ((const SourcePack *)rows.sources[n])[i];
            for (int k = 0; k < {width}; k++) sum[k] = combine(sum[k], {take_pack});
        }}
        OutPack pack;
        for (int k = 0; k < {width}; k++) pack.at[k] = {pack_result};
#pragma unroll 8
        for (int n = 0; n < {outs}; n++) ((OutPack *)rows.outs[n])[i] = pack;
    }}
    for (Count i = packs * {width} + begin; i < length; i += step) {{
        Partial sum = {take_first};
        for (int n = 1; n < {count}; n++) sum = combine(sum, {take});
        Out result = {last};
        for (int n = 0; n < {outs}; n++) rows.outs[n][i] = result;
    }}
}}
"""


def generate_source(fold: FoldSpec, count: int, outs: int) -> str:
    """Return the kernel that folds `count` sources at a time, and writes the result to `outs` places."""
    stored, partial = _STORED[fold.dtype], _partial(fold)
    out = _STORED[fold.result_dtype] if fold.finish else partial
    width = pack_width(fold)
    take, finish = "widen({})" if fold.widen else "{}", "finish({}, contributions)" if fold.finish else "{}"
    return _PRELUDE + _KERNEL.format(
        stored=stored,
        partial=partial,
        out=out,
        source="Given" if fold.widen else "Partial",
        count=count,
        outs=outs,
        width=width,
        out_alignment=min(16, width * _SIZES[out]),
        widened=_widen_expression(fold),
        combined=_combine_expression(fold),
        finished=_finish_expression(fold) if fold.finish else "sum",
        take_pack=take.format("given.at[k]"),
        take_first=take.format("rows.sources[0][i]"),
        take=take.format("rows.sources[n][i]"),
        pack_result=finish.format("sum[k]"),
        last=finish.format("sum"),
    )


def pack_width(fold: FoldSpec) -> int:
    """Return how many elements of a source a thread reads at a time."""
    return PACK_BYTES // _SIZES[_STORED[fold.dtype] if fold.widen else _partial(fold)]


def _is_split(fold: FoldSpec) -> bool:
    return fold.operation is ReduceOp.MEAN and fold.dtype in _LONG


def _partial(fold: FoldSpec) -> str:
    if fold.dtype in _HALVES:
        return "float"
    if fold.operation is ReduceOp.MEAN and fold.dtype.is_integer:
        return "Wide" if _is_split(fold) else "long long"
    return _STORED[fold.dtype]


def _widen_expression(fold: FoldSpec) -> str:
    if fold.dtype in _HALVES:
        return f"from_{fold.dtype.label}(given)"
    if _is_split(fold):
        return "Wide{(long long)(given >> 32), (long long)(given & 0xffffffffll)}"
    return "given"


def _combine_expression(fold: FoldSpec) -> str:
    # Small integers are added as int and cut to their type again, as NumPy's wrap around.
    return (
        f"(Partial)({_COMBINE[fold.operation]})"
        if fold.dtype.is_integer and not _is_split(fold)
        else _COMBINE[fold.operation]
    )


def _finish_expression(fold: FoldSpec) -> str:
    value = "sum"
    if _is_split(fold):
        value = "((double)sum.upper * 4294967296.0 + (double)sum.lower) / contributions"
    elif fold.operation is ReduceOp.MEAN:
        single = fold.dtype in (*_HALVES, DType.FLOAT32, DType.COMPLEX64)
        divisor = "(float)contributions" if single else "contributions"
        value = f"(double)sum / {divisor}" if fold.dtype.is_integer else f"sum / {divisor}"
    if fold.result_dtype in _HALVES:
        return f"to_{fold.result_dtype.label}({value})"
    return value if fold.dtype.is_complex else f"({_STORED[fold.result_dtype]})({value})"
