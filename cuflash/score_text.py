"""The C++ ``struct Score`` of a kernel: what one call's options make of a score.

Its functions are what kernels_cu/attn/program.cuh says. Arguments enter as rows that a plan adds to
its kernel's parameters (`rows`); launch_extras.py gives their values in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

from . import score_rows
from .score import BITS, BITS_BY_KEY, Program, constant, ordered, render, render_all

ELEMENTS = {
    "bool": "unsigned char",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "u16",
    "int32": "i32",
    "uint32": "u32",
    "int64": "i64",
    "uint64": "u64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "float",
    "float64": "double",
    BITS: "u32",
    BITS_BY_KEY: "u32",
}

MAP_UNIT = 128
LENGTHS = (("q_lengths", "in"), ("k_lengths", "in"))  # of kLengths: lengths_of in attn/mask.cuh

# Without any option.
PLAIN = """\
using Accum = AccumOf<Plan::Element>;
struct Score {
    static constexpr bool kProgram = false, kHides = false, kUnit = true, kKeepsScore = false;
    static constexpr bool kSinks = false, kDropout = false, kGradients = false;
    static constexpr bool kChanges = false, kCapped = false, kBitsByKey = false;
    static constexpr bool kSquares = false;
    static constexpr int kStarts = 0;
    __device__ __forceinline__ Score(const Params&, u32, u32) {}
    template <class Start> __device__ __forceinline__ Score(const Params&, u32, u32, Start) {}
    template <class F>
    static __device__ __forceinline__ void for_each_start(const Params&, u32, F) {}
    __device__ __forceinline__ Accum scaled(Accum x) const { return x; }
    __device__ __forceinline__ Accum value(Accum s, int, int) const { return s; }
    __device__ __forceinline__ Accum derivative(Accum, int, int) const { return 1; }
    __device__ __forceinline__ void value_and_derivative(Accum s, int, int, Accum& value,
                                                         Accum& slope) const {
        value = s, slope = 1;
    }
    __device__ __forceinline__ bool visible(int, int) const { return true; }
    __device__ __forceinline__ Accum sink() const { return 0; }
    __device__ __forceinline__ Accum keep_scale() const { return 1; }
    __device__ __forceinline__ Dropout dropout() const { return {}; }
    template <class F> __device__ __forceinline__ void for_each_gradient(F) const {}
};
"""


@dataclass(frozen=True)
class Gradient:
    """One of `Program.gradients` as a kernel sums it."""

    number: int
    along: tuple[bool, bool]  # whether entries vary with the query, the key
    measured: bool  # whether only a run of the kernel bounds its terms
    words: int  # of a sum (attn/score_gradients.cuh); 0: squares (attn/backward_sm90.cuh)


@dataclass(frozen=True)
class Options:
    """What a kernel's scores know of: the problem's options and which gradients it sums."""

    program: Program | None = None
    sinks: bool = False
    dropout: bool = False
    gradients: tuple[Gradient, ...] = ()  # those that are asked for
    map_block: tuple[int, int] | None = None  # of a block map that visible() looks at
    scaled: bool = False  # scores are, and statistics of rows count from there
    packed: bool = False  # b, i and j are then what attn/interval.cuh says of a pair
    lengths: bool = False  # of batch entries; without any other option
    divisible: bool = False  # summands of scaled scores can be divided by the scale

    @classmethod
    def of(cls, problem, *, stats=False, gradients=()) -> Options:
        """Those of a problem. The statistics pass needs no dropout, but scales as backward does."""
        block = problem.block_map
        # Blocks of kernels divide MAP_UNIT: a block of such a map is never met in part.
        block = block if block and any(size % MAP_UNIT for size in block) else None
        return cls(
            problem.program,
            problem.sinks,
            problem.dropout and not stats,
            gradients,
            block,
            problem.program is not None or problem.sinks or problem.dropout or bool(block),
            problem.packed,
            problem.lengths,
            abs(problem.scale) >= 2.0**-20,
        )

    def __bool__(self) -> bool:
        return self.scaled

    def __str__(self) -> str:
        """In words, for `explain`; empty without any option."""
        found, program = [], self.program
        if program is not None:
            names = ", ".join(arg.name for arg in program.args) or "the indices alone"
            found.append(f"a function of {names}")
            found += ["hidden keys, pair by pair"] if program.visible is not None else []
        found += ["a block map, pair by pair"] if self.map_block else []
        found += ["sinks"] if self.sinks else []
        found += ["dropout"] if self.dropout else []
        found += ["lengths, as the ends of queries and keys"] if self.lengths else []
        return "; ".join(found)

    @property
    def args(self):
        return () if self.program is None else self.program.args

    @property
    def summed(self) -> tuple[int, ...]:
        """The arguments whose gradients are summed, each once."""
        numbers = (self.program.gradients[g.number][0] for g in self.gradients)
        return tuple(dict.fromkeys(numbers))

    @property
    def squared(self) -> bool:
        """Whether there is one, of squares."""
        return any(gradient.words == 0 for gradient in self.gradients)


# ---- parameters ------------------------------------------------------------------------------


def rows(options: Options, forward: bool, staged: int | None = None) -> tuple[tuple[str, str], ...]:
    """What the options add to a kernel's table; ``staged``: as in `text`."""
    packed = (("q_intervals", "in"), ("k_intervals", "in")) if options.packed else ()
    if not options:
        return LENGTHS if options.lengths else packed
    found = [*packed, ("first_batch", "word")]
    found += [("staged_map", "map")] if staged is not None else []
    if options.packed:
        found += [("q_places", "in"), ("k_places", "in")]
    for n, arg in enumerate(options.args):
        found += _argument_rows(f"arg{n}", arg)
    if options.sinks:
        found += [("sinks", "in"), ("sinks_strides", "strides")]
    if options.dropout:
        found += [("seed", "word"), ("seed_array", "in"), ("keep_limit", "u32")]
    for n in options.summed:
        if options.squared:
            found += [("squares", "out"), ("square_flags", "out")]
            found += [("square_batch", "u32"), ("square_head", "u32")]
            continue
        found += [(f"sums{n}", "out"), (f"notes{n}", "out"), (f"unit{n}", "in")]
        found += [(f"largest{n}", "out"), (f"first_entry{n}", "word"), (f"entries{n}", "i64")]
        if options.args[n].kind == "grid":
            found += [(f"sums{n}_strides", "strides")]
    if options.map_block:
        found += [("map_kinds", "in"), ("map_kinds_strides", "strides")]
    if forward:
        return (*found, ("scale", "f64"))
    # as floats they are operands of instructions
    found += [("score_scale", "f32"), *([("keep_scale", "f32")] if options.dropout else [])]
    return tuple(found)


