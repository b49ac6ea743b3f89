"""What is refused before anything decodes it, and that both sides get the same upright RGB pixels."""

import io
import zlib

import pytest
from PIL import Image

from rlpost.errors import ImageError
from rlpost.images.limits import ImageLimits, open_image

COLOURS = [(250, 10, 20), (10, 240, 30), (20, 30, 230), (120, 90, 60)]


def quarters(size=(8, 6)):
    """An image whose quarters have four colours: every turn and mirror of it differs."""
    image = Image.new("RGB", size)
    for number, colour in enumerate(COLOURS):
        column, row = number % 2, number // 2
        box = (size[0] // 2, size[1] // 2)
        image.paste(
            colour, (column * box[0], row * box[1], (column + 1) * box[0], (row + 1) * box[1])
        )
    return image


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name, data):
    return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")


def bomb(side):
    """A PNG of some kilobytes that declares ``side`` pixels a side."""
    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    pixels = zlib.compress(bytes(1 << 20), 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP", "GIF", "JPEG"])
def test_each_format_gives_rgb_of_its_size(kind):
    image = open_image(encoded(quarters(), kind))
    assert (image.mode, image.size) == ("RGB", (8, 6))


def moving(kind):
    return encoded(
        quarters(), kind, save_all=True, append_images=[quarters().rotate(90)], duration=9
    )


WHOLE = encoded(quarters((64, 64)), "PNG")
PHOTO = encoded(quarters((64, 64)), "JPEG")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an image: no bytes"),
        (b"<svg xmlns='...'/>", "not an image: 18 bytes that begin with"),
        (b"https://example.org/a.png", "not an image"),
        (encoded(quarters(), "TIFF"), "not an image: .* use one of PNG, JPEG"),
        (encoded(quarters(), "ICO"), "not an image"),
        (WHOLE[: len(WHOLE) // 2], "cannot be decoded"),
        (PHOTO[: len(PHOTO) // 2], "cannot be decoded"),
        (WHOLE[:40], "cannot be decoded|not an image"),
        (WHOLE[:60] + bytes([WHOLE[60] ^ 255]) + WHOLE[61:], "cannot be decoded"),
        (moving("GIF"), "an animated GIF"),
        (moving("WEBP"), "an animated WEBP"),
        (moving("PNG"), "an animated PNG"),
        (bomb(100_000), "10000000000 pixels"),
        (bomb(9_000), "9000 x 9000 pixels; at most"),
        (bytes(ImageLimits().max_bytes + 1), "bytes; at most"),
    ],
    ids=range(15),
)  # fmt: skip
def test_what_is_no_single_image_within_the_bounds_is_refused(data, reason):
    with pytest.raises(ImageError, match=reason):
        open_image(data)


def test_a_bound_on_pixels_holds_to_the_pixel():
    data = encoded(quarters((8, 6)))
    assert open_image(data, ImageLimits(max_pixels=48)).size == (8, 6)
    with pytest.raises(ImageError, match="8 x 6 pixels; at most 47"):
        open_image(data, ImageLimits(max_pixels=47))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photo_is_upright(orientation):
    """The eight values of the EXIF tag, each against the transposition that the standard names."""
    turned = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    stored = quarters() if orientation == 1 else quarters().transpose(turned[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert open_image(encoded(stored, exif=exif)).tobytes() == quarters().tobytes()


def test_transparent_pixels_are_white_and_deep_gray_is_scaled():
    drawing = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    drawing.putpixel((1, 1), (0, 0, 0, 255))
    seen = open_image(encoded(drawing))
    assert seen.getpixel((0, 0)) == (255, 255, 255) and seen.getpixel((1, 1)) == (0, 0, 0)
    palette = Image.new("P", (4, 4), 0)
    assert open_image(encoded(palette, "GIF", transparency=0)).getpixel((0, 0)) == (255, 255, 255)
    deep = Image.new("I;16", (4, 4), 128 << 8)
    assert open_image(encoded(deep)).getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize("name", [b"zTXt", b"iCCP"])
def test_a_text_that_decompresses_to_more_than_any_image_is_refused(name):
    """256 MiB of zeros in 261 kB beside the pixels."""
    text = chunk(name, b"k\0\0" + zlib.compress(bytes(1 << 28), 9))
    with pytest.raises(ImageError, match="Decompressed data too large"):
        open_image(WHOLE[:33] + text + WHOLE[33:])


def test_a_photo_with_a_broken_orientation_is_as_it_is_stored():
    data = encoded(
        quarters((64, 64)), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01" * 20
    )
    assert open_image(data).getpixel((0, 0))[0] > 200


def test_a_photo_with_a_second_picture_behind_it_is_that_photo():
    data = encoded(
        quarters((64, 64)), "MPO", save_all=True, append_images=[Image.new("RGB", (64, 64))]
    )
    assert open_image(data).getpixel((0, 0))[0] > 200
