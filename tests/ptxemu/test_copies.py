"""Asynchronous copies, and what must be waited for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.ptxemu.warps import entry

from ptxemu import (
    EmulatorError,
    FenceError,
    IllegalInstructionError,
    Machine,
    MemoryFaultError,
    RaceError,
    TensorMap,
    UnfinishedError,
)
from ptxemu.tma import DataType, Swizzle, load, packed_strides

SEEDS = range(6)

#: Makes a tensor map of what a machine holds.
MakesMap = Callable[[Machine], object]

SETUP = """
.shared .align 1024 .b8 room[16384]; .shared .align 8 .b64 bar;
.reg .b32 %t, %at, %x, %y; .reg .b64 %in, %out, %p, %q, %map; .reg .pred %c, %d;
ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; mov.u32 %t, %tid.x;
mad.wide.u32 %p, %t, 16, %in; mad.wide.u32 %q, %t, 4, %out;
mov.b32 %at, room; shl.b32 %x, %t, 4; add.s32 %at, %at, %x;
"""


def run(
    body: str, seed: int, data: np.ndarray, threads: int = 32, *further: MakesMap
) -> np.ndarray:
    """Runs threads with 4096 words of output."""
    machine = Machine(seed=seed)
    out = machine.alloc(np.zeros(4096, np.int32))
    parameters = ["u64 in", "u64 out", "align 64 .b8 map[128]"]
    tensor = further[0](machine) if further else bytes(128)
    module = machine.load(entry(SETUP + body + "\nret;", parameters))
    module.launch(block=threads, args=[machine.alloc(data), out, tensor], budget=100_000)
    return out.read()


def reports(body: str, data: np.ndarray, threads: int = 32, *further: MakesMap) -> set[str]:
    """The kinds of errors under several seeds; empty strings where there is none."""
    found = set()
    for seed in SEEDS:
        try:
            run(body, seed, data, threads, *further)
            found.add("")
        except EmulatorError as error:
            found.add(type(error).__name__)
    return found


DATA = np.arange(1024, dtype=np.int32)

SMALL = """cp.async.ca.shared.global [%at], [%p], 16; cp.async.commit_group;
cp.async.ca.shared.global [%at+512], [%p], 16, 8; cp.async.commit_group;
cp.async.wait_group 1; ld.shared.b32 %x, [%at+4];
cp.async.wait_all; ld.shared.b32 %y, [%at+516]; add.s32 %x, %x, %y;
ld.shared.b32 %y, [%at+520]; add.s32 %x, %x, %y; st.global.b32 [%q], %x;"""


@pytest.mark.parametrize("seed", SEEDS)
def test_small_copies(seed: int) -> None:
    expected = 2 * (4 * np.arange(32) + 1)
    assert np.array_equal(run(SMALL, seed, DATA)[:32], expected)


def test_small_copies_are_waited_for() -> None:
    assert "RaceError" in reports(SMALL.replace("cp.async.wait_group 1;", ""), DATA)
    assert "RaceError" in reports(SMALL.replace("cp.async.wait_all;", ""), DATA)


#: One thread loads 512 bytes, all wait, and each stores a word.
BULK = """setp.ne.u32 %c, %t, 0; @%c bra READY;
mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;
READY: bar.sync 0; @%c bra WAIT;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 512;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [room], [%in], 512, [bar];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %d, [bar], 0; @!%d bra WAIT;
ld.shared.b32 %x, [%at]; st.global.b32 [%q], %x;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_load(seed: int) -> None:
    assert np.array_equal(run(BULK, seed, DATA)[:32], 4 * np.arange(32))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("fence.mbarrier_init.release.cluster;", "", "FenceError"),
        ("@!%d bra WAIT;", "", "RaceError"),
        (", 512, [bar];", ", 500, [bar];", "MemoryFaultError"),
        ("[room], [%in]", "[room+8], [%in]", "MemoryFaultError"),
        ("_, [bar], 512;", "_, [bar], 528;", "DeadlockError"),
        ("_, [bar], 512;", "_, [bar], 496;", "DeadlockError"),
    ],
)
def test_bulk_load_with_a_mistake(old: str, new: str, error: str) -> None:
    assert old in BULK
    assert error in reports(BULK.replace(old, new), DATA)


