"""Where does a model keep a needle? What it computes, what changes between steps, and what moves its answer.

    python examples/see_inside.py --figures figures

Asks a model that ships with the package for one of several values, looks at keys, values and attention of
every denoising step, and then puts the residual stream of another prompt's value in place of this one's,
layer by layer. Needs matplotlib for `--figures`.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from transformers import AutoTokenizer

import dllm_jax as dj
from dllm_jax.command_line import run

if not __package__:  # run as a file: `examples` is its folder
    sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.similarity import KINDS, Similarity, pairwise_similarity, step_similarity

LENGTH = 4
QUESTIONS = ("b=407;T=211;z=830;k=566;T=", "b=407;T=958;z=830;k=566;T=")  # they differ in the value of T


def main(model: str = "tiny-llada", figures: Path | None = None):
    """Prints what is found.

    Args:
      model: Name of a bundled model.
      figures: Directory of the figures. Default: none are drawn.
    """
    path = dj.bundled.path(model)
    net, tokenizer = dj.load(path), AutoTokenizer.from_pretrained(path)
    ask = lambda text: [{"role": "user", "content": text}]
    encode = lambda text: tokenizer.apply_chat_template(
        ask(text), add_generation_prompt=True, return_dict=True, return_tensors="np"
    )["input_ids"]
    clean, other = map(encode, QUESTIONS)
    words = lambda tokens: dj.decode_answers(net, tokenizer, tokens[None, clean.shape[1] :])[0]

    # A recorded generation, and what the network computes of its canvases.
    out = dj.generate(net, clean, length=LENGTH, trace=True)
    print(f"asked {QUESTIONS[0]} it answers {words(out.tokens[0])}")
    seen = dj.capture(net, out, ("attention", "k"), layers=(0, net.spec.layers - 1))
    similarity = step_similarity(net, out)
    report_attention(seen, tokenizer)
    report_similarity(similarity)

    # The value's positions hold other tokens in the other prompt, and nothing else does.
    value = np.flatnonzero(clean[0] != other[0])
    print(f"asked {QUESTIONS[1]} it answers {words(dj.generate(net, other, length=LENGTH).tokens[0])}")
    for layer, tokens in enumerate(patched_by_layer(net, clean, other, value)):
        print(f"with the other value's residual stream at layer {layer}: {words(tokens[0])}")

    if figures is not None:
        draw(figures, seen, similarity)


def report_attention(seen: dj.Capture, tokenizer):
    """The tokens that the first mask attends to most, before the first step, in each captured layer."""
    assert seen.attention is not None, "attention was asked for"
    first = int(np.argmax(seen.tokens[0, 0] != seen.tokens[-1, 0]))  # decoded by some step: a mask at first
    for layer, weights in zip(seen.layers, seen.attention[0, :, 0, :, first].mean(axis=1), strict=True):
        top = np.argsort(-weights)[:4]
        pieces = tokenizer.convert_ids_to_tokens(seen.tokens[0, 0, top].tolist())
        shown = ", ".join(
            f"{piece!r} at {at} ({weights[at]:.0%})" for piece, at in zip(pieces, top, strict=True)
        )
        print(f"layer {layer}: the first mask attends most to {shown}")


def report_similarity(similarity: Similarity):
    """How alike keys are to those of the step before, by layer and kind of position."""
    for layer, means in zip(similarity.layers, similarity.by_kind().k, strict=True):
        shown = ", ".join(f"{kind} {mean:.3f}" for kind, mean in zip(KINDS, means, strict=True))
        print(f"layer {layer}: similarity of keys to the step before: {shown}")


def patched_by_layer(net: dj.Model, clean: np.ndarray, other: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Tokens [layers + 1, 1, l] decoded with the other prompt's residual stream at some positions.

    All layers run in one program: which layer is patched is data.
    """
    masks = np.full((1, LENGTH), net.spec.mask_id, np.int32)
    source = dj.capture(net, np.concatenate([other, masks], axis=1), ("residual",), positions=at)
    assert source.residual is not None, "the stream was asked for"
    layers = jnp.arange(net.spec.layers + 1)

    def at_layer(layer: jax.Array, value: jax.Array) -> jax.Array:
        patch = dj.Intervention.patch("residual", value, layers=layer, positions=at)
        return dj.generate(net, clean, length=LENGTH, interventions=(patch,)).tokens

    return np.asarray(jax.jit(jax.vmap(at_layer))(layers, jnp.asarray(source.residual[0])))


def draw(directory: Path, seen: dj.Capture, similarity: Similarity):
    """Saves the figures with which papers on cache policies argue."""
    from examples import figures

    assert seen.k is not None, "keys were asked for"
    directory.mkdir(parents=True, exist_ok=True)
    drawn = {
        "similarity-by-kind": figures.similarity_by_kind(similarity),
        "similarity-by-step": figures.similarity_by_step(similarity, "masked"),
        "similarity-around-decoding": figures.similarity_around_decoding(similarity, window=3),
        "similarity-between-steps": figures.similarity_between_steps(
            pairwise_similarity(seen.k)[-1], seen.steps
        ),
        "attention": figures.attention_map(seen, layer=1),
    }
    for name, figure in drawn.items():
        figure.savefig(directory / f"{name}.png", dpi=110)
    print(f"{len(drawn)} figures in {directory}")


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
