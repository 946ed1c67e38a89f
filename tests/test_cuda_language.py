"""Everyday CUDA in a kernel file: each snippet gives on the host what CUDA's manual says, and compiles under NVRTC too."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from cupy_convt3d.backends.base import TensorRef, run
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.errors import LaunchError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.problem import Problem
from cupy_convt3d.source import Instance

THREADS = 32
T = np.arange(THREADS)
X = ((T - 8) / 4).astype(np.float32)  # -2, -1.75, ... 5.75
U = T.astype(np.uint32) * np.uint32(0x9E3779B1)  # what `u` is: bits of all kinds
ERF = np.array([math.erf(x) for x in X])
I = U.view(np.int32)  # noqa: E741, what `i` is
DECLARATION = '/* convt3d\npass = "fprop"\n[[launch]]\ngrid = {}\nblock = 32\n*/'
F16, BF16 = np.float16, ml_dtypes.bfloat16


class Snippet(NamedTuple):
    """What one thread of 32 does with `x`, its number `t` and `u` (or `i`, the same bits), storing to `y`; and what `y` is to be."""

    code: str
    expected: Any
    rtol: float = 0.0


def words(function: Callable[[int], int]) -> np.ndarray:
    return np.array([float(np.float32(function(int(u)))) for u in U], np.float32)


def reverse(value: int, bits: int = 32) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2)


def by_bytes(function: Callable[[np.ndarray, np.ndarray], np.ndarray], kind: str) -> np.ndarray:
    """Return the words made of what `function` gives for the small integers in `u` and `u * 3`, modulo their size."""
    a, b = U.view(kind).astype(np.int64), (U * np.uint32(3)).view(kind).astype(np.int64)
    return function(a, b).astype(kind).view(np.uint32)


def low(values: np.ndarray) -> np.ndarray:
    """Return the low 16 bits of each word, as the snippets that end in `& 0xffff` do: a float has them all."""
    return (np.asarray(values).astype(np.uint64) & np.uint64(0xFFFF)).astype(np.float32)


sig = np.int64
wide = U.astype(np.uint64)

LANGUAGE = {
    "noinline": Snippet("struct F { static __device__ __noinline__ float f(float v) { return 2 * v; } }; y = F::f(x);", 2 * X),
    "forceinline": Snippet(
        "struct F { static __device__ __forceinline__ float f(float v) { return v + 1; } }; y = F::f(x);",
        X + 1,
    ),
    "inline": Snippet("struct F { static __device__ __inline__ float f(float v) { return v + 1; } }; y = F::f(x);", X + 1),
    "restrict": Snippet("const float* __restrict__ p = &x; y = *p;", X),
    "constant": Snippet("y = table[t % 4];", np.array([1, 2, 4, 8])[T % 4]),
    "unroll": Snippet("y = 0;\n#pragma unroll\nfor (int k = 0; k < 4; ++k) y += x;", 4 * X),
    "lambda": Snippet("auto f = [&](float v) { return v * x; }; y = f(x);", X * X),
    "printf": Snippet("if (t < 0) printf(\"%d\\n\", t); y = x;", X),
    "assert": Snippet("assert(t < 32); y = x;", X),
    "assume": Snippet("__builtin_assume(t >= 0); y = x;", X),
    "trap": Snippet("if (t < 0) __trap(); y = x;", X),
    "nanosleep": Snippet("__nanosleep(20); y = x;", X),
    "clock": Snippet("const long long a = clock64(); const clock_t b = clock(); y = clock64() >= a && clock() >= b;", 1),
    "fences": Snippet("__threadfence(); __threadfence_block(); __threadfence_system(); y = x;", X),
    "dim3": Snippet("dim3 a(2, 3); uint3 b = threadIdx; dim3 c = b; y = a.x * a.y * a.z + c.x;", 6 + T),
    "float4": Snippet("float4 v = make_float4(x, 1, 2, 3); y = v.x + v.y + v.z + v.w;", X + 6),
    "double3": Snippet("double3 v = make_double3(x, 1, 2); y = v.x * v.y * v.z;", 2 * X),
    "uchar4": Snippet("uchar4 v = make_uchar4(t, 1, 2, 255); y = v.x + v.w;", T + 255),
    "char3": Snippet("char3 v = make_char3(-1, 2, 3); y = v.x + t;", T - 1),
    "short4": Snippet("short4 v = make_short4(t, -2, 3, 4); y = v.x + v.y; y += sizeof(v) + alignof(short4);", T - 2 + 16),
    "uint2": Snippet("uint2 v = make_uint2(t, 1); y = v.x + v.y + sizeof(v);", T + 9),
    "int1": Snippet("int1 v = make_int1(t); y = v.x;", T),
    "longlong2": Snippet("longlong2 v = make_longlong2(t, 5); y = v.x + v.y + alignof(longlong2);", T + 21),
    "ulonglong3": Snippet("ulonglong3 v = make_ulonglong3(t, 5, 1); y = v.x + v.y + sizeof(v);", T + 29),
    "ulong1": Snippet("ulong1 v = make_ulong1(t); y = v.x;", T),
    "vector_load": Snippet(
        "__align__(16) float a[4] = {x, 1, 2, 3}; float4 v = *reinterpret_cast<float4*>(a); y = v.x + v.w;",
        X + 3,
    ),
    "isnan": Snippet("y = isnan(x) + 2 * isnan(0.0f / (x - x)) + 4 * isnan(0.0 / (x - x));", 6),
    "isinf": Snippet("y = isinf(1.0f / (x - x)) + 2 * isinf(x) + 4 * isfinite(x);", 5),
    "signbit": Snippet("y = signbit(x) ? 1 : 0;", X < 0),
    "min_max": Snippet("y = min(t, 5) + max(2.0f, x) + min(3u, 4u) + max(1ll, 2ll);", np.minimum(T, 5) + np.maximum(2, X) + 5),
    "abs": Snippet("y = abs(x) + abs(-2) + fabs(x) + fabsf(-1.0f);", 2 * np.abs(X) + 3),
    "float_overloads": Snippet("y = sizeof(sqrt(x)) + sizeof(exp(x)) + sizeof(floor(x)) + sizeof(abs(x));", 16),
    "memcpy": Snippet("float a = x, b; memcpy(&b, &a, 4); unsigned c; memset(&c, 0, 4); y = b + c;", X),
}

FLOATS = {
    "logf": Snippet(
        "y = __logf(x + 3) + __log2f(x + 3) + __log10f(x + 3);",
        np.log(X + 3) + np.log2(X + 3) + np.log10(X + 3),
        1e-5,
    ),
    "expf": Snippet("y = __expf(x) + __exp10f(x);", np.exp(X) + 10**X, 1e-5),
    "powf": Snippet("y = __powf(x + 3, 1.5f);", (X + 3) ** 1.5, 1e-5),
    "powf_negative": Snippet("y = isnan(__powf(-2.0f, 2.0f));", 1),
    "sinf": Snippet("y = __sinf(x) + 2 * __cosf(x) + __tanf(x / 8);", np.sin(X) + 2 * np.cos(X) + np.tan(X / 8), 1e-4),
    "sincosf": Snippet(
        "float s, c; __sincosf(x, &s, &c); y = s + 2 * c; sincosf(x, &s, &c); y += s;",
        2 * np.sin(X) + 2 * np.cos(X),
        1e-4,
    ),
    "fdividef": Snippet("y = __fdividef(x, 4.0f);", X / 4),
    "fdividef_large": Snippet("y = __fdividef(x, 1.5e38f);", 0),
    "saturatef": Snippet("y = __saturatef(x);", np.clip(X, 0, 1)),
    "saturatef_nan": Snippet("y = __saturatef(0.0f / (x - x));", 0),
    "frcp": Snippet(
        "y = __frcp_rn(x + 3) + __fsqrt_rn(x + 3) + __fdiv_rn(x, 3.0f);",
        1 / (X + 3) + np.sqrt(X + 3) + X / 3,
        1e-6,
    ),
    "frsqrt": Snippet("y = __frsqrt_rn(x + 3) * rsqrtf(x + 3) * (x + 3);", 1, 1e-6),
    "fadd_rn": Snippet("y = __fadd_rn(x, 1.0f) + __fsub_rn(x, 2.0f) * __fmul_rn(x, 3.0f);", X + 1 + (X - 2) * (X * 3)),
    "add_ru": Snippet(
        "y = (__fadd_ru(1.0f, 1e-10f) > 1) + 2 * (__fadd_rd(1.0f, 1e-10f) > 1) + 4 * (__fadd_rz(-1.0f, "
        "1e-10f) > -1);",
        5,
    ),
    "mul_rd": Snippet(
        "y = __fmul_rd(0.1f, 0.1f) < __fmul_ru(0.1f, 0.1f) && __fdiv_rd(x + 3, 7.0f) <= __fdiv_ru(x + 3, "
        "7.0f);",
        1,
    ),
    "sqrt_rz": Snippet("y = __fsqrt_rd(2.0f) < __fsqrt_ru(2.0f) && __fsqrt_rz(2.0f) == __fsqrt_rd(2.0f);", 1),
    "double_rounding": Snippet(
        "y = __dadd_rn(x, 1) + __dmul_ru(x, 2) + __dsub_rz(x, 1) + __ddiv_rd(x, "
        "2) + __dsqrt_rn(4) + __drcp_rn(2);",
        X + 1 + 2 * X + X - 1 + X / 2 + 2.5,
    ),
    "double_directed": Snippet("y = __ddiv_rd(1, 3) < __ddiv_ru(1, 3);", 1),
    "fma": Snippet("y = __fmaf_rn(x, 2, 1) + fmaf(x, 2, 1) + fma(x, 2.0f, 1.0f) + __fma_rn(x, 2, 1);", 4 * (2 * X + 1)),
    "fma_directed": Snippet("y = __fmaf_rd(0.1f, 0.1f, 1.0f) < __fmaf_ru(0.1f, 0.1f, 1.0f);", 1),
    "float2int": Snippet(
        "y = __float2int_rn(x) + 100 * __float2int_rz(x) + 10000 * (__float2int_ru(x) - __float2int_rd(x));",
        np.rint(X) + 100 * np.trunc(X) + 10000 * (np.ceil(X) - np.floor(X)),
    ),
    "float2int_ends": Snippet(
        ""
        "y = (__float2int_rz(3e9f) == 2147483647) + 2 * (__float2uint_rz(-1.0f) == 0) + 4 * (__float2int_rn(0 / (x - x)) == 0);",
        7,
    ),
    "float2ll": Snippet(
        "y = __float2ll_rn(x * 4) + (int)__float2ull_rd(x + 3) + (int)__float2uint_ru(x + 3);",
        4 * X + np.floor(X + 3) + np.ceil(X + 3),
    ),
    "double2int": Snippet(
        "y = __double2int_rn(x) + __double2ll_rd(x) + __double2uint_rz(x + 3);",
        np.rint(X) + np.floor(X) + np.trunc(X + 3),
    ),
    "int2float": Snippet(
        ""
        "y = __int2float_rn(t) + __uint2float_rz(t) + __ll2float_rn(t) + __ull2float_rd(t) + __int2double_rn(t);",
        5 * T,
    ),
    "int2float_directed": Snippet("y = __int2float_rd(16777217) - 16777216.0f + (__int2float_ru(16777217) - 16777216.0f);", 2),
    "double2float": Snippet("y = __double2float_rn(x) + (__double2float_ru(0.1) > __double2float_rd(0.1));", X + 1),
    "float_as_int": Snippet("y = __int_as_float(__float_as_int(x)) + __uint_as_float(__float_as_uint(x));", 2 * X),
    "double_bits": Snippet(
        "y = __longlong_as_double(__double_as_longlong(x)) + __hiloint2double(__double2hiint(x), "
        "__double2loint(x));",
        2 * X,
    ),
    "rsqrt": Snippet("y = rsqrt(4.0) + rsqrt(4.0f) + rsqrtf(4.0f) + rcbrtf(8.0f) + rcbrt(8.0) + cbrtf(8.0f);", 4.5, 1e-6),
    "everyday": Snippet(
        "y = fminf(x, 1) + fmaxf(x, "
        "1) + sqrtf(x + 3) + expf(x) + erff(x) + tanhf(x) + log1pf(x + 3) + expm1f(x);",
        X + 1 + np.sqrt(X + 3) + np.exp(X) + ERF + np.tanh(X) + np.log1p(X + 3) + np.expm1(X),
        1e-5,
    ),
    "everyday_double": Snippet(
        "double d = x; y = exp(d) + log(d + 3) + sqrt(d + 3) + pow(d, 2.0) + fmin(d, 1.0) + fmax(d, 1.0);",
        np.exp(X) + np.log(X + 3) + np.sqrt(X + 3) + X**2 + X + 1,
        1e-6,
    ),
    "norm3df": Snippet(
        "y = norm3df(1, 2, 2) + rnorm3df(1, 2, 2) * 3 + norm4df(1, 1, 1, 1) + hypotf(3, 4) + rhypotf(3, "
        "4) * 5;",
        12,
        1e-6,
    ),
    "normf": Snippet("const float v[4] = {1, 1, 1, 1}; y = normf(4, v) + rnormf(4, v);", 2.5, 1e-6),
    "sinpif": Snippet(
        "y = sinpif(x) + 2 * cospif(x);",
        np.sin(np.pi * X.astype(float)) + 2 * np.cos(np.pi * X.astype(float)),
        1e-6,
    ),
    "sinpif_whole": Snippet("float s, c; sincospif(3.0f, &s, &c); y = s + c;", -1),
    "exp10f": Snippet(
        "y = exp10f(x) + exp2f(x) + log2f(x + 3) + log10f(x + 3);",
        10**X + 2**X + np.log2(X + 3) + np.log10(X + 3),
        1e-5,
    ),
    "erfinvf": Snippet(
        "y = erff(erfinvf(x / 8)) + erfcf(erfcinvf(0.25f)) + normcdff(normcdfinvf(0.125f));",
        X / 8 + 0.375,
        1e-5,
    ),
    "erfcxf": Snippet("y = erfcxf(0.0f) + 10 * erfcxf(30.0f);", 1.18795888861417, 1e-6),
    "rounding": Snippet(
        "y = floorf(x) + ceilf(x) + truncf(x) + roundf(x) + rintf(x) + nearbyintf(x);",
        np.floor(X) + np.ceil(X) + np.trunc(X) + np.sign(X) * np.floor(np.abs(X) + 0.5) + 2 * np.rint(X),
    ),
    "fmodf": Snippet(
        "y = fmodf(x, 0.5f) + remainderf(x, 0.5f) + copysignf(1, x) + ldexpf(x, 2) + fdimf(x, 1);",
        np.fmod(X, 0.5) + (X - 0.5 * np.rint(X / 0.5)) + np.copysign(1, X) + 4 * X + np.maximum(X - 1, 0),
    ),
    "cache_hints": Snippet(
        "float v = 0; __stcs(&v, x); y = __ldcs(&v); __stwt(&v, x); __stcg(&v, x); __stwb(&v, x); "
        "y += __ldg(&v) + __ldcg(&v) + __ldca(&v);",
        4 * X,
    ),
}

INTEGERS = {
    "popc": Snippet(
        "y = __popc(u) + 100 * __popcll((unsigned long long)u << 8 | 1);",
        words(lambda u: u.bit_count() + 100 * (u.bit_count() + 1)),
    ),
    "clz": Snippet("y = __clz(u) + 100 * __clzll(u);", words(lambda u: 32 - u.bit_length() + 100 * (64 - u.bit_length()))),
    "ffs": Snippet("y = __ffs(u) + 100 * __ffsll(u);", words(lambda u: 101 * ((u & -u).bit_length()))),
    "brev": Snippet(
        "y = (__brev(u) & 0xffff) + (__brevll(u) >> 48);",
        words(lambda u: (reverse(u) & 0xFFFF) + (reverse(u, 64) >> 48)),
    ),
    "mulhi": Snippet("y = __mulhi(i, 12345) & 0xffff;", low((I.astype(sig) * 12345 >> 32) & 0xFFFF)),
    "umulhi": Snippet("y = __umulhi(u, 123456789u) & 0xffff;", low(wide * 123456789 >> 32)),
    "mul64hi": Snippet("y = (__mul64hi(-(long long)u, 1ll << 40) & 0xffff);", words(lambda u: (-u << 40 >> 64) & 0xFFFF)),
    "umul64hi": Snippet(
        "y = __umul64hi((unsigned long long)u << 32, 1ull << 20) & 0xffff;",
        words(lambda u: (u << 52 >> 64) & 0xFFFF),
    ),
    "mul24": Snippet(
        "y = (__mul24(t - 5, -7) & 0xffff) + (__umul24(u, 3) & 0xffff);",
        low((T - 5) * -7 & 0xFFFF) + low((wide & 0xFFFFFF) * 3),
    ),
    "sad": Snippet("y = __sad(t, 10, 1u) + __usad(t, 20, 2u);", np.abs(T - 10) + np.abs(T - 20) + 3),
    "hadd_int": Snippet(
        "y = __hadd(t, -8) + __rhadd(t, -8) + (int)(__uhadd(t, 3u) + __urhadd(t, 3u));",
        (T - 8 >> 1) + (T - 7 >> 1) + (T + 3 >> 1) + (T + 4 >> 1),
    ),
    "funnelshift": Snippet(
        "y = (__funnelshift_l(u, 7u, t) & 0xffff) + (__funnelshift_r(u, 7u, t) & 0xffff);",
        [((both << t >> 32) & 0xFFFF) + (both >> t & 0xFFFF) for t, both in ((int(t), 7 << 32 | int(U[t])) for t in T)],
    ),
    "funnelshift_clamped": Snippet(
        "y = (__funnelshift_lc(u, 7u, 40) & 0xffff) + (__funnelshift_rc(u, 7u, 40) & 0xffff);",
        low(U) + 7,
    ),
    "byte_perm": Snippet("y = __byte_perm(u, 0x11223344u, 0x7610) & 0xffff;", low(U)),
    "byte_perm_digits": Snippet("y = __byte_perm(0x80u, 0x7fu, 0xc8cc) & 0xffff00;", 0x807F00),
    "fns": Snippet(
        "y = __fns(0xf0u, 0, 2) + __fns(0xf0u, 7, -2) + __fns(0xf0u, 5, 0) + (__fns(1u, 0, 3) == ~0u);",
        5 + 6 + 5 + 1,
    ),
    "dp4a": Snippet(
        "y = (__dp4a((int)0xff02fe03, 0x01020304, t) - t) + __dp4a(0x01020304u, 0xff000001u, 5u);",
        (-1 + 4 - 6 + 12) + 255 + 4 + 5,
    ),
    "dp2a": Snippet(
        "y = __dp2a_lo(0x00020003, 0x04030201, 1) + __dp2a_hi(0x00020003, 0x04030201, 1);",
        (3 + 4 + 1) + (9 + 8 + 1),
    ),
    "vadd4": Snippet("y = __vadd4(u, u * 3) & 0xffff;", low(by_bytes(lambda a, b: a + b, "u1"))),
    "vsub2": Snippet("y = __vsub2(u, u * 3) & 0xffff;", low(by_bytes(lambda a, b: a - b, "u2"))),
    "vaddss2": Snippet("y = __vaddss2(u, u * 3) & 0xffff;", low(by_bytes(lambda a, b: np.clip(a + b, -32768, 32767), "i2"))),
    "vaddus4": Snippet("y = __vaddus4(u, u * 3) & 0xffff;", low(by_bytes(lambda a, b: np.clip(a + b, 0, 255), "u1"))),
    "vsubus4": Snippet("y = __vsubus4(u, u * 3) & 0xffff;", low(by_bytes(lambda a, b: np.clip(a - b, 0, 255), "u1"))),
    "vmaxs4": Snippet(
        "y = (__vmaxs4(u, u * 3) & 0xffff) + (__vminu4(u, u * 3) & 0xffff);",
        low(by_bytes(np.maximum, "i1")) + low(by_bytes(np.minimum, "u1")),
    ),
    "vavgu4": Snippet("y = __vavgu4(u, u * 3) & 0xffff;", low(by_bytes(lambda a, b: (a + b + 1) // 2, "u1"))),
    "vabsdiffu4": Snippet("y = __vabsdiffu4(u, u * 3) & 0xffff;", low(by_bytes(lambda a, b: abs(a - b), "u1"))),
    "vsadu4": Snippet(
        "y = __vsadu4(u, u * 3);",
        np.abs(U.view("u1").astype(int) - (U * np.uint32(3)).view("u1").astype(int)).reshape(-1, 4).sum(1),
    ),
    "vcmpgts4": Snippet(
        "y = (__vcmpgts4(u, u * 3) & 0xffff) + (__vsetgts4(u, u * 3) & 0xffff);",
        low(by_bytes(lambda a, b: -(a > b).astype(int), "i1")) + low(by_bytes(lambda a, b: (a > b).astype(int), "i1")),
    ),
    "stdint": Snippet("uint8_t a = 300; int64_t b = -1; uint32_t c = UINT32_MAX; y = a + b + (c == 4294967295u);", 44),
}

WARPS = {
    "shfl": Snippet("y = __shfl_sync(~0u, x, 3) + __shfl_sync(~0u, t, t + 1, 8);", X[3] + (T & ~7) + (T + 1) % 8),
    "shfl_down_sum": Snippet(
        "y = x; for (int d = 16; d; d /= 2) y += __shfl_down_sync(~0u, y, d); y = __shfl_sync(~0u, y, 0);",
        X.sum(),
    ),
    "shfl_types": Snippet(
        "long long a = __shfl_xor_sync(~0u, (long long)t << 40, 1); double b = __shfl_up_sync(~0u, "
        "(double)t, 1); y = (a >> 40) + b;",
        (T ^ 1) + np.maximum(T - 1, 0),
    ),
    "shfl_small": Snippet(
        "unsigned char a = t; short b = -t; bool c = t & 1; y = __shfl_xor_sync(~0u, a, "
        "1) + __shfl_xor_sync(~0u, b, 2) + __shfl_xor_sync(~0u, c, 1);",
        (T ^ 1) - (T ^ 2) + ((T ^ 1) & 1),
    ),
    "activemask": Snippet(
        "y = 0; if (t < 8) { const unsigned m = __activemask(); y = __popc(m) + __shfl_sync(m, t, 7); }",
        np.where(T < 8, 15, 0),
    ),
    "activemask_all": Snippet("y = __activemask() == ~0u;", 1),
    "activemask_sum": Snippet(
        "y = 0; if (t % 2) { unsigned m = __activemask(); y = __reduce_add_sync(m, t); }",
        np.where(T % 2, 256, 0),
    ),
    "match_any": Snippet(
        "y = __popc(__match_any_sync(~0u, t / 4)) + __ffs(__match_any_sync(~0u, x >= 0));",
        4 + np.where(X >= 0, 9, 1),
    ),
    "match_all": Snippet(
        "int p, q; unsigned a = __match_all_sync(~0u, 7, &p), b = __match_all_sync(~0u, t, &q); "
        "y = (a == ~0u) + p + b + q;",
        2,
    ),
    "reduce": Snippet(
        "y = __reduce_add_sync(~0u, t) + __reduce_max_sync(~0u, t) - __reduce_min_sync(~0u, t - 3);",
        496 + 31 + 3,
    ),
    "reduce_bits": Snippet(
        "y = __reduce_or_sync(~0u, 1u << (t % 8)) + __reduce_and_sync(~0u, t | 64u) + __reduce_xor_sync(~0u, "
        "t == 3 ? 5u : 0u);",
        255 + 64 + 5,
    ),
    "votes": Snippet(
        "y = __ballot_sync(~0u, t == 2) + __any_sync(~0u, t == 9) + 2 * __all_sync(~0u, t < 32); "
        "__syncwarp();",
        7,
    ),
    "lane": Snippet("y = threadIdx.x % warpSize;", T),
    "syncthreads_count": Snippet(
        ""
        "y = __syncthreads_count(t % 4 == 0) + __syncthreads_and(t < 32) + 10 * __syncthreads_or(t == 3) + 100 * __syncthreads_and(t);",
        19,
    ),
    "syncthreads_rounds": Snippet("y = 0; for (int k = 0; k < 6; ++k) y += __syncthreads_count(t < k);", 15),
    "atomic_integers": Snippet(
        "__shared__ int s[8]; __shared__ unsigned w[2]; if (t == 0) { for (int k = 0; k < 8; ++k) s[k] = 0; "
        "s[3] = -1; w[0] = w[1] = 0; } __syncthreads();atomicSub(&s[0], 1); atomicMax(&s[1], t); "
        "atomicMin(&s[2], -t); atomicAnd(&s[3], ~(1 << (t % 4))); atomicOr(&s[4], "
        "1 << (t % 4));atomicXor(&s[5], t); atomicInc(&w[0], 9u); atomicDec(&w[1], 9u); "
        "atomicAdd_block(&s[6], 1); atomicAdd_system(&s[7], 2); "
        "__syncthreads();y = s[0] + s[1] + s[2] + (s[3] & 15) + s[4] + s[5] + w[0] + w[1] + s[6] + s[7];",
        -32 + 31 - 31 + 0 + 15 + 0 + 2 + 8 + 32 + 64,
    ),
    "atomic_wide": Snippet(
        "__shared__ long long s[2]; __shared__ unsigned long long v[2]; "
        "if (t == 0) s[0] = s[1] = v[0] = v[1] = 0; __syncthreads();atomicMax(&s[0], (long long)t << 33); "
        "atomicMin(&s[1], -((long long)t << 33)); atomicAdd(&v[0], 1ull << 33); atomicOr(&v[1], "
        "1ull << (t + 32)); __syncthreads();y = (s[0] >> 33) + (s[1] >> 33) + (v[0] >> 33) + __popcll(v[1]);",
        64,
    ),
    "atomic_floats": Snippet(
        "__shared__ float s; __shared__ double d; if (t == 0) s = 0, d = 0; __syncthreads(); atomicAdd(&s, "
        "x); atomicAdd(&d, 1.0); atomicAdd_block(&s, 1.0f); __syncthreads(); y = s + d;",
        X.sum() + 64,
    ),
    "atomic_float2": Snippet(
        "__shared__ float2 s; if (t == 0) s = make_float2(0, 0); __syncthreads(); atomicAdd(&s, make_float2(1, x)); __syncthreads(); "
        "y = s.x + s.y;",
        32 + X.sum(),
    ),
    "atomic_exchange": Snippet(
        "__shared__ int lock; __shared__ float f; if (t == 0) lock = 0, f = 7; __syncthreads(); "
        "int won = atomicCAS(&lock, 0, t + 1) == 0;__syncthreads(); "
        "y = __syncthreads_count(won) + (t == 0 ? atomicExch(&f, 1.0f) : 7);",
        8,
    ),
}

HALVES = {
    "conversion": Snippet(
        "y = __half2float(__float2half(x / 3)) + __half2float(__float2half_rn(x));",
        (X / 3).astype(F16).astype(np.float32) + X,
    ),
    "implicit": Snippet("half h = x / 3; float f = h; y = f;", (X / 3).astype(F16)),
    "operators": Snippet(
        "half a = __float2half(x / 3), b = __float2half(0.7f); half c = a * b + a - a / b; c += a; c -= b; "
        "y = c;",
        (lambda a, b: a * b + a - a / b + a - b)((X / 3).astype(F16), F16(0.7)),
    ),
    "comparison": Snippet(
        "half a = __float2half(x); y = (a > __float2half(1)) + 2 * (a == __float2half(2)) + 4 * __hlt(a, "
        "__float2half(0)) + 8 * __hge(a, a);",
        (X > 1) + 2 * (X == 2) + 4 * (X < 0) + 8,
    ),
    "hadd": Snippet(
        "half a = __float2half(x / 3); y = __half2float(__hmul(__hadd(a, __float2half(1)), __hsub(a, "
        "__hneg(a))));",
        (lambda a: (a + F16(1)) * (a - -a))((X / 3).astype(F16)),
    ),
    "hfma": Snippet(
        "half a = __float2half(x / 3); y = __hfma(a, a, __float2half(1e-3f));",
        ((X / 3).astype(F16).astype(np.float64) ** 2 + float(F16(1e-3))).astype(F16),
    ),
    "hfma_once": Snippet(
        "y = __hfma(__ushort_as_half(0x3c01), __ushort_as_half(0x3c01), "
        "__ushort_as_half(0x0001)) > __hmul(__ushort_as_half(0x3c01), __ushort_as_half(0x3c01));",
        0,
    ),
    "hmax": Snippet(
        "half a = __float2half(x); y = __hmax(a, __float2half(1)) + __hmin(a, __float2half(1)) + __habs(a);",
        X + 1 + np.abs(X),
    ),
    "hexp": Snippet(
        "half a = __float2half(x); "
        "y = __half2float(hexp(a)) + __half2float(hsqrt(__habs(a))) + __half2float(hlog(__habs(a) + __float2half(1)));",
        np.exp(X).astype(F16).astype(float) + np.sqrt(np.abs(X)).astype(F16) + np.log(np.abs(X) + 1).astype(F16),
        2e-3,
    ),
    "hrcp": Snippet(
        "half a = __float2half(x + 3); y = __half2float(hrcp(a)) + __half2float(hrsqrt(a));",
        1 / (X + 3) + 1 / np.sqrt(X + 3),
        2e-3,
    ),
    "nan": Snippet(
        "half a = __float2half(0.0f / (x - x)); y = __hisnan(a) + 2 * __heq(a, a) + 4 * __hneu(a, "
        "a) + 8 * __hisinf(__float2half(1e6f));",
        13,
    ),
    "subnormal": Snippet(
        "y = __half2float(__float2half(x * 1e-6f)) * 1e6f;",
        (X * np.float32(1e-6)).astype(F16).astype(np.float32) * np.float32(1e6),
    ),
    "directed": Snippet(
        "y = __float2half_ru(0.1f) > __float2half_rd(0.1f) && __half2float(__float2half_rz(1e6f)) == 65504;",
        1,
    ),
    "integers": Snippet(
        ""
        "y = __half2int_rn(__float2half(x)) + __half2float(__int2half_rn(t)) + __half2int_rz(__float2half(x)) + (int)__float2half(x);",
        np.rint(X) + T + 2 * np.trunc(X),
    ),
    "bits": Snippet(
        ""
        "y = __half_as_ushort(__float2half(x)) - __half_as_short(__ushort_as_half(3)) + __half2float(__short_as_half(0x3c00));",
        X.astype(F16).view(np.uint16).astype(np.float32) - 2,
    ),
    "half2": Snippet(
        "half2 a = __floats2half2_rn(x, 1), b = __float2half2_rn(2); half2 c = __hfma2(a, b, b); "
        "float2 f = __half22float2(__hadd2(c, a)); y = f.x + f.y;",
        (2 * X + 2 + X) + 5,
    ),
    "half2_operators": Snippet(
        "half2 a = make_half2(__float2half(x), __float2half(2)); half2 c = a * a + a - a; "
        "y = __low2float(c) + __high2float(c);",
        X * X + 4,
    ),
    "half2_parts": Snippet(
        "half2 a = __halves2half2(__float2half(x), __float2half(2)); half2 b = __lowhigh2highlow(a); "
        "y = __half2float(__low2half(b)) + __half2float(__high2half(b)) * 10 + __half2float(a.y);",
        4 + 10 * X,
    ),
    "half2_broadcast": Snippet(
        "half2 a = __half2half2(__float2half(x)); half2 b = __low2half2(a); half2 c = __highs2half2(a, b); "
        "y = __low2float(c) + __high2float(b);",
        2 * X,
    ),
    "half2_float2": Snippet(
        "half2 a = __float22half2_rn(make_float2(x, 3)); y = __low2float(__hmul2(a, "
        "a)) + __high2float(__hsub2(a, a)) + __high2float(__hneg2(a));",
        X * X - 3,
    ),
    "half2_compare": Snippet(
        "half2 a = __floats2half2_rn(x, 1), b = __float2half2_rn(1); y = __low2float(__hgt2(a, "
        "b)) + 2 * __hbeq2(a, b) + 4 * (__heq2_mask(a, b) >> 31);",
        (X > 1) + 2 * (X == 1) + 4,
    ),
    "half2_max": Snippet(
        "half2 a = __floats2half2_rn(x, 1), b = __float2half2_rn(1); y = __low2float(__hmax2(a, "
        "b)) + __high2float(__hmin2(a, b));",
        np.maximum(X, 1) + 1,
    ),
    "half2_math": Snippet(
        "half2 a = __floats2half2_rn(x, 1); half2 b = h2exp(a); y = __low2float(b);",
        np.exp(X).astype(F16),
        2e-3,
    ),
    "half2_load": Snippet(
        "__align__(4) half a[2] = {__float2half(x), __float2half(2)}; "
        "half2 v = *reinterpret_cast<half2*>(a); y = __low2float(v) + __high2float(v);",
        X + 2,
    ),
    "shuffle": Snippet(
        "half h = __float2half(x); y = __half2float(__shfl_xor_sync(~0u, h, "
        "1)) + __low2float(__shfl_xor_sync(~0u, __half2half2(h), 2));",
        X[T ^ 1] + X[T ^ 2],
    ),
    "atomic": Snippet(
        "__shared__ half2 s; if (t == 0) s = __float2half2_rn(0); __syncthreads(); atomicAdd(&s, "
        "__floats2half2_rn(1, 2)); __syncthreads(); y = __low2float(s) + __high2float(s);",
        96,
    ),
    "atomic_half": Snippet(
        "__shared__ half s[2]; if (t == 0) s[0] = 0; __syncthreads(); atomicAdd(&s[0], __float2half(1)); "
        "__syncthreads(); y = s[0];",
        32,
    ),
    "shared": Snippet("__shared__ half s[32]; s[t] = __float2half(x); __syncthreads(); y = __half2float(s[31 - t]);", X[::-1]),
    "ldg": Snippet("half h = __float2half(x); y = __half2float(__ldg(&h));", X),
    "saturated": Snippet(
        "half a = __float2half(x); y = __hadd_sat(a, a) + __hfma_relu(a, a, __float2half(-4));",
        np.clip(2 * X, 0, 1) + np.maximum(X * X - 4, 0),
    ),
}

BRAINS = {
    "conversion": Snippet(
        "y = __bfloat162float(__float2bfloat16(x / 3)) + __bfloat162float(__float2bfloat16_rn(x));",
        (X / 3).astype(BF16).astype(np.float32) + X,
    ),
    "operators": Snippet(
        "__nv_bfloat16 a = __float2bfloat16(x / 3), b = __float2bfloat16(0.7f); a = a * b + a; a -= b; y = a;",
        (lambda a, b: a * b + a - b)((X / 3).astype(BF16), BF16(0.7)),
    ),
    "hfma": Snippet(
        "__nv_bfloat16 a = __float2bfloat16(x / 3); y = __bfloat162float(__hfma(a, a, __hadd(a, a)));",
        (lambda a: (a.astype(float) ** 2 + (a + a).astype(float)).astype(BF16))((X / 3).astype(BF16)),
    ),
    "pairs": Snippet(
        "__nv_bfloat162 a = __floats2bfloat162_rn(x, 1); float2 f = __bfloat1622float2(__hfma2(a, a, a)); "
        "y = f.x + f.y;",
        (X * X + X).astype(BF16).astype(float) + 2,
    ),
    "parts": Snippet(
        "__nv_bfloat162 a = __halves2bfloat162(__float2bfloat16(x), __float2bfloat16(2)); "
        "y = __low2float(a) + __bfloat162float(__high2bfloat16(a)) + __high2float(__bfloat162bfloat162(a.x));",
        2 * X + 2,
    ),
    "comparison": Snippet(
        "__nv_bfloat16 a = __float2bfloat16(x); y = (a > __float2bfloat16(1)) + 2 * __hlt(a, "
        "__float2bfloat16(0)) + 4 * __hisnan(a);",
        (X > 1) + 2 * (X < 0),
    ),
    "max": Snippet(
        "__nv_bfloat16 a = __float2bfloat16(x), b = __float2bfloat16(1); y = __bfloat162float(__hmax(a, "
        "b)) + __bfloat162float(__habs(a));",
        np.maximum(X, 1) + np.abs(X),
    ),
    "integers": Snippet("y = __bfloat162int_rn(__float2bfloat16(x)) + __bfloat162float(__int2bfloat16_rn(t));", np.rint(X) + T),
    "bits": Snippet(
        "y = __bfloat16_as_ushort(__float2bfloat16(x)) + __bfloat162float(__ushort_as_bfloat16(0x3f80));",
        X.astype(BF16).view(np.uint16).astype(np.float32) + 1,
    ),
    "math": Snippet("__nv_bfloat16 a = __float2bfloat16(x); y = __bfloat162float(hexp(a));", np.exp(X).astype(BF16), 1e-2),
    "shuffle": Snippet("y = __bfloat162float(__shfl_xor_sync(~0u, __float2bfloat16(x), 1));", X[T ^ 1]),
    "atomic": Snippet(
        "__shared__ __nv_bfloat162 s; if (t == 0) s = __float2bfloat162_rn(0); __syncthreads(); "
        "atomicAdd(&s, __floats2bfloat162_rn(1, 2)); __syncthreads(); y = __low2float(s) + __high2float(s);",
        96,
    ),
    "double": Snippet(
        "y = __bfloat162float(__double2bfloat16(x / 3.0)) + __bfloat162float(__float2bfloat16_rz(x / 3));",
        (X / 3.0).astype(BF16).astype(float) + ((X / np.float32(3)).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
    ),
}

GROUPS = {
    "block": Snippet(
        "auto b = cg::this_thread_block(); b.sync(); "
        "y = b.thread_rank() + b.size() + b.group_index().x * 0 + b.thread_index().x;",
        2 * T + 32,
    ),
    "tile_rank": Snippet(
        "auto w = cg::tiled_partition<8>(cg::this_thread_block()); "
        "y = w.thread_rank() + 10 * w.meta_group_rank() + 100 * w.size() + w.meta_group_size();",
        T % 8 + 10 * (T // 8) + 804,
    ),
    "tile_sum": Snippet(
        "auto w = cg::tiled_partition<16>(cg::this_thread_block()); y = x; for (int d = 8; d; "
        "d /= 2) y += w.shfl_down(y, d); y = w.shfl(y, 0);",
        np.repeat(X.reshape(2, 16).sum(1), 16),
    ),
    "tile_xor": Snippet(
        "cg::thread_block_tile<32> w = cg::tiled_partition<32>(cg::this_thread_block()); y = w.shfl_xor(x, "
        "3) + w.shfl_up(x, 1);",
        X[T ^ 3] + X[np.maximum(T - 1, 0)],
    ),
    "tile_votes": Snippet(
        "auto w = cg::tiled_partition<4>(cg::this_thread_block()); "
        "y = w.any(t == 5) + 2 * w.all(t >= 8) + 4 * w.ballot(t % 4 == 2); w.sync();",
        (T // 4 == 1) + 2 * (T >= 8) + 16,
    ),
    "tile_of_tile": Snippet(
        "auto w = cg::tiled_partition<32>(cg::this_thread_block()); auto q = cg::tiled_partition<8>(w); "
        "y = q.shfl(t, 0) + q.meta_group_rank();",
        T // 8 * 8 + T // 8,
    ),
    "tile_match": Snippet(
        "auto w = cg::tiled_partition<8>(cg::this_thread_block()); y = w.match_any(t % 2);",
        np.where(T % 2, 0xAA, 0x55),
    ),
    "runtime_tile": Snippet(
        "cg::thread_block b = cg::this_thread_block(); cg::thread_group g = cg::tiled_partition(b, 4); "
        "g.sync(); y = g.thread_rank() + g.size();",
        T % 4 + 4,
    ),
    "coalesced": Snippet(
        "y = 0; if (t % 4 == 1) { auto g = cg::coalesced_threads(); "
        "y = g.size() + g.thread_rank() * 10 + g.shfl(t, 0); }",
        np.where(T % 4 == 1, 8 + T // 4 * 10 + 1, 0),
    ),
    "reduce": Snippet(
        "auto w = cg::tiled_partition<32>(cg::this_thread_block()); y = cg::reduce(w, t, "
        "cg::plus<int>()) + cg::reduce(w, x, cg::greater<float>()) + cg::reduce(w, x, cg::less<float>());",
        496 + 5.75 - 2,
    ),
    "reduce_tiles": Snippet(
        "auto w = cg::tiled_partition<8>(cg::this_thread_block()); y = cg::reduce(w, x, cg::plus<float>());",
        np.repeat(X.reshape(4, 8).sum(1), 8),
    ),
    "scan": Snippet(
        "auto w = cg::tiled_partition<32>(cg::this_thread_block()); y = cg::inclusive_scan(w, t, "
        "cg::plus<int>()) + cg::exclusive_scan(w, t, cg::plus<int>());",
        2 * np.cumsum(T) - T,
    ),
    "grid": Snippet("auto g = cg::this_grid(); y = g.thread_rank() - blockIdx.x * 32 + (g.size() >= 32);", T + 1),
    "free_functions": Snippet("auto b = cg::this_thread_block(); cg::sync(b); y = cg::thread_rank(b);", T),
}

CONSTANTS = {
    "inf": Snippet("y = isinf(CUDART_INF_F) + 2 * isnan(CUDART_NAN_F) + 4 * isinf(CUDART_INF) + 8 * isnan(CUDART_NAN);", 15),
    "pi": Snippet("y = CUDART_PI_F + (float)CUDART_PI + CUDART_PIO2_F;", np.float32(2.5 * np.pi), 1e-6),
    "others": Snippet(
        ""
        "y = CUDART_SQRT_TWO_F * CUDART_SQRT_HALF_F + CUDART_LN2_F * CUDART_L2E_F + CUDART_MAX_NORMAL_F / CUDART_MAX_NORMAL_F;",
        3,
        1e-6,
    ),
    "cfloat": Snippet("y = (x < FLT_MAX) + (FLT_EPSILON == 1.1920929e-7f) + (DBL_MAX > FLT_MAX) + (INT_MAX == 2147483647);", 4),
    "cmath": Snippet(
        "y = std::sqrt(4.0f) + std::abs(-2.0f) + std::fmax(1.0f, "
        "2.0f) + (INFINITY > x) + std::isnan(NAN) + (M_PI > 3);",
        9,
    ),
    "algorithm": Snippet("y = std::min(t, 3) + std::max(t, 30);", np.minimum(T, 3) + np.maximum(T, 30)),
    "cstdint": Snippet("std::uint16_t a = 65537; uintptr_t p = 8; y = a + p;", 9),
    "limits": Snippet("y = (std::numeric_limits<float>::max() == FLT_MAX) + std::numeric_limits<int>::digits;", 32),
    "cuda_std": Snippet(
        "cuda::std::int16_t a = t; y = a + cuda::std::numeric_limits<int>::digits + cuda::std::is_same_v<int, int>;",
        T + 32,
    ),
    "type_traits": Snippet("y = std::is_same<float, float>::value + std::is_integral_v<int> + std::is_same_v<int, float>;", 2),
}

CUDA = {"halves", "brains", "groups"}  # these need CUDA's own headers under NVRTC
CORPUS: dict[str, tuple[tuple[str, ...], dict[str, Snippet]]] = {
    "language": (("<stdint.h>",), LANGUAGE),
    "floats": ((), FLOATS),
    "integers": (("<cstdint>",), INTEGERS),
    "warps": ((), WARPS),
    "halves": (("<cuda_fp16.h>",), HALVES),
    "brains": (("<cuda_bf16.h>",), BRAINS),
    "groups": (("<cooperative_groups.h>", "<cooperative_groups/reduce.h>", "<cooperative_groups/scan.h>"), GROUPS),
    "constants": (
        (
            *("<cuda_runtime.h>", "<math_constants.h>", "<cfloat>", "<cmath>", "<climits>", "<cstdint>", "<algorithm>", "<limits>"),
            *("<type_traits>", "<cuda/std/cstdint>", "<cuda/std/limits>", "<cuda/std/type_traits>"),
        ),
        CONSTANTS,
    ),
}
ALL = [(chapter, name) for chapter, (_, snippets) in CORPUS.items() for name in snippets]


@lru_cache
def kernel(chapter: str) -> Kernel:
    """Return one kernel whose block number n runs the chapter's snippet number n."""
    includes, snippets = CORPUS[chapter]
    lines = [DECLARATION.format(len(snippets)), *(f"#include {name}" for name in includes)]
    lines.append("__constant__ float table[4] = {1, 2, 4, 8};")
    if chapter == "groups":
        lines.append("namespace cg = cooperative_groups;")
    for name, snippet in snippets.items():
        lines += [f"__device__ void {name}_(float x, int t, unsigned u, int i, float& y) {{", snippet.code, "}"]
    lines.append("extern \"C\" __global__ void __launch_bounds__(32) corpus(const float* __restrict__ input, float* output) {")
    lines.append("const int t = threadIdx.x;\nconst unsigned u = t * 0x9e3779b1u;\nfloat y = -12345.0f;\nswitch (blockIdx.x) {")
    lines += [f"case {n}: {name}_(input[t], t, u, static_cast<int>(u), y); break;" for n, name in enumerate(snippets)]
    return Kernel.from_source("\n".join([*lines, "}", "output[blockIdx.x * 32 + t] = y;", "}", ""]), chapter)


