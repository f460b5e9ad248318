"""What score_rows.py makes of programs: its functions, compiled for the host where there is a
compiler, give for each pair what the expression does.
"""

import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from conftest import np_dtype
from test_launch_scores import program_of
from test_plan import HOPPER, problem_of

from cuflash import mask_bits, params, score_rows, source
from cuflash.families import Access, sm90
from cuflash.score import BITS, Arg, Expr, element, evaluate, symbol
from cuflash.score_rows import pairable
from cuflash.score_text import Options

BIAS = Arg("grid", "bfloat16", 4, "bias")
KEYS = Arg("grid", "float16", 4, "row bias", (False, True))
SLOPES = Arg("grid", "float32", 4, "alibi_slopes", (False, False))
MASK = Arg("grid", "bool", 4, "mask")
WORDS = Arg("grid", BITS, 4, "masks")
LENS = Arg("grid", "int32", 4, "kv_lens", (False, False))
OWN, OTHERS = (Arg("grid", "int32", 4, "ids", along) for along in ((True, False), (False, True)))
TABLE = Arg("free", "float32", 2, "table")
CAP = Arg("scalar", "float32", 0, "softcap")
I, J = Expr(symbol("i")), Expr(symbol("j"))


def _at(n, arg):
    return Expr(element(n, arg))


PROGRAMS = {
    "softcap": program_of(lambda s, i, j, cap: cap * np.tanh(s / cap), [CAP]),
    "bias": program_of(lambda s, i, j: s + _at(0, BIAS), [BIAS, MASK], _at(1, MASK).node),
    "alibi": program_of(
        lambda s, i, j: s - _at(0, SLOPES) * abs(i + 7 - j), [SLOPES, LENS], (J < _at(1, LENS)).node
    ),
    "alibi and bias": program_of(
        lambda s, i, j: _at(1, BIAS) - (_at(0, SLOPES) - 1) * abs(j - I) + s - 0.5,
        [SLOPES, BIAS],
    ),
    "segments": program_of(
        lambda s, i, j: s, [OWN, OTHERS], ((_at(0, OWN) == _at(1, OTHERS)) & (I - J < 9)).node
    ),
    "tanh": program_of(
        lambda s, i, j, table: s / 3.0 + table[3, j] * np.tanh(s + _at(0, KEYS)) - (j - i) * 0.1,
        [KEYS, TABLE],
        ((I + 2 * J) % 5 != 0).node,
    ),
    "bits": program_of(lambda s, i, j: s + _at(0, BIAS), [BIAS, WORDS], _at(1, WORDS).node),
    "two tanh": program_of(
        lambda s, i, j, cap: np.tanh(cap * np.tanh(s / cap) + _at(1, BIAS)), [CAP, BIAS]
    ),
}

