"""How a CPU would cut problems into register tiles, and where tiles read them."""

from __future__ import annotations

import pytest
from tests.host.kernel_checks import AVX512, dot_kernels

from maxconv._explain import explain_choice
from maxconv._problems import parse_problem

AVX512_BF16 = dot_kernels("bfloat16")[:1] == ["avx512_bf16"]


@pytest.mark.skipif(not AVX512_BF16, reason="another unit multiplies bfloat16 here")
@pytest.mark.parametrize(
    ("conv", "words"),
    [
        # 4 KiB apart, the rows of a tile compete for sets of L1.
        ("1x7x7x2048:512x1x1", "rows of the im2col matrix are copied"),
        ("1x7x7x1984:512x1x1", "activations are read where they lie"),
        ("1x14x14x1024:512x3x3", "pixels are copied with their padding"),
    ],
)
def test_rows_that_compete_are_copied(conv: str, words: str) -> None:
    kernel, reason = explain_choice(parse_problem(conv), dtype="bfloat16")
    assert (kernel, words in reason) == ("avx512_bf16", True), reason


@pytest.mark.skipif(not AVX512, reason="tiles of this CPU have one width")
@pytest.mark.parametrize(
    ("conv", "tile"),
    [
        ("1x160x160x64:64x1x1", "6 pixels x 64 filters"),
        ("1x56x56x64:32x1x1", "14 pixels x 32 filters"),
        # Strips of image rows, which Winograd's kernel would take with other taps.
        ("1x30x30x64:128x1x5", "14 pixels x 32 filters"),
        # Rows of few pixels leave registers for more panels.
        ("1x1x1x1280:1000x1x1", "1 pixels x 64 filters"),
    ],
)
def test_tiles_of_few_pixels_have_more_filters(conv: str, tile: str) -> None:
    _, reason = explain_choice(parse_problem(conv), dtype="float32")
    assert f"register tile {tile};" in reason
