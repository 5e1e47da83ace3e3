"""``maxconv emulate``: runs a kernel from a PTX file on the CPU, as a description says.

The folder ``example`` has a kernel with two warps and a ring of two stages, and its description.
Under three seeds, with a timeline of the first one::

    cd python/maxconv/emulate/example
    python -m maxconv emulate ring.ptx --config ring.json --trace trace.json --plot trace.png

A description that also compares the output with a file::

    {
      "kernel": "scale_tiles",
      "block": [64],
      "seeds": [0, 1, 2],
      "arrays": {
        "x": {"dtype": "float32", "shape": [6, 128], "fill": "arange"},
        "y": {"dtype": "float32", "shape": [6, 128], "fill": "unwritten"}
      },
      "arguments": [
        {"array": "x"},
        {"array": "y"},
        {"scalar": {"type": "u32", "value": 6}},
        {"scalar": {"type": "f32", "value": 3}}
      ],
      "compare": [{"array": "y", "expected": "expected.npy", "rtol": 1e-6}]
    }

Fields, of which ``block`` and ``arguments`` are needed; ``--schema`` prints them as a JSON schema:

* ``arch`` (``sm_90a``), ``sms`` (132), ``seeds`` ([0]): the machine, one run a seed; ``relaxed``:
  rules of the ISA that the hardware or its assembler is seen to do without (``Machine``).
* ``kernel`` (the only one), ``grid``, ``block``, ``cluster`` (x first), ``shared_bytes``,
  ``budget``: the launch, and the instructions after which it is stopped.
* ``arrays``, by name: ``dtype``, ``shape`` and ``fill`` (``zeros``; ``arange``; ``poison``, the
  default: NaN, or bytes a5; ``unwritten``: poison whose reading is an error; ``{"value": v}``;
  ``{"uniform": {"low": l, "high": h, "seed": s}}``; ``integers`` likewise, both ends included), or
  ``file``, an .npy, with ``dtype`` where numpy has none of that name.
* ``arguments``, in order: ``{"array": name}``; ``{"scalar": {"type", "value"}}``;
  ``{"tiled": {...}}`` and ``{"im2col": {...}}``, with ``array`` and the fields of
  ``maxconv.tma``'s descriptors; ``{"struct": {"hex" or "size", "fields": [{"offset", "array"},
  {"offset", "type", "value"}]}}``; ``{"members": [...]}``, a struct of arguments that follow each
  other, a tensor map among them.
* ``print``, ``save`` (.npy by array, of the first seed), ``compare`` (``expected``: .npy, ``rtol``,
  ``atol``: both 0 by default).

File names are relative to the description's. ``--trace`` and ``--plot`` show what happened when
(``maxconv.emulator.trace``); ``--plot`` needs the extra ``plot``.
"""

from __future__ import annotations

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