# In place of the headers of ptx and tile, and of what only a GPU has.
HOST = """
#include <cmath>
#include <cstdio>
#include <cstring>
#define __device__
#define __forceinline__ inline
using u16 = unsigned short; using u32 = unsigned; using i32 = int;
using u64 = unsigned long long; using i64 = long long;
struct f16 { u16 bits; }; struct bf16 { u16 bits; };
template <class A, class B> inline constexpr bool kSame = false;
template <class A> inline constexpr bool kSame<A, A> = true;
template <class T> using AccumOf = float;
struct Strides { i64 batch[3], head, row, col; };
struct alignas(64) TensorMap { char bytes[128]; };
struct Dropout { u64 seed; u32 limit, batch, head; };
inline int ceil_div(int a, int b) { return a > 0 ? (a + b - 1) / b : -(-a / b); }
struct int2 { int x, y; }; struct int4 { int x, y, z, w; };
template <class X> X load_constant(const X* address) { return *address; }
template <class T> T min_of(T a, T b) { return a < b ? a : b; }
template <class T> T max_of(T a, T b) { return a > b ? a : b; }
template <class To, class From> To bits(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
u32 __funnelshift_r(u32 low, u32 high, int by) {
    return u32((u64(high) << 32 | low) >> (by & 31));
}
float __uint_as_float(u32 x) { return bits<float>(x); }
double __longlong_as_double(i64 x) { return bits<double>(x); }
float to_float(bf16 x) { return bits<float>(u32(x.bits) << 16); }
float to_float(f16 x) {
    const int e = x.bits >> 10 & 31, m = x.bits & 1023;
    const float size = e == 0 ? ldexpf(m, -24) : ldexpf(m + 1024, e - 25);
    return x.bits >> 15 ? -size : size;
}
float fma_of(float a, float b, float c) { return fmaf(a, b, c); }
float exp2_of(float x) { return exp2f(x); }
float exp_of(float x) { return expf(x); }
float log_of(float x) { return logf(x); }
template <class A> A infinity() { return INFINITY; }
template <class A> A lowest() { return bits<float>(0xff7fffff); }
template <class T, class P> T* head_start(P* p, const Strides&, const i32 (&)[3], u32, u32) {
    return (T*)p;
}
"""
MAIN = """
static char* load(const char* name, int bytes) {
    char* data = new char[bytes + 64];
    FILE* file = fopen(name, "rb");
    if (file == nullptr || fread(data, 1, bytes, file) != size_t(bytes)) return nullptr;
    return data;
}
int main() {
    constexpr int kLength = LENGTH, kTiles = BLOCK / 8;
    Params p{};
    p.seqlen_q = p.seqlen_k = kLength;
    p.scale = SCALE;
    SETUP
    const float* s = (const float*)load("s", 4 * kLength * kLength);
    FILE* file = fopen("found", "wb");
    for (int i = 0; i < kLength; ++i)
        for (int n = 0; n < 4 * ((kLength + BLOCK - 1) / BLOCK); ++n) {
            const int first = n / 4 * BLOCK + n % 4 * 2;
            const Score score(p, 0, 0);
            const Score::Query q[2] = {score.query(i), score.query(i + 8)};
            Score::Ahead<kTiles> ahead;
            Score::read_ahead<false>(p, ahead, q, first);
            for (int n = 0; n < 2 * kTiles; ++n) {
                const Key j{first, n / 2 * 8 + n % 2};
                if (int(j) >= kLength) continue;
                const auto at = Score::elements(p, ahead, q[0], 0, n / 2, n % 2, j);
                const float x = s[i * kLength + int(j)];
                NEAR
                const float row[6] = {float(i), float(int(j)), float(near),
                                      Score::value<true>(p, x, q[0], j, at),
                                      Score::value<false>(p, x, q[0], j, at),
                                      float(Score::visible(p, q[0], j, at))};
                fwrite(row, 4, 6, file);
            }
        }
    return fclose(file);
}
"""


def _header(name):
    text = (source.folder() / "attn" / name).read_text()
    text = re.sub(r"#(include|pragma once).*", "", text)
    text = re.sub(r'asm\("rcp.*', "inverse = 1 / x;", text)
    copied = "memcpy(two.words, address, 2 * sizeof(Element)); return two;"
    start = r"if constexpr \(sizeof\(Element\) == 1\)\s+asm.*?return two;"
    text = re.sub(start, copied, text, flags=re.S)
    start = r'asm volatile\("ld.global.nc.(v2.)?u32.*?\);\n}'
    return re.sub(start, "memcpy(words, address, sizeof words);\n}", text, flags=re.S)


