"""Processor of conversations with images, which `dj.chat` accepts in place of a tokenizer."""

import dataclasses
import os
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int, UInt8

from dllm_jax.checkpoint.config import read_config
from dllm_jax.checkpoint.source import locate
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec, VisionSpec
from dllm_jax.options import Options, PositiveInt, check_argument
from dllm_jax.state import host
from dllm_jax.state.inputs import EMBEDS_PLACEHOLDER, Prompts, padded_together
from dllm_jax.state.text import Disguise
from dllm_jax.vision import tower
from dllm_jax.vision.images import (
    NEWLINE,
    AnyRes,
    Merge,
    Pad,
    Views,
    normalized,
    open_image,
    views_of_config,
)
from dllm_jax.vision.prompt import PLACE, SUPPRESSED, prompt_ids, rendered
from dllm_jax.vision.tower import PromptImages

LONGEST = 16384  # rows of a prompt in training


class Encoded(NamedTuple):
    """A prompt with its images, on the host.

    Attributes:
      ids: token ids, `EMBEDS_PLACEHOLDER` in place of image tokens.
      source: features that image tokens are made of, see `Merge`; of the prompt's own views.
      weight: Weight of each feature; 0 at ids.
      pixels: Pixels of all views.
    """

    ids: Int[np.ndarray, "p"]
    source: Int[np.ndarray, "p 4"]
    weight: Float32[np.ndarray, "p 4"]
    pixels: UInt8[np.ndarray, "views side side 3"]


@dataclasses.dataclass(frozen=True)
class Processor(Options):
    """Turns conversations with images into prompts of LLaDA-V.

    Attributes:
      tokenizer: the checkpoint's.
      one: Views of the image of a prompt with one image.
      several: Views of each of several images.
      drop_first_id: Whether the first id after an image is left out, as in the reference implementation
        (`dllm_jax.vision.prompt.prompt_ids`).
      exif: turn images as their EXIF orientation says.
      convert: images to RGB before anything else, see `open_image`.
      at_once: views that the tower takes in one program, which bounds its memory.
      longest: Maximum tokens of a prompt; longer ones raise `ValueError` (the reference implementation cuts
        them).
    """

    tokenizer: Any
    one: Views = AnyRes()
    several: Views = Pad()
    drop_first_id: bool = True
    exif: bool = False
    convert: bool = True
    at_once: PositiveInt = tower.AT_ONCE
    longest: PositiveInt = LONGEST

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> "Processor":
        """The processor of a checkpoint: its tokenizer, and how its config.json cuts images.

        Args:
          path: Directory or hub id, as in `dllm_jax.load`.
          **options: fields, in place of the checkpoint's.

        Raises:
          FileNotFoundError: no such directory or hub id, no config.json, or no tokenizer.
          NotADirectoryError: the path is a file's.
          ValueError: an unsupported value, or a tokenizer that cannot be read; of the checkpoint's it names
            the file.
          TypeError: an option that is no field.
        """
        folder = locate(path)
        config = read_config(folder / "config.json")
        aspect, pinpoints = (config.values.get(f"image_{key}") for key in ("aspect_ratio", "grid_pinpoints"))
        longest = config.read("tokenizer_model_max_length", PositiveInt, default=LONGEST)
        settings = {"one": views_of_config(aspect, pinpoints, config.where), "longest": longest}
        if "tokenizer" not in options:
            settings["tokenizer"] = read_tokenizer(folder)
        return cls(**{**settings, **options})

    @property
    def suppress_tokens(self) -> tuple[int, ...]:
        """Ids that an answer never holds; those of the four that the tokenizer knows."""
        known = self.tokenizer.convert_tokens_to_ids(list(SUPPRESSED))

        # A tokenizer answers with its unknown token, or None, for words that it does not have.
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        return tuple(i for i in known if i is not None and i != unknown)

    def encode(self, model: Model, conversations: list[list[dict[str, Any]]], ladder: Any = None) -> Prompts:
        """Prompts of a batch of conversations, left-padded, with the features of their images.

        Args:
          model: Model whose tower is used; all images of the batch go through it together, `at_once` views at
            a time.
          conversations: lists of messages, see `dllm_jax.vision.prompt`.
          ladder: pad to its next rung (`dllm_jax.buckets.Ladder`), so that images of all sizes share
            programs.

        Raises:
          ImportError: there are images, and Pillow is not installed.
          FileNotFoundError: the file of an image does not exist.
          ValueError: a model without a tower, messages, placeholders or images that break a rule, or a prompt
            that is too long.
        """
        spec = check_argument("model", model, Model, ", such as dj.load(path)").spec
        vision = tower.tower_of(spec)
        prompts = self._prompts(conversations, vision)
        width = max(len(prompt.ids) for prompt in prompts)
        width = width if ladder is None else ladder.fit(width)
        ids, mask, source, weight = _left_padded(prompts, width, spec.eos_id)
        ids, mask = host.put(ids, np.int32), host.put(mask, bool)
        pixels = np.concatenate([prompt.pixels for prompt in prompts])
        if not len(pixels):
            return Prompts(ids, mask, None)
        # Features are counted over the views of all prompts from here on.
        first = np.cumsum([0, *(len(prompt.pixels) for prompt in prompts)])[:-1] * vision.patches
        source = np.where(source == NEWLINE, source, source + first[:, None, None])
        assert model.vision is not None, "a spec with a tower"
        views = tower.view_embeddings(model.vision, vision, pixels, self.at_once)
        return Prompts(ids, mask, tower.merged(model.vision, views, source, weight))

    def batch(
        self, spec: ModelSpec, conversations: list[list[dict[str, Any]]]
    ) -> tuple[Int[np.ndarray, "b p"], Bool[np.ndarray, "b p"], PromptImages | None]:
        """Encodes a batch of conversations for training: ids and mask, left-padded, and the images, if any.

        Raises:
          ImportError, FileNotFoundError, ValueError: as `encode`.
        """
        vision = tower.tower_of(spec)
        prompts = self._prompts(conversations, vision)
        ids, mask, source, weight = _left_padded(prompts, max(len(p.ids) for p in prompts), spec.eos_id)
        views = max(len(prompt.pixels) for prompt in prompts)
        if not views:
            return ids, mask, None
        # Black views (-1) fill up prompts with fewer of them: one array for the batch.
        pixels = np.full((len(prompts), views, vision.image, vision.image, 3), -1, np.float32)
        for row, prompt in enumerate(prompts):
            pixels[row, : len(prompt.pixels)] = normalized(prompt.pixels)
        return ids, mask, PromptImages(pixels, source, weight)

    def _prompts(self, conversations: list[list[dict[str, Any]]], vision: VisionSpec) -> list[Encoded]:
        if not conversations:
            raise ValueError(f"conversations={conversations!r} must hold at least one")
        return [self.prompt(messages, vision) for messages in conversations]

    def prompt(self, messages: list[dict[str, Any]], vision: VisionSpec) -> Encoded:
        """Encodes one conversation on the host: ids, the composition of its image tokens, and pixels."""
        text, sources = rendered(messages)
        disguise = Disguise.of(self.tokenizer, [text])
        traced, _ = rendered(messages, disguise.hide)
        # One image is cut into tiles, several have one view each, as published.
        images = [open_image(source, self.exif, self.convert) for source in sources]
        views = self.one if len(images) < 2 else self.several
        pixels = [views.pixels(image, vision) for image in images]
        merges = [views.merge(image.size, vision) for image in images]
        result = spliced(
            prompt_ids(self.tokenizer, disguise.rendered(text, traced), self.drop_first_id),
            pixels,
            merges,
            vision,
        )
        if len(result.ids) > self.longest:
            raise ValueError(f"the prompt has {len(result.ids)} positions; at most longest={self.longest}")
        return result