#: All threads write, one copies it all to global memory.
STORE = """st.shared.b32 [%at], %t; st.shared.b32 [%at+4], 1; st.shared.b32 [%at+8], 2;
st.shared.b32 [%at+12], 3;
fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %c, %t, 0; @%c bra END;
cp.async.bulk.global.shared::cta.bulk_group [%out], [room], 512; cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
END: bar.sync 0; st.shared.b32 [%at], 9;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_store(seed: int) -> None:
    found = run(STORE, seed, DATA)[:128].reshape(32, 4)
    assert np.array_equal(found[:, 0], np.arange(32))
    assert np.array_equal(found[:, 3], np.full(32, 3))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("fence.proxy.async.shared::cta;", "", FenceError),
        ("cp.async.bulk.wait_group.read 0;", "", UnfinishedError),
        ("cp.async.bulk.commit_group;", "", UnfinishedError),
        ("[%at+12], 3;", "[%at+8], 3;", RaceError),
    ],
)
def test_bulk_store_with_a_mistake(old: str, new: str, error: type[EmulatorError]) -> None:
    assert old in STORE
    body = STORE.replace(old, new).replace("END: bar.sync 0; st.shared.b32 [%at], 9;", "END:")
    assert reports(body + "mov.b32 %x, 0;", DATA) == {error.__name__}


def test_shared_memory_that_a_store_still_reads() -> None:
    body = STORE.replace("cp.async.bulk.wait_group.read 0;", "")
    assert "RaceError" in reports(body, DATA)


SHAPE = (16, 8, 4)


def tiled(machine: Machine) -> TensorMap:
    """A tensor of 4 x 8 x 16 words, boxes of 2 x 4 x 8."""
    tensor = machine.alloc(np.arange(512, dtype=np.int32))
    strides = packed_strides(SHAPE, DataType.INT32)
    return TensorMap.tiled(DataType.INT32, tensor, SHAPE, strides, (8, 4, 2), swizzle=Swizzle.B32)


TENSOR = (
    BULK.replace("512;", "256;")
    .replace(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [room], [%in], 512, [bar]",
        "mov.b64 %map, map; cvta.param.u64 %map, %map;"
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [room], [%map, {12, 6, 3}], [bar]",
    )
    .replace(
        "ld.shared.b32 %x, [%at]",
        "mov.b32 %at, room; mad.lo.s32 %at, %t, 4, %at; ld.shared.b32 %x, [%at]; "
        "ld.shared.b32 %y, [%at+128]; st.global.b32 [%q+128], %y",
    )
)


@pytest.mark.parametrize("seed", SEEDS)
def test_tensor_load(seed: int) -> None:
    """What arrives is what the model of TMA says, beyond the tensor's end too."""
    machine = Machine()
    descriptor = tiled(machine).descriptor
    tensor = np.arange(512, dtype=np.int32)
    expected = load(descriptor, tensor, (12, 6, 3)).view(np.int32)
    assert np.count_nonzero(expected) == 8
    found = run(TENSOR, seed, DATA, 32, tiled)[:64]
    assert np.array_equal(found, expected)


def test_tensor_load_with_a_mistake() -> None:
    at = "[%map, {12, 6, 3}]"
    assert reports(TENSOR.replace(at, "[%map, {2, 6, 3}]"), DATA, 32, tiled) == {
        IllegalInstructionError.__name__
    }
    assert reports(TENSOR.replace(at, "[%in, {12, 6, 3}]"), DATA, 32, tiled) == {
        MemoryFaultError.__name__
    }
    assert reports(TENSOR.replace("256;", "128;"), DATA, 32, tiled) == {"DeadlockError"}


def test_load_into_what_nobody_has_read() -> None:
    """The second load may arrive before anyone has read what the first one brought."""
    again = """cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    [room], [%in], 512, [bar];"""
    body = BULK.replace("_, [bar], 512;", "_, [bar], 1024;").replace(
        "WAIT: mbar", again + "\nWAIT: mbar", 1
    )
    assert reports(body, DATA) == {"RaceError"}


TENSOR_STORE = """st.shared.b32 [%at], %t; st.shared.b32 [%at+4], %t; st.shared.b32 [%at+8], %t;
st.shared.b32 [%at+12], %t; fence.proxy.async.shared::cta; bar.sync 0;
setp.ne.u32 %c, %t, 0; @%c bra END; mov.b64 %map, map; cvta.param.u64 %map, %map;
KIND.3d.global.shared::cta.MODE.bulk_group [%map, {8, 6, 3}], [room];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END: mov.b32 %x, 0;"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reduction", ["", "add", "max"])
def test_tensor_store_and_reduction(seed: int, reduction: str) -> None:
    """Two of four rows and one of two planes lie inside the tensor."""
    kind = "cp.reduce.async.bulk.tensor" if reduction else "cp.async.bulk.tensor"
    mode = reduction + ".tile" if reduction else "tile"
    body = TENSOR_STORE.replace("KIND", kind).replace("MODE", mode)
    machine = Machine(seed=seed)
    start = np.arange(512, dtype=np.int32) % 11
    tensor = machine.alloc(start)
    strides = packed_strides(SHAPE, DataType.INT32)
    tensor_map = TensorMap.tiled(DataType.INT32, tensor, SHAPE, strides, (8, 4, 2))
    parameters = ["u64 in", "u64 out", "align 64 .b8 map[128]"]
    module = machine.load(entry(SETUP + body + "\nret;", parameters))
    module.launch(block=32, args=[tensor, tensor, tensor_map])
    box = np.repeat(np.arange(32), 4)[:64].reshape(2, 4, 8)
    expected = start.reshape(4, 8, 16).copy()
    inside = expected[3:4, 6:8, 8:16]
    new = box[:1, :2]
    inside[:] = {"": new, "add": inside + new, "max": np.maximum(inside, new)}[reduction]
    assert np.array_equal(tensor.read().reshape(4, 8, 16), expected)


def test_store_at_a_negative_coordinate() -> None:
    body = TENSOR_STORE.replace("KIND", "cp.async.bulk.tensor").replace("MODE", "tile")
    found = reports(body.replace("{8, 6, 3}", "{8, -1, 3}"), DATA, 32, tiled)
    assert found == {IllegalInstructionError.__name__}
