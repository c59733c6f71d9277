"""Turns messages, which are frozen dataclasses, into msgpack and back.

A message is sent as ``[protocol version, class name, [field values in order]]``. Fields at the end that have
their default values are left out; in most messages, these are most fields. Field types are read from the
annotations once, when the class is first used. :func:`decode` checks every value against its field's type, so
that the code that uses a decoded message never meets a wrong type. Nothing is ever unpickled.

Releases next to each other understand one another. A message only ever gains fields, at its end and with
defaults, and a field keeps its meaning. A reader ignores fields at the end that it does not know. Where that
would be wrong, the field is made with :func:`since`: a message that uses it has that protocol version, and
older readers refuse it. All other messages have :data:`FIRST_VERSION`.

Supported annotations: ``bool int float str bytes``, ``X | None``, ``list[X]``, ``tuple[X, ...]``,
``tuple[X, Y]``, ``dict[str, X]``, ``Literal["a", "b"]`` and other message classes. A field that may have one
of several message classes (``A | B``, ``A | B | None``) is sent as ``[class name, [field values]]``.
"""

from __future__ import annotations

import dataclasses
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any, Literal, TypeVar, cast, dataclass_transform

import msgpack

from wire.errors import ProtocolVersionError, WireError

PROTOCOL_VERSION = 7
"""The newest version that this release reads. Increased in a release that has a new field of
:func:`since`."""
FIRST_VERSION = 7
"""The version of messages that every release since 0.2.0 can read."""
OLDEST_PEER = 7
"""The newest version that the release before this one reads. Processes that read less are refused."""

MAX_MESSAGE_BYTES = 64 << 20
"""Our own messages are far shorter; a longer message is an attack or a bug."""

MAX_UNKNOWN_FIELDS = 32
"""How many fields of a newer release a message may have."""

T = TypeVar("T")
_brief = reprlib.Repr()
_brief.maxlevel = 2  # the default, 6 levels of 6 items each, can be 46,656 items
_Check = Callable[[Any, str], Any]
_classes: dict[str, type] = {}
_decoders: dict[type, _Check] = {}
_encoders: dict[type, Callable[[Any], list[Any]]] = {}
_version_readers: dict[type, Callable[[Any], int] | None] = {}


@dataclass_transform(frozen_default=True)
def message(cls: type[T]) -> type[T]:
    """Makes ``cls`` a frozen dataclass that :func:`encode` and :func:`decode` identify by its name."""
    made = dataclasses.dataclass(frozen=True, slots=True)(cls)
    if made.__name__ in _classes:
        raise TypeError(f"two messages are named {made.__name__}")
    _classes[made.__name__] = made
    return made


def since(version: int, default: T) -> T:
    """Makes a new field that a reader of an older protocol version must not ignore."""
    return dataclasses.field(default=default, metadata={"since": version})


def ignorable(default: T) -> T:
    """Makes a new field that an older reader may ignore."""
    return dataclasses.field(default=default, metadata={"since": FIRST_VERSION})


def encode(msg: Any) -> bytes:
    """Returns a message's bytes."""
    cls = type(msg)
    packed: bytes = msgpack.packb([version_of(msg), cls.__name__, _encoder(cls)(msg)])
    return packed


def check_peer(newest: int) -> None:
    """Raises :class:`ProtocolVersionError` if a peer, which reads versions up to ``newest``, is of a release
    that this one does not work with."""
    if newest < OLDEST_PEER:
        raise ProtocolVersionError.between(newest, OLDEST_PEER, PROTOCOL_VERSION)


def version_of(msg: Any) -> int:
    """Returns the oldest protocol version whose readers understand a message."""
    read = _version_reader(type(msg))
    return FIRST_VERSION if read is None else read(msg)


