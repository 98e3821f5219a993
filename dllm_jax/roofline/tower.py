"""Cost of a prompt's images: positions and views by image size, and the vision tower's pass."""

from collections.abc import Sequence
from typing import NamedTuple

from dllm_jax.nn.parameters import abstract_vision, count
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt, PositiveInt, check_argument
from dllm_jax.roofline.steps import Cost
from dllm_jax.vision.images import AnyRes, Pad, Views
from dllm_jax.vision.tower import AT_ONCE, tower_of

UNREAD = 2  # vectors of the tower's width: scale and bias of SigLIP's last norm


class Images(NamedTuple):
    """Images of one prompt.

    Attributes:
      positions: that they take in the prompt, besides its text.
      views: that the tower sees.
    """

    positions: int
    views: int


def images(
    spec: ModelSpec, sizes: Sequence[tuple[int, int]], one: Views = AnyRes(), several: Views = Pad()
) -> Images:
    """Positions and views of a prompt's images; neither files nor Pillow are needed.

    Args:
      spec: a model with a tower, such as `dj.presets.model_spec("llada-v-8b")`.
      sizes: (width, height) of each, in pixels.
      one: Views of the image of a prompt with one image (`dllm_jax.vision.Processor`).
      several: Views of each of several images.

    Raises:
      ValueError: a model without a tower, or a size that is none.
    """
    vision, views = tower_of(spec), one if len(sizes) < 2 else several
    for size in sizes:
        if len(size) != 2 or min(size) < 1:
            raise ValueError(f"sizes hold {size}; expected pairs (width, height) of at least one pixel")
    positions = sum(len(views.merge(size, vision).source) for size in sizes)
    return Images(positions, sum(views.count(size, vision) for size in sizes))


def tower_cost(spec: ModelSpec, views: int, itemsize: int, at_once: int = AT_ONCE) -> Cost:
    """Computes the cost of the tower and the projector for the views of a batch, before its first step.

    Pixels are read once and features written once, counted with the weights; activations in between are
    not, as in a step.

    Args:
      spec: a model with a tower.
      views: Number of views of all images of the batch.
      itemsize: bytes of a parameter or feature.
      at_once: views in one program: each streams the weights once; black views fill up the last.
    """
    vision, views = tower_of(spec), check_argument("views", views, NonNegativeInt)

    # The last program is filled up with black views, which cost as much as others.
    passes = -(-views // check_argument("at_once", at_once, PositiveInt))
    views, patches = passes * at_once, vision.patches
    width, inputs = vision.width, 3 * vision.patch**2
    # Weights of the products: patches, then each layer's four projections and two MLP matrices, the
    # projector.
    matrices = inputs * width + vision.layers * (4 * width**2 + 2 * width * vision.mlp_width)
    matrices += width * spec.width + spec.width**2
    # Scores and weighted values, 2 FLOPs a multiply-add each, over the heads' common width.
    scores = 4 * vision.layers * patches**2 * width
    pixels, features = 4 * 3 * vision.image**2, itemsize * patches * spec.width
    streamed = passes * itemsize * (tower_size(spec) - UNREAD * width - spec.width)
    products = {"dense_flops": 2 * views * patches * matrices, "attention_flops": views * scores}
    return Cost(weights=streamed + views * (pixels + features), **products)


def tower_size(spec: ModelSpec) -> int:
    """Scalars of tower, projector and newline, with those that are stored unread; 0 of text models."""
    return count(abstract_vision(spec))
