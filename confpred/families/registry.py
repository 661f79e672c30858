"""The registry of kernel families.

It has the families of every module in a folder beside this file, those of libraries, and those of
the modules that the environment variable ``CONFPRED_FAMILIES`` names, separated by commas. A module
defines ``FAMILY``, or ``FAMILIES`` if it has several. In a module that defines neither, the Triton
kernels under ``confpred.tuned`` are families.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import confpred.families
from confpred.errors import InvalidInput
from confpred.families.protocol import (
    ABSENT,
    PYTORCH,
    Candidate,
    Family,
    config_dict,
)
from confpred.problem.conv import CONV
from confpred.problem.conv2d import CONVOLUTION
from confpred.problem.operation import Operation
from confpred.problem.record import Record

PLUGINS = "CONFPRED_FAMILIES"
#: Modules whose families are libraries' algorithms and products; they import kernels'
#: descriptions, so they are not beside this file.
_LIBRARIES = (
    "confpred.cudnn.family",
    *(f"confpred.products.{name}" for name in ("im2col", "epilogue", "strassen")),
)
#: Families that are measured only on request: a library's plans cannot be estimated before they are
#: measured, and im2col is legal for nearly all layers but fast for few.
_ON_REQUEST = ("cudnn", "cudnn_nd", "im2col")
#: Operations that are looked up without importing any family.
_CONVOLUTIONS: tuple[Operation, ...] = (CONVOLUTION, CONV)


#: Families that `introduce` registered in this process, by name.
_introduced: dict[str, Family] = {}


def families_in(module: str) -> Sequence[Family]:
    """Return the families of an importable module; none if it has none.

    Raises:
        ImportError: it cannot be imported, for whatever reason.
    """
    try:
        imported = importlib.import_module(module)
    except ImportError:
        raise
    except Exception as error:  # what a user's module raises
        raise ImportError(f"{type(error).__name__}: {error}") from error
    if hasattr(imported, "FAMILIES") or hasattr(imported, "FAMILY"):
        return getattr(imported, "FAMILIES", None) or (imported.FAMILY,)
    kernels = (getattr(value, "family", None) for value in [*vars(imported).values()])
    return list(dict.fromkeys(family for family in kernels if isinstance(family, Family)))


def plug_in(module: str) -> Sequence[Family]:
    """Register the families of a module, in child processes too, as if the environment variable
    named it, and return them.

    Raises:
        ImportError: it cannot be imported.
        InvalidInput: see `all_families`.
    """
    named = list(filter(None, os.environ.get(PLUGINS, "").split(",")))
    os.environ[PLUGINS] = ",".join(dict.fromkeys([*named, module]))
    _forget()
    names = [family.name for family in families_in(module)]
    return [all_families()[name] for name in names]


def introduce(family: Family) -> None:
    """Register a family that no module lists in this process, such as that of a Triton kernel; a
    family of the same name and configs stays.

    Raises:
        InvalidInput: another family has its name.
    """
    existing = all_families().get(family.name)
    if existing is None:
        _introduced[family.name] = family
        _forget()
    elif not np.array_equal(existing.configs, family.configs):
        raise InvalidInput("name", family.name, "a name that no other kernel has")


def _forget() -> None:
    for cached in (all_families, all_operations, family_named, config_of, config_ids):
        cached.cache_clear()


@cache
def _packaged() -> dict[str, Family]:
    """Return the families of this package by name, in the order of their names."""
    package = confpred.families
    modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    names = (*(info.name for info in modules), *_LIBRARIES)
    packaged = [family for name in names for family in families_in(name)]
    return {f.name: f for f in sorted(packaged, key=lambda f: f.name)}


def is_extended(operation: str) -> bool:
    """Return whether a family that is not this package's computes the operation of this name."""
    others = (family for name, family in all_families().items() if name not in _packaged())
    return operation in (family.operation.name for family in others)


