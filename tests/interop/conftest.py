"""Fixtures that several test modules of this folder share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the graphs that are compiled while a test runs."""
    from max.engine import InferenceSession

    names: list[str] = []
    load = InferenceSession.load

    def counted(self: InferenceSession, model: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(str(getattr(model, "name", model)))
        return load(self, model, *args, **kwargs)

    monkeypatch.setattr(InferenceSession, "load", counted)
    return names
