"""Images on the host: the views of an image that the tower sees, and what each image token is made of.

The published preprocessing of LLaDA-V (LLaVA-NeXT's anyres), in Pillow's integer arithmetic. An image becomes
square views; the tower makes features of their patches; an image token is a weighted sum of at most four
features, or the newline embedding. Which ones depends on the image's size alone and is a table (`Merge`).
"""

import abc
import base64
import dataclasses
import io
import math
import os
import re
import warnings
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import unquote

import numpy as np
from annotated_types import MinLen
from jaxtyping import Float, Float32, Int, UInt8
from typing_extensions import override

from dllm_jax.nn.spec import VisionSpec
from dllm_jax.options import NoneMeans, Options, PositiveInt, check_argument, local_path, shown

PIXELS = 89_478_485  # in an image; Pillow's own limit against decompression bombs
ASPECT = 200  # longest side over shortest: beyond, a view has no pixel of the image left
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")
LONGEST_PATH, LONGEST_SHOWN = 4096, 300  # characters, as of Linux and in a message
FIRST_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # of PNG, JPEG, GIF and WEBP
NEWLINE = -1  # instead of a feature: the newline embedding
GRAY = (127, 127, 127)  # of padding to a square, the mean of the normalization; a canvas of tiles is black

# float32(u8 * (1/255) in float64), then (x - 0.5) / 0.5 in float32, for every value of a byte.
NORMALIZED = ((np.arange(256) * (1 / 255)).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)

ALONE = np.array([1, 0, 0, 0], np.float32)  # the weights of a token that is one feature
Canvases = tuple[tuple[PositiveInt, ...], ...]  # pairs (width, height)


class Merge(NamedTuple):
    """Composition of an image's tokens from features of its views.

    Attributes:
      source: features that a token is the sum of, by view * patches + patch (row-major); `NEWLINE` in all
        four is the newline embedding.
      weight: Weight of each feature; 0 for those that do not count.
    """

    source: Int[np.ndarray, "t 4"]
    weight: Float32[np.ndarray, "t 4"]


@dataclasses.dataclass(frozen=True)
class Views(Options, abc.ABC):
    """How an image becomes views and tokens."""

    @abc.abstractmethod
    def cut(self, image: Any, vision: VisionSpec) -> list[Any]:
        """The views of an image: square, `vision.image` pixels wide, as Pillow's images in RGB."""

    @abc.abstractmethod
    def count(self, size: tuple[int, int], vision: VisionSpec) -> int:
        """How many views an image of this size (width, height) has."""

    @abc.abstractmethod
    def merge(self, size: tuple[int, int], vision: VisionSpec) -> Merge:
        """The tokens of an image of this size (width, height)."""

    def pixels(self, image: Any, vision: VisionSpec) -> UInt8[np.ndarray, "views side side 3"]:
        """The views as an array."""
        return np.stack([np.asarray(view) for view in self.cut(image, vision)])


