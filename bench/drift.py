"""How much keys and values change from one denoising step to the next: what every cache rests on.

    python -m bench.drift tiny-llada tiny-dream --json bench/results/drift_cpu.json

For each layer the mean cosine similarity of K and of V between the canvases of adjacent steps of the exact
decoder, of the prompt's positions, of those decoded before, decoded in this step, and still masked. Papers
show it for LLaDA-8B and Dream-7B: dKV-Cache (arXiv:2505.15781, figure 2), dLLM-Cache (arXiv:2506.06295),
Elastic-Cache (arXiv:2510.14973), d2Cache (arXiv:2509.23094).
"""

import itertools
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Bool, Float, Int

import dllm_jax as dj
from bench.policies.workloads import ASKED, Asked
from bench.shared import runner
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.nn.arithmetic import cosine, rope_table
from dllm_jax.nn.layer import Layer, walk
from dllm_jax.tasks import examples, prompt_arrays

KINDS = ("prompt", "decoded", "new", "masked")


@jax.jit
def keys_and_values(model: dj.Model, tokens: Int[Array, "b l"]) -> Float[Array, "2 n b l k d"]:
    """Keys (rotated) and values of every layer in a full pass."""
    spec, (b, length) = model.spec, tokens.shape
    stream = dj.hidden_states(model, tokens)
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (b, length))

    def run(layer: Layer, pairs: Float[Array, "2 n b l k d"]) -> Float[Array, "2 n b l k d"]:
        x = stream[layer.index]
        return pairs.at[:, layer.index].set(jnp.stack([layer.qk(x, position)[1], layer.value(x)]))

    pairs = jnp.zeros((2, spec.layers, b, length, spec.kv_heads, spec.head), stream.dtype)
    return walk(model.params, spec, rope_table(length, spec.head, spec.rope_base), run, pairs)


def kinds(
    before: Int[Array, "b l"], after: Int[Array, "b l"], prompt: int, mask_id: int
) -> Bool[Array, "4 b l"]:
    """Which positions are of each of `KINDS` in a step from one canvas to the next."""
    in_prompt = jnp.broadcast_to(jnp.arange(before.shape[1]) < prompt, before.shape)
    was, still = before == mask_id, after == mask_id
    return jnp.stack([in_prompt, ~in_prompt & ~was, was & ~still, still])


def similarities(
    model: dj.Model, tokens: Int[np.ndarray, "t b l"], prompt: int
) -> Float[np.ndarray, "2 n 4"]:
    """Mean cosine similarity of K and V between adjacent canvases, by layer and kind; NaN if there is none.

    Args:
      model: the model.
      tokens: canvases of adjacent steps, `Trace.tokens` of the exact decoder.
      prompt: length of the prompts, which are not padded.
    """
    alike = jax.jit(jax.vmap(jax.vmap(cosine)))
    total, count = np.zeros((2, model.spec.layers, len(KINDS))), np.zeros(len(KINDS))
    last = keys_and_values(model, jnp.asarray(tokens[0]))
    for before, after in itertools.pairwise(tokens):
        now = keys_and_values(model, jnp.asarray(after))
        of = kinds(jnp.asarray(before), jnp.asarray(after), prompt, model.spec.mask_id)
        total += np.einsum("pnbl,kbl->pnk", np.asarray(alike(last, now)), np.asarray(of, np.float64))
        count += np.sum(of, axis=(1, 2))
        last = now
    return np.where(count, total / np.maximum(count, 1), np.nan)


def rows(name: str, title: str, asked: Asked, prompts: int) -> Iterator[runner.Row]:
    """A row for each layer of an embedded model on a task, decoded in one block, one token per step."""
    path = dj.embedded.path(name)
    model, tokenizer = dj.load(path), read_tokenizer(path)
    drawn = examples(asked.task, 31, asked.size, prompts, "held_out")
    prompt, _ = prompt_arrays(tokenizer, drawn, model.spec.eos_id)
    out = dj.generate(model, prompt, length=asked.length, trace=True)
    assert out.trace is not None, "asked for above"
    found = similarities(model, np.asarray(out.trace.tokens), prompt.shape[1])
    for layer in range(model.spec.layers):
        of = lambda values: dict(zip(KINDS, (round(float(v), 4) for v in values), strict=True))
        yield {
            "model": name,
            "task": title,
            "layer": layer,
            "k": of(found[0, layer]),
            "v": of(found[1, layer]),
        }


COLUMNS: runner.Columns = {
    "model": lambda row: f"`{row['model']}`",
    "task": lambda row: row["task"],
    "layer": lambda row: row["layer"],
    **{f"K, {kind}": lambda row, kind=kind: f"{row['k'][kind]:.3f}" for kind in KINDS},
    **{f"V, {kind}": lambda row, kind=kind: f"{row['v'][kind]:.3f}" for kind in KINDS},
}


def main(
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = tuple(dj.embedded.NAMES),
    tasks: tuple[str, ...] = ("chain", "needles-256", "few-shot"),
    prompts: int = 32,
    json: runner.JsonFile = None,
):
    """Prints a line per model, task and layer.

    Args:
      names: embedded models.
      tasks: names of tasks, as in bench.policies.
      prompts: held-out prompts of each task.
      json: results go here.
    """
    if unknown := sorted(set(tasks) - set(ASKED)):
        raise SystemExit(f"--tasks {' '.join(unknown)}: not among {', '.join(ASKED)}")
    measured = (row for name in names for title in tasks for row in rows(name, title, ASKED[title], prompts))
    document: Any = lambda found: runner.provenance("float32") | {"prompts": prompts, "rows": found}
    runner.run(measured, COLUMNS, json, document)


if __name__ == "__main__":
    tyro.cli(main)
