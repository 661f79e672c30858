"""The problems of a Triton kernel: the arguments that its configs are chosen by."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from functools import cache
from itertools import combinations
from math import prod
from typing import Any, ClassVar

from confpred.errors import InvalidInput, nearest
from confpred.problem.record import ITEMSIZES, OTHER_NAMES, Record

#: Dtypes of tensors, and the bytes of an element.
SIZES: Mapping[str, int] = {
    **ITEMSIZES,
    "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1,
    "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
_MOST = 2**31 - 1
#: The words of names in a key.
Words = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class KernelCall(Record):
    """A call of a Triton kernel. `call_record` adds a field for each name of the kernel's key: an
    integer, or a truth value as 0 or 1, or one of some words. The field ``dtype`` is that of the
    first tensor that has floating point, or else of the first one: it decides those of the others
    mostly.

    Attributes:
        KERNEL, KEY: the kernel's name, and the names of its key.
        SIZES: those of the key that are sizes: neither words nor strides, such as ``stride_x``.
        WORDS: the words of each name of the key that has words.
    """

    KERNEL: ClassVar[str] = ""
    KEY: ClassVar[tuple[str, ...]] = ()
    SIZES: ClassVar[tuple[str, ...]] = ()
    WORDS: ClassVar[Words] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return SIZES[self.dtype]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the key; flags that are 0 count as 1."""
        return tuple(max(getattr(self, name), 1) for name in self.SIZES)

    @property
    def minimum_bytes(self) -> int:
        """A scale for times, not a bound, as the sizes of each tensor are unknown: every tensor has
        all sizes but one, as those of a matrix product do; or both of two."""
        rank = min(len(self.sizes), max(2, len(self.sizes) - 1))
        return self.itemsize * sum(map(prod, combinations(self.sizes, rank)))

    @property
    def flops(self) -> int:
        """A scale for times: those of a matrix product of these sizes."""
        return 2 * prod(self.sizes)

    def layer(self) -> KernelCall:
        """Return the sizes; calls with other dtypes are held out with them."""
        return replace(self, dtype="float16")  # type: ignore[call-arg]

    def __reduce__(self) -> Any:
        values = tuple(getattr(self, name) for name in self._fields())
        return _restored, (self.KERNEL, self.KEY, self.WORDS, values)


@cache
def _record(kernel: str, key: tuple[str, ...], words: Words) -> type[KernelCall]:
    for name in key:
        if hasattr(KernelCall, name) or name == "dtype":
            raise InvalidInput("key", name, "a name that no problem has: rename the argument")
    integers = [name for name in key if name not in dict(words)]
    members = {
        "KERNEL": kernel,
        "KEY": key,
        "SIZES": tuple(name for name in integers if "stride" not in name.lower()),
        "WORDS": words,
        "LIMITS": dict.fromkeys(integers, (0, _MOST)),
        "CHOICES": {**dict(words), "dtype": tuple(SIZES)},
        "__doc__": f"A call of {kernel}.",
    }
    fields: list[Any] = [
        *((name, "int") for name in integers),
        *((name, "str", several[0]) for name, several in words),
        ("dtype", "str", "float16"),
    ]
    made: Any = make_dataclass(
        f"{kernel}_call", fields, bases=(KernelCall,), namespace=members, frozen=True, slots=True
    )
    return made  # type: ignore[no-any-return]


def call_record(
    kernel: str, key: Sequence[str], choices: Mapping[str, Sequence[object]] | None = None
) -> type[KernelCall]:
    """Return the record of the calls of a kernel with this key; the same one at each call.

    Args:
        kernel, key: its name, and the names of its key.
        choices: the values of each name of the key that has texts or dtypes.

    Raises:
        InvalidInput: a name of the key cannot be a field of a problem, or a value no word.
    """
    for name, values in (choices or {}).items():
        if name not in key:
            raise InvalidInput("choices", name, nearest(name, key))
        if not values or not all(re.fullmatch(r"[\w.+-]+", word_of(value)) for value in values):
            raise InvalidInput("choices", values, f"values of {name}: texts without blanks")
    words = {n: tuple(dict.fromkeys(map(word_of, values))) for n, values in (choices or {}).items()}
    return _record(kernel, tuple(key), tuple(words.items()))


def _restored(kernel: str, key: tuple[str, ...], words: Words, values: Any) -> KernelCall:
    return _record(kernel, key, words)(*values)


def word_of(value: object) -> str:
    """Return a text in small letters, or a dtype of PyTorch or Triton by PyTorch's name, as a field
    holds it."""
    text = str(value).removeprefix("torch.").lower()
    return OTHER_NAMES.get(text, text)


def leading(dtypes: Sequence[str]) -> str:
    """Return what the field ``dtype`` holds for tensors of these, in the order of the arguments."""
    return next((dtype for dtype in dtypes if "float" in dtype), dtypes[0])