def _argument_rows(name, arg):
    if arg.kind == "scalar":
        return [(name, "word")]
    if arg.kind == "grid":
        return [(name, "in"), (f"{name}_strides", "strides")]
    parts = [f"{part}{axis}" for axis in range(arg.ndim) for part in ("size", "stride")]
    return [(name, "in"), *((f"{name}_{part}", "i64") for part in parts)]


# ---- text ------------------------------------------------------------------------------------


def text(
    options: Options, paired: tuple[int, ...] | None = None, quick: bool = False,
    inverses: bool = False, staged: int | None = None,
) -> str:
    """The C++ definition of ``struct Score``. With ``paired`` that of kernels which keep their
    queries (score_rows.py), perhaps with a ``staged`` argument; ``quick``: of backward kernels with
    16-bit results, with quick_tanh (attn/score_keys.cuh) and numbers that are floats already;
    ``inverses``: of numbers, in place of divisions.
    """
    if not options:
        return PLAIN
    program = options.program
    args = options.args
    parts = [*_constants(options), *_start(options, quick), *_accessors(args)]
    if quick:
        parts += [
            "static __device__ __forceinline__ float tanh_of(float x) { return quick_tanh(x); }"
        ]
    value = ["return s;"] if program is None else _body(options, program.value, inverses)
    parts += _function("Accum value(Accum s, int i, int j)", value)
    slope = ["return 1;"] if program is None else _body(options, program.derivative, inverses)
    parts += _function("Accum derivative(Accum s, int i, int j)", slope)
    head = "void value_and_derivative(Accum s, int i, int j, Accum& value, Accum& slope)"
    parts += _function(head, _value_and_derivative(options, inverses))
    parts += _visible(options)
    if (n := _bits_by_key(options)) is not None:
        row = f"start{n} + i64(j) * p.arg{n}_strides.row"
        parts += _function("const u32* bits_of_key(int j)", [f"return {row};"])
    parts += _function("Accum sink()", _sink(options))
    parts += _function("Accum keep_scale()", _keep_scale(options, quick))
    kind = "PackedDropout" if options.packed and options.dropout else "Dropout"
    parts += _function(f"{kind} dropout()", _dropout(options))
    parts += _gradients(options)
    if paired is not None:
        symbols = {**SYMBOLS, "b": "at.number"} if options.packed else SYMBOLS
        parts += score_rows.parts(options, paired, staged, symbols, ELEMENTS, _fetch, _read)
    lines = ["using Accum = AccumOf<Plan::Element>;", "struct Score {"]
    return "\n".join([*lines, *("    " + part for part in parts), "};", ""])


