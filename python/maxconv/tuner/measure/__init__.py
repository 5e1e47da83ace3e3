"""Measures candidates: right first, then how long."""

from __future__ import annotations

from .base import DISPATCHED, Measurer, Outcome, Protocol
from .cpu import CpuMeasurer
from .executors import executor_of

__all__ = ["DISPATCHED", "CpuMeasurer", "Measurer", "Outcome", "Protocol", "executor_of"]