@lru_cache
def results(chapter: str, seed: int) -> dict[str, np.ndarray]:
    """Return what each snippet of a chapter gives on the host; with a seed, in an order of threads drawn from it."""
    snippets = CORPUS[chapter][1]
    values, output = X.copy(), np.full((len(snippets), THREADS), np.nan, np.float32)
    tensors = {n: TensorRef(a.ctypes.data, (a.size,), (1,)) for n, a in (("input", values), ("output", output))}
    run(HostBackend(optimize=seed == 0), kernel(chapter), Problem(1, 1, 1, 4, 1), "fp32", tensors, lambda name, size: 0, seed=seed)
    return dict(zip(snippets, output, strict=True))


def test_the_corpus_is_large() -> None:
    assert len(ALL) >= 150


@pytest.mark.parametrize(("chapter", "name"), ALL, ids=["-".join(pair) for pair in ALL])
def test_snippet(chapter: str, name: str) -> None:
    snippet = CORPUS[chapter][1][name]
    expected = np.broadcast_to(np.asarray(snippet.expected).astype(np.float32), THREADS)
    np.testing.assert_allclose(results(chapter, 7)[name], expected, rtol=snippet.rtol, atol=snippet.rtol / 10)


@pytest.mark.slow
@pytest.mark.parametrize("chapter", CORPUS)
def test_optimized_gives_the_same(chapter: str) -> None:
    for name, found in results(chapter, 7).items():
        np.testing.assert_allclose(results(chapter, 0)[name], found, rtol=1e-6, err_msg=name)