def spliced(
    ids: list[int],
    pixels: list[UInt8[np.ndarray, "views side side 3"]],
    merges: list[Merge],
    vision: VisionSpec,
) -> Encoded:
    """A prompt in which every `PLACE` has become its image's tokens.

    Args:
      ids: Token ids of `prompt_ids`.
      pixels: the views of each image.
      merges: the tokens of each image.
      vision: the tower.

    Raises:
      ValueError: another number of places than of images.
    """
    if ids.count(PLACE) != len(merges):
        raise ValueError(f"the prompt has {ids.count(PLACE)} places for {len(merges)} images")
    # Features are counted over all views of the prompt, image after image.
    first = np.cumsum([0, *map(len, pixels)])[:-1] * vision.patches  # of each image, among all features
    images = iter(zip(merges, first, strict=True))
    tokens, source, weight = [], [], []

    # A place becomes as many ids as its image has tokens; text reads no feature, with weights of 0.
    text = Merge(np.zeros((1, 4), np.int64), np.zeros((1, 4), np.float32))
    for i in ids:
        merge, offset = next(images) if i == PLACE else (text, 0)
        tokens.append([EMBEDS_PLACEHOLDER if i == PLACE else i] * len(merge.source))
        source.append(np.where(merge.source < 0, merge.source, merge.source + offset))
        weight.append(merge.weight)
    empty = np.zeros((0, vision.image, vision.image, 3), np.uint8)
    views = np.concatenate([empty, *pixels])
    return Encoded(np.concatenate(tokens), np.concatenate(source), np.concatenate(weight), views)


def _left_padded(
    prompts: list[Encoded], width: int, pad_id: int
) -> tuple[
    Int[np.ndarray, "b p"], Bool[np.ndarray, "b p"], Int[np.ndarray, "b p 4"], Float32[np.ndarray, "b p 4"]
]:
    """The prompts as arrays of one width; features are counted over each prompt's own views."""
    ids, mask = padded_together([prompt.ids for prompt in prompts], pad_id, width)
    source = np.zeros((*ids.shape, 4), np.int32)
    weight = np.zeros(source.shape, np.float32)
    source[mask] = np.concatenate([prompt.source for prompt in prompts])
    weight[mask] = np.concatenate([prompt.weight for prompt in prompts])
    return ids.astype(np.int32), mask, source, weight
