"""Images: views and tokens, prompts, and what is refused; the tower is that of recordings (test_goldens)."""

import base64
import io
import json
import warnings
from pathlib import Path
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from PIL import Image

import dllm_jax as dj
from dllm_jax import vision
from dllm_jax.eval.benchmarks.images import read_pictures
from dllm_jax.nn.spec import VisionSpec
from dllm_jax.vision import AnyRes, Pad, tower
from dllm_jax.vision.images import open_image, views_of_config
from dllm_jax.vision.prompt import PLACE, prompt_ids, rendered
from tests import refuses, table

PUBLISHED = VisionSpec()
# Width and height: canvas, rows and columns of the map after scaling, tokens.
SIZES = {tuple(size): (tuple(canvas), *rest) for size, (canvas, *rest) in table("image_sizes")["sizes"]}


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


@pytest.mark.parametrize("size", SIZES)
def test_sizes_give_the_published_numbers_of_tokens(size):
    canvas, rows, columns, tokens = SIZES[size]
    assert AnyRes().canvas(size, PUBLISHED) == canvas
    merge = AnyRes().merge(size, PUBLISHED)
    assert len(merge.source) == tokens == 729 + rows * (columns + 1)
    newline = np.flatnonzero(merge.source[:, 0] < 0)
    np.testing.assert_array_equal(newline, 729 + columns + np.arange(rows) * (columns + 1))
    np.testing.assert_allclose(merge.weight.sum(axis=1), 1, rtol=1e-6)
    views = 1 + canvas[0] * canvas[1] // 384**2
    assert merge.source.max() < views * 729
    assert AnyRes().count(size, PUBLISHED) == views
    assert (Pad().count(size, PUBLISHED), len(Pad().merge(size, PUBLISHED).source)) == (1, 729)


def test_settings_are_read_from_the_config():
    grids = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]
    for pinpoints in (grids, "(1x1),...,(6x6)", None):
        found = views_of_config("anyres_max_4", pinpoints, "here")
        assert found.canvas((1280, 720), PUBLISHED) == (1536, 768)
    assert views_of_config("pad", None, "here") == Pad(newline=True)
    assert views_of_config("anyres", None, "here") == AnyRes(None)
    for aspect, pinpoints, message in (
        ("square", None, "here: image_aspect_ratio='square' must be anyres_max_N"),
        ("anyres_max_4", "(1x1),...,(3x3)", "here: image_grid_pinpoints="),
        ("anyres_max_4", [[384]], "here: image_grid_pinpoints: .*pairs"),
        ("anyres_max_4", [["a", 2]], "here: image_grid_pinpoints: "),
    ):
        refuses(message, views_of_config, aspect, pinpoints, "here")
    refuses(r"\(100, 384\); expected multiples of 384", AnyRes(4, ((100, 384),)).canvas, (5, 5), PUBLISHED)


@pytest.fixture(scope="module")
def model(llada_v_path) -> dj.Model:
    return dj.load(llada_v_path)


def test_neither_batches_nor_the_form_of_layers_nor_a_mesh_change_features(model, llada_v_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 30, 30, 3), np.uint8)
    spec = model.spec.vision
    want = tower.view_embeddings(model.vision, spec, pixels, 5)
    for at_once in (2, 8):
        ours = tower.view_embeddings(model.vision, spec, pixels, at_once)
        np.testing.assert_allclose(ours[:5], want, atol=1e-5)
    stacked = dj.load(llada_v_path, separate_layers=False)
    np.testing.assert_allclose(tower.view_embeddings(stacked.vision, spec, pixels, 5), want, atol=1e-5)
    mesh = jax.make_mesh((2, 2), ("tp", "fsdp"))
    split = dj.load(llada_v_path, mesh=mesh, separate_layers=True)
    assert split.vision["layers"][0]["vision_q"].sharding.spec == PartitionSpec("fsdp", "tp", None)
    np.testing.assert_allclose(tower.view_embeddings(split.vision, spec, pixels, 5), want, atol=1e-5)
    half = dj.load(llada_v_path, dtype=jnp.bfloat16)
    near = tower.view_embeddings(half.vision, spec, pixels, 5)
    assert near.dtype == jnp.bfloat16
    np.testing.assert_allclose(near.astype(np.float32), want, atol=0.15)


