"""The Jinja environment of chat templates, which are foreign code and may come with a request.

Owns one rule: no text, list or number that a template makes is larger than a limit. Its size is
computed before it is made, so that a few characters of Jinja cannot fill the memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from functools import wraps
from string import Formatter
from typing import Any, NoReturn

import jinja2
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_LENGTH = 2**24
"""Characters of a text, elements of a list."""
MAX_BITS = 2**14
"""Of a number that is calculated with."""
_MAX_DIGITS = 4300  # what Python reads and prints
_MAX_INDENT = 16
_PRINTF_WIDTH = re.compile(r"[%)][-#0 +]*([\d.*]*)")
_NUMBER = re.compile(r"\d+")


def check_length(length: int) -> None:
    """Raises OverflowError for more than the limit."""
    if length > MAX_LENGTH:
        raise OverflowError(f"a result longer than {MAX_LENGTH}")


def bounded_join(parts: Iterable[str]) -> str:
    """The texts in one. Raises OverflowError as soon as they are too long together."""
    taken: list[str] = []
    length = 0
    for part in parts:
        length += len(part)
        check_length(length)
        taken.append(part)
    return "".join(taken)


def printed_length(value: Any) -> int:
    """At least the characters that str() would take; anything beyond the limit may be cut short.

    A part that is held many times counts as often: printing would repeat it.
    """
    total, todo = 0, [value]
    while todo and total <= MAX_LENGTH:
        item = todo.pop()
        if isinstance(item, Namespace):
            item = item._Namespace__attrs
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3 + 2
        elif isinstance(item, Collection):
            total += 16 + 16 * len(item)  # more than brackets and commas: visits take time, too
            todo.extend(item)
            if isinstance(item, Mapping):
                todo.extend(item.values())
        else:
            total += 32
    return total


def _text(value: Any) -> Any:
    """What a filter works on: text, or a value printed."""
    if isinstance(value, str | bytes):
        return value
    check_length(printed_length(value))
    return str(value)


def _padded(value: Any, width: int = 80, *_: Any) -> int:
    return max(printed_length(value), width)


def _replaced(value: Any, old: Any, new: Any, count: Any = None) -> int:
    text = _text(value)
    return len(text) + int(text.count(_text(old))) * len(_text(new))


def _expanded(text: Any, tabsize: int = 8) -> int:
    return len(text) + len(text) * max(tabsize, 0)


def _translated(text: str, table: Any) -> int:
    values = table.values() if isinstance(table, Mapping) else table
    return len(text) * max((printed_length(value) for value in values), default=1)


def _indented(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> int:
    text = _text(value)
    step = len(width) if isinstance(width, str) else width
    return len(text) + (len(text.splitlines()) + 1) * step


def _wrapped(value: Any, width: int = 79, *rest: Any, **named: Any) -> int:
    wrapstring = named.get("wrapstring", rest[1] if len(rest) > 1 else None)
    return len(_text(value)) * (1 + len(wrapstring or "\n"))


def _widths(specs: Iterable[str]) -> int:
    """Sum of all numbers in format specs; each adds at most so many characters."""
    total = 0
    for spec in specs:
        if "{" in spec or "*" in spec:
            raise OverflowError("a format whose width is itself a value")
        total += sum(int(number) for number in _NUMBER.findall(spec))
    return total


def _percent(template: Any, *args: Any, **named: Any) -> int:
    """Of `template % values`."""
    text = template.decode("latin-1") if isinstance(template, bytes) else _text(template)
    longest = max(map(printed_length, (*args, *named.values())), default=0)
    return len(text) + _widths(_PRINTF_WIDTH.findall(text)) + text.count("%") * longest


def _formatted(template: str, *args: Any, **named: Any) -> int:
    """Of `template.format(...)`."""
    longest = max(map(printed_length, (*args, *named.values())), default=0)
    fields = [field for field in Formatter().parse(template) if field[1] is not None]
    return len(template) + _widths(spec or "" for _, _, spec, _ in fields) + len(fields) * longest


def _rounded(value: Any, precision: int = 0, method: str = "common") -> int:
    return MAX_LENGTH + 1 if abs(precision) > _MAX_DIGITS else 0


def _parsed(value: Any, *_: Any, **__: Any) -> int:
    return MAX_LENGTH + 1 if printed_length(value) > _MAX_DIGITS else 0


def _summed(value: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise TypeError("sum adds numbers only")
    return 0


def _counted(value: Any, number: int, fill_with: Any = None) -> int:
    return number


_METHODS: dict[str, Callable[..., int]] = {
    "center": _padded,
    "ljust": _padded,
    "rjust": _padded,
    "zfill": _padded,
    "expandtabs": _expanded,
    "replace": _replaced,
    "translate": _translated,
    "join": lambda text, items: printed_length(items) + len(text) * len(items),
    "to_bytes": lambda number, length=1, *_, **__: length,
}
"""Methods of str, bytes and int that can make much of little: the length of their results."""

_FILTERS: dict[str, Callable[..., int]] = {
    "center": _padded,
    "replace": _replaced,
    "indent": _indented,
    "wordwrap": _wrapped,
    "format": _percent,
    "round": _rounded,
    "int": _parsed,
    "float": _parsed,
    "sum": _summed,
    "batch": _counted,
    "slice": _counted,
    **dict.fromkeys(
        (
            *("string", "safe", "upper", "lower", "title", "capitalize", "trim", "striptags"),
            *("escape", "e", "forceescape", "urlencode", "wordcount", "truncate"),
        ),
        lambda value, *_, **__: printed_length(value),
    ),
}
"""The same for filters; the last ones print a value that is no text."""

_ABSENT = ("pprint", "urlize", "xmlattr")
"""Filters that make more than they are given and that no prompt needs."""


class _Generator(CodeGenerator):
    """Compiles `a ~ b` so that it is bounded as well."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        """str() of each part, joined."""
        self.write("environment.concat(str(environment.finalize(context, x)) for x in (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with transformers' additions and bounded results."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("*", "**", "+", "%", "/", "//"))
    concat = staticmethod(bounded_join)

    def __init__(self) -> None:
        # Not optimised: that would calculate constant expressions on its own, without bounds.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            finalize=_printable,
            optimized=False,
        )
        self.filters["tojson"] = _tojson
        self.filters["join"] = _join
        for name, rule in _FILTERS.items():
            self.filters[name] = _bounded(self.filters[name], rule)
        for name in _ABSENT:
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator, or OverflowError."""
        if isinstance(left, int) and isinstance(right, int):
            bits = max(left.bit_length(), right.bit_length())
            if operator == "*":
                bits = left.bit_length() + right.bit_length()
            elif operator == "**":
                bits = left.bit_length() * right
            if bits > MAX_BITS:
                raise OverflowError(f"a number of more than {MAX_BITS} bits")
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
                    check_length(len(one) * other)
        elif operator == "+" and isinstance(left, Collection) and isinstance(right, Collection):
            check_length(len(left) + len(right))
        elif operator == "%" and isinstance(left, str | bytes):
            check_length(_percent(left, *(right if isinstance(right, tuple) else (right,))))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of a call, or OverflowError."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int) and (rule := _METHODS.get(__obj.__name__)):
            if __obj.__name__ == "join":
                args = tuple(list(items) for items in args)  # a generator is read once
            check_length(rule(owner, *args, **kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format and str.format_map as a template gets them."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        return _bounded(wrapped, lambda *args, **named: _formatted(value.__self__, *args, **named))


def _bounded(function: Callable[..., Any], rule: Callable[..., int]) -> Callable[..., Any]:
    """The function, refused where the rule says that its result would be too long."""
    takes_context = hasattr(function, "jinja_pass_arg")

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_length(rule(*args[takes_context:], **kwargs))
        return function(*args, **kwargs)

    return call


@jinja2.pass_context
def _printable(context: Any, value: Any) -> Any:
    """What `{{ value }}` is about to print. (With the context Jinja computes nothing ahead.)"""
    if not isinstance(value, str):
        check_length(printed_length(value))
    return value


@jinja2.pass_eval_context
def _join(eval_ctx: Any, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    items = list(value)
    check_length(printed_length(items) + len(items) * printed_length(d))
    joined: str = jinja2.filters.do_join(eval_ctx, items, d, attribute)
    return joined


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like transformers': no HTML escapes, unlike Jinja's own filter."""
    if indent is not None and (not isinstance(indent, int) or indent > _MAX_INDENT):
        raise OverflowError(f"tojson: indent is a number up to {_MAX_INDENT}")
    check_length(printed_length(value))
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return bounded_join(encoder.iterencode(value))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(_text(message) or "refused by the template")


def _strftime_now(form: str) -> str:
    check_length(256 * len(form))  # no field takes more
    return datetime.now().strftime(form)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
