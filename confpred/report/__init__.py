"""Explanations and evaluations as plots and pages."""

from __future__ import annotations

from importlib.util import find_spec

from confpred.errors import MissingExtra

_PACKAGES = ("matplotlib", "jinja2")


def require_packages() -> None:
    """Check that what plots and pages need is installed, before its modules are imported.

    Raises:
        MissingExtra: a package is not installed.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingExtra(" and ".join(missing), "train")
