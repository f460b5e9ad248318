"""The part of ``struct Score`` for kernels whose lanes keep two queries for a whole piece of work
and go through blocks of keys (kernels_cu/attn/score_rows.cuh).

A program is taken apart by what its terms depend on. What no key changes is computed once a query
(`Query`); elements that neighbours can be read with are read ahead, two keys at a time (`Ahead`);
the rest is left for each pair. Only 16-bit inputs come here, whose scores are floats.
"""

from __future__ import annotations

from itertools import compress

from .score import BITS, BITS_BY_KEY, CPP, constant, ordered, render, symbol

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
_TYPES = {"float": "Accum", "int": "int", "bool": "bool"}
# Whole numbers are compared with a key by their distance to the lane's first one, which then is
# computed once: what a number below -1 says of keys, -1 says too.
_ORDERS = {"less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">="}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}

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
    writer = _Writer(options, {"b": "b", "h": "h"})
    used = writer.functions()
    total = 2 + (22 if options.packed else 12) * options.dropout
    total += 8 * max(0, len(used) + options.dropout - 1)  # addresses beside each other
    for (kind, *_), name in writer.fields.items():
        width = 4 + 3 if kind == "CappedSeries" else 1
        total += width * (2 if name in writer.own else 1)
    return total + sum(4 if options.args[n].along[0] else 2 for n in used)


def is_long(options) -> bool:
    """Whether a pair takes many instructions: reads by computed indices, integer divisions, calls
    of the mathematical library.
    """
    writer = _Writer(options, {})
    terms = [x for root in _roots(options) for x in ordered(root) if not writer.fixed(x)]
    wide = any(x.op == "element" and item_bytes(options.args[x.value]) > AHEAD_BYTES for x in terms)
    return wide or any(x.op in _LONG for x in terms)


def changes(options) -> bool:
    """Whether scores are anything but the scaled product, in units of their own."""
    return _evaluates(options) and not adds(options)


def adds(options) -> bool:
    """Whether terms are added to the product, in its own units: with slopes of distances a pair then
    costs two instructions where all keys of a block are on one side.
    """
    if not (_evaluates(options) and options.divisible):
        return False
    terms = _terms(options.program.value)
    writer = _Writer(options, {})
    products = [negative for negative, x in terms if x is symbol("s")]
    others = [x for _, x in terms if x is not symbol("s")]
    return (
        products == [False]
        and not any("s" in writer.of(x) for x in others)
        and any(writer.slope(x) for x in others)
    )


def is_capped(options) -> bool:
    """Whether scores are c * tanh(s / c), which are in units of log2 then: they never exceed the
    product, so that a look at it says how far weights can grow.
    """
    return _evaluates(options) and _Writer(options, {}).cap(options.program.value) is not None


def _evaluates(options) -> bool:
    return options.program is not None and options.program.value is not symbol("s")


def _terms(node, negative=False) -> list:
    """(whether subtracted, node) of a sum's terms."""
    if node.op == "negative":
        return _terms(node.operands[0], not negative)
    if node.op not in ("add", "subtract") or node.kind != "float":
        return [(negative, node)]
    a, b = node.operands
    return _terms(a, negative) + _terms(b, negative != (node.op == "subtract"))


class _Writer:
    """One program's functions, as they are written."""

    def __init__(self, options, symbols):
        self.options, self.symbols = options, symbols
        self.fields: dict = {}  # (type, lines) of a query's value: its name
        self.own: set = set()  # names of those that differ between queries
        self.depends: dict = {}
        self.bent: dict = {}  # arguments of tanh that pairs change
        self.caps: dict = {}  # names of the fields that hold a CappedSeries
        self.centres: dict = {}  # numbers from which distances to keys count on either side

    # ---- what depends on what ----

    def of(self, node) -> frozenset:
        if node not in self.depends:
            for x in ordered(node):
                own = frozenset()
                if x.op == "symbol":
                    own = frozenset(x.value)
                elif x.op == "element":
                    own = frozenset(compress("ij", self.options.args[x.value].along))
                self.depends[x] = own.union(*(self.depends[y] for y in x.operands))
        return self.depends[node]

    def fixed(self, node) -> bool:
        """Whether a query's value, which no key changes."""
        return not self.of(node) & {"s", "j"}

    def field(self, kind, body, node=None) -> str:
        """The name of a query's value of ``node``. ``body``: lines, the last of them an expression.
        """
        key = kind, *body
        name = self.fields.setdefault(key, f"h{len(self.fields)}")
        varying = "ib" if self.options.packed else "i"
        if node is not None and self.of(node) & set(varying):
            self.own.add(name)
        return f"q.{name}"

    def _fixed_body(self, node):
        names = {**self.symbols, "element": lambda n: f"arg{n}(i, 0)"}
        lines, expression = render(node, names)
        return [*lines, expression]

    def _wrapped(self, node, before, after):
        *lines, expression = self._fixed_body(node)
        return [*lines, f"{before}{expression}{after}"]

    def scale(self) -> str:
        return self.field("Accum", ["Accum(p.scale)"])

    # ---- a pair's terms ----

    def function(self, root):
        """Lines of a function that returns the node's value of a pair."""
        uses: dict = {}
        for x in ordered(root):
            for y in x.operands:
                uses[y] = uses.get(y, 0) + 1
        lines, texts = [], {}

        def text(node):
            found = texts.get(node)
            if found is None:
                found = self._term(node, text)
                simple = self.fixed(node) or node.op in ("symbol", "element")
                if uses.get(node, 0) > 1 and not simple:
                    kind = _TYPES[node.kind]
                    lines.append(f"const {kind} t{len(lines)} = {found};")
                    found = f"t{len(lines) - 1}"
                texts[node] = found
            return found

        expression = text(root)
        return [*lines, f"return {expression};"]

    def _term(self, node, text):
        if node is symbol("s"):
            return f"({self.scale()} * s)"
        if node is symbol("j"):
            return "int(j)"
        if node is symbol("i"):
            return "q.i"
        if node.op == "const":
            return render(node)[1]
        if self.fixed(node):
            return self.field(_TYPES[node.kind], self._fixed_body(node), node)
        if node.op == "element":
            return f"at.arg{node.value}"
        if node.op == "fetch":
            return f"fetch{node.value}({', '.join(['p', *map(text, node.operands)])})"
        return self._special(node, text) or self._plain(node, text)

    def _plain(self, node, text):
        operands = [text(x) for x in node.operands]
        joints = {"and": "({0} & {1})", "or": "({0} | {1})"}  # no branches between reads
        return joints.get(node.op, CPP[node.op]).format(*operands)

    def _special(self, node, text):
        handler = getattr(self, f"_{node.op}", None)
        if node.op in _ORDERS:
            return self._order(node)
        return handler(node, text) if handler is not None else None

    def _order(self, node):
        """j beside a whole number of the query's."""
        for (a, b), order in (
            (node.operands, _ORDERS[node.op]),
            (node.operands[::-1], _MIRRORED[_ORDERS[node.op]]),
        ):
            if a is symbol("j") and b.kind == "int" and self.fixed(b):
                bound = self.field("int", self._wrapped(b, "max_of(", ", -1)"), b)
                return f"(j.beyond {order} {bound} - j.first)"
        return None

    def _float(self, node, text):
        """float of a difference to j, without a conversion for each pair."""
        (x,) = node.operands
        if x.op == "abs":
            inner = self._difference(x.operands[0])
            return None if inner is None else f"fabsf({inner})"
        return self._difference(x)

    def _difference(self, x):
        if x.kind != "int":
            return None
        if x.op == "negative":
            inner = self._difference(x.operands[0])
            return None if inner is None else f"(-{inner})"
        other = self._beside_j(x)
        if other is None:
            return None
        return f"{'' if x.operands[1] is symbol('j') else '-'}distance({self._whole(other)}, j)"

    def _beside_j(self, x):
        """The query's number of which j is subtracted, or which is subtracted of j."""
        if x.op != "subtract" or symbol("j") not in x.operands:
            return None
        a, b = x.operands
        other = a if b is symbol("j") else b
        return other if self.fixed(other) and other.op != "const" else None

    def _whole(self, node):
        return "q.i" if node is symbol("i") else self.field("int", self._fixed_body(node), node)

    def slope(self, node):
        """(a, x) where the term is a * |x - j|, neither changed by a key; or None."""
        if node.op != "multiply":
            return None
        for a, b in (node.operands, node.operands[::-1]):
            if b.op != "float" or b.operands[0].op != "abs" or not self.fixed(a):
                continue
            x = self._beside_j(b.operands[0].operands[0])
            if x is not None:
                return a, x
        return None

    def sum(self, root):
        """Lines of a function that adds a sum's terms to the product."""
        sum, inverse = "s", self.field("Accum", ["inverse_of(fabsf(p.scale))"])
        lines = []
        for negative, term in _terms(root):
            if term is symbol("s"):
                continue
            sloped, sign = self.slope(term), "-" if negative else ""
            if sloped:
                a, x = sloped
                *before, expression = self._fixed_body(a)
                body = [*before, f"in_units({sign}{expression}, fabsf(p.scale))"]
                centre = self._whole(x)
                self.centres.setdefault(centre)
                sum = f"sloped<kNear>({sum}, {self.field('Accum', body, a)}, {centre}, j)"
            else:
                *before, result = self.function(term)
                lines += before
                sum = f"fma_of({sign}{result.removeprefix('return ')[:-1]}, {inverse}, {sum})"
        return [*lines, f"return {sum};"]

    def _divide(self, node, text):
        a, b = node.operands
        if not self.fixed(b) or self.fixed(a):
            return None
        # Where the inverse is not precise the quotient is out of range, too.
        return f"({text(a)} * {self._inverse(b)})"

    def _inverse(self, node):
        if node.op == "const":
            return render(constant(1.0 / node.value if node.value else float("inf")))[1]
        return self.field("Accum", self._wrapped(node, "inverse_of(", ")"), node)

    def _tanh(self, node, text):
        self.bent.setdefault(node.operands[0])
        return f"bent<kNear>({text(node.operands[0])})"

    def cap(self, node):
        """c where the node is c * tanh(s / c)."""
        if node.op != "multiply":
            return None
        for c, bent in (node.operands, node.operands[::-1]):
            if bent.op == "tanh" and self.fixed(c):
                x = bent.operands[0]
                if x.op == "divide" and x.operands == (symbol("s"), c):
                    return c
        return None

    def _multiply(self, node, text):
        """c * tanh(s / c), as one polynomial of s."""
        c = self.cap(node)
        if c is None:
            return None
        unit = "kLog2e" if node is self.options.program.value else "1.f"
        body = self._wrapped(c, "CappedSeries(p.scale, ", f", {unit})")
        name = self.field("CappedSeries", body, c)
        self.caps.setdefault(name)
        return f"{name}.at<kNear>(s)"

    def functions(self):
        """Writes all functions once; the elements that they use and a key changes."""
        program = self.options.program
        self.value, self.seen = ["return s;"], ["return true;"]
        if _evaluates(self.options):
            self.value = (self.sum if adds(self.options) else self.function)(program.value)
        if program is not None and program.visible is not None:
            self.seen = self.function(program.visible)
        self.reaches = bool(self.bent or self.caps)
        self.bends = self.reaches or bool(self.centres)
        self.reached = self.reach() if self.bends else ((), ())
        roots = _roots(self.options)
        used = {x.value for root in roots for x in ordered(root) if x.op == "element"}
        return [n for n in sorted(used) if self.options.args[n].along[1]]

    def reach(self):
        """(lines of reach, lines of near)"""
        if not self.bent and not self.centres and len(self.caps) == 1:
            return ["return fabsf(s);"], [f"return {next(iter(self.caps))}.near;"]
        lines = ["constexpr bool kNear = true;"] if self.bent else []
        lines += ["float most = 0;"]
        lines += [f"most = fmaxf(most, fabsf(s * {name}.slope));" for name in self.caps]
        for x in list(self.bent):
            *inner, result = self.function(x)
            argument = result.removeprefix("return ").removesuffix(";")
            lines += ["{", *inner, f"most = fmaxf(most, fabsf({argument}));", "}"]
        near = ["float near = kNearTanh;"]
        near += [f"near = {name}.near > 0 ? near : -1.f;" for name in self.caps]
        near += [f"near = on_one_side({x}, first, keys) ? near : -1.f;" for x in self.centres]
        return [*lines, "return most;"], [*near, "return near;"]


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
    writer = _Writer(options, symbols)
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
        (name,) = writer.caps
        lines += _function("const CappedSeries& series(const Query& q)", [f"return {name};"])
    if writer.bends:
        reach, near = writer.reached
        lines += _function(f"float reach({pair})", reach) if writer.reaches else []
        lines += _function("float near(const Query& q, int first, int keys)", near)
    return lines


def _roots(options):
    program = options.program
    return [] if program is None else [x for x in (program.value, program.visible) if x is not None]


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