@cache
def all_families() -> MappingProxyType[str, Family]:
    """Return every family by name, this package's first, in the order of their names.

    Raises:
        InvalidInput: a plug-in cannot be imported, has no ``FAMILY``, or takes a name that is used.
    """
    by_name = dict(_packaged())
    for module in filter(None, os.environ.get(PLUGINS, "").split(",")):
        try:
            families = families_in(module)
            if not families:
                raise AttributeError(f"module {module!r} has no attribute 'FAMILY'")
        except (ImportError, AttributeError) as error:
            allowed = f"a module that can be imported and defines FAMILY ({error})"
            raise InvalidInput(PLUGINS, module, allowed) from error
        for family in families:
            if not isinstance(family, Family) or family.name in by_name:
                allowed = "a module whose FAMILY is a kernel family of a new name"
                raise InvalidInput(PLUGINS, module, allowed)
            by_name[family.name] = family
    return MappingProxyType(by_name | {n: f for n, f in _introduced.items() if n not in by_name})


@cache
def family_named(name: str) -> Family | None:
    """Return the family called `name`; None if there is none.

    A folder's families are called as the folder, and mostly as the module: ``grouped_wgrad`` is
    looked for in ``grouped/grouped_wgrad.py`` first. So a process that needs one family imports
    few modules.
    """
    if name == PYTORCH:
        return None
    package = confpred.families
    folder = Path(package.__path__[0], name.partition("_")[0])
    modules = [info.name for info in pkgutil.iter_modules([str(folder)])]
    parts = set(name.split("_"))
    for module in sorted(modules, key=lambda stem: -len(parts.intersection(stem.split("_")))):
        for family in families_in(f"{package.__name__}.{folder.name}.{module}"):
            if family.name == name:
                return family
    return all_families().get(name)


def family_of(candidate: Candidate) -> Family:
    """Return the family of a candidate that is one of a family's configs."""
    return family_named(candidate.provider) or all_families()[candidate.provider]


def families_of(problem: Record) -> dict[str, Family]:
    """Return the families of `problem`'s operation, by name."""
    return {n: f for n, f in all_families().items() if f.operation.problem is type(problem)}


def kernels_of(problem: Record) -> dict[str, Family]:
    """Return the families of `problem`'s operation that are measured, and estimated without a
    model, unless the caller names families."""
    return {n: f for n, f in families_of(problem).items() if n not in _ON_REQUEST}


@cache
def all_operations() -> dict[str, Operation]:
    """Return every operation that some family computes, and convolution of any rank, by name."""
    computed = (family.operation for family in all_families().values())
    return {operation.name: operation for operation in (*computed, CONV)}


def operation_named(name: object) -> Operation:
    """Return the operation called `name`.

    Raises:
        InvalidInput: no family computes one of that name.
    """
    for operation in _CONVOLUTIONS:
        if operation.name == name:
            return operation
    if isinstance(name, str) and name in all_operations():
        return all_operations()[name]
    raise InvalidInput("operation", name, " or ".join(all_operations()))


def operation_of(problem: Record) -> Operation:
    """Return the operation that `problem` is a problem of.

    Raises:
        InvalidInput: no family computes such problems.
    """
    for operation in _CONVOLUTIONS:
        if operation.problem is type(problem):
            return operation
    for operation in all_operations().values():
        if operation.problem is type(problem):
            return operation
    records = " or ".join(o.problem.__name__ for o in all_operations().values())
    raise InvalidInput("problem", problem, f"a {records}")


@lru_cache(maxsize=8_192)
def config_of(candidate: Candidate) -> Mapping[str, int]:
    """Return a candidate's config by field name; empty where its provider has no fields."""
    family = family_named(candidate.provider)
    return MappingProxyType({} if family is None else config_dict(family, candidate.config_id))


def config_words(candidate: Candidate) -> str:
    """Return a candidate's config as the ``config`` column of measurements holds it, such as
    ``"block_n=2 block_q=28 ..."``; empty where its provider has no fields."""
    config = config_of(candidate)
    return _words(config, config.values())


@cache
def config_ids(provider: str) -> Mapping[str, int]:
    """Return the number of each config of a provider by its `config_words`."""
    family = family_named(provider)
    if family is None:
        return {"": 0}
    names: Any = family.configs.dtype.names
    return {_words(names, row): number for number, row in enumerate(family.configs.tolist())}


def _words(names: Iterable[str], values: Iterable[int]) -> str:
    pairs = zip(names, values, strict=True)
    return " ".join([f"{name}={value}" for name, value in pairs if value != ABSENT])
