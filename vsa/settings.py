"""Types of settings: what a constructor's annotations allow, checked where a config is read and where Python calls.

A range stands beside its argument, `lr: Annotated[float, Gt(0), Le(1)]`. Numbers are finite, an integer is a number
but 2.0 is not an integer, and text is never a list.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

AtLeastOne = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]
ShareBelowOne = Annotated[float, Ge(0), Lt(1)]

Class = TypeVar("Class", bound=type)

_SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "text", types.NoneType: "null"}
_BOUNDS = ((Gt, "gt", "above"), (Ge, "ge", "of at least"), (Lt, "lt", "below"), (Le, "le", "of at most"))


def checked(cls: Class) -> Class:
    """Class decorator: a constructor call with an impossible value raises ValueError.

    Arguments whose annotation holds a class of ours are left to the constructor.
    """
    initialise = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(initialise)

    @functools.wraps(initialise)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        hints = hints_of(cls)
        wrong = [
            refusal(name, given[name], hint)
            for name, hint in hints.items()
            if name in given and plain(hint) == hint and not fits(given[name], hint)
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        initialise(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[misc]
    return cls


@functools.cache
def hints_of(constructor: Callable[..., Any]) -> Mapping[str, Any]:
    """Annotation of every argument by name, `Any` where there is none; `**` stands for further ones."""
    initialise = constructor.__init__ if isinstance(constructor, type) else constructor
    found = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found["**"] = Any
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            found[name] = _hint(inspect.unwrap(initialise), name)
    return found


def _hint(function: Any, name: str) -> Any:
    alone = types.SimpleNamespace(__annotations__={name: function.__annotations__.get(name, Any)})
    try:
        return get_type_hints(alone, function.__globals__, include_extras=True)[name]
    except NameError:
        # other projects import some types for type checkers only
        if function.__module__.startswith("vsa."):
            raise
        return Any


def plain(hint: Any) -> Any:
    """The part of an annotation that a YAML value can be: scalars, literals, lists and mappings; None: no part is."""
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
    """Whether a value is one that a plain annotation allows."""
    from pydantic import ValidationError

    try:
        _adapter(hint).validate_python(value)
    except ValidationError:
        return False
    return True


@functools.cache
def _adapter(hint: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(_strict(hint))


def _strict(hint: Any) -> Any:
    """The same annotation with scalars that are not converted; a list of YAML may still be a tuple."""
    from pydantic import AllowInfNan, Strict

    origin, args = get_origin(hint), get_args(hint)
    if hint is float:
        return Annotated[float, Strict(), AllowInfNan(False)]
    if hint in (bool, int, str):
        return Annotated[hint, Strict()]
    if origin is Annotated:
        return Annotated[(_strict(args[0]), *args[1:])]  # type: ignore[return-value]
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_strict, args))
    if not args or origin is Literal:
        return hint
    return origin[tuple(part if part is ... else _strict(part) for part in args)]  # type: ignore[index]


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
        bounds = {name: getattr(b, name) for b in args[1:] for kind, name, _ in _BOUNDS if isinstance(b, kind)}
        if bounds.keys() == {"ge", "le"}:
            return f"{describe(args[0])} from {bounds['ge']} to {bounds['le']}"
        words = [f"{word} {bounds[name]}" for _, name, word in _BOUNDS if name in bounds]
        return f"{describe(args[0])} {' and '.join(words)}".rstrip()
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
    """A value as it stands in YAML."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def refusal(key: str, value: Any, hint: Any) -> str:
    """What to say of a value that does not fit."""
    return f"{key}={shown(value)}: expected {describe(hint)}, got {repr(value) if value is not None else 'null'}"


def _is(origin: Any, kind: type) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)
