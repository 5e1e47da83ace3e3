"""The table of configurations that are compiled, and for which operands."""

from std.utils import IndexList

from ....conv.known import NARROW_FILTERS
from ....conv.operands import OperandTypes
from ...split_k import MAX_SPLIT_K
from .config import DIRECT, Sm90Config
from .epilogue_config import MATRIX_ROWS, SUBTILE_FILTERS, EpilogueConfig


struct Candidate(ImplicitlyCopyable, Movable):
    """A row of the table: a configuration, and the ops that are compiled with
    it."""

    var config: Sm90Config
    var half_inputs: Bool
    """Whether it is for inputs of 16 bits: not where others are as fast, as each
    takes every op time to compile."""
    var other_inputs: Bool
    """Whether it is for float32 and 8-bit inputs too: a few are, all were tuned
    for 16 bits."""
    var other_outputs: Bool
    """Whether it is for float32 outputs of 16-bit inputs too, and for those that
    the graph compiler fused something behind: a few are. Every fused op compiles
    them anew, and few ops of a network widen their output."""
    var correction: Float64
    """What the model's time is multiplied with; fitted with its constants."""
    var only_tuned: Bool
    """Whether the model does not choose it, but measurements do (tuned.mojo)."""

    def __init__(
        out self,
        config: Sm90Config,
        *,
        half_inputs: Bool = True,
        other_inputs: Bool = False,
        other_outputs: Bool = False,
        correction: Float64 = 1.0,
        only_tuned: Bool = False,
    ):
        """A row; by default for inputs and outputs of 16 bits.

        Args:
            config: The configuration.
            half_inputs: Whether inputs of 16 bits have it.
            other_inputs: Whether float32 and 8-bit inputs have it.
            other_outputs: Whether float32 outputs and those with work fused
                behind have it.
            correction: What the model's time is multiplied with.
            only_tuned: Whether only measurements choose it.
        """
        self.config = config
        self.only_tuned = only_tuned
        self.correction = correction
        self.half_inputs = half_inputs
        self.other_inputs = other_inputs
        self.other_outputs = other_outputs

    def offered(
        self,
        types: OperandTypes,
        *,
        narrow: Bool = False,
        unaligned: Bool = False,
        has_chunks: Bool = True,
        lacks_chunks: Bool = True,
    ) -> Bool:
        """Whether ops with such operands are compiled with it.

        Args:
            types: Of the operands.
            narrow: Whether groups have no more than `NARROW_FILTERS`. Then a
                wide tile is half empty: by the model it is never 5 % faster.
            unaligned: Whether pixels of activation or output are no multiples of
                `COPY_BYTES`.
            has_chunks: Whether those of the activation may be, and TMA loads
                them.
            lacks_chunks: Whether they may be none, and threads load them.
        """
        if self.config.unaligned != unaligned:
            return False
        if unaligned and not (
            lacks_chunks if self.config.gathers() else has_chunks
        ):
            return False
        if types.fused_output and (
            not self.other_outputs
            or (narrow and self.config.block_tile_shape[1] > NARROW_FILTERS)
        ):
            return False
        if types.input.is_half_float():
            return self.half_inputs and (
                types.output.is_half_float() or self.other_outputs
            )
        return self.other_inputs


comptime PAIR_M = (2, 1, 1)
"""A cluster of two blocks along the pixels, which share filters."""

comptime PAIR_N = (1, 2, 1)
"""A cluster of two blocks along the filters, which share activations."""

comptime SPLIT_K = (1, 1, MAX_SPLIT_K)
"""Clusters of blocks that may share a tile."""


comptime GATHER_STAGES = 3
"""Stages of rows that threads copy."""