def test_kinds_of_images_are_the_same_image_turned_on_request_alone(tmp_path):
    image, exif = picture(9, 6), Image.Exif()
    image.save(tmp_path / "a.png")
    for source in (tmp_path / "a.png", str(tmp_path / "a.png"), np.asarray(image), image):
        np.testing.assert_array_equal(open_image(source), np.asarray(image))
    assert open_image(picture(9, 6, mode="L")).mode == "RGB"
    assert open_image(picture(9, 6, mode="L"), convert=False).mode == "L"
    assert open_image(np.zeros((6, 9, 4), np.uint8)).mode == "RGB"
    assert open_image(picture(9, 6).convert("P")).size == (9, 6)
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "a.png", exif=exif)
    assert open_image(tmp_path / "a.png").size == (9, 6)
    np.testing.assert_array_equal(open_image(tmp_path / "a.png", exif=True), np.rot90(image, -1))


def broken(path):
    stream = io.BytesIO()
    picture(64, 64).save(stream, "png")
    path.write_bytes(stream.getvalue()[:2000])
    return path


def bomb(path, width=20000):
    Image.new("1", (width, 9000)).save(path)
    return path


REFUSED = {
    "cannot be decoded": lambda at: broken(at / "cut.png"),
    "cannot be read": lambda at: (at / "text.png").write_text("no image") and at / "text.png",
    "does not exist": lambda at: at / "nothing.png",
    "cannot be read: Image size .180000000 pixels.": lambda at: bomb(at / "bomb.png"),
    "16000 x 9000 pixels; at most": lambda at: bomb(at / "smaller.png", 16000),
    "cannot be read: ": lambda at: at,
    "one side is more than 200 times the other": lambda at: Image.new("RGB", (1001, 5)),
    "image has 0 x 5 pixels": lambda at: Image.new("RGB", (0, 5)),
    "image has 3 x 0 pixels": lambda at: np.zeros((0, 3, 3), np.uint8),
    "dtype float32": lambda at: np.zeros((4, 4, 3), np.float32),
    r"shape \(4, 4, 2\)": lambda at: np.zeros((4, 4, 2), np.uint8),
    "has the mode 'F'": lambda at: Image.new("F", (4, 4)), "image=3 must be": lambda at: 3,
}  # fmt: skip


def test_values_that_are_no_image_are_refused_by_name(tmp_path):
    for message, make in REFUSED.items():
        with warnings.catch_warnings(), pytest.raises((ValueError, FileNotFoundError), match=message):
            open_image(make(tmp_path))


def in_base64(kind: str, width: int = 9) -> str:
    stream = io.BytesIO()
    picture(width, 6).save(stream, kind)
    return base64.b64encode(stream.getvalue()).decode()


