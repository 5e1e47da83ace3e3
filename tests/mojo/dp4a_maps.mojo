"""Answers questions about the interleaved layouts and the dp4a kernel, a line
each; needs no GPU.

    dp4a_maps QUESTION...

A question is a word and integers, joined by commas:

    image,X,LAST,N,C,H,W    offsets of all elements, in the order of n, c, h, w,
                            of blocks of X channels, with the images LAST or not
    known,N,C,H,W           the same of the map that a GPU's kernels have
    filter,X,K,C,R,S        the same of a filter, in the order of k, c, r, s
    index,X,LAST,N,C,H,W    of the last element, its index in the tensor
    tile,T,PIXELS,FILTERS,C blocks along x and y, steps, then the first pixels of
                            the columns and the first filters of the rows
    batch,T,P,Q,N,K         blocks along x, y and z of batch-blocked tensors, then
                            the first p, q, n and k of each
    access,X,LAST,BYTES     why not accesses of int8, and of bfloat16
    shared,T,WORD,I         the words of shared memory in front of a filter's and
                            of a pixel's
    choose,PIXELS,FILTERS,M the tile, with M multiprocessors
    refuse,ALIGNMENT,...    why not, with the numbers of `ConvProblem.of_numbers`
    types                   why not other types and layouts, a sentence each
    layouts                 why not other layouts of the filter
"""

from std.collections import Optional
from std.sys import argv
from std.utils import IndexList

from operations.conv.fields import (
    INTERLEAVED,
    LAYOUT_INTERLEAVED,
    LAYOUT_KRSC,
)
from operations.conv.interleave import BlockLayout, Interleaved, block_refusal
from operations.conv.operands import (
    Device,
    Operands,
    OperandTypes,
    alignment_of,
)
from operations.conv.problem import ConvProblem
from operations.conv.kernel import built_refusal
from operations.conv.tile_maps import access_refusal
from operations.nvidia.generic.dp4a_launch import Dp4a
from operations.nvidia.generic.dp4a_tile import TILES, tile_of
from operations.nvidia.sm80.launch import Mma

comptime TYPES = OperandTypes.unfused(
    DType.int8, DType.float32, interleaved=INTERLEAVED
)


def text_of(refusal: Optional[String]) -> String:
    """A refusal, or None."""
    return refusal.value() if refusal else String("None")


def map_of(x: Int, last: Int, n: Int, c: Int, h: Int, w: Int) -> Interleaved[]:
    """The map of an activation."""
    return Interleaved[].of_layout(
        BlockLayout(x, last != 0), IndexList[4](n, h, w, c)
    )


def image(map: Interleaved, n: Int, c: Int, h: Int, w: Int) -> String:
    """Offsets of an activation."""
    var text = String()
    for i in range(n * c * h * w):
        var rest, column = divmod(i, w)
        var outer, row = divmod(rest, h)
        var batch, channel = divmod(outer, c)
        text += String(map.offset(batch, channel, row, column)) + " "
    return text


def filter(x: Int, k: Int, c: Int, r: Int, s: Int) -> String:
    """Offsets of a filter."""
    var map = Interleaved[].of_filter(r * s, k, x)
    var text = String()
    for i in range(k * c * r * s):
        var rest, tap = divmod(i, r * s)
        var own, channel = divmod(rest, c)
        text += String(map.offset(0, channel, tap, own)) + " "
    return text


def tile(index: Int, pixels: Int, filters: Int, channels: Int) -> String:
    """What a tile's blocks compute."""
    var tile = materialize[TILES]()[index]
    var blocks, rows = tile.grid(pixels, filters)
    var text = String(t"{blocks} {rows} {tile.steps(channels)}")
    for x in range(blocks):
        text += String(t" {tile.first_pixel(x)}")
    for y in range(rows):
        text += String(t" {tile.first_filter(y)}")
    return text


def batch(index: Int, p: Int, q: Int, n: Int, k: Int) -> String:
    """What a tile's blocks compute of batch-blocked tensors."""
    var map = materialize[TILES]()[index].map()
    var grid = map.batch_grid(p * q, n, k)
    var text = String(t"{grid[0]} {grid[1]} {grid[2]}")
    for x in range(grid[0]):
        for y in range(grid[1]):
            for z in range(grid[2]):
                var at = map.batch_origin(IndexList[3](x, y, z), q)
                text += String(t" {at.p} {at.q} {at.n} {at.k}")
    return text


