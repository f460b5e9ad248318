"""The part of ``struct Score`` for kernels whose lanes keep two queries for a whole piece of work
and go through blocks of keys (kernels_cu/attn/score_rows.cuh).

A program is taken apart by what its terms depend on (score_writer.py). What no key changes is
computed once a query (`Query`); elements that neighbours can be read with are read ahead, two keys
at a time (`Ahead`); the rest is left for each pair. Only 16-bit inputs come here, whose scores are
floats.
"""

from __future__ import annotations

from .score import BITS, BITS_BY_KEY, ordered
from .score_writer import Writer, adds, changes, is_capped, roots

# An element read ahead takes a register or two; wider ones are read where they are used.
AHEAD_BYTES = 4
_SIZES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
    BITS: 4, BITS_BY_KEY: 4,
}  # fmt: skip
_LONG = {
    "fetch", "floor_divide", "remainder", "power", "exp", "expm1", "log", "log1p", "sin", "cos",
    "sqrt",
}  # fmt: skip


def item_bytes(arg) -> int:
    return _SIZES[arg.dtype]


def pairable(arg) -> bool:
    """Whether neighbours of the argument may be read two keys at a time, if they lie so in memory."""
    by_key = arg.kind == "grid" and arg.along[1]
    return by_key and arg.dtype not in (BITS, BITS_BY_KEY) and item_bytes(arg) <= AHEAD_BYTES


def stageable(arg) -> bool:
    """Whether blocks of such an argument may come by way of shared memory, if they lie so that a
    tensor map can describe them.
    """
    return arg.kind == "grid" and all(arg.along) and arg.dtype in ("float16", "bfloat16")


def reads_bits(options) -> bool:
    """Whether masks are bits of a query's keys, read by words."""
    return any(arg.dtype == BITS for arg in options.args)