def _array(arg, length, rng):
    shape = [length if along else 1 for along in arg.along]
    if arg.dtype == BITS:
        return as_words(rng.random(shape) < 0.6)
    if arg.kind == "free":
        shape = [4, length]
    if arg.dtype == "bool":
        return rng.random(shape) < 0.6
    if arg.dtype == "int32":
        return rng.integers(0, 3, shape).astype(np.int32) + (length // 2) * (arg.name == "kv_lens")
    return rng.standard_normal(shape).astype(np_dtype(arg.dtype))


def places(length):
    """Bit by bit of a row of words: which key's it is (mask_bits.cu)."""
    bits = np.arange(32 * mask_bits.row_words(length))
    lane, bit = bits // 32 % 4, bits % 32
    return bits // 128 * 128 + bit // 2 * 8 + 2 * lane + bit % 2


def as_words(seen):
    """Booleans (rows, keys) in rows of words, those behind the end 0."""
    padded = np.zeros((len(seen), 32 * mask_bits.row_words(seen.shape[-1])), bool)
    padded[:, : seen.shape[-1]] = seen
    ordered = np.ascontiguousarray(padded[:, places(seen.shape[-1])])
    return np.packbits(ordered, axis=-1, bitorder="little").view(np.uint32)


def as_booleans(words, length, by_key=False):
    """The rows of words up to ``length``. ``by_key``: rows of keys, whose queries lie in order."""
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    if not by_key:
        bits = bits[:, np.argsort(places(bits.shape[1] - 32 * mask_bits.SPARE_WORDS))]
    return bits[:, :length] == 1


def _setup(n, arg, array, folder):
    """Statements that give the parameters of an argument their values."""
    if arg.kind == "scalar":
        return f"p.arg{n} = bits<u32>(float({array}));"
    array.tofile(folder / f"arg{n}")
    text = f'p.arg{n} = load("arg{n}", {array.nbytes});'
    rows, cols = array.shape
    if arg.kind == "free":
        sizes = f"p.arg{n}_size0 = {rows}; p.arg{n}_size1 = {cols};"
        return f"{text} {sizes} p.arg{n}_stride0 = {cols}; p.arg{n}_stride1 = 1;"
    return f"{text} p.arg{n}_strides.row = {cols}; p.arg{n}_strides.col = 1;"


def _run(program, length, scale, paired, folder, rng, block=48):
    """i, j, whether near, both values and whether visible of each pair; what it should be."""
    args = program.args
    arrays = [2.5 if a.kind == "scalar" else _array(a, length, rng) for a in args]
    problem = replace(problem_of("bfloat16", length=length), program=program, scale=scale)
    plan = sm90.forward_plan(problem, HOPPER, Access(16, 16), paired=paired)
    scores = (6 * rng.standard_normal((length, length))).astype(np.float32)
    adds, unit = "kAdds = true" in plan.score, 1
    if adds:  # of what comes and goes
        unit = abs(scale)
    elif "kCapped = true" in plan.score:
        unit = np.log(2)
    (scores * (np.sign(scale) if adds else 1)).astype(np.float32).tofile(folder / "s")
    near = "const bool near = true;"
    if "kBends = true" in plan.score:
        reach = "Score::reach(p, x, q[0], j, at)" if "kReaches = true" in plan.score else "0"
        near = f"const bool near = {reach} <= Score::near(q[0], j.first, BLOCK);"
    setup = "\n".join(_setup(n, *x, folder) for n, x in enumerate(zip(args, arrays)))
    main = MAIN.replace("LENGTH", str(length)).replace("SCALE", repr(scale))
    main = main.replace("BLOCK", str(block))
    parts = [HOST, _header("program.cuh"), _header("score_keys.cuh")]
    parts += [params.text(plan.params, plan.operands), "struct Plan { using Element = bf16; };"]
    parts += [plan.score, main.replace("SETUP", setup).replace("NEAR", near.replace("BLOCK", str(block)))]
    (folder / "host.cpp").write_text("\n".join(parts))
    build = ["g++", "-std=c++17", "-O1", "-w", "-o", "host", "host.cpp"]
    subprocess.run(build, check=True, cwd=folder, timeout=120)
    subprocess.run([folder / "host"], check=True, cwd=folder, timeout=60)
    i, j = np.indices((length, length))
    env = dict(s=scores.astype(float) * scale, b=0, h=0, i=i, j=j, args=dict(enumerate(arrays)))
    env["element"] = lambda n: (
        as_booleans(arrays[n], length) if args[n].dtype == BITS else arrays[n]
    )
    want = np.broadcast_to(evaluate(program.value, env), i.shape)
    seen = True if program.visible is None else evaluate(program.visible, env)
    found = np.fromfile(folder / "found", np.float32).reshape(-1, 6)
    found[:, 3:5] *= unit
    return found, want, seen, scores


@pytest.mark.skipif(shutil.which("g++") is None, reason="it needs a compiler for the host")
@pytest.mark.parametrize("scale", (0.125, -0.3))
@pytest.mark.parametrize("name", PROGRAMS)
def test_pairs_get_what_the_expression_says(name, scale, tmp_path):
    program = PROGRAMS[name]
    args = program.args
    paired = tuple(n for n, arg in enumerate(args) if pairable(arg))
    length, paired = (40, paired) if scale > 0 else (41, ())
    rng, block = np.random.default_rng(3), 16 if "alibi" in name else 48
    found, want, seen, scores = _run(program, length, scale, paired, tmp_path, rng, block)
    i, j = found[:, :2].astype(int).T
    assert len(found) == length**2 == len({*zip(i, j)})
    near, changed = found[:, 2] == 1, program.value is not symbol("s")
    if not changed:  # the product stays as it is
        want = scores
    assert np.allclose(found[near, 3], want[i, j][near], rtol=2e-6, atol=2e-6)
    assert np.allclose(found[:, 4], want[i, j], rtol=2e-6, atol=2e-6)
    if "alibi" not in name:  # what is near has the same bits, whatever else a warp holds
        assert np.array_equal(found[near, 3], found[near, 4])
    assert near.any() and not (("tanh" in name or "alibi" in name) and near.all())
    assert np.array_equal(found[:, 5] == 1, np.broadcast_to(seen, want.shape)[i, j])


@pytest.mark.skipif(shutil.which("g++") is None, reason="it needs a compiler for the host")
@pytest.mark.parametrize("block", (16, 48, 64, 80, 112, 128))
def test_blocks_find_their_bits(block, tmp_path):
    """Blocks that begin and end within words, and that go on behind the keys."""
    rng = np.random.default_rng(4)
    found, _, seen, _ = _run(PROGRAMS["bits"], 250, 1.0, (), tmp_path, rng, block)
    i, j = found[:, :2].astype(int).T
    assert len(found) == 250**2 and np.array_equal(found[:, 5] == 1, seen[i, j])


def _score(name):
    problem = replace(problem_of("bfloat16", length=64), program=PROGRAMS[name])
    return sm90.forward_plan(problem, HOPPER, Access(16, 16)).score


def test_what_no_key_changes_is_found_once_a_query():
    """Slopes, lengths and the distance's start; a length is compared with a constant."""
    text = _score("alibi")
    value = text[text.index("template <bool kNear>") :]
    assert "arg" not in value and "sloped<kNear>(s, q.h" in value and "(j.beyond < q.h" in value
    assert "CappedSeries(p.scale, " in _score("softcap")
    assert "kReaches = false" in text and "kReaches = true" in _score("two tanh")


@pytest.mark.parametrize(
    "name, scale, adds",
    [
        ("alibi", 0.1, True), ("alibi", -0.1, True), ("alibi", 0.0, False), ("alibi", 1e-9, False),
        ("alibi and bias", 0.1, True), ("bias", 0.1, False), ("tanh", 0.1, False),
    ],
)  # fmt: skip
def test_when_terms_are_added_to_products(name, scale, adds):
    problem = replace(problem_of("bfloat16", length=64), program=PROGRAMS[name], scale=scale)
    assert score_rows.adds(Options.of(problem)) == adds
    assert score_rows.changes(Options.of(problem)) != adds