def access(x: Int, last: Int, bytes: Int) -> String:
    """Why a layout does not allow accesses."""
    var layout = BlockLayout(x, last != 0)
    var text = text_of(access_refusal(layout, DType.int8, bytes))
    return text + ". " + text_of(access_refusal(layout, DType.bfloat16, bytes))


def shared(index: Int, word: Int, i: Int) -> String:
    """Where words lie in shared memory."""
    var tile = materialize[TILES]()[index]
    return String(t"{tile.shared_filter(word, i)} {tile.shared_pixel(word, i)}")


def refuse(numbers: List[Int]) raises -> String:
    """Why the kernel does not take a problem."""
    var rest = List[Int]()
    for i in range(1, len(numbers)):
        rest.append(numbers[i])
    var operands = Operands.bare(TYPES)
    # An address, of which the operands' alignment is made.
    operands.alignment = alignment_of(4096 + numbers[0])
    return text_of(
        Dp4a.refusal(ConvProblem.of_numbers(rest), operands, Device(80, 108))
    )


def types():
    """Why kernels are not built for types and layouts, and devices."""
    print(text_of(built_refusal[Dp4a](TYPES)))
    comptime last = OperandTypes.unfused(DType.int8, DType.float32)
    print(text_of(built_refusal[Dp4a](last)))
    print(text_of(built_refusal[Mma](TYPES)))
    comptime half = OperandTypes.unfused(
        DType.bfloat16, DType.bfloat16, interleaved=INTERLEAVED
    )
    print(text_of(built_refusal[Dp4a](half)))
    var fused = materialize[TYPES]()
    fused.fused_input = True
    print(text_of(built_refusal[Dp4a](fused)))
    print(text_of(Dp4a.device_refusal(60)))
    print(text_of(Dp4a.device_refusal(61)))


def layouts() raises:
    """Why filters are not allowed beside activations."""
    var problem = ConvProblem.of_numbers(
        [1, 8, 8, 1, 1, 5, 5, 1, 3, 3, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1]
    )
    for interleaved in [False, True]:
        for layout in [LAYOUT_KRSC, LAYOUT_INTERLEAVED]:
            try:
                problem.validate(
                    layout, 8 * 72, DType.int8, interleaved=interleaved
                )
                print("None")
            except error:
                print(error)
    try:
        problem.validate(LAYOUT_INTERLEAVED, 7, DType.int8, interleaved=True)
    except error:
        print(error)
    var fours = BlockLayout(4, batch_last=False)
    print(fours.channels_last_shape("input", IndexList[5](2, 3, 5, 7, 4)))
    try:
        _ = fours.channels_last_shape("input", IndexList[5](2, 3, 5, 7, 8))
    except error:
        print(error)
    var last = BlockLayout(16, batch_last=True)
    print(last.channels_last_shape("input", IndexList[5](2, 3, 5, 7, 16)))
    for x in [4, 8, 16, 32, 64]:
        print(text_of(block_refusal("input", BlockLayout(x, batch_last=True))))


def main() raises:
    for i in range(1, len(argv())):
        var words = String(argv()[i]).split(",")
        var n = List[Int]()
        for j in range(1, len(words)):
            n.append(Int(String(words[j])))
        if words[0] == "image":
            var map = map_of(n[0], n[1], n[2], n[3], n[4], n[5])
            print(image(map, n[2], n[3], n[4], n[5]))
        elif words[0] == "known":
            var map = Interleaved[INTERLEAVED].of_image(n[1], n[2], n[3])
            print(image(map, n[0], n[1], n[2], n[3]))
        elif words[0] == "filter":
            print(filter(n[0], n[1], n[2], n[3], n[4]))
        elif words[0] == "index":
            var map = map_of(n[0], n[1], n[2], n[3], n[4], n[5])
            print(map.index(n[2] - 1, n[3] - 1, n[4] - 1, n[5] - 1))
        elif words[0] == "tile":
            print(tile(n[0], n[1], n[2], n[3]))
        elif words[0] == "batch":
            print(batch(n[0], n[1], n[2], n[3], n[4]))
        elif words[0] == "access":
            print(access(n[0], n[1], n[2]))
        elif words[0] == "shared":
            print(shared(n[0], n[1], n[2]))
        elif words[0] == "choose":
            print(tile_of(n[0], n[1], n[2]))
        elif words[0] == "refuse":
            print(refuse(n))
        elif words[0] == "types":
            types()
        else:
            layouts()
