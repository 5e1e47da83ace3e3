"""Transposes the matrices of a batch: channels first to channels last and back.

A block of a cache line by a cache line is read and written whole, so that rows
whose distance is a power of two, which share few lines of L1, cost no second
visit. Vectors transpose in registers, by perfect shuffles.
"""

from std.math import ceildiv
from std.math.uutils import udivmod
from std.sys.info import size_of
from std.utils import IndexList

from ..conv.memory import CACHE_LINE, Reads, Writes
from .pages import ask_for_large_pages
from .pool import Pool, Work, run_tasks

comptime WIDTH = 8
"""Rows and columns of what is transposed in registers."""

comptime TASK_EDGE = 128
"""Columns of a task, and at least as many rows."""

comptime TASK_ELEMENTS = 1 << 14
"""Elements of a task where there are rows enough."""

comptime Shuffle = IndexList[WIDTH]


def _interleaved(first: Int) -> Shuffle:
    """Lanes of two vectors in turns, for `shuffle`.

    Args:
        first: The lane to start at.
    """
    var mask = Shuffle(fill=0)
    for lane in range(WIDTH):
        mask[lane] = first + lane // 2 + WIDTH * (lane % 2)
    return mask


@fieldwise_init
struct Matrices[dtype: DType](ImplicitlyCopyable, Movable):
    """A batch of matrices `[rows, columns]` in `source`, which are
    `[columns, rows]` in `target`; both are contiguous.

    Parameters:
        dtype: Of the elements; only its size matters.
    """

    var source: Reads[Self.dtype]
    var target: Writes[Self.dtype]
    var batch: Int
    var rows: Int
    var columns: Int

    @always_inline
    def transpose_vectors(self, source: Int, target: Int):
        """Transposes `WIDTH` rows and columns.

        Args:
            source: The offset of their first element in `source`.
            target: The same in `target`.
        """
        comptime Vector = SIMD[Self.dtype, WIDTH]
        comptime low = _interleaved(0)
        comptime high = _interleaved(WIDTH // 2)
        var rows = Array[Vector, WIDTH](fill=Vector(0))
        comptime for i in range(WIDTH):
            rows[i] = self.source.unsafe_load[width=WIDTH](
                source + i * self.columns
            )
        # An element's index in all rows, [row, column], turns by a bit in each
        # perfect shuffle; half of its bits make it [column, row].
        comptime for _ in range(3):
            var shuffled = Array[Vector, WIDTH](fill=Vector(0))
            comptime for i in range(WIDTH // 2):
                ref other = rows[i + WIDTH // 2]
                shuffled[2 * i] = rows[i].shuffle[mask=low](other)
                shuffled[2 * i + 1] = rows[i].shuffle[mask=high](other)
            rows = shuffled^
        comptime for i in range(WIDTH):
            self.target.unsafe_store(target + i * self.rows, rows[i])

    @always_inline
    def transpose_block[
        checked: Bool
    ](self, image: Int, row: Int, column: Int, rows: Int, columns: Int):
        """Transposes up to a cache line by a cache line.

        Parameters:
            checked: Whether `rows` and `columns` are less than a line.

        Args:
            image: Which matrix.
            row: The block's first row.
            column: The block's first column.
            rows: Of the block.
            columns: Of the block.
        """
        var first = image * self.rows * self.columns
        var source = first + row * self.columns + column
        var target = first + column * self.rows + row
        comptime if not checked:
            comptime line = CACHE_LINE // size_of[Self.dtype]()
            comptime for i in range(0, line, WIDTH):
                comptime for j in range(0, line, WIDTH):
                    self.transpose_vectors(
                        source + j * self.columns + i,
                        target + i * self.rows + j,
                    )
            return
        var whole_rows = rows // WIDTH * WIDTH
        var whole_columns = columns // WIDTH * WIDTH
        for j in range(0, whole_rows, WIDTH):
            for i in range(0, whole_columns, WIDTH):
                self.transpose_vectors(
                    source + j * self.columns + i, target + i * self.rows + j
                )
        for j in range(rows):
            for i in range(whole_columns if j < whole_rows else 0, columns):
                self.target[
                    unsafe_offset=target + i * self.rows + j
                ] = self.source[unsafe_offset=source + j * self.columns + i]

    @always_inline
    def transpose_strip[
        rows: Int, columns: Int
    ](self, image: Int, first: Int, last: Int):
        """Transposes rows or columns of a matrix that has few of the other, of
        which loops of a known length make vectors.

        Parameters:
            rows: Of the matrix; 0 for those from `first` on.
            columns: Of the matrix; 0 for those from `first` on.

        Args:
            image: Which matrix.
            first: The first row or column.
            last: The one behind the last.
        """
        var start = image * self.rows * self.columns
        var source = self.source.unsafe_offset(start)
        var target = self.target.unsafe_offset(start)
        for i in range(first, last):
            comptime for j in range(rows):
                target[unsafe_offset=i * rows + j] = source[
                    unsafe_offset=j * self.columns + i
                ]
            comptime for j in range(columns):
                target[unsafe_offset=j * self.rows + i] = source[
                    unsafe_offset=i * columns + j
                ]


@fieldwise_init
struct _Transposition[dtype: DType](Work):
    """The tasks of a batch: blocks of its matrices.

    Parameters:
        dtype: Of the elements.
    """

    var matrices: Matrices[Self.dtype]
    var rows: Int
    """Of a task, but for a matrix's last rows."""
    var columns: Int
    """Of a task, but for a matrix's last columns."""

    def tasks(self) -> Int:
        return (
            self.matrices.batch
            * ceildiv(self.matrices.rows, self.rows)
            * ceildiv(self.matrices.columns, self.columns)
        )

    def run(self, worker: Int, task: Int):
        """See `Work`."""
        comptime line = CACHE_LINE // size_of[Self.dtype]()
        ref matrices = self.matrices
        var across = ceildiv(matrices.columns, self.columns)
        var strip, place = udivmod(task, across)
        var image, down = udivmod(strip, ceildiv(matrices.rows, self.rows))
        var row = down * self.rows
        var column = place * self.columns
        var last_row = min(matrices.rows, row + self.rows)
        var last_column = min(matrices.columns, column + self.columns)
        comptime for edge in range(2, WIDTH):
            if matrices.rows == edge:
                return matrices.transpose_strip[edge, 0](
                    image, column, last_column
                )
            if matrices.columns == edge:
                return matrices.transpose_strip[0, edge](image, row, last_row)
        for i in range(column, last_column, line):
            var columns = min(line, last_column - i)
            for j in range(row, last_row, line):
                var rows = min(line, last_row - j)
                if columns == line and rows == line:
                    matrices.transpose_block[False](image, j, i, line, line)
                else:
                    matrices.transpose_block[True](image, j, i, rows, columns)


def transpose[
    dtype: DType
](mut pool: Some[Pool], matrices: Matrices[dtype]) raises:
    """Transposes every matrix of a batch.

    Parameters:
        dtype: Of the elements.

    Args:
        pool: The threads.
        matrices: The batch.

    Raises:
        If the threads refuse the work.
    """
    comptime line = CACHE_LINE // size_of[dtype]()
    var columns = min(TASK_EDGE, matrices.columns)
    if matrices.rows < WIDTH:
        columns = TASK_ELEMENTS // WIDTH
    var rows = max(TASK_EDGE, TASK_ELEMENTS // columns // line * line)
    var work = _Transposition(matrices, rows, columns)
    var elements = matrices.batch * matrices.rows * matrices.columns
    ask_for_large_pages(Int(matrices.target), elements * size_of[dtype]())
    var tasks = work.tasks()
    var workers = min(pool.threads(), tasks, elements // TASK_ELEMENTS)
    run_tasks(pool, work, tasks, workers)
