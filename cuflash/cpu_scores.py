"""The NumPy path of calls whose options act on scores or weights: programs, sinks, dropout.

Head by head and tile by tile as in `cpu`, in float64, with x = value(scale * q @ k.T, b, h, i, j),
-inf where hidden, and the sink as a key without a value. In backward, m is what dropout keeps over
its probability:

    p  = exp(x - lse);  dv = (m * p).T @ dout;  dp = m * (dout @ v.T);  dx = p * (dp - delta)
    ds = dx * d value / d s;  dsink = -p_sink * delta;  an array's entry: the sum of dx * slope
"""

from __future__ import annotations

import numpy as np

from .blockmap import EMPTY, FULL, PARTIAL
from .cpu_rows import work_size
from .cpu_tiles import BLOCK_N, hidden_pairs, key_range, key_tiles, run, weighted_sum
from .philox import kept
from .score import evaluate

_ROWS = 256
# A block map's own blocks are the tiles where they are neither too small for NumPy nor too large.
_MAP_SIZES = range(64, 513)
_PAIRS = 1 << 21  # of a tile of block_kinds


class _Masks:
    """One query head, as far as a Tile's visible pairs go."""

    def __init__(self, problem, extras, place, h):
        self.problem, self.extras, self.h, self.place = problem, extras, h, (*place, h)
        batch = int(np.ravel_multi_index(place, problem.batch)) if place else 0
        self.b = extras.first_batch + batch


