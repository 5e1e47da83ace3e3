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


@pytest.fixture(scope="session")
def torch_graphs() -> None:
    """Compiles in one go the graphs of PyTorch's rarer signatures.

    Each alone would take MAX half a minute, most of it the same for all. The commonest, of two
    dimensions and float32, is left to the first call that needs it.
    """
    import torch
    from max.driver import CPU
    from max.engine import InferenceSession
    from max.graph import Module

    from maxconv.library import library_path
    from maxconv.torch import _engine

    single, brain, half = torch.float32, torch.bfloat16, torch.float16
    signatures = {
        "signal": _engine.Signature(1, single, single),
        "volume": _engine.Signature(3, single, single),
        "brain": _engine.Signature(2, brain, brain),
        "half": _engine.Signature(2, half, half),
        "wide_bias": _engine.Signature(1, brain, single),
        "scaled": _engine.Signature(2, single, single, out_dtype=brain, scaled=True),
    }
    module = Module()
    for name, signature in signatures.items():
        _engine._graph(signature, name, module)
    session = InferenceSession(devices=[CPU()])
    models = session.load_all(module, custom_extensions=[library_path()])
    for name, signature in signatures.items():
        assert signature not in _engine._models
        _engine._models[signature] = models[name]
