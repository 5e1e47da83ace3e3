"""The command line: kernels from files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.documents import ROOT, blocks

from ptxemu import cli
from ptxemu._run.arrays import DTYPES, decode, encode, filled
from ptxemu._run.schema import SCHEMA, ConfigError, check

EXAMPLE = Path(cli.__file__).parent / "example"
DOCUMENT = ROOT / "docs" / "ptxemu.md"

COPY = """.version 8.5
.target sm_90a
.address_size 64
.visible .entry copy(.param .u64 x, .param .u64 y)
{
  .reg .b32 %i, %v; .reg .b64 %p, %q, %o;
  mov.u32 %i, %tid.x; ld.param.u64 %p, [x]; ld.param.u64 %q, [y];
  mul.wide.u32 %o, %i, 4; add.u64 %p, %p, %o; add.u64 %q, %q, %o;
  ld.global.b32 %v, [%p]; st.global.b32 [%q], %v;
  ret;
}
"""


def base() -> dict[str, Any]:
    return {
        "block": [32],
        "arrays": {
            "x": {"dtype": "int32", "shape": [32], "fill": "arange"},
            "y": {"dtype": "int32", "shape": [32]},
        },
        "arguments": [{"array": "x"}, {"array": "y"}],
        "print": ["y"],
    }


@pytest.fixture
def emulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a text under a description; returns the exit status and what it printed."""

    def call(document: Any, *options: str, ptx: str = COPY) -> tuple[int, str, str]:
        kernel, config = tmp_path / "kernel.ptx", tmp_path / "run.json"
        kernel.write_text(ptx)
        config.write_text(document if isinstance(document, str) else json.dumps(document))
        status = cli.main([str(kernel), "--config", str(config), *options])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_the_example(tmp_path: Path) -> None:
    """As the documentation runs it."""
    command = "ring.ptx --config ring.json"
    shown = f"python -m ptxemu {command} --trace trace.json --plot trace.png"
    assert shown in (cli.__doc__ or "")
    assert shown in DOCUMENT.read_text()
    trace, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    options = ["--trace", str(trace), "--plot", str(picture), "--json"]
    finished = subprocess.run(
        [sys.executable, "-m", "ptxemu", *command.split(), *options],
        cwd=EXAMPLE,
        capture_output=True,
        text=True,
        check=True,
    )
    results = json.loads(finished.stdout)
    assert [result["seed"] for result in results] == [0, 1, 2]
    expected = 3 * np.arange(6 * 128, dtype=np.float32).reshape(6, 128)
    for result in results:
        assert result["status"] == "ended"
        assert np.array_equal(np.array(result["arrays"]["y"]["values"]), expected)
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"warp 0", "warp 1", "TMA", "mbarrier 2048", "barrier 0"} <= names


def test_the_description_in_the_documentation(emulated: Any, tmp_path: Path) -> None:
    (document,) = [block.text for block in blocks(DOCUMENT) if block.language == "json"]
    expected = 3 * np.arange(6 * 128, dtype=np.float32).reshape(6, 128)
    np.save(tmp_path / "expected.npy", expected)
    ptx = (EXAMPLE / "ring.ptx").read_text()
    status, printed, _ = emulated(document, ptx=ptx)
    assert status == 0
    assert printed.count("y: as expected, largest difference 0") == 3
    np.save(tmp_path / "expected.npy", expected + np.where(np.arange(128) == 7, 1, 0))
    status, printed, _ = emulated(document, ptx=ptx)
    assert status == 1
    assert (
        "6 of 768 elements are wrong, largest difference 1; the first at [0, 7] is 21 and not 22"
        in printed
    )


def test_arrays_are_saved_and_read(emulated: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.arange(32, dtype=np.int32) ** 2)
    document = {**base(), "save": {"y": "out.npy"}}
    document["arrays"]["x"] = {"file": "in.npy"}
    status, printed, _ = emulated(document)
    assert status == 0
    assert "y: int32 [32]" in printed
    assert np.array_equal(np.load(tmp_path / "out.npy"), np.arange(32) ** 2)


def test_a_report_names_kind_line_and_warp(emulated: Any) -> None:
    document = {**base(), "block": [64], "seeds": [4]}
    status, printed, _ = emulated(document)
    assert status == 1
    assert "seed 4: MemoryFaultError\n  line 9 `ld.global.b32" in printed
    status, printed, _ = emulated(document, "--json")
    (result,) = json.loads(printed)
    assert result["status"] == "stopped"
    assert result["error"]["kind"] == "MemoryFaultError"
    place = result["error"]["place"]
    assert (place["line"], place["warp"], place["block"]) == (9, 1, [0, 0, 0])


def test_a_deadlock_says_where_everyone_waits(emulated: Any) -> None:
    ptx = COPY.replace("mov.u32 %i, %tid.x;", "bar.sync 1, 64; mov.u32 %i, %tid.x;")
    status, printed, _ = emulated(base(), "--json", "--seed", "0", "1", ptx=ptx)
    assert status == 1
    results = json.loads(printed)
    assert [result["error"]["kind"] for result in results] == ["DeadlockError"] * 2
    (waiting,) = results[0]["error"]["waiting"]
    assert waiting["line"] == 7
    assert waiting["for"] == "barrier 1 (32 of 64 threads have arrived)"


