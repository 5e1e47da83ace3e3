"""What the ISA leaves open and kernels rely on: recorded on a GPU, beside the emulator's answer."""

from __future__ import annotations

from ptxemu.tma import DataType, TiledDescriptor

from . import clusters
from .case import Family, Map, words

FAMILY = Family("probes")

_SETUP, _SYNC, _RNG, _values = clusters._SETUP, clusters._SYNC, clusters._RNG, clusters._values


def _windows() -> None:
    """A block's own address, what mapa gives of it, and what cvta does; the rank is in bit 24."""
    rows = []
    for block in range(4):
        rank = block % 2
        own, mapped = rank << 24, [r << 24 for r in range(2)]
        # Relative to the offset that all of them end in.
        rows += [own, *mapped, own, own] + [0] * 123
    FAMILY.kernel(
        "windows",
        _SETUP + "mov.u32 %s, room; mov.u32 %v, 0; setp.eq.u32 %p, %t, 0; @%p mov.u32 %v, %s; "
        "mapa.shared::cluster.u32 %x, %s, 0; setp.eq.u32 %p, %t, 1; @%p mov.u32 %v, %x; "
        "mapa.shared::cluster.u32 %x, %s, 1; setp.eq.u32 %p, %t, 2; @%p mov.u32 %v, %x; "
        "cvt.u64.u32 %g, %s; cvta.shared.u64 %g, %g; cvta.to.shared.u64 %g, %g; cvt.u32.u64 %x, %g; "
        "setp.eq.u32 %p, %t, 3; @%p mov.u32 %v, %x; cvt.u64.u32 %g, %s; cvta.shared.u64 %g, %g; "
        "cvta.to.shared::cluster.u64 %g, %g; cvt.u32.u64 %x, %g; setp.eq.u32 %p, %t, 4; "
        "@%p mov.u32 %v, %x; and.b32 %v, %v, 0xffff0000; st.global.b32 [%to], %v; " + _SYNC,
        words(*rows),
        [words(*_values(4))],
        block=128,
        grid=4,
        cluster=2,
    )


def _signalled(name: str, barrier: str, expected: tuple[int, int]) -> None:
    """A load of the second block for itself, with an mbarrier's address as ``barrier`` makes it.

    Both blocks announce the bytes and look for a while; which of them the bytes reach?
    """
    tensor = _RNG.integers(0, 1 << 31, (8, 16)).astype("u4")
    descriptor = TiledDescriptor(DataType.UINT32, 0, (16, 8), (64,), (16, 8), (1, 1))
    FAMILY.kernel(
        name,
        _SETUP
        + "@%first mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster; "
        + _SYNC
        + "mov.u64 %map, map0; cvta.param.u64 %map, %map; mov.u32 %v, 0; @!%first bra END; "
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 512; setp.eq.u32 %p, %r, 0; @%p bra LOOK; "
        f"mov.u32 %x, bar; {barrier} "
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[room], [%map, {0, 0}], [%far]; LOOK: mov.u32 %i, 0; "
        "AGAIN: mbarrier.test_wait.parity.shared::cta.b64 %q, [bar], 0; @%q bra FOUND; "
        "add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 20000; @%p bra AGAIN; bra END; FOUND: mov.u32 %v, 1; "
        "END: st.global.b32 [%to], %v; " + _SYNC,
        words(*([expected[0]] + [0] * 127 + [expected[1]] + [0] * 127)),
        [words(*_values(2)), tensor.reshape(-1)],
        block=128,
        grid=2,
        cluster=2,
        maps=(Map(1, descriptor),),
    )


_windows()
_signalled("signal_own", "mov.u32 %far, %x;", (0, 1))
_signalled("signal_without_rank", "and.b32 %far, %x, 0xfeffffff;", (0, 1))
_signalled("signal_first", "mapa.shared::cluster.u32 %far, %x, 0;", (0, 1))
