"""The terms of expressions."""

from __future__ import annotations

import threading
import weakref

_nodes = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Node:
    """A term: equal terms are one object, so that comparing and hashing cost nothing.

    Attributes
    ----------
    op : str
        "symbol", "const", "element", "fetch", or a name in OPS.
    operands : tuple of Node
    value : object
        A symbol's name, a constant's value, an argument's number.
    kind : {"float", "int", "bool"}
    """

    __slots__ = ("op", "operands", "value", "kind", "__weakref__")

    def __new__(cls, op, operands=(), value=None, kind="float"):
        # repr tells 0.0 from -0.0, 1 from True, and makes one NaN of all.
        key = (op, tuple(map(id, operands)), repr(value), kind)
        with _lock:
            node = _nodes.get(key)
            if node is None:
                node = object.__new__(cls)
                for name, x in zip(cls.__slots__, (op, tuple(operands), value, kind)):
                    object.__setattr__(node, name, x)
                _nodes[key] = node
        return node

    def __setattr__(self, name, value):
        raise AttributeError(f"a Node is frozen: {name} cannot be set")

    def __reduce__(self):
        return Node, (self.op, self.operands, self.value, self.kind)

    def __repr__(self):
        shown = self.op if self.value is None else f"{self.op} {self.value!r}"
        return f"<{self.kind} {shown} of {len(self.operands)}>"