def ahead_registers(options, paired, tiles: int) -> int:
    """Registers of a lane for what is read ahead of a block of ``tiles`` times 8 keys."""
    total = 2 * -(-tiles // 8) if options.dropout else 0
    if reads_bits(options):
        total += 2
    for n in paired:
        arg = options.args[n]
        total += tiles * (2 if arg.along[0] else 1) * (2 if item_bytes(arg) == 4 else 1)
    return total


def query_registers(options) -> int:
    """About as many as what the two queries of a lane keep."""
    writer = Writer(options, {"b": "b", "h": "h"})
    used = writer.functions()
    total = 2 + (22 if options.packed else 12) * options.dropout
    total += 8 * max(0, len(used) + options.dropout - 1)  # addresses beside each other
    for (kind, *_), name in writer.fields.items():
        width = 4 + 3 if kind == "CappedSeries" else 1
        total += width * (2 if name in writer.own else 1)
    total += 8 * len(writer.bent)
    return total + sum(4 if options.args[n].along[0] else 2 for n in used)


def is_long(options) -> bool:
    """Whether a pair takes many instructions: reads by computed indices, integer divisions, calls
    of the mathematical library.
    """
    writer = Writer(options, {})
    terms = [x for root in roots(options) for x in ordered(root) if not writer.fixed(x)]
    wide = any(x.op == "element" and item_bytes(options.args[x.value]) > AHEAD_BYTES for x in terms)
    return wide or any(x.op in _LONG for x in terms)


# ---- the whole -------------------------------------------------------------------------------


def _function(head, body, before="static "):
    head = f"{before}__device__ __forceinline__ {head}"
    return [f"{head} {{", *("    " + line for line in body), "}"]


def parts(options, paired, staged, symbols, elements, accessor, read) -> list[str]:
    """Lines of ``struct Score`` behind those of score_text.py, which gives the spellings.

    Parameters
    ----------
    options : score_text.Options
    paired : tuple of int
        The arguments whose elements for keys 2n and 2n + 1 are aligned neighbours.
    staged : int or None
        Of these, the one whose blocks come by way of shared memory.
    symbols : dict
        Spellings of b and h.
    elements : dict
        C++ types by dtype.
    accessor : callable
        (number, Arg) -> lines of the function that fetches from it.
    read : callable
        (Arg, place) -> its element there in C++.
    """
    writer = Writer(options, symbols)
    used = writer.functions()
    little = not options.dropout and not any(n in paired for n in used)
    lines = [
        f"static constexpr bool kChanges = {str(changes(options)).lower()};",
        f"static constexpr bool kLong = {str(is_long(options)).lower()};",
        f"static constexpr bool kAdds = {str(adds(options)).lower()};",
        f"static constexpr bool kCapped = {str(is_capped(options)).lower()};",
        f"static constexpr bool kBends = {str(writer.bends).lower()};",
        f"static constexpr bool kReaches = {str(writer.reaches).lower()};",
        f"static constexpr bool kReadsLittle = {str(little).lower()};",
    ]
    for n, arg in enumerate(options.args):
        if arg.kind == "free":
            lines += accessor(n, arg)
    lines += _query(writer, options, used, elements)
    lines += _elements(options, used, elements, read, [n for n in used if n in paired], staged)
    pair = "const Params& p, Accum s, const Query& q, Key j, const Elements& at"
    lines += ["template <bool kNear>", *_function(f"Accum value({pair})", writer.value)]
    pair_of_places = pair.replace("Accum s, ", "")
    lines += _function(f"bool visible({pair_of_places})", writer.seen)
    if is_capped(options):
        series = "const CappedSeries& series(const Query& q)"
        lines += _function(series, [f"return {writer.series};"])
    if writer.bends:
        reach, near = writer.reached
        lines += _function(f"float reach({pair})", reach) if writer.reaches else []
        lines += _function("float near(const Query& q, int first, int keys)", near)
    return lines


def _query(writer, options, used, elements):
    """What a query's pairs share, and the function that finds it."""
    fields, body = ["int i;"], ["Query q;", "i = min_of(i, p.seqlen_q - 1);"]
    if writer.options.packed:
        fields += ["int k_start;"]  # of its sequence
        body += ["const Sequence at = sequence_at(p.q_places, i);"]
        body += ["i -= at.q_start, q.k_start = at.k_start;"]
    body += ["q.i = i;"]
    for n in used:
        fields.append(f"const {elements[options.args[n].dtype]}* start{n};")
        along = f" + i64(i) * p.arg{n}_strides.row" if options.args[n].along[0] else ""
        body.append(f"q.start{n} = start{n}{along};")
    for (kind, *lines, expression), name in writer.fields.items():
        fields.append(f"{kind} {name};")
        body.append(" ".join(["{", *lines, f"q.{name} = {expression};", "}"]))
    struct = ["struct Query {", *("    " + field for field in fields), "};"]
    start = "q.k_start" if writer.options.packed else "0"
    return [
        *struct,
        *_function("Query query(int i) const", [*body, "return q;"], ""),
        *_function("int first_key(const Query& q)", [f"return {start};"]),
    ]


def _elements(options, used, elements, read, ahead, staged):
    """What is read ahead of a block, and a pair's elements."""
    held, rows, fetched, found, fields = [], [], [], [], []
    for n in used:
        arg = options.args[n]
        element, along = elements[arg.dtype], f"p.arg{n}_strides.col"
        fields.append(f"{_kind(arg)} arg{n};")
        if arg.dtype == BITS:
            held.append(f"RowBits<kTiles> arg{n}[2];")
            rows += [f"ahead.arg{n}[{row}].read(q[{row}].start{n}, first);" for row in range(2)]
            found.append(f"ahead.arg{n}[half].get(n, r)")
            continue
        if n not in ahead:
            place = f"q.start{n}[i64(min_of(int(j), p.seqlen_k - 1)) * {along}]"
            found.append(read(arg, place))
            continue
        ways = 2 if arg.along[0] else 1
        held.append(f"Two<{element}> arg{n}[{ways}][kTiles];")
        # First the lane's own address, then constants: these are a part of the instruction.
        fetched += [
            f"ahead.arg{n}[{row}][n] = read_two(q[{row}].start{n} + from + beyond);"
            for row in range(ways if n != staged else 0)
        ]
        half = "half" if ways == 2 else "0"
        found.append(read(arg, f"one_of<{element}>(ahead.arg{n}[{half}][n], r)"))
    reading = [
        "#pragma unroll",
        "for (int n = 0; n < kTiles; ++n) {",
        "    const int from = kInside ? first : min_of(first + 8 * n, p.seqlen_k - 2);",
        "    const int beyond = kInside ? 8 * n : 0;",
        *("    " + line for line in fetched),
        "}",
    ]
    head = "const Params& p, {}Ahead<kTiles>& ahead, "
    return [
        "template <int kTiles> struct Ahead {", *("    " + field for field in held), "};",
        "struct Elements {", *("    " + field for field in fields), "};",
        "template <bool kInside, int kTiles>",
        *_function(f"void read_ahead({head.format('')}const Query (&q)[2], int first)",
                   rows + (reading if fetched else [])),
        "template <int kTiles>",
        *_function("void read_staged(Ahead<kTiles>& ahead, u32 rows)",
                   [f"read_panels(ahead.arg{staged}, rows);"] if staged in ahead else []),
        "template <int kTiles>",
        *_function(
            f"Elements elements({head.format('const ')}const Query& q, int half, int n, int r, "
            "Key j)",
            [f"return {{{', '.join(found)}}};"],
        ),
    ]  # fmt: skip


def _kind(arg):
    if arg.dtype in ("bool", BITS, BITS_BY_KEY):
        return "bool"
    return "int" if arg.dtype.startswith(("int", "uint")) else "Accum"
