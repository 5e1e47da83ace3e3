"""Clusters (PTX ISA 9.0, 9.7.9.23, 9.7.9.24, 9.7.13.3, multicast of 9.7.9.27.1.2)."""

from __future__ import annotations

import numpy as np

from ptxemu.tma import DataType, Swizzle, TiledDescriptor

from .case import Family, Map, words

FAMILY = Family("clusters")

_RNG = np.random.default_rng(61)

#: %b is the block, %r its rank; %v the thread's value; %s its cell; %to its place in the output.
_SETUP = (
    ".shared .align 1024 .b8 room[4096]; .shared .align 8 .b64 bar; .reg .b64 %at, %to, %g, %map; "
    ".reg .b32 %s, %v, %b, %r, %n, %far, %i, %x; .reg .b16 %mask; .reg .pred %p, %q, %first; "
    "mov.u32 %b, %ctaid.x; mov.u32 %r, %cluster_ctarank; mov.u32 %n, %cluster_nctarank; "
    "setp.eq.u32 %first, %t, 0; mad.lo.u32 %x, %b, 128, %t; mul.wide.u32 %at, %x, 4; "
    "add.u64 %to, %out, %at; add.u64 %at, %in0, %at; ld.global.b32 %v, [%at]; mov.u32 %s, room; "
    "mad.lo.u32 %s, %t, 4, %s; "
)
_SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; "


def _values(blocks: int) -> list[int]:
    return [int(v) for v in _RNG.integers(0, 1 << 31, 128 * blocks, np.uint64)]


def _turned(values: list[int], cluster: int, step: int) -> list[int]:
    """Each block's values from the block ``step`` further in its cluster."""
    found = []
    for k in range(len(values)):
        block, thread = divmod(k, 128)
        first = block // cluster * cluster
        found.append(values[(first + (block - first + step) % cluster) * 128 + thread])
    return found


