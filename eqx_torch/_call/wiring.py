"""Which pullback has which recording's token, read off the module that JAX lowers.

A token that is the operand of a pullback is *proven* if, back from there, it is the result of a
recording in the same block, or has come from one through nothing but calls of private functions,
manual computations and optimisation barriers, of which XLA makes no operation that moves it. No
loop, branch, slice or entry of the program lies between. Such a token is computed once before each
time that it is used, and lies where the recording has written it.

The same block is seen when the pullback is lowered. The rest is not known before the module is
complete, so it is read at the first run of a call in it.
"""

import threading
from collections.abc import Iterable
from typing import Any

from jax.interpreters import mlir


ir: Any = mlir.ir


class Port:
    """What one lowered call has to do with tokens.

    Attributes:
        operand: which of its operands is a token, None if none is.
        first: the first of its results that is a token.
        is_proven: whether a recording's token lies where its operand does.
        wanted: the tokens that it gives, counted from `first`, which some pullback finds so.
        wiring: that of its module, None once it is known.
    """

    def __init__(self, operand: int | None, first: int) -> None:
        self.operand = operand
        self.first = first
        self.is_proven = False
        self.wanted: set[int] = set()
        self.wiring: Wiring | None = None

    def settle(self) -> None:
        """Finds out what the whole module says."""
        if self.wiring is not None:
            self.wiring.settle()
            self.wiring = None


class Wiring:
    """The calls of one module that give or take tokens."""

    def __init__(self) -> None:
        self._module: Any = None  # while something in it is to be traced
        self._ports: dict[int, Port] = {}
        self._open: dict[int, int] = {}  # pullbacks not traced yet, and which operand is a token
        self._lock = threading.Lock()

    @classmethod
    def of(cls, context: mlir.ModuleContext) -> "Wiring":
        """That of the module that is being lowered."""
        kept: Any = context.keepalives
        found = next((x for x in kept if isinstance(x, cls)), None)
        if found is None:
            found = cls()
            context.add_keepalive(found)
        return found

    def add(self, call: Any, port: Port, module: Any) -> None:
        """Takes a call that has been lowered into a module."""
        index = _callback_index(call)
        assert index is not None
        self._ports[index] = port
        if port.operand is None:
            port.wiring = self
            return
        call = call.operation
        source = call.operands[port.operand]
        if _is_result_beside(source, call) and _callback_index(_owner(source)) is not None:
            self._connect(port, [_named(source)])
        elif _may_be_traced(source, call):
            self._open[index], self._module = port.operand, module
        port.wiring = self

    def settle(self) -> None:
        """Traces what could not be traced when it was lowered."""
        with self._lock:
            if self._open:
                traced = _Traced(self._module)
                for index, operand in self._open.items():
                    port = self._ports[index]
                    self._connect(port, traced.sources(traced.calls[index], operand))
            self._module, self._open = None, {}

    def _connect(self, port: Port, sources: Iterable[tuple[int, int]] | None) -> None:
        tokens = [(self._ports.get(index), result) for index, result in sources or ()]
        if not tokens or any(source is None or n < source.first for source, n in tokens):
            return
        port.is_proven = True
        for source, result in tokens:
            assert source is not None
            source.wanted.add(result - source.first)


class _Traced:
    """A complete module: its functions, who calls them, and the callbacks in it by their index."""

    def __init__(self, module: Any) -> None:
        self.functions: dict[str, Any] = {}
        self.callers: dict[str, list[Any]] = {}
        self.calls: dict[int, Any] = {}
        pending = list(module.body.operations)
        while pending:
            op = pending.pop().operation
            index = _callback_index(op)
            if index is not None:
                self.calls[index] = op
            elif op.name == "func.func":
                self.functions[_text(op, "sym_name")] = op
            elif op.name == "func.call":
                self.callers.setdefault(_text(op, "callee"), []).append(op)
            pending.extend(inner for region in op.regions for block in region for inner in block)

    def sources(self, call: Any, operand: int) -> set[tuple[int, int]] | None:
        """The callbacks and their results that an operand may be, None if it may be another."""
        found: set[tuple[int, int]] = set()
        pending = [(call, operand)]
        for _ in range(10_000):
            if not pending:
                return found
            op, n = pending.pop()
            value = op.operands[n]
            if not _may_be_traced(value, op):
                return None
            owner = _owner(value)
            if isinstance(owner, ir.Block):
                outer, n = owner.owner.operation, value.arg_number
                sites = [outer]
                if outer.name == "func.func":
                    sites = self.callers.get(_text(outer, "sym_name"), [])
                if not sites:
                    return None
                pending.extend((site, n) for site in sites)
            elif _callback_index(owner) is not None:
                found.add(_named(value))
            elif owner.name == "stablehlo.optimization_barrier":
                pending.append((owner, value.result_number))
            else:
                body = self.functions[_text(owner, "callee")] if _is_call(owner) else owner
                *_, end = body.regions[0].blocks[0].operations
                pending.append((end.operation, value.result_number))
        return None


def _may_be_traced(value: Any, user: Any) -> bool:
    """Whether an operand is of its user's own block, and of a kind that leads on."""
    owner = _owner(value)
    if isinstance(owner, ir.Block):
        op = owner.owner.operation
        through = op.name == "sdy.manual_computation"
        private = op.name == "func.func" and _text(op, "sym_visibility") == "private"
        return owner == user.block and (through or private)
    if not _is_result_beside(value, user):
        return False
    through = owner.name in ("sdy.manual_computation", "stablehlo.optimization_barrier")
    return through or _is_call(owner) or _callback_index(owner) is not None


def _is_result_beside(value: Any, user: Any) -> bool:
    owner = _owner(value)
    return not isinstance(owner, ir.Block) and owner.block == user.block


def _owner(value: Any) -> Any:
    """The operation that a value is a result of, or the block that it is an argument of."""
    owner = value.owner
    return owner if isinstance(owner, ir.Block) else owner.operation


def _is_call(op: Any) -> bool:
    """Whether it calls a function that XLA inlines."""
    return op.name == "func.call" and "mhlo.frontend_attributes" not in op.attributes


def _named(value: Any) -> tuple[int, int]:
    index = _callback_index(_owner(value))
    assert index is not None
    return index, value.result_number


def _callback_index(op: Any) -> int | None:
    """Which of the module's callbacks an operation calls, if it does."""
    if op.name != "stablehlo.custom_call":
        return None
    attributes = op.attributes
    if "callback" not in _text(op, "call_target_name") or "mhlo.backend_config" not in attributes:
        return None
    config = attributes["mhlo.backend_config"]
    return config["index"].value if "index" in config else None


def _text(op: Any, attribute: str) -> str:
    attributes = op.attributes
    return attributes[attribute].value if attribute in attributes else ""