def _rows(
    tile: Tuple[Int, Int],
    stages: Tuple[Int, Int, Int],
    *,
    cluster: Tuple[Int, Int, Int] = (1, 1, 1),
    subtile_pixels: Int = 64,
    consumers: Int = 2,
    cooperative: Bool = True,
    halo: Int = 0,
    stationary: Bool = False,
    swapped: Bool = True,
    gathers: Bool = False,
    directly: Bool = False,
) -> Sm90Config:
    """A configuration; TMA stores what it loads, but for tiles with a halo.

    Args:
        tile: M and N.
        stages: Of activations, of filters, and of the residual.
        cluster: Blocks along M, N and K.
        subtile_pixels: Pixels of what the epilogue stores at a time.
        consumers: Warpgroups that multiply.
        cooperative: Whether they share a tile.
        halo: As the field.
        stationary: As the field.
        swapped: As the field.
        gathers: Whether threads load, and not TMA.
        directly: Whether these load straight into the rings.
    """
    var gathered = DIRECT if directly else GATHER_STAGES
    return Sm90Config(
        block_tile_shape=IndexList[2](tile[0], tile[1]),
        cluster_shape=IndexList[3](cluster[0], cluster[1], cluster[2]),
        consumers=consumers,
        cooperative=cooperative,
        swapped=swapped,
        halo=halo,
        num_act_pipeline_stages=stages[0],
        num_filter_pipeline_stages=stages[1],
        num_gather_stages=gathered if gathers else 0,
        stationary=stationary,
        unaligned=gathers,
        epilogue=EpilogueConfig(
            output_tile_shape=IndexList[2](subtile_pixels, SUBTILE_FILTERS),
            num_epi_load_stages=stages[2],
            num_output_stages=min(2, stages[2]),
            fragment_size=16 if (
                cooperative and not gathers and subtile_pixels > MATRIX_ROWS
            ) else 8,
            reuse_c=True,
            delay_store=False,
            tma_store=halo == 0 and not gathers,
            whole_rows=halo > 0 and not cooperative,
        ),
    )


comptime HALO_64 = _rows((256, 64), (3, 8, 3), cooperative=False, halo=8)
"""In turns, for 64 filters and stride 1 along w."""

comptime HALO_64_CORRECTION = 0.945
"""Of its model, aligned or not."""

comptime HALO_STATIONARY = _rows(
    (160, 64),
    (4, 9, 5),
    cooperative=False,
    halo=8,
    stationary=True,
    subtile_pixels=32,
)
"""The same, for filters of few stages."""

comptime HALO_STATIONARY_CORRECTION = 0.945
"""Of its model, aligned or not."""

comptime HALO_SPLIT = _rows(
    (128, 128),
    (4, 7, 4),
    halo=8,
    cluster=SPLIT_K,
    subtile_pixels=32,
)
"""For few tiles with stride 1 along w."""

comptime HALO_SPLIT_CORRECTION = 0.914
"""Of its model, aligned or not."""

comptime NARROW_HALO_SPLIT = _rows(
    (128, 64), (6, 6, 3), cluster=SPLIT_K, halo=8, subtile_pixels=16
)
"""For fewer tiles, or fewer filters."""

comptime NARROW_HALO_SPLIT_CORRECTION = 1.17
"""Of its model where pixels are unaligned; no others' is asked."""

comptime PING_PONG_128 = _rows((128, 128), (5, 5, 4), cooperative=False)
"""In turns, for any stride."""


def _unaligned(config: Sm90Config) -> Sm90Config:
    """A configuration, for pixels that are no multiples of `COPY_BYTES`: threads
    store."""
    var result = config
    result.unaligned = True
    result.epilogue.tma_store = False
    return result


def candidates() -> List[Candidate]:
    """The table; what a plan calls a candidate is its index here."""
    var table = _aligned_candidates()
    table.extend(_unaligned_candidates())
    table.extend(_tuned_candidates())
    return table^


