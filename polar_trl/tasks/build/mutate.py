"""List mutations of a Python file: small edits of its functions that change their behaviour, as a defect might.

Edits keep the rest of the text byte for byte. Code that runs at import only is left alone: code outside functions,
decorators, default values and annotations.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "//"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
METHODS = {
    "lower": "upper",
    "upper": "lower",
    "strip": "lstrip",
    "lstrip": "rstrip",
    "rstrip": "lstrip",
    "startswith": "endswith",
    "endswith": "startswith",
    "find": "rfind",
    "rfind": "find",
    "index": "rindex",
    "split": "rsplit",
    "rsplit": "split",
    "partition": "rpartition",
    "rpartition": "partition",
    "extend": "append",
    "union": "intersection",
    "keys": "values",
    "setdefault": "get",
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "ceil": "floor"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Bytes `start`..`end` of a file become `new`."""

    operator: str
    """The kind of edit, such as "comparison"."""
    start: int
    end: int
    old: str
    new: str
    line: int
    """From 1, of the edited place."""
    function: str
    """Dotted name of the innermost function, such as "Parser.read"."""
    outer: str
    """Name of the outermost function around it: the one whose code a judge can exchange."""
    outer_line: int
    """Its first line, decorators included."""

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


def list_edits(source: bytes) -> list[Edit]:
    """List all edits of a file, in node order; a few do not compile. Raises `SyntaxError`, `ValueError`."""
    return _Finder(source, ast.parse(source.decode("utf-8"))).edits


class _Finder(ast.NodeVisitor):
    """Walk functions and record the edits of every operator at each node."""

    def __init__(self, source: bytes, tree: ast.Module) -> None:
        self.edits: list[Edit] = []
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._names: list[str] = []
        self._functions: list[Function] = []
        self.visit(tree)

    # the functions around a node

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for child in node.body:
            self.visit(child)
        self._names.pop()

    def _visit_function(self, node: Function) -> None:
        self._names.append(node.name)
        self._functions.append(node)
        for child in node.body:
            self.visit(child)
        self._functions.pop()
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip f-strings: positions in them are wrong before Python 3.12."""

    def generic_visit(self, node: ast.AST) -> None:
        if self._functions:
            for name, operator in OPERATORS.items():
                for start, end, new in operator(self, node):
                    self._note(name, start, end, new)
        super().generic_visit(node)

    def _note(self, operator: str, start: int, end: int, new: str) -> None:
        outer = self._functions[0]
        old = self._source[start:end].decode()
        if old == new:
            return
        first = min([outer.lineno, *(decorator.lineno for decorator in outer.decorator_list)])
        self.edits.append(
            Edit(
                operator=operator,
                start=start,
                end=end,
                old=old,
                new=new,
                line=self._source.count(b"\n", 0, start) + 1,
                function=".".join(self._names),
                outer=outer.name,
                outer_line=first,
            )
        )

    # the positions of a node

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self._source[start:end].decode()

    def length(self, start: int, pattern: bytes) -> int:
        """Return the length of a pattern's match at a position, 0 without a match."""
        match = re.compile(pattern).match(self._source, start)
        return 0 if match is None else len(match[0])

    def gap(self, left: ast.expr, right: ast.expr) -> str:
        """Return the text between two nodes."""
        return self._source[self.span(left)[1] : self.span(right)[0]].decode()

    def between(self, left: ast.expr, right: ast.expr, token: str) -> tuple[int, int] | None:
        """Find the operator between two operands, among parentheses and comments; None where it is not unique."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = re.sub(rb"#[^\n]*", lambda match: b" " * len(match[0]), self._source[start:end])
        words = rb"\s+".join(re.escape(word.encode()) for word in token.split())
        edge = rb"\b" if token[0].isalpha() else rb""
        found = list(re.finditer(edge + words + edge, gap))
        return (start + found[0].start(), start + found[0].end()) if len(found) == 1 else None


# conditions for which another operator has a better negation
_CLEARER = (ast.Constant, ast.Compare, ast.UnaryOp)
Place = tuple[int, int, str]
Operator = Callable[[_Finder, ast.AST], Iterator[Place]]


def _comparison(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            token, new = COMPARISONS[type(operator)]
            if place := finder.between(left, right, token):
                yield (*place, new)


def _arithmetic(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node.left):
        token, new = ARITHMETIC[type(node.op)]
        if place := finder.between(node.left, node.right, token):
            yield (*place, new)


def _off_by_one(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield (*finder.span(node), str(node.value + 1))


def _boolean(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield (*finder.span(node), str(not node.value))


def _and_or(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.BoolOp):
        token, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            if place := finder.between(left, right, token):
                yield (*place, new)


def _negated_condition(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(node.test, _CLEARER):
        yield (*finder.span(node.test), f"not ({finder.text(node.test)})")


def _dropped_not(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        start = finder.span(node)[0]
        yield start, start + finder.length(start, rb"not\s*"), ""


def _dropped_sign(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        start = finder.span(node)[0]
        yield start, start + finder.length(start, rb"-\s*"), ""


def _returned_none(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield (*finder.span(node), "return None")


def _lost_return(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
        yield (*finder.span(node), finder.text(node.value))


def _loop_exit(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, (ast.Break, ast.Continue)):
        yield (*finder.span(node), "continue" if isinstance(node, ast.Break) else "break")


def _augmented(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
        token, new = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
        if place := finder.between(node.target, node.value, token):
            yield (*place, new)


def _dropped_statement(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    is_store = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_store or is_call or isinstance(node, ast.AugAssign):
        assert isinstance(node, ast.stmt)
        yield (*finder.span(node), "pass")


def _swapped_arguments(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        first, second = node.args[:2]
        if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            start, end = finder.span(first)[0], finder.span(second)[1]
            yield start, end, finder.text(second) + finder.gap(first, second) + finder.text(first)


def _swapped_branches(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.IfExp) and not isinstance(node.orelse, (ast.IfExp, ast.Lambda)):
        start, end = finder.span(node.body)[0], finder.span(node.orelse)[1]
        test = finder.gap(node.body, node.test) + finder.text(node.test) + finder.gap(node.test, node.orelse)
        yield start, end, finder.text(node.orelse) + test + finder.text(node.body)


def _other_function(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        yield (*finder.span(node.func), FUNCTIONS[node.func.id])


def _other_method(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        end = finder.span(node.func)[1]
        yield end - len(node.func.attr), end, METHODS[node.func.attr]


def _dropped_bound(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None:
                yield (*finder.span(bound), "")


def _dropped_default(finder: _Finder, node: ast.AST) -> Iterator[Place]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop")):
        return
    if len(node.args) == 2 and not any(isinstance(argument, ast.Starred) for argument in node.args):
        yield finder.span(node.args[0])[1], finder.span(node.args[1])[1], ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


OPERATORS: dict[str, Operator] = {
    "comparison": _comparison,
    "arithmetic": _arithmetic,
    "off by one": _off_by_one,
    "boolean": _boolean,
    "and/or": _and_or,
    "negated condition": _negated_condition,
    "dropped not": _dropped_not,
    "dropped sign": _dropped_sign,
    "returned None": _returned_none,
    "lost return": _lost_return,
    "break/continue": _loop_exit,
    "augmented assignment": _augmented,
    "dropped statement": _dropped_statement,
    "swapped arguments": _swapped_arguments,
    "swapped branches": _swapped_branches,
    "other function": _other_function,
    "other method": _other_method,
    "dropped bound": _dropped_bound,
    "dropped default": _dropped_default,
}
"""Mutation operators by name. Each looks like a slip that people make."""