for _cluster in (2, 4):
    _v = _values(2 * _cluster)
    _options = {"block": 128, "grid": 2 * _cluster, "cluster": _cluster}
    FAMILY.kernel(
        f"read_peer_{_cluster}",
        _SETUP + "st.shared.b32 [%s], %v; " + _SYNC + "add.u32 %x, %r, 1; rem.u32 %x, %x, %n; "
        "mapa.shared::cluster.u32 %far, %s, %x; ld.shared::cluster.b32 %v, [%far]; "
        "st.global.b32 [%to], %v; " + _SYNC,
        words(*_turned(_v, _cluster, 1)),
        [words(*_v)],
        **_options,
    )
    FAMILY.kernel(
        f"write_peer_{_cluster}",
        # By a generic address, and getctarank of it.
        _SETUP
        + "cvt.u64.u32 %g, %s; cvta.shared.u64 %g, %g; add.u32 %x, %r, 1; rem.u32 %x, %x, %n; "
        "mapa.u64 %g, %g, %x; getctarank.u32.u64 %i, %g; ".replace(
            "getctarank.u32.u64", "getctarank.u64"
        )
        + "add.u32 %v, %v, %i; "
        + _SYNC
        + "st.b32 [%g], %v; "
        + _SYNC
        + "ld.shared.b32 %v, [%s]; st.global.b32 [%to], %v;",
        words(
            *(v + k // 128 % _cluster for k, v in enumerate(_turned(_v, _cluster, _cluster - 1)))
        ),
        [words(*_v)],
        **_options,
    )
    FAMILY.kernel(
        f"atomics_{_cluster}",
        # All threads of a cluster add to the first block's counter.
        _SETUP + "@%first st.shared.b32 [room], 0; " + _SYNC + "mov.u32 %s, room; "
        "mapa.shared::cluster.u32 %far, %s, 0; atom.add.shared::cluster.u32 %x, [%far], 3; "
        + _SYNC
        + "ld.shared::cluster.b32 %v, [%far]; st.global.b32 [%to], %v; "
        + _SYNC,
        words(*([3 * 128 * _cluster] * len(_v))),
        [words(*_v)],
        **_options,
    )
    FAMILY.kernel(
        f"remote_arrive_{_cluster}",
        # The first block's mbarrier counts an arrival of every thread of the cluster.
        _SETUP + f"@%first mbarrier.init.shared::cta.b64 [bar], {128 * _cluster}; "
        "fence.mbarrier_init.release.cluster; " + _SYNC + "mov.u32 %s, bar; "
        "mapa.shared::cluster.u32 %far, %s, 0; "
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%far]; setp.ne.u32 %p, %r, 0; @%p bra END; "
        "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %q, [bar], 0; @!%q bra WAIT; "
        "add.u32 %v, %v, 1; END: st.global.b32 [%to], %v; " + _SYNC,
        words(*(v + (k // 128 % _cluster == 0) for k, v in enumerate(_v))),
        [words(*_v)],
        **_options,
    )
    for _vector, _type in (("", "b32"), (".v2", "f32"), (".v4", "b32")):
        _count = int(_vector[2:] or 1)
        # The next block's mbarrier counts the bytes of each of its 128 threads.
        FAMILY.kernel(
            f"store_async_{_cluster}_{_count}_{_type}",
            _SETUP
            + "@%first mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster; "
            + f"@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {512 * _count}; "
            + f"mov.u32 %s, room; mad.lo.u32 %s, %t, {4 * _count}, %s; mov.u32 %i, bar; "
            + "add.u32 %x, %r, 1; rem.u32 %x, %x, %n; mapa.shared::cluster.u32 %far, %s, %x; "
            + "mapa.shared::cluster.u32 %i, %i, %x; "
            + _SYNC
            + f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{_vector}.{_type} [%far], "
            + ("%v" if _count == 1 else f"{{{', '.join(['%v'] * _count)}}}")
            + ", [%i]; WAIT: mbarrier.try_wait.parity.shared::cta.b64 %q, [bar], 0; @!%q bra WAIT; "
            + f"ld.shared.b32 %v, [%s+{4 * _count - 4}]; st.global.b32 [%to], %v; "
            + _SYNC,
            words(*_turned(_v, _cluster, _cluster - 1)),
            [words(*_v)],
            **_options,
        )
    FAMILY.kernel(
        f"registers_{_cluster}",
        _SETUP
        + "mov.u32 %x, %clusterid.x; mad.lo.u32 %v, %x, 16, %r; mov.u32 %x, %cluster_ctaid.x; "
        "mad.lo.u32 %v, %v, 16, %x; mov.u32 %x, %cluster_nctaid.x; mad.lo.u32 %v, %v, 16, %x; "
        "mad.lo.u32 %v, %v, 16, %n; mov.u32 %x, %nclusterid.x; mad.lo.u32 %v, %v, 16, %x; "
        "st.global.b32 [%to], %v;",
        words(
            *(
                (
                    (((b // _cluster * 16 + b % _cluster) * 16 + b % _cluster) * 16 + _cluster) * 16
                    + _cluster
                )
                * 16
                + 2
                for b in range(2 * _cluster)
                for _ in range(128)
            )
        ),
        [words(*_v)],
        **_options,
    )


def _multicast(cluster: int, mask: int) -> None:
    """Each block loads a box of 8 rows of 64 bytes for the blocks of the mask, at its own rank's
    place; every block of the mask waits for the bytes of all loads.
    """
    blocks = 2 * cluster
    tensor = _RNG.integers(0, 1 << 31, (8 * blocks, 16)).astype(np.uint32)
    descriptor = TiledDescriptor(
        DataType.UINT32, 0, (16, 8 * blocks), (64,), (16, 8), (1, 1), swizzle=Swizzle.NONE
    )
    expected = np.full((blocks, 128 * cluster), 0x77777777, np.uint32)
    for block in range(blocks):
        if mask >> (block % cluster) & 1:
            first = block // cluster * cluster
            for rank in range(cluster):
                rows = tensor[8 * (first + rank) : 8 * (first + rank) + 8]
                expected[block, 128 * rank : 128 * rank + 128] = rows.reshape(-1)
    loads = " ".join(
        f"ld.shared.b32 %v, [%s+{512 * rank}]; st.global.b32 [%to+{512 * rank}], %v;"
        for rank in range(cluster)
    )
    fill = " ".join(f"st.shared.b32 [%s+{512 * rank}], 0x77777777;" for rank in range(cluster))
    FAMILY.kernel(
        f"multicast_{cluster}_{mask}",
        _SETUP.replace("add.u64 %to, %out, %at; ", "").replace(
            "%x, 4; add.u64 %at, %in0", "%t, 4; add.u64 %at, %in0"
        )
        + f"mad.lo.u32 %x, %b, {128 * cluster}, %t; mul.wide.u32 %to, %x, 4; add.u64 %to, %out, %to; "
        + fill
        + " @%first mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster; "
        f"fence.proxy.async.shared::cta; bar.sync 0; mov.u32 %x, {mask}; shr.u32 %x, %x, %r; and.b32 %x, %x, 1; "
        "setp.eq.u32 %p, %x, 1; mov.u64 %map, map0; cvta.param.u64 %map, %map; "
        f".reg .pred %both; and.pred %both, %p, %first; @%both mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {512 * cluster}; "
        + _SYNC
        + "@!%first bra READY; mov.u32 %s, room; mad.lo.u32 %s, %r, 512, %s; "
        f"mov.b16 %mask, {mask}; shl.b32 %x, %b, 3; "
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%s], [%map, {0, %x}], [bar], %mask; READY: @!%p bra DONE; "
        "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %q, [bar], 0; @!%q bra WAIT; DONE: "
        "mov.u32 %s, room; mad.lo.u32 %s, %t, 4, %s; " + loads + " " + _SYNC,
        expected.reshape(-1),
        [tensor.reshape(-1)],
        block=128,
        grid=blocks,
        cluster=cluster,
        maps=(Map(0, descriptor),),
    )


_multicast(2, 3)
_multicast(4, 15)
_multicast(4, 5)