def test_a_kernel_that_does_not_end_is_stopped(emulated: Any) -> None:
    ptx = COPY.replace("ret;", "bra AGAIN; AGAIN: bra AGAIN;")
    status, printed, _ = emulated({**base(), "budget": 500}, ptx=ptx)
    assert status == 1
    assert "BudgetError" in printed
    assert "not ended after 500 instructions" in printed


def test_what_nothing_wrote_is_not_read(emulated: Any) -> None:
    document = base()
    document["arrays"]["x"]["fill"] = "unwritten"
    status, printed, _ = emulated(document)
    assert status == 1
    assert "RaceError" in printed
    assert "nothing has written it" in printed


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_unknown_instruction_is_refused_before_anything_runs(
    emulated: Any, options: list[str]
) -> None:
    ptx = COPY.replace("mov.u32 %i, %tid.x;", "frobnicate.b32 %i;")
    status, printed, _ = emulated(base(), *options, ptx=ptx)
    assert status == 1
    assert "line 7: frobnicate.b32 is not supported" in printed


def test_a_struct_of_arguments(emulated: Any) -> None:
    """Pointers in a struct's bytes, and a struct of pointers."""
    ptx = COPY.replace(".param .u64 x, .param .u64 y", ".param .align 8 .b8 both[16]")
    ptx = ptx.replace("[x]", "[both]").replace("[y]", "[both+8]")
    fields = [{"offset": 8, "array": "y"}, {"offset": 0, "array": "x"}]
    members = [{"array": "x"}, {"array": "y"}]
    for argument in ({"struct": {"hex": "00" * 16, "fields": fields}}, {"members": members}):
        status, printed, _ = emulated({**base(), "arguments": [argument]}, "--json", ptx=ptx)
        assert status == 0
        assert json.loads(printed)[0]["arrays"]["y"]["values"] == list(range(32))


def test_a_tensor_map(emulated: Any) -> None:
    """A box of a tensor, loaded and copied out."""
    ptx = """.version 8.5
.target sm_90a
.address_size 64
.visible .entry load(.param .align 64 .b8 map[128], .param .u64 y)
{
  .shared .align 128 .b8 room[64]; .shared .align 8 .b64 bar;
  .reg .pred %p; .reg .b32 %t, %s, %v; .reg .b64 %q, %o, %m;
  mov.u32 %t, %tid.x; setp.ne.u32 %p, %t, 0; mov.u64 %m, map; cvta.param.u64 %m, %m;
  @%p bra WAIT;
  mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 64;
  cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [room], [%m, {4, 1}], [bar];
WAIT:
  bar.sync 0;
AGAIN:
  mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0;
  @!%p bra AGAIN;
  mov.u32 %s, room; mad.lo.u32 %s, %t, 4, %s; ld.shared.b32 %v, [%s];
  ld.param.u64 %q, [y]; mul.wide.u32 %o, %t, 4; add.u64 %q, %q, %o; st.global.b32 [%q], %v;
  ret;
}
"""
    tensor = {"array": "x", "data_type": "INT32", "global_dim": [8, 4], "box_dim": [4, 4]}
    document = {
        "block": [16],
        "arrays": {
            "x": {"dtype": "int32", "shape": [4, 8], "fill": "arange"},
            "y": {"dtype": "int32", "shape": [4, 4], "fill": "unwritten"},
        },
        "arguments": [{"tiled": {**tensor, "swizzle": "NONE"}}, {"array": "y"}],
        "print": ["y"],
    }
    status, printed, _ = emulated(document, "--json", ptx=ptx)
    assert status == 0
    rows = [[8 * r + c for c in range(4, 8)] for r in range(1, 4)] + [[0] * 4]
    assert json.loads(printed)[0]["arrays"]["y"]["values"] == rows


def changed(**fields: Any) -> dict[str, Any]:
    return {**base(), **fields}


def argument(**value: Any) -> dict[str, Any]:
    return changed(arguments=[{"array": "x"}, value])


MAP = {"array": "x", "data_type": "INT32", "global_dim": [32]}