def decode(data: bytes, *expected: type[T]) -> T:
    """Returns the message in ``data``, which must have one of the ``expected`` classes.

    Raises :class:`WireError` for anything else: too long, not msgpack, another protocol version,
    an unexpected class, a missing field or a value of the wrong type. If the message class itself checks its
    values, a value out of range raises the error of that check. The :class:`WireError` shows the peer's value
    as :func:`brief` shortens it, since a deep value could cause a recursion error, and a long value would
    make a long message.
    """
    names = " or ".join(cls.__name__ for cls in expected)
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    try:
        envelope = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"expected {names}, got bytes that are not msgpack: {error}") from error
    if not isinstance(envelope, list) or len(envelope) != 3:
        raise WireError(f"expected {names}, got msgpack without the envelope [version, name, fields]")
    version, name, fields = envelope
    if type(version) is not int or not FIRST_VERSION <= version <= PROTOCOL_VERSION:
        raise ProtocolVersionError.between(brief(version), FIRST_VERSION, PROTOCOL_VERSION)
    for cls in expected:
        if cls.__name__ == name:
            made: T = _decoder(cls)(fields, cls.__name__)
            return made
    raise WireError(f"expected {names}, got {brief(name)}")


def brief(value: object) -> str:
    """Returns a value as a short text for an error: two levels, a few items per level, long texts cut."""
    return _brief.repr(value)


def _encoder(cls: type) -> Callable[[Any], list[Any]]:
    if cls not in _encoders:
        hints = typing.get_type_hints(cls)
        parts = [(operator.attrgetter(f.name), _packer_for(hints[f.name])) for f in dataclasses.fields(cls)]
        defaults = _defaults(cls)
        num_required = len(parts) - len(defaults)
        optional = [(get, default) for (get, _), default in zip(parts[num_required:], defaults, strict=True)]
        optional.reverse()

        def pack(msg: Any) -> list[Any]:
            num_fields = len(parts)
            for get, default in optional:
                if get(msg) is not default:
                    break
                num_fields -= 1
            return [
                get(msg) if pack_field is None else pack_field(get(msg))
                for get, pack_field in parts[:num_fields]
            ]

        _encoders[cls] = pack
    return _encoders[cls]


def _version_reader(cls: type) -> Callable[[Any], int] | None:
    """Returns the function that :func:`version_of` calls; None if no field of ``cls`` has its own version."""
    if cls not in _version_readers:
        _version_readers[cls] = None  # message classes may contain one another
        hints = typing.get_type_hints(cls)
        newer: list[tuple[Callable[[Any], Any], Any, int]] = [
            (operator.attrgetter(f.name), f.default, version)
            for f in dataclasses.fields(cls)
            if (version := f.metadata.get("since", FIRST_VERSION)) > FIRST_VERSION
        ]
        inner = [
            operator.attrgetter(name)
            for name, hint in hints.items()
            if any(_version_reader(one) is not None for one in _classes_in(hint))
        ]

        def read(msg: Any) -> int:
            used = (version for get, default, version in newer if get(msg) != default)
            return max((FIRST_VERSION, *used, *(_version_in(get(msg)) for get in inner)))

        _version_readers[cls] = read if newer or inner else None
    return _version_readers[cls]


