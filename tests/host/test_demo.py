"""`maxconv demo` without a graph: its arguments, the photographs that it reads, its picture."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxconv import _cli as cli
from maxconv import _demo as demo

ORIENTATION = 0x0112
ROTATED_LEFT = 6


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo writes where it is called; and no test here compiles."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "_compile", lambda _: pytest.fail("the demo compiled"))
    Image.new("RGB", (4, 3), "red").save("red.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sigma", "0"], "sigma: 0 is not between 1 and 255"),
        (["--sigma", "-25"], "sigma: -25 is not between 1 and 255"),
        (["--sigma", "256"], "sigma: 256 is not between 1 and 255"),
        (["--sigma", "nan"], "sigma: nan is not between 1 and 255"),
        (["--sigma", "inf"], "sigma: inf is not between 1 and 255"),
        (["--seed", "-1"], "seed: -1 is negative; 0 and above are allowed"),
        (["-o", "."], "output: . is a folder; name a file in it"),
        (["-o", "out"], "output: out has no picture's extension; take .png or .jpg"),
        (["-o", "out.txt"], "output: out.txt has no picture's extension; take .png or .jpg"),
        (["-o", "nowhere/out.png"], "output: nowhere does not exist"),
        (["red.png", "-o", "red.png"], "output: red.png is the photograph itself"),
        (["none.png"], "photo: none.png: No such file or directory"),
        (["."], "photo: .: Is a directory"),
        (["text.png"], "photo: text.png is not a picture of a known format"),
        (["empty.png"], "photo: empty.png is not a picture of a known format"),
        (["cut.png"], "photo: cut.png: "),
        (["float.tiff"], "photo: float.tiff: its pixels are floating-point numbers"),
    ],
)
def test_a_bad_argument_is_one_line_and_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.png").write_text("no picture")
    Path("empty.png").touch()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save("whole.png")
    whole = Path("whole.png").read_bytes()
    Path("cut.png").write_bytes(whole[: len(whole) // 2])
    Image.new("F", (2, 2)).save("float.tiff")
    assert cli.main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"maxconv demo: {message}")
    assert captured.err.count("\n") == 1
    assert not Path("denoised.png").exists()


@pytest.mark.parametrize("arguments", [["--sigma", "much"], ["--seed", "1.5"], ["a.png", "b.png"]])
def test_a_wrong_command_line_exits_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", *arguments])
    assert "usage: maxconv" in capsys.readouterr().err


@pytest.mark.parametrize("pixels", [11, 5], ids=["at the limit", "at twice the limit"])
def test_a_photograph_that_is_too_large_is_refused(
    pixels: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Pillow warns above its limit and refuses above twice its limit; red.png has 12 pixels.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels)
    assert cli.main(["demo", "red.png"]) == 2
    assert capsys.readouterr().err == "maxconv demo: photo: red.png has more than 0 megapixels\n"


def test_a_folder_that_cannot_be_written_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cli.main(["demo", "red.png"]) == 2
    assert capsys.readouterr().err == "maxconv demo: output: . is not writable\n"


def test_reading_the_arguments_does_not_import_max() -> None:
    program = (
        "import sys, maxconv._cli as c; c.main(['demo', 'none.png']); "
        "sys.exit(any(name in sys.modules for name in ('max', 'torch', 'skimage')))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (finished.returncode, finished.stderr.count("\n")) == (0, 1), finished.stderr


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "LA", "1", "CMYK", "I;16"])
def test_a_photograph_of_any_mode_becomes_rgb(mode: str) -> None:
    # A grey that each of these has, the palette too; but one bit is black or white.
    level = 255 if mode == "1" else 153
    if mode == "I;16":
        picture = Image.fromarray(np.full((3, 4), level * 257, np.uint16))
    else:
        picture = Image.new("RGB", (4, 3), (level,) * 3).convert(mode)
    name = "photo.tiff" if mode == "CMYK" else "photo.png"
    picture.save(name)
    pixels = demo._read(Path(name))
    assert (pixels.shape, pixels.dtype) == ((3, 4, 3), np.dtype(np.float32))
    np.testing.assert_allclose(pixels, level / 255, atol=1e-6)


def test_colours_keep_their_order_and_their_place() -> None:
    picture = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10
    Image.fromarray(picture).save("colours.png")
    np.testing.assert_allclose(demo._read(Path("colours.png")) * 255, picture, atol=1e-4)


def test_sixteen_bits_of_grey_are_kept() -> None:
    ramp = np.array([[0, 1000, 30000, 65535]], np.uint16)
    Image.fromarray(ramp).save("ramp.png")
    pixels = demo._read(Path("ramp.png"))
    np.testing.assert_allclose(pixels[:, :, 1], ramp / 65535, atol=1e-6)


def test_what_is_transparent_is_white() -> None:
    Image.new("RGBA", (1, 1), (255, 0, 0, 0)).save("clear.png")
    np.testing.assert_array_equal(demo._read(Path("clear.png")), np.ones((1, 1, 3)))
    Image.new("RGBA", (1, 1), (255, 0, 0, 255)).save("red.png")
    np.testing.assert_array_equal(demo._read(Path("red.png")), [[[1, 0, 0]]])


def test_a_photograph_taken_sideways_is_turned() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = ROTATED_LEFT
    Image.new("RGB", (4, 3)).save("sideways.jpg", exif=exif)
    assert demo._read(Path("sideways.jpg")).shape == (4, 3, 3)


def test_a_tile_is_cut_from_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_TILE", 4)
    photo = np.arange(10 * 3 * 3, dtype=np.float32).reshape(10, 3, 3)
    np.testing.assert_array_equal(demo._middle(photo), photo[3:7])


@pytest.mark.parametrize("width", [3, 400], ids=["narrower than its caption", "wide"])
def test_the_picture_shows_the_panels_side_by_side(width: int) -> None:
    height = 200
    colours = {"red": (1, 0, 0), "green": (0, 1, 0), "blue, with a long caption": (0, 0, 1)}
    panels = {
        name: np.full((height, width, 3), colour, np.float32) * 2 - 0.5
        for name, colour in colours.items()
    }
    drawn = np.asarray(demo._draw(panels))
    band = drawn.shape[0] - height
    assert band > 0
    for colour in colours.values():
        rows, columns = np.nonzero((drawn == np.multiply(colour, 255)).all(axis=2))
        assert len(rows) == height * width
        assert (rows.min(), rows.max()) == (band, band + height - 1)
        assert columns.max() - columns.min() == width - 1
    # In the captions' band there is writing in each third; the lines between end it.
    thirds = np.array_split(drawn[:band].max(axis=2) > 100, 3, axis=1)
    assert all(third[band // 2].any() for third in thirds)


def test_noise_beyond_the_training_is_told() -> None:
    report = {
        "photo": "a.png", "width": 4, "height": 3, "sigma": 80.0, "trained_sigmas": [5.0, 55.0],
        "seed": 0, "psnr_noisy": 10.0, "psnr_denoised": 21.5, "timed_width": 4, "timed_height": 3,
        "maxconv_ms": 2.0, "max_ms": 3.0, "speedup": 1.5, "largest_difference": 0.0,
        "output": "b.png",
    }  # fmt: skip
    text = demo._text(report)
    assert "sigma 80, seed 0; the network was trained with 5 to 55" in text
    assert "21.50 dB PSNR, +11.50 dB" in text
    assert "trained" not in demo._text({**report, "sigma": 55.0})