#: What is wrong, and how the message ends.
WRONG: list[tuple[Any, str]] = [
    ("{", "JSON is allowed"),
    ([], "the file: []; an object is allowed"),
    ({"arguments": []}, "block is missing; a list"),
    (changed(blok=1), "blok is no field; arch, sms, relaxed, seeds,"),
    (changed(arch="sm_80"), 'arch: "sm_80"; one of "sm_90a", "sm_100a" is allowed'),
    (
        changed(relaxed=["races"]),
        'relaxed[0]: "races"; one of "tensor_load_waits", "barrier_fences"',
    ),
    (changed(sms=0), "sms: 0; at least 1 is allowed"),
    (changed(block=[1, 1, 1, 1]), "block: [1, 1, 1, 1]; 1 to 3 entries are allowed"),
    (changed(block=[True]), "block[0]: true; an integer is allowed"),
    (changed(block=[2048]), "block: 2048 threads; up to 1024 are allowed"),
    (changed(seeds=[]), "seeds: []; 1 or more entries are allowed"),
    (changed(kernel="paste"), "name: 'paste'; the module has copy"),
    (changed(print=["z"]), "print[0]: 'z' is none of arrays; x, y are allowed"),
    (changed(arguments=[{"array": "x"}]), "args: 1; copy has 2"),
    (argument(array="z"), "arguments[1].array: 'z' is none of arrays; x, y are allowed"),
    (
        argument(),
        "arguments[1]: {}; exactly one of array, scalar, tiled, im2col, struct, members is allowed",
    ),
    (
        argument(scalar={"type": "u8", "value": 256}),
        "256 for u8; integers from 0 to 255 are allowed",
    ),
    (
        argument(scalar={"type": "int", "value": 1}),
        'arguments[1].scalar.type: "int"; one of "b8", ',
    ),
    (argument(scalar={"type": "u32", "value": 1}), "args: 4 bytes for y of 8 bytes"),
    (argument(struct={"hex": "0g"}), "pairs of hexadecimal digits are allowed"),
    (argument(struct={"size": 4, "fields": [{"offset": 0, "array": "x"}]}), "up to -4 is allowed"),
    (
        argument(struct={"size": 8, "fields": [{"offset": 0}]}),
        "array, or type and value, is allowed",
    ),
    (argument(tiled=MAP), "arguments[1].tiled.box_dim is missing; a list"),
    (argument(tiled={**MAP, "box_dim": [257]}), "arguments[1].tiled: tensor map: "),
    (
        argument(tiled={**MAP, "box_dim": [4], "swizzle": "B4"}),
        'arguments[1].tiled.swizzle: "B4"; one',
    ),
    (
        changed(arrays={"x": {"dtype": "int32"}}),
        "arrays.x.shape is missing; it, or file, is needed",
    ),
    (changed(arrays={"x": {"file": "no.npy"}}), "an .npy file is allowed"),
    (
        changed(arrays={"x": {"dtype": "int32", "shape": [1], "fill": "ones"}}),
        'arrays.x.fill: "ones"; one of "zeros", "arange", "poison", "unwritten" is allowed',
    ),
    (
        changed(arrays={"x": {"dtype": "int32", "shape": [1], "fill": 1}}),
        'arrays.x.fill: 1; "zeros", "arange", "poison", "unwritten" or an object is allowed',
    ),
]


@pytest.mark.parametrize(("document", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_description_is_told(emulated: Any, document: Any, message: str) -> None:
    status, printed, told = emulated(document)
    assert (status, printed) == (2, "")
    assert told.startswith("ptxemu: ")
    assert message in told


def test_the_command_line_needs_both_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "KERNEL.ptx and --config RUN.json are needed" in capsys.readouterr().err


def test_a_picture_in_an_unknown_format(emulated: Any) -> None:
    status, _, told = emulated(base(), "--plot", "picture.doc")
    assert status == 2
    assert "--plot: picture.doc; one of" in told


def test_a_picture_without_matplotlib(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "ptxemu._run.plot", raising=False)
    status, _, told = emulated(base(), "--plot", "picture.png")
    assert status == 1
    assert told == "ptxemu: matplotlib is not installed; pip install 'maxconv[plot]'\n"


def test_the_schema_is_one_and_the_check_follows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == SCHEMA
    jsonschema.Draft202012Validator.check_schema(printed)
    validator = jsonschema.Draft202012Validator(printed)
    documents = [document for document, _ in WRONG if not isinstance(document, str)]
    documents += [base(), json.loads((EXAMPLE / "ring.json").read_text())]
    refused = 0
    for document in documents:
        try:
            check(document)
        except ConfigError:
            refused += 1
            assert not validator.is_valid(document)
        else:
            assert validator.is_valid(document)
    assert refused > 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_hold_small_integers_and_poison(dtype: str) -> None:
    values = np.array([0, 1, 2, 3, 6, 12])
    assert decode(encode(values, dtype), dtype).tolist() == values.tolist()
    drawn = decode(filled(dtype, [3, 50], {"integers": {"low": 0, "high": 4, "seed": 1}}), dtype)
    assert set(np.unique(drawn)) == {0, 1, 2, 3, 4}
    poisoned = decode(filled(dtype, [5], "poison"), dtype)
    is_poison = np.isnan(poisoned) if "float" in dtype else poisoned == poisoned[0]
    assert is_poison.all() and (poisoned != 0).all()


def test_types_round_to_nearest_even() -> None:
    ties = np.array([257.0, 259.0, -257.0, np.inf])
    assert decode(encode(ties, "bfloat16"), "bfloat16").tolist() == [256.0, 260.0, -256.0, np.inf]
    eights = np.array([17.0, 19.0, 1000.0, -0.0])
    assert decode(encode(eights, "float8_e4m3fn"), "float8_e4m3fn").tolist() == [16, 20, 448, 0]
    assert encode(np.array([2.5, 3.5]), "int8").tolist() == [2, 4]
