"""A *record*: the frozen dataclass that describes a problem, with its limits and its text forms.

An operation's problem is a subclass that lists its fields and the values that each may have. It
inherits the code that reads JSON and the words of a command line, and refuses other values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from confpred.errors import InvalidProblem, nearest

_R = TypeVar("_R", bound="Record")
#: Bytes of an element, by dtype.
ITEMSIZES: Mapping[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
#: Other names of dtypes in words, as PyTorch and others have them.
_NAMES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32"}
OTHER_NAMES: Mapping[str, str] = {**_NAMES, "fp32": "float32", **{n: n for n in ITEMSIZES}}


@dataclass(frozen=True, slots=True)
class Record:
    """Base of all problems. Fields are integers, tuples of integers, texts or booleans; one of the
    texts is ``dtype``: ``float16``, ``bfloat16`` or ``float32``.

    Attributes:
        LIMITS: smallest and largest value of every integer field; a tuple obeys it in all members.
        TUPLES: the integer fields that have a member an axis, and the axes' letters in order.
        CHOICES: the allowed texts of every text field.

    Raises:
        InvalidProblem: a field is out of range.
    """

    LIMITS: ClassVar[Mapping[str, tuple[int, int]]] = {}
    TUPLES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for name in self._fields():
            value = getattr(self, name)
            if (checked := self._checked(name, value)) is not value:
                object.__setattr__(self, name, checked)

    @classmethod
    def _checked(cls, name: str, value: object) -> object:
        """Return `value` as it is stored in the field `name`."""
        if name in cls.TUPLES:
            count = len(cls.TUPLES[name])
            members = value if isinstance(value, (tuple, list)) else (value,) * count
            if len(members) != count:
                raise InvalidProblem(name, value, f"one integer or {_several(count)}")
            return tuple(cls._integer(name, v) for v in members)
        if name in cls.LIMITS:
            return cls._integer(name, value)
        if name in cls.CHOICES:
            choices = cls.CHOICES[name]
            if not isinstance(value, str) or value not in choices:
                raise InvalidProblem(name, value, " or ".join(choices))
        elif not isinstance(value, bool):
            raise InvalidProblem(name, value, "true or false")
        return value

    @classmethod
    @cache
    def _fields(cls) -> Mapping[str, dataclasses.Field[Any]]:
        """Return the fields by name, cached, because a look-up takes as long as checking all of
        them."""
        return {field.name: field for field in dataclasses.fields(cls)}

    @classmethod
    @cache
    def column_types(cls) -> Mapping[str, str]:
        """Return the types of a table's columns by name; a tuple has a column a member."""
        types: dict[str, str] = {}
        for name, field in cls._fields().items():
            names = [f"{name}_{axis}" for axis in cls.TUPLES.get(name, ())]
            types |= dict.fromkeys(names, "int") if names else {name: str(field.type)}
        return types

    @classmethod
    def _integer(cls, name: str, value: object) -> int:
        """Return `value` as an int within limits: NumPy integers too, but no boolean, float or
        text."""
        low, high = cls.LIMITS[name]
        if type(value) is int and low <= value <= high:
            return value
        with contextlib.suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]
            if low <= number <= high and not isinstance(value, bool):
                return number
        several = f", or {_several(len(cls.TUPLES[name]))}" if name in cls.TUPLES else ""
        raise InvalidProblem(name, value, f"an integer from {low} to {high}{several}")

    if TYPE_CHECKING:

        @property
        def dtype(self) -> str: ...

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZES[self.dtype]

    @property
    def minimum_bytes(self) -> int:
        """Bytes that must cross device memory: every operand read or written once."""
        raise NotImplementedError

    @property
    def flops(self) -> int:
        """Multiplications plus additions."""
        raise NotImplementedError

    @property
    def grouping(self) -> str:
        """The sort of problem; measurements of one sort do not predict another."""
        return "any"

    @property
    def kind(self) -> str:
        """The grouping, and what else the speed of PyTorch's operator depends on."""
        return self.grouping

    def layer(self: _R) -> _R:
        """Return the part of the problem that a network's design fixes. Problems that differ only
        in what a user chooses (batch, dtype) have the same layer, and are held out of training
        together."""
        return self

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary that `from_json` accepts; tuples become lists."""
        fields = {name: getattr(self, name) for name in self._fields()}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    @classmethod
    def from_json(cls: type[_R], fields: Mapping[str, Any]) -> _R:
        """Build a problem from a mapping of field names.

        Raises:
            InvalidProblem: a field is unknown, missing or out of range.
        """
        declared = cls._fields()
        if not isinstance(fields, Mapping):
            names = ", ".join(list(declared)[:5])
            raise InvalidProblem("problem", fields, f"an object of fields such as {names}")
        for name in fields:
            if name not in declared:
                near = nearest(name, declared)
                all_of_them = near == " or ".join(declared)
                allowed = f"among {', '.join(declared)}" if all_of_them else f"such as {near}"
                raise InvalidProblem(str(name), fields[name], f"a field {allowed}")
        for name, field in declared.items():
            if field.default is dataclasses.MISSING and name not in fields:
                for other in fields:  # one that is wrong is likely why this one is missing
                    cls._checked(other, fields[other])
                low, high = cls.LIMITS[name]
                raise InvalidProblem(name, None, f"an integer from {low} to {high} (required)")
        return cls(**fields)

    @classmethod
    def parse(cls: type[_R], text: str) -> _R:
        """Build a problem from words such as ``"n=32 c=64 h=56 w=56 k=64 r=3 s=3 padding=1x2"``,
        with blanks between them.

        A tuple is one integer, or several joined by ``x`` or commas. A dtype may have PyTorch's
        names, too.

        Raises:
            InvalidProblem: a word is not ``field=value``, or `from_json` refuses the fields.
        """
        return cls.from_texts(texts_of(text))

    @classmethod
    def from_texts(cls: type[_R], texts: Mapping[str, str]) -> _R:
        """Build a problem from the texts of its fields, written as in `parse`.

        Raises:
            InvalidProblem: see `from_json`.
        """
        return cls.from_json({name: cls._value(name, text) for name, text in texts.items()})

    @classmethod
    def _value(cls, name: str, text: str) -> Any:
        if name in cls.CHOICES:
            return OTHER_NAMES.get(text.removeprefix("torch."), text) if name == "dtype" else text
        if name not in cls.LIMITS and name in cls._fields():
            return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
        if name in cls.TUPLES and re.fullmatch(r"[0-9]{1,18}([x,][0-9]{1,18})+", text):
            members = [int(part) for part in re.split("[x,]", text)]
            return members if len(members) <= len(cls.TUPLES[name]) else text
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text

    def __str__(self) -> str:
        """Return the words that `parse` reads, defaults left out."""
        words = []
        for name, field in self._fields().items():
            value = getattr(self, name)
            if value != field.default:
                words.append(f"{name}={_text(value)}")
        return " ".join(words)

    def to_texts(self) -> dict[str, str]:
        """Return the texts of all fields, which `from_texts` reads."""
        return {name: _text(getattr(self, name)) for name in self._fields()}


def texts_of(words: str) -> dict[str, str]:
    """Return the texts of the fields in words such as ``"n=32 c=64"``.

    Raises:
        InvalidProblem: a word is not ``field=value``, or a field occurs twice.
    """
    texts: dict[str, str] = {}
    for word in words.split():
        name, equals, value = word.partition("=")
        if not equals or not name or "=" in value or value.endswith((",", ";")):
            allowed = "words of the form field=value, with blanks between them"
            raise InvalidProblem("layer", word, allowed)
        if name in texts:
            raise InvalidProblem(name, value, "one value a field")
        texts[name] = value
    return texts


def _several(count: int) -> str:
    return "a pair of them" if count == 2 else f"{count} of them"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        value = value[0] if len(set(value)) == 1 else "x".join(map(str, value))
    return str(value).lower()
