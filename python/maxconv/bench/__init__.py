"""``maxconv bench``: convolutions timed against MAX's own and torch, in turns, in one process.

How it measures, and how to read what it prints, is in ``benchmarks/protocol.md``.
"""

from __future__ import annotations

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