def _aligned_candidates() -> List[Candidate]:
    """Rows for pixels that are multiples of `COPY_BYTES`."""
    return [
        Candidate(
            _rows((256, 128), (3, 5, 2), cluster=PAIR_M, halo=8),
            half_inputs=False,
            other_inputs=True,
            other_outputs=True,
        ),
        Candidate(
            _rows((256, 128), (4, 4, 2), cluster=PAIR_M), correction=0.912
        ),
        Candidate(
            _rows((224, 128), (4, 4, 6), cluster=PAIR_N, subtile_pixels=32),
            correction=0.946,
        ),
        Candidate(
            _rows((192, 128), (5, 5, 3), subtile_pixels=32),
            other_inputs=True,
            other_outputs=True,
            correction=0.909,
        ),
        Candidate(
            _rows((96, 128), (7, 7, 3), subtile_pixels=32),
            other_inputs=True,
            other_outputs=True,
            correction=0.961,
        ),
        Candidate(
            _rows((96, 128), (7, 7, 3), cluster=PAIR_N, subtile_pixels=32),
            correction=1.011,
        ),
        Candidate(
            HALO_64,
            other_inputs=True,
            other_outputs=True,
            correction=HALO_64_CORRECTION,
        ),
        Candidate(HALO_STATIONARY, correction=HALO_STATIONARY_CORRECTION),
        Candidate(
            _rows(
                (64, 64),
                (8, 8, 4),
                consumers=1,
                cluster=SPLIT_K,
                subtile_pixels=32,
            ),
            other_inputs=True,
            other_outputs=True,
            correction=0.972,
        ),
        Candidate(
            _rows((64, 128), (6, 6, 4), cluster=SPLIT_K, subtile_pixels=16),
            correction=1.001,
        ),
        Candidate(PING_PONG_128, half_inputs=False, other_inputs=True),
        Candidate(HALO_SPLIT, correction=HALO_SPLIT_CORRECTION),
        Candidate(
            _rows((128, 160), (5, 5, 2), cooperative=False, swapped=False),
            correction=1.064,
        ),
        Candidate(
            _rows(
                (160, 64),
                (5, 8, 5),
                cooperative=False,
                subtile_pixels=32,
            ),
            correction=1.006,
        ),
        Candidate(
            _rows((160, 128), (5, 5, 3), cooperative=False, subtile_pixels=32),
            correction=0.986,
        ),
        Candidate(
            _rows((128, 64), (7, 7, 3), cooperative=False), correction=0.941
        ),
        Candidate(
            _rows((96, 64), (9, 9, 4), cooperative=False, subtile_pixels=32),
            correction=1.051,
        ),
        Candidate(
            _rows(
                (64, 80),
                (11, 11, 2),
                cluster=PAIR_M,
                consumers=1,
                swapped=False,
            ),
            correction=0.823,
        ),
        Candidate(
            _rows((80, 128), (8, 8, 4), subtile_pixels=16), correction=0.988
        ),
        Candidate(
            _rows((112, 128), (6, 6, 5), subtile_pixels=16), correction=0.918
        ),
        Candidate(
            _rows((128, 64), (8, 8, 3), subtile_pixels=16, cluster=SPLIT_K),
            correction=1.125,
        ),
        Candidate(
            _rows((128, 128), (6, 6, 3), subtile_pixels=32, cluster=SPLIT_K),
            correction=1.049,
        ),
        Candidate(
            _rows(
                (64, 64),
                (8, 8, 4),
                consumers=1,
                subtile_pixels=16,
                cluster=SPLIT_K,
            ),
            correction=1.027,
        ),
        Candidate(
            _rows((96, 128), (5, 5, 3), subtile_pixels=16, cluster=SPLIT_K),
            correction=1.016,
        ),
        Candidate(
            _rows((256, 128), (4, 4, 4), subtile_pixels=32, cluster=SPLIT_K),
            correction=0.893,
        ),
        Candidate(
            _rows((160, 128), (5, 5, 3), subtile_pixels=32),
            correction=0.929,
        ),
    ]