def facts(options: Options) -> dict[str, bool]:
    """The constants of ``struct Score``, by name."""
    program = options.program
    unit = program is None or program.derivative is constant(1.0)
    needs = any(depends(program.gradients[g.number][2], "s") for g in options.gradients)
    return {
        "kProgram": bool(options),
        "kHides": _masks(options) or options.map_block is not None,
        "kUnit": unit,
        "kKeepsScore": needs,
        "kSinks": options.sinks,
        "kDropout": options.dropout,
        "kGradients": bool(options.gradients) and not options.squared,
        "kBitsByKey": _bits_by_key(options) is not None,
        "kSquares": options.squared,
    }


def _constants(options):
    return [
        f"static constexpr bool {name} = {str(on).lower()};" for name, on in facts(options).items()
    ]


def _function(head, body):
    return [f"__device__ __forceinline__ {head} const {{", *("    " + line for line in body), "}"]


def _masks(options):
    return options.program is not None and options.program.visible is not None


def _bits_by_key(options) -> int | None:
    """The argument that alone says what is visible, if it holds bits of all queries of a key."""
    if not _masks(options) or options.map_block is not None:
        return None
    node = options.program.visible
    by_key = node.op == "element" and options.args[node.value].dtype == BITS_BY_KEY
    return node.value if by_key else None


def _visible(options):
    """What the masks let through, and the block map where its blocks are met in part."""
    body = _body(options, options.program.visible) if _masks(options) else ["return true;"]
    if options.map_block is None:
        return _function("bool visible(int i, int j)", body)
    rows, keys = options.map_block
    strides = "p.map_kinds_strides"
    place = f"i64(i / {rows}) * {strides}.row + i64(j / {keys}) * {strides}.col"
    allowed = _function("bool allowed(int i, int j)", [f"return map_start[{place}] != 0;"])
    *lines, result = body
    result = result.removeprefix("return ").removesuffix(";")
    seen = [*lines, f"return allowed(i, j) & ({result});"]
    return allowed + _function("bool visible(int i, int j)", seen)


def _start(options, quick):
    """Where this head's arrays begin. A kernel short of registers keeps where its batch entry's
    begin, `for_each_start`, and hands them back: start(k).
    """
    grids = [(n, ELEMENTS[arg.dtype]) for n, arg in enumerate(options.args) if arg.kind == "grid"]
    fields = ["const Params& p;", "const u32 batch, head;"]
    fields += [f"const {element}* start{n};" for n, element in grids]
    common = ["p(params)", "batch(of_batch)", "head(of_head)"]
    anew = [f"start{n}({_head_start(n, element, 'of_batch', 'of_head')})" for n, element in grids]
    given = [
        f"start{n}(static_cast<const {element}*>(start({k})) + "
        f"i64(of_head) * params.arg{n}_strides.head)"
        for k, (n, element) in enumerate(grids)
    ]
    if options.map_block:
        fields.append("const unsigned char* map_start;")
        of_map = (
            "map_start(head_start<const unsigned char>(params.map_kinds, params.map_kinds_strides, "
            "params.batch_sizes, of_batch, of_head))"
        )
        anew, given = [*anew, of_map], [*given, of_map]
    visits = [f"f({k}, {_head_start(n, e, 'batch', '0')});" for k, (n, e) in enumerate(grids)]
    head = "__device__ __forceinline__ Score(const Params& params, u32 of_batch, u32 of_head"
    scale = "p.score_scale" if quick else "Accum(p.scale)"
    return [
        f"static constexpr int kStarts = {len(grids)};",
        *fields,
        head + ")",
        "    : " + ", ".join(common + anew) + " {}",
        "template <class Start>",
        head + ", Start start)",
        "    : " + ", ".join(common + given) + " {}",
        "template <class F>",
        "static __device__ __forceinline__ void for_each_start(const Params& params, u32 batch, "
        "F f) {",
        *("    " + visit for visit in visits),
        "}",
        *_function("Accum scaled(Accum x)", [f"return {scale} * x;"]),
    ]


