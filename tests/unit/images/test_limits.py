"""What is refused before anything decodes it, and that both sides get the same upright RGB pixels."""

import io
import os
import struct
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
    with pytest.raises(ImageError, match="gray image of 16 bits with a transparent value"):
        open_image(encoded(deep, transparency=128 << 8))


def segment(marker, data):
    return bytes([0xFF, marker]) + (len(data) + 2).to_bytes(2, "big") + data


def frame(num_blocks):
    """A GIF of one pixel, after this number of empty comments."""
    screen = b"GIF89a" + b"\1\0\1\0\x80\0\0" + bytes(3) + b"\xff" * 3
    return screen + b"\x21\xfe\1a\0" * num_blocks + b"\x2c" + b"\0" * 4 + b"\1\0\1\0\0\2\2\x4c\1\0;"


def run_lengths():
    """A compressed BMP of 64 x 64 pixels."""
    lines, header, palette = b"\x40\5\0\0" * 64 + b"\0\1", 14 + 40, bytes(1024)
    sizes = struct.pack("<IiiHHIIiiII", 40, 64, 64, 1, 8, 1, len(lines), 0, 0, 256, 0)
    begin = header + len(palette)
    return b"BM" + struct.pack("<III", begin + len(lines), 0, begin) + sizes + palette + lines


def progressive(num_more, between=b""):
    """A progressive JPEG whose last scan is there this number of times more."""
    data = encoded(quarters((64, 64)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + (between + data[last:-2]) * (num_more + 1) + data[-2:]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (progressive(64), "more than 64 scans"),
        (progressive(64, segment(0xFE, b"\xff\xd9")), "more than 64 scans"),  # no end of the image
        (progressive(64, segment(0xFE, b"") * 99), "or 4096 segments"),
        (PHOTO[:2] + segment(0xE1, b"Exif\0\0") * 1000 + PHOTO[2:], "too many parts"),
        (PHOTO[:2] + (b"\xff\xd8" + segment(0xE1, b"Exif\0\0")) * 1000 + PHOTO[2:], "too many"),
        (PHOTO[:2] + b"\xff" * 5000 + PHOTO[2:], "too many parts"),
        (PHOTO[:-2] + b"\xff" * 5000 + PHOTO[-2:], "4096 fill bytes"),  # after its pixels
        (PHOTO[:-9] + b"\xff" * 5000 + b"\0" + PHOTO[-9:], "4096 fill bytes"),  # among them
        (WHOLE[:33] + chunk(b"abCd", b"") * 1000 + WHOLE[33:], "too many parts"),
        (WHOLE[:33] + chunk(b"IDAT", b"") * 1000 + WHOLE[33:], "too many parts"),
        (frame(1000), "too many parts"),
        (run_lengths(), "compressed BMP"),
    ],
    ids=range(12),
)  # fmt: skip
def test_a_file_of_many_small_parts_is_refused_before_they_are_read(data, reason):
    """Of 32 MiB, each took between 10 s and hours (libjpeg-turbo#284), of one thread."""
    with pytest.raises(ImageError, match=reason):
        open_image(data)


def test_a_file_of_usual_parts_is_read():
    profile = segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(600)) * 255
    thumbnail = segment(0xE1, b"Exif\0\0" + progressive(60))
    white = segment(0xEE, b"\xff" * 9000)
    video = b"\xff\xda\0\0" * 10_000 + b"\xff" * 9000  # behind the picture, as phones write it
    assert open_image(PHOTO[:2] + profile + thumbnail + white + PHOTO[2:] + video).size == (64, 64)
    assert open_image(progressive(40)).size == (64, 64)
    assert open_image(frame(200)).size == (1, 1)
    pixels = os.urandom(3 << 16)  # several blocks, as libpng writes them
    photo = Image.frombytes("RGB", (256, 256), pixels)
    for kind in ("PNG", "GIF", "BMP"):
        assert open_image(encoded(photo, kind)).size == (256, 256)


@pytest.mark.parametrize("name", [b"zTXt", b"iCCP"])
def test_a_text_that_decompresses_to_more_than_any_image_is_refused(name):
    """8 MiB of zeros in 8 kB beside the pixels; Pillow reads 1 MiB."""
    text = chunk(name, b"k\0\0" + zlib.compress(bytes(1 << 23), 9))
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
