"""Imports what the extra ``tune`` installs."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["MissingExtraError", "extra"]


class MissingExtraError(ModuleNotFoundError):
    """A package of the extra ``tune`` is not installed."""


def extra(module: str) -> Any:
    """Returns a module of a package that the extra ``tune`` installs.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f"{package} is not installed; pip install 'maxconv[tune]' installs it", name=package
        ) from error