def _head_start(n, element, batch, head):
    return (
        f"head_start<const {element}>(params.arg{n}, params.arg{n}_strides, params.batch_sizes, "
        f"{batch}, {head})"
    )


def _read(arg, place):
    if arg.dtype == "bool":
        return f"{place} != 0"
    if arg.dtype == BITS:
        return f"({place} >> ((j >> 3 & 15) * 2 + (j & 1)) & 1) != 0"
    if arg.dtype == BITS_BY_KEY:
        return f"({place} >> (i & 31) & 1) != 0"
    if arg.dtype.startswith(("int", "uint")):
        return f"read_int({place})"
    return f"read<Accum>({place})"


def _result(arg):
    if arg.dtype in ("bool", BITS, BITS_BY_KEY):
        return "bool", "false"
    if arg.dtype.startswith(("int", "uint")):
        return "int", "0"
    return "Accum", "infinity<Accum>() * 0"


def _accessors(args):
    lines = []
    for n, arg in enumerate(args):
        kind, outside = _result(arg)
        if arg.kind == "scalar":
            value = f"int(p.arg{n})" if kind == "int" else f"number<Accum>(p.arg{n})"
            lines += _function(f"{kind} arg{n}()", [f"return {value};"])
        elif arg.kind == "grid":
            steps = (("i", "row"), ("j", "col"))
            if arg.dtype == BITS:
                steps = (("i", "row"), ("(j >> 7) * 4 + (j >> 1 & 3)", "col"))
            elif arg.dtype == BITS_BY_KEY:
                steps = (("j", "row"), ("i >> 5", "col"))
            steps = [f"i64({x}) * p.arg{n}_strides.{to}" for x, to in compress(steps, arg.along)]
            place = f"start{n}[{' + '.join(steps) or 0}]"
            lines += _function(f"{kind} arg{n}(int i, int j)", [f"return {_read(arg, place)};"])
        else:
            head = ", ".join(f"i64 x{a}" for a in range(arg.ndim))
            lines += _function(f"{kind} arg{n}({head})", _free_body(n, arg, outside))
    return lines


def _free_body(n, arg, outside):
    axes = range(arg.ndim)
    body = [f"x{a} = wrapped(x{a}, p.arg{n}_size{a});" for a in axes]
    if arg.ndim:
        body.append(f"if ({' || '.join(f'x{a} < 0' for a in axes)}) return {outside};")
    offset = " + ".join(f"x{a} * p.arg{n}_stride{a}" for a in axes) or "0"
    place = f"static_cast<const {ELEMENTS[arg.dtype]}*>(p.arg{n})[{offset}]"
    return [*body, f"return {_read(arg, place)};"]


def _fetch(n, arg):
    """The accessor of an indexed argument for functions that have no Score."""
    kind, outside = _result(arg)
    head = ", ".join(["const Params& p", *(f"i64 x{a}" for a in range(arg.ndim))])
    head = f"static __device__ __forceinline__ {kind} fetch{n}({head}) {{"
    return [head, *("    " + line for line in _free_body(n, arg, outside)), "}"]


def _sink(options):
    if not options.sinks:
        return ["return 0;"]
    start = "head_start<const Accum>(p.sinks, p.sinks_strides, p.batch_sizes, batch, head)"
    return [f"return *{start};"]


def _keep_scale(options, quick):
    if quick and options.dropout:
        return ["return p.keep_scale;"]
    return [f"return {'Accum(256) / Accum(p.keep_limit)' if options.dropout else '1'};"]


def _dropout(options):
    if not options.dropout:
        return ["return {};"]
    places = ", p.q_places" if options.packed else ""
    return [
        "const u64* array = static_cast<const u64*>(p.seed_array);",
        "const u64 seed = array == nullptr ? p.seed : *array;",
        f"return {{seed, p.keep_limit, u32(p.first_batch) + batch, head{places}}};",
    ]


# ---- gradients -------------------------------------------------------------------------------


def _gradients(options):
    """Structs for attn/score_gradients.cuh."""
    lines, summed = [], () if options.squared else options.gradients
    for gradient in summed:
        n = gradient.number
        number, node, term = options.program.gradients[n]
        lines += _function(f"Accum term{n}(Accum s, int i, int j)", _body(options, term))
        lines += _function(f"i64 entry{n}(int i, int j)", _entry(options, number, node))
        lines += _gradient_struct(gradient, number)
    visits = [f"f(Gradient{g.number}{{*this}});" for g in summed]
    head = "template <class F> __device__ __forceinline__ void for_each_gradient(F f) const {"
    return [*lines, head, *("    " + visit for visit in visits), "}"]