class _Head(_Masks):
    """One query head: its arrays, and the tiles of its scores."""

    def __init__(self, problem, extras, place, h, q, k, v):
        super().__init__(problem, extras, place, h)
        kv = (*place, h // problem.group)
        self.q, self.k, self.v = (x[at] for x, at in ((q, self.place), (k, kv), (v, kv)))
        self.sink = -np.inf if extras.sinks is None else float(extras.sinks[self.place])

    def tiles(self, begin, end):
        """The tiles with a visible pair past rows [begin, end)."""
        problem = self.problem
        q = self.q[begin:end].astype(np.float64)
        keys = key_range(problem.band, begin, end, problem.seqlen_k)
        for first, last in key_tiles(*keys, _tile_size(problem, 1, BLOCK_N)):
            blocks = self.blocks(begin, end, first, last)
            if blocks is not None and not blocks.any():
                continue
            tile = Tile(self, begin, end, first, last, blocks)
            if tile.hidden is None or not tile.hidden.all():
                tile.score(q)
                yield tile

    def blocks(self, begin, end, first, last):
        """The block map's kinds that rows [begin, end) and keys [first, last) meet, or None."""
        block_map = self.extras.block_map
        if block_map is None:
            return None
        size_q, size_k = block_map.block
        rows = slice(begin // size_q, -(-end // size_q))
        return block_map.kinds[self.place][rows, first // size_k : -(-last // size_k)]

    def softmax(self, begin, end, weigh=None):
        """Maximum and sum of the rows [begin, end); weigh(tile, weights, fade) sees each tile."""
        top = np.full((end - begin, 1), self.sink)
        total = np.where(top == -np.inf, 0.0, 1.0)
        for tile in self.tiles(begin, end):
            new = np.maximum(top, tile.x.max(axis=-1, keepdims=True))
            shift = np.where(new == -np.inf, 0, new)
            fade, top = np.exp(top - shift), new
            weights = np.exp(tile.x - shift)
            total = total * fade + weights.sum(axis=-1, keepdims=True)
            if weigh is not None:
                weigh(tile, weights, fade)
        return top, total


class Tile:
    """Rows [begin, end) by keys [first, last) of a head; blocks: the kinds that it meets."""

    def __init__(self, head, begin, end, first, last, blocks=None):
        self.head, self.rows, self.keys = head, slice(begin, end), slice(first, last)
        self.env = {
            "b": head.b,
            "h": head.h,
            "i": np.arange(begin, end)[:, None],
            "j": np.arange(first, last)[None, :],
            "element": self.element,
            "args": head.extras.args,
        }
        self.shape = (end - begin, last - first)
        self.hidden = hidden_pairs(head.problem.band, begin, end, first, last)
        seen = self.visible() if blocks is None or not (blocks == FULL).all() else None
        if blocks is not None and not blocks.all():
            allowed = self.allowed(blocks)
            seen = allowed if seen is None else seen & allowed
        if seen is not None:
            unseen = ~np.broadcast_to(seen, self.shape)
            self.hidden = unseen if self.hidden is None else self.hidden | unseen

    def allowed(self, blocks):
        """Which pairs lie in blocks that are not empty."""
        size_q, size_k = self.head.problem.block_map
        rows = np.arange(self.rows.start, self.rows.stop) // size_q
        keys = np.arange(self.keys.start, self.keys.stop) // size_k
        return blocks[(rows - rows[0])[:, None], keys - keys[0]] != EMPTY

    def visible(self):
        """What the options let be seen, or None for everything."""
        called, program = self.head.extras.called, self.head.problem.program
        node = called.visible if called else program.visible if program else None
        seen = None if node is None else evaluate(node, self.env)
        if called is None or called.mask_mod is None:
            return seen
        also = np.asarray(called.mask_mod(*self.place(), *called.args))
        if also.dtype != bool:
            raise TypeError(f"mask_mod: it must return booleans, but it gave {also.dtype}")
        return also if seen is None else seen & also

    def place(self):
        """b, h, i, j as the caller's functions take them."""
        return tuple(self.env[name] for name in "bhij")

    def element(self, number):
        """This tile of an argument; one row or column stands for all where its stride is 0."""
        array = self.head.extras.args[number][self.head.place]
        rows, keys = array.strides
        part = array[self.rows, self.keys]
        return part[: None if rows else 1, : None if keys else 1]

    def score(self, q):
        problem = self.head.problem
        s = problem.scale * (q @ self.head.k[self.keys].astype(np.float64).T)
        self.env["s"] = s
        self.x = s if problem.program is None else self.value()
        self.x = np.broadcast_to(self.x, self.shape)
        if self.hidden is not None:
            self.x = np.where(self.hidden, -np.inf, self.x)

    def value(self):
        called = self.head.extras.called
        if called is None:
            return evaluate(self.head.problem.program.value, self.env)
        s = evaluate(called.value, self.env)
        return s if called.score_mod is None else called.score_mod(s, *self.place(), *called.args)

    def full(self, node):
        """A node's numbers for all pairs."""
        return np.broadcast_to(evaluate(node, self.env), self.shape)

    def kept(self):
        """What the weights are multiplied by in dropout."""
        extras = self.head.extras
        seed = int(np.ravel(extras.seed)[0]) if isinstance(extras.seed, np.ndarray) else extras.seed
        at = ((x.start, x.stop) for x in (self.rows, self.keys))
        return kept(seed, self.head.b, self.head.h, *at, extras.keep) / extras.keep


def _blocks(problem):
    rows, end = _tile_size(problem, 0, _ROWS), problem.seqlen_q
    return [(begin, min(begin + rows, end)) for begin in range(0, end, rows)]


def _tile_size(problem, axis, usual):
    own = problem.block_map
    return usual if own is None or own[axis] not in _MAP_SIZES else own[axis]


def _sum(weights, rows, hidden):
    """weights @ rows, in which hidden pairs have no part."""
    hidden = None if hidden is None else hidden[None]
    out = np.empty((1, weights.shape[0], rows.shape[1]))
    return weighted_sum(weights[None], rows[None], hidden, out)[0]


def forward(problem, q, k, v, out, lse, extras):
    """As `cpu.forward`, with the operands of the problem's options."""

    def work(task, _):
        place, h, begin, end = task
        head = _Head(problem, extras, place, h, q, k, v)
        acc = np.zeros((end - begin, problem.head_dim_v))

        def weigh(tile, weights, fade):
            acc[...] *= fade
            if problem.dropout:
                weights = weights * tile.kept()
            acc[...] += _sum(weights, head.v[tile.keys].astype(np.float64), tile.hidden)

        top, total = head.softmax(begin, end, weigh)
        rows = (*head.place, slice(begin, end))
        out[rows] = np.where(top == -np.inf, 0, acc / total)
        if lse is not None:
            lse[rows] = (top + np.log(total))[:, 0]

    heads = [(p, h) for p in np.ndindex(problem.batch) for h in range(problem.num_heads)]
    tasks = [(*head, *block) for head in heads for block in _blocks(problem)]
    run(tasks, work, np.float64, work_size(problem))


def backward(problem, dout, q, k, v, out, dlse, grads, extras, dargs, dsinks):
    """As `cpu.backward`; grads is (dq, dk, dv), dargs and dsinks are written where given."""
    sums = [x for x in (*(dargs or ()), dsinks) if x is not None]
    for x in sums:
        x[...] = 0

    def work(task, _):
        place, kv_head = task
        keys = (*place, kv_head)
        dk, dv = np.zeros(k[keys].shape), np.zeros(v[keys].shape)
        for h in range(kv_head * problem.group, (kv_head + 1) * problem.group):
            head = _Head(problem, extras, place, h, q, k, v)
            for begin, end in _blocks(problem):
                rows = (*head.place, slice(begin, end))
                dlse_rows = None if dlse is None else dlse[rows]
                block = _Rows(head, begin, end, dout[rows], out[rows], dlse_rows)
                dq = block.backward(dk, dv, dargs, dsinks)
                if grads[0] is not None:
                    grads[0][rows] = dq
        for grad, value in zip(grads[1:], (dk, dv)):
            if grad is not None:
                grad[keys] = value

    # Sums over heads have one order only when one thread adds them.
    size = 0 if sums else 3 * work_size(problem)
    tasks = [(p, h) for p in np.ndindex(problem.batch) for h in range(problem.num_kv_heads)]
    run(tasks, work, np.float64, size)


class _Rows:
    """Rows [begin, end) of a head in backward."""

    def __init__(self, head, begin, end, dout, out, dlse):
        self.head, self.begin, self.end = head, begin, end
        self.top, self.total = head.softmax(begin, end)
        self.seen = np.zeros((end - begin, 1), bool)
        self.dout = dout.astype(np.float64)
        self.delta = (self.dout * out.astype(np.float64)).sum(axis=-1, keepdims=True)
        self.dlse = 0 if dlse is None else dlse.astype(np.float64)[:, None]

    def backward(self, dk, dv, dargs, dsinks):
        """Add to the sums; returns dq."""
        head, problem = self.head, self.head.problem
        q = head.q[self.begin : self.end].astype(np.float64)
        dq = np.zeros(q.shape)
        unseeing = self.top == -np.inf
        shift = np.where(unseeing, 0, self.top)
        for tile in head.tiles(self.begin, self.end):
            hidden = tile.hidden
            self.seen |= True if hidden is None else ~hidden.all(axis=-1, keepdims=True)
            if unseeing.any():
                hidden = unseeing | (np.zeros(tile.shape, bool) if hidden is None else hidden)
            p = np.exp(tile.x - shift) / self.total
            drop = tile.kept() if problem.dropout else 1.0
            if hidden is not None:
                p = np.where(hidden, 0, p)
            turned = None if hidden is None else hidden.T
            keys = tile.keys
            dv[keys] += _sum((p * drop).T, self.dout, turned)
            dp = drop * (self.dout @ head.v[keys].astype(np.float64).T)
            if problem.dropout:
                # What is dropped has no part in dp, whatever its value holds.
                dp = np.where(drop == 0, 0, dp)
            dx = p * (dp - self.delta + self.dlse)
            dx = dx if hidden is None else np.where(hidden, 0, dx)
            self.add_arguments(tile, dx, hidden, dargs)
            if problem.program is not None:
                dx = dx * tile.full(problem.program.derivative)
                dx = dx if hidden is None else np.where(hidden, 0, dx)
            dx = dx * problem.scale
            dq += _sum(dx, head.k[keys].astype(np.float64), hidden)
            dk[keys] += _sum(dx.T, q, turned)
        if dsinks is not None:
            self.add_sink(dsinks, shift)
        return dq

    def add_arguments(self, tile, dx, hidden, dargs):
        program = self.head.problem.program
        if not dargs or program is None:
            return
        for number, node, slope in program.gradients:
            target = dargs[number]
            if target is None:
                continue
            term = dx * tile.full(slope)
            term = term if hidden is None else np.where(hidden, 0, term)
            if node.op == "fetch":
                np.add.at(target, tuple(tile.full(x) for x in node.operands), term)
                continue
            place = tuple(0 if n == 1 else x for n, x in zip(target.shape, self.head.place))
            for axis in (0, 1):
                if target.shape[axis - 2] == 1:
                    term = term.sum(axis=axis, keepdims=True)
            rows = slice(None) if target.shape[-2] == 1 else tile.rows
            keys = slice(None) if target.shape[-1] == 1 else tile.keys
            target[(*place, rows, keys)] += term

    def add_sink(self, dsinks, shift):
        sink = self.head.sink
        if sink == -np.inf:
            return
        # A row without a key has out 0 for any dout: only lse depends on its sink.
        delta = np.where(self.seen, self.delta, 0) - self.dlse
        place = tuple(0 if n == 1 else x for n, x in zip(dsinks.shape, self.head.place))
        dsinks[place] -= (np.exp(sink - shift) / self.total * delta).sum()


def block_kinds(problem, extras, block, kinds):
    """Write the kinds of a call's blocks, each of block = (queries, keys) pairs.

    kinds, of uint8 (*batch or 1, Hq or 1, query blocks, key blocks), holds zeros.
    """
    size_q, size_k = block
    wide = max(size_k, _PAIRS // size_q // size_k * size_k)

    def work(task, _):
        *place, h, m = task
        masks = _Masks(problem, extras, tuple(place), h)
        begin, end = m * size_q, min((m + 1) * size_q, problem.seqlen_q)
        first, last = key_range(problem.band, begin, end, problem.seqlen_k)
        for start in range(first // size_k * size_k, last, wide):
            stop = min(start + wide, problem.seqlen_k)
            tile = Tile(masks, begin, end, start, stop)
            columns = np.arange(start, stop, size_k)
            rows, keys = end - begin, np.minimum(columns + size_k, stop) - columns
            if tile.hidden is None:
                found = np.full(len(columns), FULL)
            else:
                seen = np.add.reduceat((~tile.hidden).sum(axis=0), columns - start)
                found = np.where(seen == 0, EMPTY, np.where(seen == rows * keys, FULL, PARTIAL))
            at = columns[0] // size_k
            kinds[(*place, h, m, slice(at, at + len(columns)))] = found

    run(np.ndindex(kinds.shape[:-1]), work, np.float64, work_size(problem))