@pytest.mark.nvrtc
@pytest.mark.parametrize("chapter", CORPUS)
def test_nvrtc_takes_it(chapter: str) -> None:
    nvrtc = pytest.importorskip("cupy_convt3d.backends.nvrtc")
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    if chapter in CUDA and nvrtc.cuda_headers() is None:
        pytest.skip("CUDA's own headers, of NVRTC's version, are not here")
    cubin, _ = nvrtc.compile_cubin(Instance(kernel(chapter), "fp32"), "sm_90a")
    assert cubin[:4] == b"\x7fELF"


def body(code: str) -> Kernel:
    head = f"{DECLARATION.format(1)}\n#include <assert.h>\n__global__ void trial(const float* input, float* output) {{"
    return Kernel.from_source(f"{head}\n{code}\n}}\n", "trial")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("assert(threadIdx.x < 9);", r"assertion failed: threadIdx.x < 9 at trial.cu:9"),
        ("if (threadIdx.x == 3) __trap();", r"thread \(3, 0, 0\): __trap\(\) at trial.cu:9"),
        ("__builtin_assume(input[0] > 1);", r"not as assumed: input\[0\] > 1 at trial.cu:9"),
    ],
)
def test_what_stops_a_kernel_is_told(code: str, words: str) -> None:
    values, output = X.copy(), np.zeros(THREADS, np.float32)
    tensors = {n: TensorRef(a.ctypes.data, (a.size,), (1,)) for n, a in (("input", values), ("output", output))}
    with pytest.raises(LaunchError, match=words):
        run(HostBackend(), body(code), Problem(1, 1, 1, 4, 1), "fp32", tensors, lambda name, size: 0)