def _gradient_struct(gradient, number):
    n = gradient.number
    functions = [
        *_function("Accum term(Accum s, int i, int j)", [f"return score.term{n}(s, i, j);"]),
        *_function("i64 entry(int i, int j)", [f"return score.entry{n}(i, j);"]),
        *_function("int seqlen_q()", ["return score.p.seqlen_q;"]),
        *_function("int seqlen_k()", ["return score.p.seqlen_k;"]),
        *_function(
            "Accum unit()", [f"return Accum(*static_cast<const double*>(score.p.unit{number}));"]
        ),
        *_function("u64* largest()", [f"return static_cast<u64*>(score.p.largest{number});"]),
        *_function(
            "GradientSums sums()",
            [
                f"return {{static_cast<u64*>(score.p.sums{number}), "
                f"static_cast<u32*>(score.p.notes{number}), score.p.entries{number}}};"
            ],
        ),
    ]
    flags = {"kAlongI": gradient.along[0], "kAlongJ": gradient.along[1]}
    flags["kMeasured"] = gradient.measured
    constants = ", ".join(f"{name} = {str(on).lower()}" for name, on in flags.items())
    lines = [
        f"static constexpr bool {constants};",
        f"static constexpr int kWords = {gradient.words};",
        "const Score& score;",
        *functions,
    ]
    return [f"struct Gradient{n} {{", *("    " + line for line in lines), "};"]


def _entry(options, number, node):
    """The place of the pair's entry in the argument's own sums; -1: it has none."""
    arg = options.args[number]
    if arg.kind == "grid":
        strides = f"p.sums{number}_strides"
        start = f"batch_offset({strides}, p.batch_sizes, batch) + i64(head) * {strides}.head"
        start = f"i64(p.first_entry{number}) + {start}"
        return [f"return {start} + i64(i) * {strides}.row + i64(j) * {strides}.col;"]
    (lines, symbols), entry = _indices(options), "0"
    for axis, index in enumerate(node.operands):
        size = f"p.arg{number}_size{axis}"
        inner, expression = render(index, symbols)
        lines.append(f"i64 x{axis};")
        lines.append(" ".join(["{", *inner, f"x{axis} = wrapped({expression}, {size});", "}"]))
        lines.append(f"if (x{axis} < 0) return -1;")
        entry = f"x{axis}" if axis == 0 else f"({entry}) * {size} + x{axis}"
    return [*lines, f"return {entry};"]


# ---- expressions -----------------------------------------------------------------------------


def _quotient(options):
    """Divisions by numbers: times their inverses, operands of instructions."""

    def text(node, a, b):
        divisor = node.operands[1]
        if divisor.op == "const" and divisor.value:
            return f"({a} * {render(constant(1.0 / divisor.value))[1]})"
        if divisor.op == "fetch":
            arg = options.args[divisor.value]
            if arg.kind == "scalar" and arg.dtype == "float32":
                return f"({a} * inverse_number(p.arg{divisor.value}))"
        return f"({a} / {b})"

    return text


SYMBOLS = {"b": "int(p.first_batch + batch)", "h": "int(head)"}
# Of packed sequences: i and j count through all of them, `at` in their own.
PACKED_SYMBOLS = {**SYMBOLS, "b": "at.b", "i": "at.i", "j": "at.j"}


def depends(node, symbol) -> bool:
    """Whether the expression can differ between two values of a symbol."""
    return any(
        x.op == "symbol" and x.value == symbol or x.op == "element" and symbol in "bhij"
        for x in ordered(node)
    )


def _indices(options):
    """What a function of i and j begins with, and its spelling of symbols."""
    if not options.packed:
        return [], SYMBOLS
    return ["const PackedIndices at(p.q_places, p.k_places, i, j);"], PACKED_SYMBOLS


def _body(options, node, inverses=False):
    lines, (expression,) = _rendered(options, [node], inverses)
    return [*lines, f"return {expression};"]


def _value_and_derivative(options, inverses):
    """They share terms."""
    if options.program is None:
        return ["value = s, slope = 1;"]
    nodes = [options.program.value, options.program.derivative]
    lines, (value, slope) = _rendered(options, nodes, inverses)
    return [*lines, f"value = {value}, slope = {slope};"]


def _rendered(options, nodes, inverses):
    first, names = _indices(options)
    if inverses:
        names = {**names, "divide": _quotient(options)}
    lines, expressions = render_all(nodes, names)
    return [*first, *lines], expressions
