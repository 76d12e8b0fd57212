"""Type checks of settings against the annotations of constructors, for configs and for calls from Python.

A range is part of the annotation, `lr: Annotated[float, Bound(">", 0), Bound("<=", 1)]`. Numbers must be finite; an
integer is a number, but 2.0 is not an integer; text is never a list.

The check is our own instead of a library's, because attention, models and objectives depend on torch only.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints


class Bound(NamedTuple):
    """A bound of a number or of the length of a list."""

    sign: Literal[">", ">=", "<", "<="]
    limit: float

    def holds(self, value: Any) -> bool:
        return _SIGNS[self.sign][0](len(value) if isinstance(value, Sequence) else value, self.limit)


_SIGNS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    ">": (operator.gt, "above"),
    ">=": (operator.ge, "of at least"),
    "<": (operator.lt, "below"),
    "<=": (operator.le, "of at most"),
}

AtLeastOne = Annotated[int, Bound(">=", 1)]
Count = Annotated[int, Bound(">=", 0)]
Seed = Annotated[int, Bound(">=", 0), Bound("<=", 2**63 - 1)]
"""A seed fits into 63 bits, as those of torch's generators do."""
Workers = Annotated[int, Bound(">=", 0), Bound("<=", 256)]
"""Processes of a data loader; more than 256 have filled the memory of a machine before they begin."""
Positive = Annotated[float, Bound(">", 0)]
NonNegative = Annotated[float, Bound(">=", 0)]
NonPositive = Annotated[float, Bound("<=", 0)]
Share = Annotated[float, Bound(">=", 0), Bound("<=", 1)]
PositiveShare = Annotated[float, Bound(">", 0), Bound("<=", 1)]
ShareBelowOne = Annotated[float, Bound(">=", 0), Bound("<", 1)]

Class = TypeVar("Class", bound=type)

_SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "text", types.NoneType: "null"}


def validated(cls: Class) -> Class:
    """Class decorator that makes a constructor raise ValueError for invalid values.

    Arguments whose annotation contains a class of this project are not checked.
    """
    initialise = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(initialise)

    @functools.wraps(initialise)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        values = signature.bind(self, *args, **kwargs).arguments
        hints = hints_of(cls)
        wrong = [
            refusal(name, values[name], hint)
            for name, hint in hints.items()
            if name in values and plain(hint) == hint and not fits(values[name], hint)
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        initialise(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[misc]
    return cls


def hints_of(constructor: Callable[..., Any]) -> Mapping[str, Any]:
    """Annotation of every argument by name, `Any` without one; `**` is the key of further arguments."""
    return {name: parameter.annotation for name, parameter in arguments_of(constructor).items()}


@functools.cache
def arguments_of(constructor: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Every argument by name; for a class of this project, `**` arguments are those of its base class."""
    initialise = constructor.__init__ if isinstance(constructor, type) else constructor
    namespace = _namespace(constructor, inspect.unwrap(initialise))
    own: dict[str, inspect.Parameter] = {}
    passed_on: Mapping[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            of_project = isinstance(constructor, type) and constructor.__module__.startswith("vsa.")
            passed_on = arguments_of(constructor.__base__) if of_project else {"**": parameter.replace(annotation=Any)}
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            own[name] = parameter.replace(annotation=_hint(inspect.unwrap(initialise), name, namespace))
    return {**passed_on, **own}


def _namespace(constructor: Any, initialise: Any) -> dict[str, Any]:
    """The names that annotations of a constructor may use, also those of base dataclasses in other modules."""
    if not dataclasses.is_dataclass(constructor):
        return getattr(initialise, "__globals__", {})
    classes = reversed(inspect.getmro(cast(type, constructor)))
    return {name: value for cls in classes for name, value in vars(sys.modules[cls.__module__]).items()}


def _hint(function: Any, name: str, namespace: dict[str, Any]) -> Any:
    alone = types.SimpleNamespace(__annotations__={name: function.__annotations__.get(name, Any)})
    try:
        return get_type_hints(alone, namespace, include_extras=True)[name]
    except NameError:
        # other projects import some types only for type checkers
        if function.__module__.startswith("vsa."):
            raise
        return Any


def plain(hint: Any) -> Any:
    """The part of an annotation that YAML can express: scalars, literals, lists and mappings; None without any."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in (Any, object):
        return Any
    if hint in _SCALARS or origin is Literal:
        return hint
    if hint is None:
        return types.NoneType
    if origin is Annotated:
        return hint if plain(args[0]) == args[0] else plain(args[0])
    if origin in (Union, types.UnionType):
        parts = [part for part in map(plain, args) if part is not None]
        return hint if parts == list(args) else functools.reduce(operator.or_, parts) if parts else None
    if _is(origin, Sequence) or _is(origin, Mapping):
        return hint if all(part is ... or plain(part) == part for part in args) else None
    return None


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain annotation allows a value; a YAML list is allowed for a tuple."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in (Any, object):
        return True
    if origin is Annotated:
        return fits(value, args[0]) and all(bound.holds(value) for bound in args[1:])
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in args)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in args)
    if _is(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(k, args[0]) and fits(v, args[1]) for k, v in value.items())
    if _is(origin, Sequence):
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            return False
        parts = args if _is(origin, tuple) and ... not in args else args[:1] * len(value)
        return len(value) == len(parts) and all(map(fits, value, parts))
    if hint in (int, float):
        kind = int if hint is int else int | float
        return isinstance(value, kind) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, hint)


