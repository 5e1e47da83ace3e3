"""Barriers in shared memory (mbarrier) and among the warps of a block."""

from std.sys._assembly import inlined_assembly

from ..tma.copy import SharedAddress

comptime BARRIER_BYTES = 8
"""Bytes of a barrier, and its alignment."""


@fieldwise_init
struct Barrier(TrivialRegisterPassable):
    """A barrier in this block's shared memory.

    A phase completes after `count` arrivals and every expected byte; then the
    next begins. `wait(parity)` returns once the phase of
    that parity has completed: on a fresh barrier parity 1 at once."""

    var address: SharedAddress

    @always_inline
    def init(self, count: Int):
        """Starts the first phase; one thread, before any other use.

        Args:
            count: Arrivals of a phase.
        """
        inlined_assembly[
            "mbarrier.init.shared::cta.b64 [$0], $1;",
            NoneType,
            constraints="r,r,~{memory}",
        ](self.address, Int32(count))

    @always_inline
    def arrive(self):
        """Arrives once."""
        inlined_assembly[
            "mbarrier.arrive.shared::cta.b64 _, [$0];",
            NoneType,
            constraints="r,~{memory}",
        ](self.address)

    @always_inline
    def arrive_at[*, publishes: Bool = False](self, block: UInt32):
        """Arrives once at the same barrier of a block of the cluster.

        Parameters:
            publishes: Whether a thread that waits with `sees_cluster` sees
                what this thread has written, or seen, in the cluster's shared
                memory.

        Args:
            block: Its rank in the cluster.
        """
        comptime order = ".release.cluster" if publishes else ""
        comptime text = String(
            """{
            .reg .b32 remote;
            mapa.shared::cluster.u32 remote, $0, $1;
            mbarrier.arrive""",
            order,
            """.shared::cluster.b64 _, [remote];
            }""",
        )
        inlined_assembly[text, NoneType, constraints="r,r,~{memory}"](
            self.address, block
        )

    @always_inline
    def arrive_expecting(self, bytes: Int):
        """Arrives once, and makes the phase wait for copied bytes too.

        Args:
            bytes: Of every copy that will complete on this barrier, whichever
                block issues it.
        """
        inlined_assembly[
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
            NoneType,
            constraints="r,r,~{memory}",
        ](self.address, Int32(bytes))

    @always_inline
    def arrive_expecting_at(self, block: UInt32, bytes: Int):
        """Arrives once at the same barrier of a block of the cluster, and makes
        its phase wait for copied bytes too.

        Args:
            block: Its rank in the cluster.
            bytes: Of every copy that will complete on that barrier,
                whichever block issues it.
        """
        inlined_assembly[
            """{
            .reg .b32 remote;
            mapa.shared::cluster.u32 remote, $0, $1;
            mbarrier.arrive.expect_tx.shared::cluster.b64 _, [remote], $2;
            }""",
            NoneType,
            constraints="r,r,r,~{memory}",
        ](self.address, block, Int32(bytes))

    @always_inline
    def wait[*, sees_cluster: Bool = False](self, parity: UInt32):
        """Waits for a phase.

        Parameters:
            sees_cluster: Whether what other blocks have published with their
                arrivals is seen.

        Args:
            parity: 0 for the first phase, 1 for the second, and so on.
        """
        comptime order = ".acquire.cluster" if sees_cluster else ""
        comptime text = String(
            """{
            .reg .pred complete;
            WAIT:
            mbarrier.try_wait.parity""",
            order,
            """.shared::cta.b64 complete, [$0], $1;
            @complete bra DONE;
            bra WAIT;
            DONE:
            }""",
        )
        inlined_assembly[text, NoneType, constraints="r,r,~{memory}"](
            self.address, parity
        )


@always_inline
def publish_barriers():
    """Makes `Barrier.init` visible to TMA and to the cluster; a
    barrier among the threads must follow."""
    inlined_assembly[
        "fence.mbarrier_init.release.cluster;",
        NoneType,
        constraints="~{memory}",
    ]()


@always_inline
def sync_threads[threads: Int](name: Int):
    """Waits until `threads` threads have arrived at a named barrier of the
    block, counting those that only `arrive_threads`.

    Parameters:
        threads: A multiple of 32.

    Args:
        name: 1 to 15.
    """
    inlined_assembly["bar.sync $0, $1;", NoneType, constraints="r,n,~{memory}"](
        Int32(name), threads
    )


@always_inline
def sync_some(name: Int, threads: UInt32):
    """Waits until some threads have arrived at a named barrier of the block,
    whose number is known only at run time.

    Args:
        name: 1 to 15.
        threads: How many, a multiple of 32.
    """
    inlined_assembly["bar.sync $0, $1;", NoneType, constraints="r,r,~{memory}"](
        Int32(name), threads
    )


@always_inline
def arrive_threads[threads: Int](name: Int):
    """Arrives at a named barrier without waiting.

    Parameters:
        threads: A multiple of 32.

    Args:
        name: 1 to 15.
    """
    inlined_assembly[
        "bar.arrive $0, $1;", NoneType, constraints="r,n,~{memory}"
    ](Int32(name), threads)


@always_inline
def sync_warp():
    """Waits for every thread of the warp, and sees what they wrote."""
    inlined_assembly[
        "bar.warp.sync 0xffffffff;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def sync_cluster_relaxed():
    """Waits until every thread of the cluster has arrived, without making its
    writes visible: enough for barriers that have been published."""
    arrive_cluster_relaxed()
    wait_cluster()


@always_inline
def arrive_cluster_relaxed():
    """Arrives at the cluster's barrier without waiting or making writes
    visible. A thread that does not `wait_cluster` arrives once."""
    inlined_assembly[
        "barrier.cluster.arrive.relaxed;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def wait_cluster():
    """Waits until every thread of the cluster has arrived."""
    inlined_assembly[
        "barrier.cluster.wait;", NoneType, constraints="~{memory}"
    ]()


@always_inline
def sync_cluster():
    """Waits for every thread of the cluster."""
    inlined_assembly[
        """barrier.cluster.arrive.release;
        barrier.cluster.wait.acquire;""",
        NoneType,
        constraints="~{memory}",
    ]()
