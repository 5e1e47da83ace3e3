"""Fixtures that several test modules of this folder share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.interop.graphs import compile_together, declared

if TYPE_CHECKING:
    from max.engine import InferenceSession, Model


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the graphs and libraries that are compiled, or loaded, while a test runs."""
    from max.engine import InferenceSession

    from maxconv import _native

    names: list[str] = []
    load = InferenceSession.load
    open_library = _native.Library.__init__

    def opened(self: _native.Library, path: Path) -> None:
        names.append(str(path))
        open_library(self, path)

    monkeypatch.setattr(_native.Library, "__init__", opened)

    def counted(self: InferenceSession, model: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(str(getattr(model, "name", model)))
        return load(self, model, *args, **kwargs)

    monkeypatch.setattr(InferenceSession, "load", counted)
    return names


def _files(request: pytest.FixtureRequest) -> list[Any]:
    """The test files of this run."""
    return [item.module for item in request.session.items if isinstance(item, pytest.Function)]


@pytest.fixture(scope="session")
def models(request: pytest.FixtureRequest, session: InferenceSession) -> dict[str, Model]:
    """The compiled graphs, by name, of all files of this run that declare any in ``GRAPHS``."""
    return compile_together(session, declared(_files(request)))


@pytest.fixture(scope="session")
def further_models(request: pytest.FixtureRequest, session: InferenceSession) -> dict[str, Model]:
    """The same of those that files declare in ``EXTENDED``."""
    return compile_together(session, declared(_files(request), "EXTENDED"))


@pytest.fixture(scope="session")
def overridden(request: pytest.FixtureRequest, session: InferenceSession) -> dict[str, Model]:
    """The same of those that files declare in ``OVERRIDDEN``."""
    return compile_together(session, declared(_files(request), "OVERRIDDEN"))