def describe(hint: Any) -> str:
    """An annotation in words, as in "expected a number above 0"."""
    origin: Any = get_origin(hint)
    args: tuple[Any, ...] = get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if hint in (Any, object):
        return "any value"
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}" if len(args) > 1 else str(args[0])  # type: ignore
    if origin is Annotated:
        if [bound.sign for bound in args[1:]] == [">=", "<="]:
            return f"{describe(args[0])} from {args[1].limit} to {args[2].limit}"
        words = " and ".join(f"{_SIGNS[bound.sign][1]} {bound.limit}" for bound in args[1:])
        if _is(get_origin(args[0]), Sequence):
            return describe(args[0]).replace("a list of", f"a list {words}", 1)
        return f"{describe(args[0])} {words}"
    if origin in (Union, types.UnionType):
        parts = [part for part in args if part is not types.NoneType]
        return " or ".join(map(describe, parts)) + (", or null" if len(parts) < len(args) else "")
    if _is(origin, Mapping):
        return f"a mapping from {describe(args[0])} to {describe(args[1])}"
    if _is(origin, Sequence):
        alike = [part for part in dict.fromkeys(args) if part is not ...]
        size = f"{len(args)} " if _is(origin, tuple) and ... not in args else ""
        return f"a list of {size}values, each {' or '.join(map(describe, alike))}"
    return f"settings of {getattr(hint, '__name__', str(hint))}"


def shown(value: Any) -> str:
    """A value as YAML text."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def refusal(key: str, value: Any, hint: Any) -> str:
    """Message for a value that does not fit its annotation."""
    return f"{key}={shown(value)}: expected {describe(hint)}, got {repr(value) if value is not None else 'null'}"


def _is(origin: Any, kind: type) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


# read as this text without quotes
_PLAIN_VALUE = re.compile(r"(?!(?:null|true|false|nan|inf)$)(?:[a-z/]|\.\.?/)[\w./-]*", re.ASCII | re.IGNORECASE)


def key_value(key: str, value: object) -> str:
    """`key=value` as a word of a command line that is read back as this text, whatever characters it has."""
    text = str(value)
    if _PLAIN_VALUE.fullmatch(text):
        return f"{key}={text}"
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    text = re.sub(r"(\\*)(?='|$)", r"\1\1", text).replace("'", r"\'")
    return f"{key}='{text}'"
