"""The C++ ``struct Score`` of a kernel: what one call's options make of a score.

Its functions are what kernels_cu/attn/program.cuh says. Arguments enter as rows that a plan adds to
its kernel's parameters (`rows`); launch_extras.py gives their values in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

from .score import Program, constant, ordered, render

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
}

MAP_UNIT = 128

# Without any option. What would take part in arithmetic is never called.
PLAIN = """\
using Accum = AccumOf<Plan::Element>;
struct Score {
    static constexpr bool kProgram = false, kHides = false, kUnit = true, kKeepsScore = false;
    static constexpr bool kSinks = false, kDropout = false, kGradients = false;
    __device__ __forceinline__ Score(const Params&, u32, u32) {}
    __device__ __forceinline__ Accum scaled(Accum x) const { return x; }
    __device__ __forceinline__ Accum value(Accum s, int, int) const { return s; }
    __device__ __forceinline__ Accum derivative(Accum, int, int) const { return 1; }
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

    number: int  # which one
    along: tuple[bool, bool]  # whether the entries that pairs meet in vary with the query, the key
    measured: bool  # whether the bound on its terms is known only from a run of the kernel
    words: int  # of a sum (attn/score_gradients.cuh)


@dataclass(frozen=True)
class Options:
    """What a kernel's scores know of: the problem's options and which gradients it sums."""

    program: Program | None = None
    sinks: bool = False
    dropout: bool = False
    gradients: tuple[Gradient, ...] = ()  # those that are asked for
    map_block: tuple[int, int] | None = None  # of a block map that visible() looks at
    # Scores are scaled, and statistics of rows count from there, whatever else is known of them.
    scaled: bool = False

    @classmethod
    def of(cls, problem, *, stats=False, gradients=()) -> Options:
        """Those of a problem. The statistics pass has no use for dropout, but its rows' maxima are
        of scaled scores where the backward kernel's are.
        """
        block = problem.block_map
        # Blocks of kernels divide MAP_UNIT: a block of such a map is never met in part.
        block = block if block and any(size % MAP_UNIT for size in block) else None
        scaled = problem.program is not None or problem.sinks or problem.dropout or bool(block)
        dropout = problem.dropout and not stats
        return cls(problem.program, problem.sinks, dropout, gradients, block, scaled)

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
        return "; ".join(found)

    @property
    def args(self):
        return () if self.program is None else self.program.args