@dataclasses.dataclass(frozen=True)
class AnyRes(Views):
    """The whole image in one view, its aspect ratio ignored, then tiles of it, fitted into a canvas.

    Tokens are those of the first view, then the rows of the tiles' map without its padding, each ended by a
    newline; the map is scaled down bilinearly where it has more than 1.1 ** 2 times `budget` views' patches.

    Attributes:
      budget: N of "anyres_max_N"; None never scales down ("anyres").
      canvases: sizes (width, height) that images are fitted into, multiples of a view's side; of those that
        suit an image equally, the first is taken. None means every grid of up to 6 x 6 views, wider ones
        later.
    """

    budget: Annotated[PositiveInt | None, NoneMeans("no limit")] = 4
    canvases: Annotated[Canvases | None, MinLen(1), NoneMeans("grids of up to 6 x 6")] = None

    def __post_init__(self):
        super().__post_init__()
        for canvas in self.canvases or ():
            if len(canvas) != 2:
                raise ValueError(f"canvases hold {canvas}; expected pairs (width, height)")

    def canvas(self, size: tuple[int, int], vision: VisionSpec) -> tuple[int, int]:
        """The canvas for an image: the one that keeps most of its pixels, then with the least waste."""
        side, (w, h) = vision.image, size
        grids = [(side * i, side * j) for i in range(1, 7) for j in range(1, 7)]
        canvases = grids if self.canvases is None else [(c[0], c[1]) for c in self.canvases]
        for width, height in canvases:
            if width % side or height % side:
                raise ValueError(f"canvases hold ({width}, {height}); expected multiples of {side}")

        def rank(canvas: tuple[int, int]) -> tuple[int, int]:
            scale = min(canvas[0] / w, canvas[1] / h)
            effective = min(int(w * scale) * int(h * scale), w * h)
            return effective, effective - canvas[0] * canvas[1]

        return max(canvases, key=rank)  # the first of equals

    @override
    def cut(self, image: Any, vision: VisionSpec) -> list[Any]:
        from PIL import Image

        side, (w, h) = vision.image, image.size
        width, height = self.canvas((w, h), vision)
        # Fitted by the tighter side; the other is rounded up, never beyond the canvas.
        if width / w < height / h:
            inner = width, min(math.ceil(h * (width / w)), height)
        else:
            inner = min(math.ceil(w * (height / h)), width), height
        # Centered on black, cut row by row: the order in which `merge` counts tiles, after the whole view.
        canvas = Image.new("RGB", (width, height), (0, 0, 0))
        canvas.paste(image.resize(inner), ((width - inner[0]) // 2, (height - inner[1]) // 2))
        corners = [(x, y) for y in range(0, height, side) for x in range(0, width, side)]
        tiles = [canvas.crop((x, y, x + side, y + side)) for x, y in corners]
        return [image.resize((side, side)).convert("RGB"), *tiles]

    @override
    def count(self, size: tuple[int, int], vision: VisionSpec) -> int:
        width, height = self.canvas(size, vision)
        return 1 + width * height // vision.image**2

    @override
    def merge(self, size: tuple[int, int], vision: VisionSpec) -> Merge:
        side, (w, h) = vision.side, size
        # The map of all tiles: their patches side by side, as if one tower had seen the canvas.
        grid = [length // vision.image for length in self.canvas(size, vision)]
        rows, columns = side * grid[1], side * grid[0]

        # Unpadding: of the map of all tiles, the symmetric part that the image covers.
        if w / h > columns / rows:
            covered = int(h * (columns / w))
            top, left = (rows - covered) // 2, 0
        else:
            covered = int(w * (rows / h))
            top, left = 0, (columns - covered) // 2
        row, column = _whole(top, rows - top), _whole(left, columns - left)

        # Downscaling: torch's bilinear interpolation without antialiasing.
        if self.budget is not None:
            # Both sides shrink by the root of the excess; up to 10 per cent of excess a side is left alone.
            times = math.sqrt(len(row[0]) * len(column[0]) / (self.budget * vision.patches))
            if times > 1.1:
                row = _bilinear(row[0][:, 0], int(len(row[0]) // times))
                column = _bilinear(column[0][:, 0], int(len(column[0]) // times))

        # A token is the sum over two rows and two columns; every row of the map ends with a newline.
        y, x = row[0][:, None, :, None], column[0][None, :, None, :]
        tile = 1 + (y // side) * grid[0] + x // side
        source = tile * vision.patches + (y % side) * side + x % side
        weight = row[1][:, None, :, None] * column[1][None, :, None, :]
        source, weight = (a.reshape(len(row[0]), len(column[0]), 4) for a in (source, weight))
        tiles = _with_newlines(source, weight)
        base = _features(np.arange(vision.patches))
        return Merge(*(np.concatenate(parts) for parts in zip(base, tiles, strict=True)))


@dataclasses.dataclass(frozen=True)
class Pad(Views):
    """One view: the image in the middle of a gray square.

    Of each of several images in a prompt, and of a single one where config.json says "pad".

    Attributes:
      newline: end the image's tokens with a newline, as the authors' training does (730 tokens). The
        published evaluation hands over all images as one array, which leaves it out (729).
    """

    newline: bool = False

    @override
    def cut(self, image: Any, vision: VisionSpec) -> list[Any]:
        from PIL import Image

        w, h = image.size
        longest = max(w, h)
        square = Image.new("RGB", (longest, longest), GRAY)
        square.paste(image, ((longest - w) // 2, (longest - h) // 2))
        return [square.resize((vision.image, vision.image))]

    @override
    def count(self, size: tuple[int, int], vision: VisionSpec) -> int:
        return 1

    @override
    def merge(self, size: tuple[int, int], vision: VisionSpec) -> Merge:
        merge = _features(np.arange(vision.patches))
        return _with_newlines(merge.source[None], merge.weight[None]) if self.newline else merge


def views_of_config(aspect: Any, pinpoints: Any, where: str) -> Views:
    """Reads `image_aspect_ratio` and `image_grid_pinpoints` of a config.json.

    Args:
      aspect: "anyres_max_4", "anyres" or "pad"; None is the published one.
      pinpoints: pairs, "(1x1),...,(6x6)", or None for the grids of up to 6 x 6.
      where: the file, for messages.

    Raises:
      ValueError: anything else.
    """
    if aspect == "pad":
        return Pad(newline=True)
    match = re.fullmatch(r"anyres(?:_max_([1-9]\d{0,3}))?", str("anyres_max_4" if aspect is None else aspect))
    if not match:
        raise ValueError(f"{where}: image_aspect_ratio={shown(aspect)} must be anyres_max_N, anyres or pad")
    budget = None if match[1] is None else int(match[1])
    if isinstance(pinpoints, str):  # of grids: "(1x1),...,(6x6)" is every one between the two
        ends = [tuple(map(int, pair)) for pair in re.findall(r"\((\d+)x(\d+)\)", pinpoints)]
        if ends != [(1, 1), (6, 6)]:
            raise ValueError(f"{where}: image_grid_pinpoints={shown(pinpoints)} is not supported; pass pairs")
        pinpoints = None
    try:
        return AnyRes(budget, check_argument("canvases", pinpoints, Canvases | None))
    except ValueError as error:
        raise ValueError(f"{where}: image_grid_pinpoints: {error}") from None


def open_image(source: Any, exif: bool = False, convert: bool = True) -> Any:
    """An image from a file, an array or one of Pillow's images, checked and decoded.

    Args:
      source: a path; a data URI ("data:image/png;base64,..."); a NumPy array uint8 [h w] gray, [h w 3] RGB or
        [h w 4] RGBA; or a `PIL.Image.Image`.
      exif: turn it as its EXIF orientation says; LLaDA-V does not.
      convert: Whether to convert to RGB, as in the published evaluation, which drops transparency; otherwise
        it is scaled in its own mode, as its demonstration does.

    Raises:
      ImportError: Pillow is not installed.
      FileNotFoundError: there is no such file.
      ValueError: broken, of no pixels, of too many pixels (decompression bombs), too thin, or of another
        kind; names the file.
    """
    name = f"image {_beginning(os.fspath(source))!r}" if isinstance(source, str | os.PathLike) else "image"
    image = _opened(source, name)
    # The header alone has been read so far: nothing is decoded before its size is known to be bearable.
    w, h = image.size
    if w < 1 or h < 1:
        raise ValueError(f"{name} has {w} x {h} pixels; expected at least one")
    if w * h > PIXELS:
        raise ValueError(f"{name} has {w} x {h} pixels; at most {PIXELS:,} are decoded")
    if max(w, h) > ASPECT * min(w, h):
        raise ValueError(f"{name} has {w} x {h} pixels: one side is more than {ASPECT} times the other")
    if image.mode not in MODES:
        raise ValueError(f"{name} has the mode {image.mode!r}; supported: {', '.join(MODES)}; convert it")
    try:
        image.load()
        if exif:
            from PIL import ImageOps

            image = ImageOps.exif_transpose(image)
        return image.convert("RGB") if convert else image
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, EOFError, struct.error, ...
        raise ValueError(f"{name} cannot be decoded: {error}") from error


def _beginning(text: Any) -> Any:
    """A path as it is, and the beginning of a longer text, such as an image in base64."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:60]}..."


def normalized(pixels: UInt8[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Pixels as the tower takes them: -1 is black, 1 full color."""
    return NORMALIZED[pixels]


def _opened(source: Any, name: str) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images need Pillow: pip install '.[vision]' in a clone") from error

    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        shaped = source.ndim == 2 or (source.ndim == 3 and source.shape[2] in (3, 4))
        if source.dtype != np.uint8 or not shaped:
            given = f"dtype {source.dtype} and shape {source.shape}"
            raise ValueError(f"image of {given} must be uint8 [h w], [h w 3] or [h w 4]")
        if not source.size:
            raise ValueError(f"image has {source.shape[1]} x {source.shape[0]} pixels; expected at least one")
        return Image.fromarray(source)
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"image={shown(source)} must be a path, a data URI, a NumPy array of uint8, or one of Pillow's "
            "images"
        )
    content = _data(source, name) if isinstance(source, str) else None
    path = Path() if content is not None else local_path("image", source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # its size is looked at next
            return Image.open(io.BytesIO(path.read_bytes() if content is None else content))
    except FileNotFoundError:
        raise FileNotFoundError(f"{name} does not exist") from None
    except Exception as error:  # what is no image at all, a directory, twice as many pixels, ...
        raise ValueError(f"{name} cannot be read: {error}") from error


def _data(source: str, name: str) -> bytes | None:
    """The bytes that a data URI holds; None of a path.

    Raises:
      ValueError: it holds no base64, or the text is base64 without the beginning of a URI.
    """
    head, comma, text = source.partition(",")
    if head[:5].lower() != "data:":
        if source.startswith(FIRST_BASE64) or len(source) > LONGEST_PATH:
            fix = 'Pass "data:image/png;base64," and the text, a path, an array or one of Pillow\'s images.'
            raise ValueError(f"{name} is no path: it looks like base64. {fix}")
        return None
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError(f"{name} is a data URI without base64; expected data:image/png;base64,...")
    text = "".join(unquote(text).split()).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError as error:
        raise ValueError(f"{name} is a data URI whose base64 is damaged: {error}") from None


Line = tuple[Int[np.ndarray, "_ 2"], Float32[np.ndarray, "_ 2"]]  # two places of a map's axis, and weights


def _whole(start: int, stop: int) -> Line:
    """The places from start to stop as they are."""
    place = np.arange(start, stop)
    return np.stack([place, place], axis=1), np.tile(ALONE[:2], (len(place), 1))


def _bilinear(places: Int[np.ndarray, "n"], length: int) -> Line:
    """Places scaled to a length: torch's interpolation with align_corners=False, in float32."""
    scale = np.float32(len(places)) / np.float32(length)
    at = np.maximum(scale * (np.arange(length, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5), 0)
    # Each place is between two, weighted by how near they are; the last one has itself on both sides.
    first = at.astype(np.int64)
    second = np.minimum(first + 1, len(places) - 1)
    fraction = at - first.astype(np.float32)
    weight = np.stack([np.float32(1) - fraction, fraction], axis=1)
    return places[np.stack([first, second], axis=1)], weight.astype(np.float32)


def _features(source: Int[np.ndarray, "t"]) -> Merge:
    """Tokens that are features as they are."""
    weight = np.tile(ALONE, (len(source), 1))
    return Merge(np.repeat(source[:, None], 4, axis=1), weight)


def _with_newlines(source: Int[np.ndarray, "r c 4"], weight: Float[np.ndarray, "r c 4"]) -> Merge:
    """The tokens of a map, row by row, each row with a newline after it."""
    ended = lambda rows, end: np.concatenate([rows, np.broadcast_to(end, (len(rows), 1, 4))], axis=1)
    return Merge(ended(source, NEWLINE).reshape(-1, 4), ended(weight, ALONE).reshape(-1, 4))