def _unaligned_candidates() -> List[Candidate]:
    """Rows for pixels that are not: threads load them, or TMA where it is the
    output's alone that are not."""
    return [
        Candidate(
            _rows((128, 128), (2, 2, 2), cluster=SPLIT_K, gathers=True),
            other_inputs=True,
            other_outputs=True,
        ),
        Candidate(
            _rows((128, 64), (4, 4, 2), cooperative=False, gathers=True),
            other_inputs=True,
        ),
        Candidate(
            _rows(
                (64, 64),
                (5, 5, 2),
                cluster=SPLIT_K,
                consumers=1,
                gathers=True,
                subtile_pixels=32,
            ),
            other_inputs=True,
            other_outputs=True,
        ),
        Candidate(
            _rows(
                (64, 64),
                (5, 5, 2),
                cluster=SPLIT_K,
                consumers=1,
                gathers=True,
                subtile_pixels=16,
            ),
        ),
        Candidate(_unaligned(PING_PONG_128)),
        Candidate(
            _unaligned(HALO_64),
            other_inputs=True,
            correction=HALO_64_CORRECTION,
        ),
        Candidate(
            _unaligned(HALO_STATIONARY), correction=HALO_STATIONARY_CORRECTION
        ),
        Candidate(_unaligned(HALO_SPLIT), correction=HALO_SPLIT_CORRECTION),
        Candidate(
            _unaligned(NARROW_HALO_SPLIT),
            correction=NARROW_HALO_SPLIT_CORRECTION,
        ),
        Candidate(
            _rows(
                (96, 128),
                (6, 6, 2),
                cluster=SPLIT_K,
                gathers=True,
                directly=True,
                subtile_pixels=32,
            ),
        ),
        Candidate(
            _rows(
                (64, 128),
                (7, 7, 2),
                cluster=SPLIT_K,
                gathers=True,
                directly=True,
                subtile_pixels=16,
            ),
        ),
    ]


def _tuned_candidates() -> List[Candidate]:
    """Rows that the tuner found, for the problems that they were measured with:
    the model says too little of them."""
    var rows = _rows((128, 64), (7, 7, 3), cooperative=False, halo=32)
    rows.epilogue.output_tile_shape[0] = 32
    rows.epilogue.whole_rows = False
    var wide = _rows((96, 256), (4, 4, 4), subtile_pixels=32)
    # With 16 values at a time registers are spilled.
    wide.epilogue.fragment_size = 8
    return [
        Candidate(
            _rows(
                (64, 64),
                (12, 12, 2),
                cooperative=False,
                halo=8,
                subtile_pixels=32,
            ),
            only_tuned=True,
        ),
        Candidate(rows, only_tuned=True),
        Candidate(NARROW_HALO_SPLIT, only_tuned=True),
        # Widths that fill waves, and 80 filters.
        Candidate(
            _rows((144, 128), (6, 5, 3), subtile_pixels=16), only_tuned=True
        ),
        Candidate(_rows((128, 80), (6, 6, 2), swapped=False), only_tuned=True),
        Candidate(
            _rows((224, 64), (5, 5, 3), subtile_pixels=16), only_tuned=True
        ),
        Candidate(
            _rows((128, 64), (8, 8, 3), cluster=PAIR_M, subtile_pixels=32),
            only_tuned=True,
        ),
        Candidate(
            _rows((224, 64), (5, 5, 2), cooperative=False, subtile_pixels=32),
            only_tuned=True,
        ),
        Candidate(
            _rows((64, 80), (9, 9, 2), consumers=1, swapped=False),
            only_tuned=True,
        ),
        Candidate(
            _rows((128, 64), (8, 8, 3), cluster=PAIR_N, subtile_pixels=32),
            only_tuned=True,
        ),
        Candidate(wide, only_tuned=True),
        Candidate(_rows((128, 112), (6, 6, 2), swapped=False), only_tuned=True),
        Candidate(
            _rows((128, 80), (6, 6, 2), swapped=False, cluster=PAIR_M),
            only_tuned=True,
        ),
        Candidate(
            _rows((272, 128), (4, 4, 4), cluster=PAIR_N, subtile_pixels=16),
            only_tuned=True,
        ),
        Candidate(
            _rows((80, 64), (11, 11, 4), consumers=1, subtile_pixels=16),
            only_tuned=True,
        ),
        Candidate(
            _rows(
                (160, 128),
                (5, 5, 3),
                cluster=PAIR_N,
                cooperative=False,
                subtile_pixels=32,
            ),
            only_tuned=True,
        ),
    ]


comptime TABLE = candidates()
"""The table, for the compiler."""

comptime CANDIDATES = len(TABLE)
"""Its rows."""


def candidate(index: Int) -> Sm90Config:
    """A row's configuration.

    Args:
        index: From 0 to `CANDIDATES - 1`.
    """
    return candidates()[index].config