    @property
    def summed(self) -> tuple[int, ...]:
        """The arguments whose gradients are summed, each once."""
        numbers = (self.program.gradients[g.number][0] for g in self.gradients)
        return tuple(dict.fromkeys(numbers))


# ---- parameters ------------------------------------------------------------------------------


def rows(options: Options, forward: bool) -> tuple[tuple[str, str], ...]:
    """What the options add to a kernel's table."""
    if not options:
        return ()
    found = [("first_batch", "word")]
    for n, arg in enumerate(options.args):
        found += _argument_rows(f"arg{n}", arg)
    if options.sinks:
        found += [("sinks", "in"), ("sinks_strides", "strides")]
    if options.dropout:
        found += [("seed", "word"), ("seed_array", "in"), ("keep_limit", "u32")]
    for n in options.summed:
        found += [(f"sums{n}", "out"), (f"notes{n}", "out"), (f"unit{n}", "in")]
        found += [(f"largest{n}", "out"), (f"first_entry{n}", "word"), (f"entries{n}", "i64")]
        if options.args[n].kind == "grid":
            found += [(f"sums{n}_strides", "strides")]
    if options.map_block:
        found += [("map_kinds", "in"), ("map_kinds_strides", "strides")]
    # backward's table has it for dk
    return (*found, ("scale", "f64")) if forward else tuple(found)


def _argument_rows(name, arg):
    if arg.kind == "scalar":
        return [(name, "word")]
    if arg.kind == "grid":
        return [(name, "in"), (f"{name}_strides", "strides")]
    parts = [f"{part}{axis}" for axis in range(arg.ndim) for part in ("size", "stride")]
    return [(name, "in"), *((f"{name}_{part}", "i64") for part in parts)]


# ---- text ------------------------------------------------------------------------------------


def text(options: Options) -> str:
    """The C++ definition of ``struct Score``."""
    if not options:
        return PLAIN
    program = options.program
    args = options.args
    parts = [*_constants(options), *_start(options), *_accessors(args)]
    value = ["return s;"] if program is None else _body(program.value)
    parts += _function("Accum value(Accum s, int i, int j)", value)
    slope = ["return 1;"] if program is None else _body(program.derivative)
    parts += _function("Accum derivative(Accum s, int i, int j)", slope)
    parts += _visible(options)
    parts += _function("Accum sink()", _sink(options))
    parts += _function("Accum keep_scale()", _keep_scale(options))
    parts += _function("Dropout dropout()", _dropout(options))
    parts += _gradients(options)
    lines = ["using Accum = AccumOf<Plan::Element>;", "struct Score {"]
    return "\n".join([*lines, *("    " + part for part in parts), "};", ""])


def _constants(options):
    program = options.program
    unit = program is None or program.derivative is constant(1.0)
    needs = any(depends(program.gradients[g.number][2], "s") for g in options.gradients)
    flags = {
        "kProgram": True,
        "kHides": _masks(options) or options.map_block is not None,
        "kUnit": unit,
        "kKeepsScore": needs,
        "kSinks": options.sinks,
        "kDropout": options.dropout,
        "kGradients": bool(options.gradients),
    }
    return [f"static constexpr bool {name} = {str(on).lower()};" for name, on in flags.items()]


def _function(head, body):
    return [f"__device__ __forceinline__ {head} const {{", *("    " + line for line in body), "}"]


def _masks(options):
    return options.program is not None and options.program.visible is not None


def _visible(options):
    """What the masks let through, and the block map where its blocks are met in part."""
    lines, expression = [], "true"
    if _masks(options):
        lines, expression = render(options.program.visible, SYMBOLS)
    if options.map_block is None:
        return _function("bool visible(int i, int j)", [*lines, f"return {expression};"])
    rows, keys = options.map_block
    strides = "p.map_kinds_strides"
    place = f"i64(i / {rows}) * {strides}.row + i64(j / {keys}) * {strides}.col"
    allowed = _function("bool allowed(int i, int j)", [f"return map_start[{place}] != 0;"])
    seen = [*lines, f"return allowed(i, j) & ({expression});"]
    return allowed + _function("bool visible(int i, int j)", seen)


def _start(options):
    """Where this head's arrays begin."""
    args = options.args
    fields = ["const Params& p;", "const u32 batch, head;"]
    inits = ["p(params)", "batch(of_batch)", "head(of_head)"]
    for n, arg in enumerate(args):
        if arg.kind == "grid":
            element = ELEMENTS[arg.dtype]
            fields.append(f"const {element}* start{n};")
            inits.append(
                f"start{n}(head_start<const {element}>(params.arg{n}, params.arg{n}_strides, "
                "params.batch_sizes, of_batch, of_head))"
            )
    if options.map_block:
        fields.append("const unsigned char* map_start;")
        inits.append(
            "map_start(head_start<const unsigned char>(params.map_kinds, params.map_kinds_strides, "
            "params.batch_sizes, of_batch, of_head))"
        )
    return [
        *fields,
        "__device__ __forceinline__ Score(const Params& params, u32 of_batch, u32 of_head)",
        "    : " + ", ".join(inits) + " {}",
        *_function("Accum scaled(Accum x)", ["return Accum(p.scale) * x;"]),
    ]


def _read(arg, place):
    if arg.dtype == "bool":
        return f"{place} != 0"
    if arg.dtype.startswith(("int", "uint")):
        return f"read_int({place})"
    return f"read<Accum>({place})"


def _result(arg):
    if arg.dtype == "bool":
        return "bool", "false"
    if arg.dtype.startswith(("int", "uint")):
        return "int", "0"
    return "Accum", "infinity<Accum>() * 0"


def _accessors(args):
    """One function an argument: its element at a place, or its number."""
    lines = []
    for n, arg in enumerate(args):
        kind, outside = _result(arg)
        if arg.kind == "scalar":
            value = f"int(p.arg{n})" if kind == "int" else f"number<Accum>(p.arg{n})"
            lines += _function(f"{kind} arg{n}()", [f"return {value};"])
        elif arg.kind == "grid":
            strides = f"p.arg{n}_strides"
            place = f"start{n}[i64(i) * {strides}.row + i64(j) * {strides}.col]"
            lines += _function(f"{kind} arg{n}(int i, int j)", [f"return {_read(arg, place)};"])
        else:
            axes = range(arg.ndim)
            head = ", ".join(f"i64 x{a}" for a in axes)
            body = [f"x{a} = wrapped(x{a}, p.arg{n}_size{a});" for a in axes]
            if arg.ndim:
                body.append(f"if ({' || '.join(f'x{a} < 0' for a in axes)}) return {outside};")
            offset = " + ".join(f"x{a} * p.arg{n}_stride{a}" for a in axes) or "0"
            place = f"static_cast<const {ELEMENTS[arg.dtype]}*>(p.arg{n})[{offset}]"
            lines += _function(f"{kind} arg{n}({head})", [*body, f"return {_read(arg, place)};"])
    return lines


def _sink(options):
    if not options.sinks:
        return ["return 0;"]
    start = "head_start<const Accum>(p.sinks, p.sinks_strides, p.batch_sizes, batch, head)"
    return [f"return *{start};"]


def _keep_scale(options):
    return [f"return {'Accum(256) / Accum(p.keep_limit)' if options.dropout else '1'};"]


def _dropout(options):
    if not options.dropout:
        return ["return {};"]
    return [
        "const u64* array = static_cast<const u64*>(p.seed_array);",
        "const u64 seed = array == nullptr ? p.seed : *array;",
        "return {seed, p.keep_limit, u32(p.first_batch) + batch, head};",
    ]


# ---- gradients -------------------------------------------------------------------------------


def _gradients(options):
    """For each gradient a struct that attn/score_gradients.cuh takes."""
    lines = []
    for gradient in options.gradients:
        n = gradient.number
        number, node, term = options.program.gradients[n]
        lines += _function(f"Accum term{n}(Accum s, int i, int j)", _body(term))
        lines += _function(f"i64 entry{n}(int i, int j)", _entry(options.args, number, node))
        lines += _gradient_struct(gradient, number)
    visits = [f"f(Gradient{g.number}{{*this}});" for g in options.gradients]
    head = "template <class F> __device__ __forceinline__ void for_each_gradient(F f) const {"
    return [*lines, head, *("    " + visit for visit in visits), "}"]


def _gradient_struct(gradient, number):
    n, call = gradient.number, "(int i, int j)"
    functions = [
        *_function("Accum term(Accum s, int i, int j)", [f"return score.term{n}(s, i, j);"]),
        *_function(f"i64 entry{call}", [f"return score.entry{n}(i, j);"]),
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
    return [
        f"struct Gradient{n} {{",
        *(
            "    " + line
            for line in (
                f"static constexpr bool {constants};",
                f"static constexpr int kWords = {gradient.words};",
                "const Score& score;",
                *functions,
            )
        ),
        "};",
    ]


def _entry(args, number, node):
    """The place of the pair's entry in the argument's own sums; -1: it has none."""
    arg = args[number]
    if arg.kind == "grid":
        strides = f"p.sums{number}_strides"
        start = f"batch_offset({strides}, p.batch_sizes, batch) + i64(head) * {strides}.head"
        start = f"i64(p.first_entry{number}) + {start}"
        return [f"return {start} + i64(i) * {strides}.row + i64(j) * {strides}.col;"]
    lines, entry = [], "0"
    for axis, index in enumerate(node.operands):
        size = f"p.arg{number}_size{axis}"
        inner, expression = render(index, SYMBOLS)
        lines.append(f"i64 x{axis};")
        lines.append(" ".join(["{", *inner, f"x{axis} = wrapped({expression}, {size});", "}"]))
        lines.append(f"if (x{axis} < 0) return -1;")
        entry = f"x{axis}" if axis == 0 else f"({entry}) * {size} + x{axis}"
    return [*lines, f"return {entry};"]


# ---- expressions -----------------------------------------------------------------------------


SYMBOLS = {"b": "int(p.first_batch + batch)", "h": "int(head)"}


def depends(node, symbol) -> bool:
    """Whether the expression can differ between two values of a symbol."""
    return any(
        x.op == "symbol" and x.value == symbol or x.op == "element" and symbol in "bhij"
        for x in ordered(node)
    )


def _body(node):
    lines, expression = render(node, SYMBOLS)
    return [*lines, f"return {expression};"]
