"""What pairs cost in kernels that keep their queries: a program's functions, taken apart by what its
terms depend on (score_rows.py writes what surrounds them).
"""

from __future__ import annotations

from itertools import compress

from .score import CPP, constant, ordered, render, symbol

_TYPES = {"float": "Accum", "int": "int", "bool": "bool"}
# Whole numbers are compared with a key by their distance to the lane's first one, which then is
# computed once: what a number below -1 says of keys, -1 says too.
_ORDERS = {"less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">="}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def changes(options) -> bool:
    """Whether scores are anything but the scaled product, in units of their own."""
    return evaluates(options) and not adds(options)


def adds(options) -> bool:
    """Whether terms are added to the product, in its own units: with slopes of distances a pair then
    costs two instructions where all keys of a block are on one side.
    """
    if not (evaluates(options) and options.divisible):
        return False
    terms = _terms(options.program.value)
    writer = Writer(options, {})
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
    return evaluates(options) and Writer(options, {}).cap(options.program.value) is not None


def evaluates(options) -> bool:
    return options.program is not None and options.program.value is not symbol("s")


def _terms(node, negative=False) -> list:
    """(whether subtracted, node) of a sum's terms."""
    if node.op == "negative":
        return _terms(node.operands[0], not negative)
    if node.op not in ("add", "subtract") or node.kind != "float":
        return [(negative, node)]
    a, b = node.operands
    return _terms(a, negative) + _terms(b, negative != (node.op == "subtract"))


def roots(options):
    program = options.program
    return [] if program is None else [x for x in (program.value, program.visible) if x is not None]


class Writer:
    """One program's functions, as they are written."""

    def __init__(self, options, symbols):
        self.options, self.symbols = options, symbols
        self.fields: dict = {}  # (type, lines) of a query's value: its name
        self.own: set = set()  # names of those that differ between queries
        self.depends: dict = {}
        self.bent: dict = {}  # arguments of tanh that pairs change
        self.series = ""  # the field that holds a CappedSeries
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
        """c * tanh(s / c) as one polynomial of s, where it is all there is."""
        c = self.cap(node)
        if c is None or node is not self.options.program.value:
            return None
        self.series = self.field("CappedSeries", self._wrapped(c, "CappedSeries(p.scale, ", ")"), c)
        return f"{self.series}.at<kNear>(s)"

    def functions(self):
        """Writes all functions once; the elements that they use and a key changes."""
        program = self.options.program
        self.value, self.seen = ["return s;"], ["return true;"]
        if evaluates(self.options):
            self.value = (self.sum if adds(self.options) else self.function)(program.value)
        if program is not None and program.visible is not None:
            self.seen = self.function(program.visible)
        self.reaches = bool(self.bent or self.series)
        self.bends = self.reaches or bool(self.centres)
        self.reached = self.reach() if self.bends else ((), ())
        used = {x.value for root in roots(self.options) for x in ordered(root) if x.op == "element"}
        return [n for n in sorted(used) if self.options.args[n].along[1]]

    def reach(self):
        """(lines of reach, lines of near)"""
        if self.series:
            return ["return fabsf(s);"], [f"return {self.series}.near;"]
        lines = ["float most = 0;"]
        for x in list(self.bent):
            *inner, result = self.function(x)
            argument = result.removeprefix("return ").removesuffix(";")
            lines += ["{", *inner, f"most = fmaxf(most, fabsf({argument}));", "}"]
        if any("kNear" in line for line in lines):  # of a tanh within another's argument
            lines.insert(0, "constexpr bool kNear = true;")
        near = ["float near = kNearTanh;"]
        near += [f"near = on_one_side({x}, first, keys) ? near : -1.f;" for x in self.centres]
        return [*lines, "return most;"], [*near, "return near;"]
