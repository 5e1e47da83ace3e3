"""A graph with every op compiles for a GPU that is not there, with every kind of fused work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compiled(folder: Path, *graphs: str) -> dict[str, str]:
    """Compiles graphs of ``tests/gpu/compile.py``; returns by name the Mojo that MAX made."""
    # MAX writes down nothing of a graph that its cache holds.
    places = {
        "MAXCONV_GPU_GRAPHS": str(folder / "exported"),
        "MODULAR_CACHE_DIR": str(folder / "cache"),
    }
    finished = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compile", "sm_90a", str(folder), *graphs],
        cwd=ROOT,
        env=os.environ | places,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return {
        name: (folder / f"{name}.mojo").read_text(encoding="utf-8")
        for name in finished.stdout.split()
    }


def kernels_of(folder: Path, name: str) -> tuple[list[str], list[str]]:
    """What a compiled graph runs when its model is loaded, and in each call."""
    program = (folder / f"{name}.mgp.mlir").read_text(encoding="utf-8")
    loading, running = (
        re.findall(r'dSummary = "([^"]*)"', part)
        for part in re.split(r"mef\.callable @\S+\$(?:init|exec)\(", program)[1:]
    )
    return loading, running


@pytest.mark.slow
@pytest.mark.extended
def test_every_op_compiles(tmp_path: Path) -> None:
    fusions: dict[str, str] = {}
    scaled: list[str] = []
    made = compiled(tmp_path, "fusions:bfloat16")
    assert list(made) == ["fusions_bfloat16"]
    for mojo in made.values():
        for function in re.split(r"^(?=def )", mojo, flags=re.MULTILINE):
            for op in re.findall(r"maxconv\.\w*registrations\.(\w+)\.execute", function):
                assert 'target = "gpu"' in function
                found = re.findall(r"_bind_to_fused_\w+|Epilogue\w+Functor", function)
                fusions[op] = fusions.get(op, "") + " ".join(found) + " "
            scaled += re.findall(r"registrations\.(\w+)\.execute\[[^\]]*scaled = True", function)
    # Work behind the op, of both kinds, and in front of the op that takes it.
    assert set(fusions) == {"ConvGpu", "ConvFusedInputGpu", "ConvUnfusedGpu"}
    assert not fusions["ConvUnfusedGpu"].strip()
    # One convolution of the graph has a scale; the others' kernels are spared it.
    assert scaled == ["ConvUnfusedGpu"]
    for kind in ("EpilogueComputeFunctor", "EpilogueStoreFunctor", "_bind_to_fused_compute_output"):
        assert kind in fusions["ConvGpu"]
    assert "_bind_to_fused_input" in fusions["ConvFusedInputGpu"]
    # Of the configurations for depthwise filters only the one for the filter that is there.
    (exported,) = (tmp_path / "exported").glob("*.mef")
    diagonal = re.findall(rb"\.text\.(maxconv_nvidia_sm90_diag\w+)", exported.read_bytes())
    assert len(set(diagonal)) == 1


@pytest.mark.slow
@pytest.mark.extended
def test_convolutions_of_int8_store_int8(tmp_path: Path) -> None:
    """What rounds their sums is a part of their kernels."""
    (name,) = compiled(tmp_path, "quantized:int8")
    _, running = kernels_of(tmp_path, name)
    kernels = [kernel for kernel in running if "conv" in kernel]
    assert len(kernels) == 2
    for kernel in kernels:
        assert re.search(r"Epilogue\(custom__maxconv_conv_gpu, .*mo\.round.*mo\.cast", kernel)
    elementwise = re.compile(r"mo\.(round|cast|mul|max|min)")
    assert not any(elementwise.search(kernel) for kernel in running if "conv" not in kernel)


@pytest.mark.slow
@pytest.mark.extended
def test_interleaved_convolutions_compile(tmp_path: Path) -> None:
    """With rounding to int8 as a part of their kernels; all others share theirs."""
    (mojo,) = compiled(tmp_path, "interleaved:int8").values()
    ops = re.findall(r"interleaved_registrations\.(\w+)\.execute\[target = \"gpu\"", mojo)
    assert sorted(ops) == ["ConvInterleavedGpu"] * 2 + ["ConvInterleavedUnfusedGpu"] * 2
    loading, running = kernels_of(tmp_path, "interleaved_int8")
    kernels = [kernel for kernel in running if "conv_interleaved_gpu" in kernel]
    assert len(kernels) == 2
    for kernel in kernels:
        assert re.search(r"Epilogue\(custom__maxconv_conv_inter.*mo\.round.*mo\.cast", kernel)
    # The first images are interleaved, the given filter packed and the last result put back.
    assert sum("mo.transpose" in kernel for kernel in running) == 3
    assert not any("mo.transpose" in kernel for kernel in loading)
    # No kernel of another layout is compiled.
    (exported,) = (tmp_path / "exported").glob("*.mef")
    names = re.findall(rb"\.text\.(maxconv_nvidia_\w+)", exported.read_bytes())
    assert names and all(b"generic_dp4a" in name for name in names)


@pytest.mark.slow
@pytest.mark.extended
def test_a_subgraphs_filters_are_packed_and_copied_when_the_model_is_loaded(tmp_path: Path) -> None:
    (name,) = compiled(tmp_path, "subgraph:bfloat16")
    loading, running = kernels_of(tmp_path, name)
    # Two calls, each with its filter, which is copied after it was packed.
    first, second = (i for i, kernel in enumerate(loading) if kernel == "mo.transpose")
    assert "mgp.buffer.host_to_device" in loading[first:second]
    assert "mgp.buffer.host_to_device" in loading[second:]
    assert sum("custom__maxconv_conv_unfused_gpu" in kernel for kernel in running) == 2
    assert not re.search("transpose|host_to_device|copy", " ".join(running))


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.torch
def test_what_maxs_bridge_to_pytorch_makes_compiles(tmp_path: Path) -> None:
    custom_op, block = compiled(tmp_path, "bridge:custom_op", "bridge:block").values()
    for mojo in (custom_op, block):
        assert 'ConvGpu.execute[target = "gpu"' in mojo
    # Activation, filter, bias and residual come on the GPU; scale, geometry and scalars do not.
    (operands,) = set(re.findall(r"custom__maxconv_conv_gpu : \((.*?)\) -> ", custom_op))
    places = [tensor.endswith("gpu:0>") for tensor in operands.split(", !mo.tensor")]
    assert places == [True] * 4 + [False] * 3