def test_data_uris_are_images_and_other_long_texts_are_refused_in_a_line(tmp_path, unannotated):
    text = in_base64("png")
    spellings = ("image/png;base64,", text), ("image/png;name=a.png;BASE64,", text), (";base64,", text)
    wrapped = "\n".join(text[i : i + 76] for i in range(0, len(text), 76))
    spellings += (("image/png;base64,", text.rstrip("=")), ("image/png;base64,", wrapped))
    for head, content in (*spellings, ("image/png;base64,", quote(text))):
        for scheme in ("data:", "DATA:"):
            np.testing.assert_array_equal(open_image(scheme + head + content), np.asarray(picture(9, 6)))
    large = "data:image/png;base64," + in_base64("png", 1000)[:-100]
    bare = r"is no path: it looks like base64\. Pass \"data:image/png;base64,\" and the text"
    for source, message in (
        (text, bare),
        (in_base64("jpeg"), bare),
        ("QUJD" * 2000, bare),
        (large, "cannot be decoded"),
        ("data:image/png;base64,%%%", "is a data URI whose base64 is damaged"),
        ("data:image/png;base64," + "A" * 10**6, "cannot be read: "),
        ("data:image/svg+xml,<svg/>", "is a data URI without base64"),
        ("data:image/png", "is a data URI without base64"),
        (Path("x" * 5000), "^image=.* is no path: File name too long"),
        ("a\0b", "^image=.* is no path: embedded null"),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            open_image(source)
        assert len(str(refused.value)) < 1500
    (tmp_path / "q.jsonl").write_text(
        json.dumps({"id": "1", "image": text * 30, "question": "?", "answer": "2"})
    )
    with pytest.raises(ValueError, match=r"q\.jsonl:1: image .* does not exist in") as refused:
        read_pictures(tmp_path / "q.jsonl")
    assert len(str(refused.value)) < 1500


class Letters:
    """A tokenizer of bytes."""

    def encode(self, text, add_special_tokens):
        return list(text.encode())


def test_images_have_their_places_in_both_forms_of_a_message():
    text, images = rendered([{"role": "user", "content": "<image> <image>\nA?", "images": [1, 2]}])
    parts = [{"type": "image", "image": 1}, {"type": "image", "image": 2}, {"type": "text", "text": "A?"}]
    assert rendered([{"role": "user", "content": parts}]) == (text, [1, 2])
    urls = [
        {"type": "image_url", "image_url": given} for given in ({"url": "a.png", "detail": "low"}, "b.png")
    ]
    assert rendered([{"role": "user", "content": [*urls, parts[2]]}]) == (text, ["a.png", "b.png"])
    for odd in ({"type": "image_url", "image_url": {}}, {"type": "image_url"}, {"type": "audio"}):
        refuses("must be .* or have a list of parts", rendered, [{"role": "user", "content": [odd]}])
    mixed, images = rendered([{"role": "user", "content": [parts[2], parts[0]]}])
    assert mixed.endswith(
        "user<|end_header_id|>\n\nA?<image><|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert images == [1]
    own, _ = rendered([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A?"}])
    assert own.startswith("<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>")


def test_the_first_id_behind_an_image_is_lost_unless_it_is_asked_for():
    assert prompt_ids(Letters(), "ab<image>\ncd<image>") == [97, 98, PLACE, 99, 100, PLACE]
    assert prompt_ids(Letters(), "ab<image>\ncd", drop_first_id=False) == [97, 98, PLACE, 10, 99, 100]


def test_messages_that_do_not_match_their_images_are_refused():
    of = lambda content, **images: [{"role": "user", "content": content, **images}]
    for messages, message in (
        ([], "messages=.* must be at least one message"),
        (of("<image>"), r"messages\[0\] has 1 placeholders <image> and 0 images"),
        (of("A", images=[1]), "has 0 placeholders <image> and 1 images"),
        (of("<image> <image>", images=[1]), "2 placeholders <image> and 1 "),
        ([{"role": "robot", "content": "A"}], "roles: system, user, assistant"),
        ([{"role": "user"}], r"messages\[0\]="),
        (of([{"type": "video"}]), r"messages\[0\]="),
        (of([{"type": "text", "text": "<image>"}]), "1 placeholders <image> and 0 images"),
        (of("<image>", images=3), "images=3 must be a list"),
        (of("A", videos=["a.mp4"]), r"messages\[0\] has \['videos'\], which no processor here reads"),
    ):
        refuses(message, rendered, messages)


def test_an_image_needs_a_tower_and_a_place():
    text = dj.load(dj.bundled.path("tiny-llada"))
    with pytest.raises(ValueError, match=r"the model \(llada\) has no vision tower"):
        vision.Processor(Letters()).encode(text, [[{"role": "user", "content": "A"}]])
    refuses("1 places for 0 images", vision.processor.spliced, [1, PLACE], [], [], PUBLISHED)