def _version_in(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return max(map(_version_in, value), default=FIRST_VERSION)
    return version_of(value) if dataclasses.is_dataclass(value) else FIRST_VERSION


def _classes_in(hint: Any) -> list[type]:
    """Returns the message classes that a field of this type may contain."""
    if dataclasses.is_dataclass(hint):
        return [cast(type, hint)]
    if typing.get_origin(hint) is Literal:
        return []
    return [cls for arg in typing.get_args(hint) for cls in _classes_in(arg)]


def _defaults(cls: type) -> list[Any]:
    """Returns the default values of the last fields, which a message may leave out.

    A field with a default factory does not count, since the value that the factory makes belongs to one
    message. The fields before such a field don't count either.
    """
    defaults: list[Any] = []
    for f in reversed(dataclasses.fields(cls)):
        if f.default is dataclasses.MISSING:
            break
        defaults.append(f.default)
    return defaults[::-1]


def _alternatives(hint: Any) -> dict[str, type]:
    """Returns the message classes, by name, of a field that may have one of several; else an empty dict."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return {}
    inner = [a for a in typing.get_args(hint) if a is not type(None)]
    is_of_messages = len(inner) > 1 and all(dataclasses.is_dataclass(a) for a in inner)
    return {a.__name__: a for a in inner} if is_of_messages else {}


def _packer_for(hint: Any) -> Callable[[Any], Any] | None:
    """Returns the function that prepares a field's value for msgpack; None if msgpack takes it unchanged."""
    if _alternatives(hint):
        return _tagged
    return _plain if _holds_messages(hint) else None


def _holds_messages(hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return False
    return dataclasses.is_dataclass(hint) or any(map(_holds_messages, typing.get_args(hint)))


def _tagged(value: Any) -> Any:
    return None if value is None else [type(value).__name__, _plain(value)]


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in (int, str, float, bool, bytes) or value is None:
        return value
    if kind in (list, tuple):
        return [_plain(item) for item in value]
    if kind is dict:
        return {key: _plain(item) for key, item in value.items()}
    return _encoder(kind)(value)


def _decoder(cls: type) -> _Check:
    if cls not in _decoders:
        hints = typing.get_type_hints(cls)
        parts = [
            (f.name, _right_as_is(hints[f.name]), _check_for(hints[f.name])) for f in dataclasses.fields(cls)
        ]

        make = _maker(cls)
        defaults = _defaults(cls)
        num_required, most = len(parts) - len(defaults), len(parts) + MAX_UNKNOWN_FIELDS

        def build(value: Any, where: str) -> Any:  # fields behind the last known one are ignored
            if type(value) is not list or not num_required <= len(value) <= most:
                raise WireError(f"{where}: expected a list of {num_required} to {most} fields")
            return make(
                *[
                    item if type(item) in as_is else check(item, f"{where}.{name}")
                    for item, (name, as_is, check) in zip(value, parts, strict=False)
                ],
                *defaults[len(value) - num_required :],
            )

        _decoders[cls] = build
    return _decoders[cls]


def _maker(cls: type) -> Callable[..., Any]:
    """Returns a function that makes a message from all its fields, in order, in a third of ``cls``'s time.

    A frozen dataclass sets its fields through ``object.__setattr__``, which looks up each name. Setting the
    slots directly needs no lookup. For a class that checks its values this returns ``cls`` itself.
    """
    if hasattr(cls, "__post_init__"):
        return cls
    setters = [getattr(cls, f.name).__set__ for f in dataclasses.fields(cls)]
    names = [f"field_{i}" for i in range(len(setters))]
    calls = "".join(f"    set_{name}(made, {name})\n" for name in names)
    source = f"def make({', '.join(names)}):\n    made = new(cls)\n{calls}    return made\n"
    scope: dict[str, Any] = {"new": object.__new__, "cls": cls}
    scope |= {f"set_{name}": setter for name, setter in zip(names, setters, strict=True)}
    exec(source, scope)  # dataclasses writes its methods in the same way
    return cast(Callable[..., Any], scope["make"])


def _right_as_is(hint: Any) -> frozenset[type]:
    """Returns the types whose values fit ``hint`` without a further check.

    Most fields of most messages have such a type. For other fields the result is empty.
    """
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return frozenset[type]().union(*map(_right_as_is, typing.get_args(hint)))
    return frozenset((hint,)) if hint in (int, str, bool, bytes, float, type(None)) else frozenset()


def _check_for(hint: Any) -> _Check:
    """Returns a function that returns the decoded value for ``hint`` or raises :class:`WireError`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [a for a in args if a is not type(None)]
        alternatives = _alternatives(hint)
        if not alternatives and (len(inner) != 1 or len(args) != 2):
            raise TypeError(f"{hint}: a message's unions must be X | None or unions of message classes")
        check = _one_of(alternatives) if alternatives else _check_for(inner[0])
        return _optional(check) if type(None) in args else check
    if origin is Literal:
        return _literal(args)
    if origin is list:
        return _sequence(args[0], list)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _sequence(args[0], tuple)
    if origin is tuple:
        return _fixed(args)
    if origin is dict:
        return _mapping(args)
    if dataclasses.is_dataclass(hint):
        return _nested(cast(type, hint))
    if hint is float:
        return _float
    if hint in (int, str, bool, bytes):
        return _scalar(hint)
    raise TypeError(f"{hint} can't be part of a message")


def _nested(cls: type) -> _Check:
    def check(value: Any, where: str) -> Any:
        # The decoder is made when it is first needed, since message classes may contain one another.
        return (_decoders.get(cls) or _decoder(cls))(value, where)

    return check


def _wrong(where: str, expected: str, value: Any) -> WireError:
    return WireError(f"{where}: expected {expected}, got {type(value).__name__}")


def _scalar(kind: type) -> _Check:
    def check(value: Any, where: str) -> Any:
        if type(value) is not kind:
            raise _wrong(where, kind.__name__, value)
        return value

    return check


def _float(value: Any, where: str) -> float:
    if type(value) not in (float, int):
        raise _wrong(where, "float", value)
    return float(value)


def _optional(inner: _Check) -> _Check:
    return lambda value, where: None if value is None else inner(value, where)


def _one_of(classes: dict[str, type]) -> _Check:
    def check(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != 2 or type(value[0]) is not str:
            raise _wrong(where, "[class name, fields]", value)
        if value[0] not in classes:
            raise WireError(f"{where}: expected {' or '.join(classes)}, got {brief(value[0])}")
        return _decoder(classes[value[0]])(value[1], where)

    return check


def _literal(options: tuple[Any, ...]) -> _Check:
    def check(value: Any, where: str) -> Any:
        if not any(type(value) is type(option) and value == option for option in options):
            raise WireError(f"{where}: expected one of {', '.join(map(repr, options))}, got {brief(value)}")
        return value

    return check


def _sequence(item_hint: Any, kind: type) -> _Check:
    item_check = _check_for(item_hint)
    is_of_numbers = item_hint == tuple[int, float]

    def check(value: Any, where: str) -> Any:
        if type(value) is not list:
            raise _wrong(where, kind.__name__, value)
        if is_of_numbers and (pairs := _pairs(value)) is not None:
            return kind(pairs)
        if item_hint is int:  # long lists of token ids and block ids, checked without a call per item
            if not set(map(type, value)) <= {int}:
                wrong = next(item for item in value if type(item) is not int)
                raise _wrong(f"{where}[…]", "int", wrong)
            return kind(value)
        try:
            return kind([item_check(item, where) for item in value])
        except WireError:  # check again, to name the wrong item
            return kind(item_check(item, f"{where}[{i}]") for i, item in enumerate(value))

    return check


def _pairs(value: list[Any]) -> list[tuple[int, float]] | None:
    """Returns the items of ``value``, checked without a call per item.

    Such lists are log-probabilities, and an answer may have twenty of them per token. Returns None if any
    item is not exactly an int and a float. The general check then converts this item or names the error.
    """
    try:
        pairs = [(i, number) for i, number in value if type(i) is int and type(number) is float]
    except (TypeError, ValueError):
        return None
    return pairs if len(pairs) == len(value) else None


def _fixed(hints: tuple[Any, ...]) -> _Check:
    checks = [_check_for(hint) for hint in hints]

    def check(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != len(checks):
            raise _wrong(where, f"a list of {len(checks)}", value)
        return tuple(c(item, f"{where}[{i}]") for i, (c, item) in enumerate(zip(checks, value, strict=True)))

    return check


def _are_lists_of_ints(values: Collection[Any]) -> bool:
    return set(map(type, values)) <= {list} and set(map(type, chain.from_iterable(values))) <= {int}


def _mapping(hints: tuple[Any, Any]) -> _Check:
    if hints[0] is not str:
        raise TypeError("the keys of a message's dict must be strings")
    item_check = _check_for(hints[1])
    is_of_ids = hints[1] == tuple[int, ...]

    def check(value: Any, where: str) -> Any:
        if type(value) is not dict or not set(map(type, value)) <= {str}:
            raise _wrong(where, "dict with string keys", value)
        if is_of_ids and _are_lists_of_ints(value.values()):  # a step's tokens, without a call per request
            return {key: tuple(ids) for key, ids in value.items()}
        try:
            return {key: item_check(item, where) for key, item in value.items()}
        except WireError:  # check again, to name the wrong item
            return {key: item_check(item, f"{where}[{brief(key)}]") for key, item in value.items()}

    return check
