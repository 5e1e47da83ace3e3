"""The shapes of MAX's own tests of convolution and pooling: how each is called, and its result.

They are re-stated in ``max_shapes.yaml``, by the file that has them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import yaml
from tests.reference import Floats, conv_reference, conv_transpose_reference, pool_reference

if TYPE_CHECKING:
    from max.graph import TensorValue

Array = npt.NDArray[Any]

SHAPES = Path(__file__).with_name("max_shapes.yaml")


@dataclass(frozen=True)
class Case:
    """A convolution or a pooling, as MAX's graph functions take it: one of a line has an image of
    one row."""

    kind: str
    """``convolutions``, ``transposed`` or ``poolings``."""
    entry: Mapping[str, Any]
    name: str

    @functools.cached_property
    def rank(self) -> int:
        return max(2, len(self.entry["input"]) - 2)

    def per_axis(self, field: str, missing: int = 1) -> tuple[int, ...]:
        """The values of a field; ``missing`` for each axis where there are none."""
        found = self.entry.get(field, ())
        return (missing,) * (self.rank - len(found)) + tuple(found)

    @functools.cached_property
    def padding(self) -> tuple[int, ...]:
        """Before and after each axis."""
        found = self.entry.get("padding", ())
        if self.kind == "poolings":
            found = [side for side in found for _ in range(2)]
        return (0,) * (2 * self.rank - len(found)) + tuple(found)

    @functools.cached_property
    def input(self) -> tuple[int, ...]:
        batch, *sizes, channels = self.entry["input"]
        return (batch, *(1,) * (self.rank - len(sizes)), *sizes, channels)

    @functools.cached_property
    def channels(self) -> int:
        """Of the input, in a group."""
        return self.input[-1] // int(self.entry.get("groups", 1))

    @functools.cached_property
    def depth(self) -> int:
        """The length of the longest sum."""
        return math.prod(self.per_axis("filter")) * self.channels

    @functools.cached_property
    def products(self) -> int:
        """About how many a convolution multiplies."""
        pixels = math.prod(self.input[:-1]) // math.prod(self.per_axis("stride"))
        return pixels * self.depth * int(self.entry["filters"])

    @functools.cached_property
    def arrays(self) -> dict[str, Array]:
        """Input, filter and bias as the graph takes them, with results of size about 1."""
        rng = np.random.default_rng(list(self.name.encode()))
        first = "channels_first" in self.entry

        def draw(*shape: int) -> Array:
            return rng.standard_normal(shape, np.float32)

        made = {"x": self._to_front(draw(*self.input)) if first else draw(*self.input)}
        if self.kind == "poolings":
            # Below zero for the most part: a zero of padding would be the largest.
            return {"x": made["x"] - np.float32(1.5)}
        ends = [self.channels, self.entry["filters"]]
        if self.kind == "transposed":
            ends.reverse()
        filter = draw(*self.per_axis("filter"), *ends) / np.float32(math.sqrt(self.depth))
        if first or "filters_first" in self.entry:
            filter = np.moveaxis(filter, (-1, -2), (0, 1))
        made["filter"] = np.ascontiguousarray(filter)
        if "bias" in self.entry:
            made["bias"] = draw(self.entry["filters"])
        return made

    @staticmethod
    def _to_front(x: Array) -> Array:
        return np.ascontiguousarray(np.moveaxis(x, -1, 1))

    @property
    def inputs(self) -> list[str]:
        """Those of the arrays that are inputs of the graph; it holds the others."""
        return ["x"] if "constant" in self.entry else list(self.arrays)

    def call(self, values: Mapping[str, Any]) -> TensorValue:
        """Adds it to the current graph by MAX's function."""
        from max.graph import ops
        from max.graph.type import ConvInputLayout, FilterLayout

        given: dict[str, Any] = {
            "stride": self.per_axis("stride"),
            "dilation": self.per_axis("dilation"),
        }
        result: TensorValue
        if self.kind == "poolings":
            more = ["ceil_mode", "count_boundary"] if "average" in self.entry else ["ceil_mode"]
            given |= {name: self.entry[name] for name in more if name in self.entry}
            pool: Any = ops.avg_pool2d if "average" in self.entry else ops.max_pool2d
            result = pool(values["x"], self.per_axis("window"), padding=self.padding[::2], **given)
            return result
        given |= {"padding": self.padding, "bias": values.get("bias")}
        function: Any = ops.conv2d_transpose
        if self.kind == "transposed":
            given["output_paddings"] = self.per_axis("output_padding", 0)
            if "channels_first" in self.entry:
                given |= {"input_layout": ConvInputLayout.NCHW, "filter_layout": FilterLayout.CFRS}
        else:
            function = ops.conv2d if self.rank == 2 else ops.conv3d
            given["groups"] = self.entry.get("groups", 1)
            if "filters_first" in self.entry:
                layouts = {2: FilterLayout.FCRS, 3: FilterLayout.FCQRS}
                given["filter_layout"] = layouts[self.rank]
        result = function(values["x"], values["filter"], **given)
        return result

    def expected(self) -> Floats:
        """The result in float64."""
        sizes: dict[str, Any] = {
            "stride": self.per_axis("stride"),
            "dilation": self.per_axis("dilation"),
            "pad_before": self.padding[::2],
            "pad_after": self.padding[1::2],
        }
        x = self.arrays["x"]
        if self.kind == "poolings":
            return self._expected_pool(x, sizes)
        first, bias = "channels_first" in self.entry, self.arrays.get("bias")
        filter = self.arrays["filter"]
        if first or "filters_first" in self.entry:
            filter = np.moveaxis(filter, 1, -1)
        else:
            filter = np.moveaxis(filter, -1, 0)
        if self.kind == "transposed":
            sizes["output_padding"] = self.per_axis("output_padding", 0)
            x = np.moveaxis(x, 1, -1) if first else x
            y = conv_transpose_reference(x, filter, bias=bias, **sizes)
            return self._to_front(y) if first else y
        return conv_reference(x, filter, bias=bias, groups=self.entry.get("groups", 1), **sizes)

    def _expected_pool(self, x: Array, sizes: dict[str, Any]) -> Floats:
        window = self.per_axis("window")
        spans = [d * (n - 1) + 1 for d, n in zip(sizes["dilation"], window, strict=True)]
        ends = [
            size + 2 * pad for size, pad in zip(self.input[1:-1], self.padding[::2], strict=True)
        ]
        up = self.entry.get("ceil_mode", False)
        output = [
            (end - span + (stride - 1 if up else 0)) // stride + 1
            for end, span, stride in zip(ends, spans, sizes["stride"], strict=True)
        ]
        # A mean of MAX's counts whatever a window covers, also behind the padding.
        sizes["pad_after"] = [
            max(pad, (count - 1) * stride + span - pad - size)
            for pad, count, stride, span, size in zip(
                self.padding[1::2], output, sizes["stride"], spans, self.input[1:-1], strict=True
            )
        ]
        return pool_reference(
            x, window, output=output, average="average" in self.entry,
            count_boundary=self.entry.get("count_boundary", True), **sizes,
        )  # fmt: skip

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of the result, by its definition; of a pooling, which is small, the reference's."""
        if self.kind == "poolings":
            return self.expected().shape
        taps, strides, sizes = self.per_axis("filter"), self.per_axis("stride"), self.input[1:-1]
        found = []
        for i, dilation in enumerate(self.per_axis("dilation")):
            span, pads = dilation * (taps[i] - 1) + 1, sum(self.padding[2 * i : 2 * i + 2])
            if self.kind == "transposed":
                more = span - pads + self.per_axis("output_padding", 0)[i]
                found.append((sizes[i] - 1) * strides[i] + more)
            else:
                found.append((sizes[i] + pads - span) // strides[i] + 1)
        if "channels_first" in self.entry:
            return (self.input[0], self.entry["filters"], *found)
        return (self.input[0], *found, self.entry["filters"])

    def check(self, actual: Array) -> None:
        """Compares a result in float32 with the reference.

        The largest elements are among those read. In a sum of n products, whose own size is about
        1, the partial sums are of size ``sqrt(k / n)``, and each is rounded by half a unit in the
        last place at most, in any direction: together ``2**-24 * sqrt(n / 6)`` in the mean. Results
        are up to 6 of their standard deviations away, and so are their errors; the transforms of
        Winograd's method make them some four times as large. A short sum has products of up to 20,
        whose rounding is theirs.
        """
        expected = self.expected()
        assert actual.shape == expected.shape, self.name
        if self.kind == "poolings" and "average" not in self.entry:
            assert (actual == expected).all(), self.name
            return
        atol = 2.0**-24 * (24 * math.sqrt(self.terms / 6) + 20)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=self.name)

    @property
    def terms(self) -> int:
        return math.prod(self.per_axis("window")) if self.kind == "poolings" else self.depth


def load() -> list[Case]:
    document = yaml.safe_load(SHAPES.read_text(encoding="utf-8"))
    return [
        Case(kind, entry, f"{kind}: {file}: {entry}")
        for kind, files in document.items()
        for file, entries in files.items()
        for entry in entries
    ]


CASES = load()
