"""The registry of kernel families: every module of this package that defines ``FAMILY``."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import MappingProxyType

from confpred.families.base import Family, KernelSource, Launch, config_dict
from confpred.measurement import config_text

__all__ = ["Family", "KernelSource", "Launch", "all_families", "config_dict", "config_texts"]


@cache
def all_families() -> MappingProxyType[str, Family]:
    """Every family by name, in the order of their names."""
    found: dict[str, Family] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda i: i.name):
        family = getattr(importlib.import_module(f"{__name__}.{info.name}"), "FAMILY", None)
        if family is not None:
            found[family.name] = family
    return MappingProxyType(found)


@cache
def config_texts(family: str) -> tuple[str, ...]:
    """Each row of a family's config table as the ``config`` column of measurements holds it."""
    table = all_families()[family]
    return tuple(config_text(config_dict(table, row)) for row in range(len(table.configs)))
