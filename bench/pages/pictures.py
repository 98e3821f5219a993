"""Pictures of policies: the tokens that each step and layer of a small generation recomputes and reuses."""

import dataclasses
import functools
import re
from typing import Any

import numpy as np
from jaxtyping import Bool

import dllm_jax as dj
from bench.pages.layers import Layers, Watcher
from dllm_jax.decoding.watch.recording import Recording
from dllm_jax.expressions import call

CELL, GAP, LABEL = 9, 18, 16  # of a picture, in pixels
COMPUTED, UPDATED, STALEST = "#3f6fd1", "#a8c2f0", 16  # steps of age from which on colors do not change
# For a short canvas, where the defaults of papers would never come to a refresh or drop anything.
DRAWN = {
    "DLLMCache": dict(prompt_every=8, response_every=4),
    "SPACache": dict(prompt_every=8, response_every=4),
    "MaskKV": dict(prompt_every=8, response_every=4, budget=8),
    "EvictPrompt": dict(budget=8),
    "ElasticCache": dict(window=4),
    "D2Cache": dict(k=4),
    "SlidingCache": dict(window=2),
    "SuffixDropout": dict(keep=dj.policies.NearAndLast(near=2, last=1)),
    "WindowDiffusion": dict(window=6, active=2, refresh_every=5),
    "MAGE": dict(keep=4),
    "DyLLM": dict(full_steps=4),
    "ESDLLM": dict(prompt_every=8, block_every=4),
}
EXAMPLE = """\
import dllm_jax as dj

model = dj.load(dj.bundled.path("{model}"))
policy = {policy}
prompt = [list(range(40, 60))]
options = dict(length=16, block=8, policy=policy{sampler})
out = dj.generate(model, prompt, trace=True, **options)
"""
RANDOM = ", sampler=dj.samplers.RandomOrder(), key=jax.random.key(0)"  # of the one policy that needs it
RESPONSE = 16  # of the example


def example(policy: dj.policies.Policy) -> str:
    """Writes a small generation under the policy; `recording` runs it."""
    made = re.sub(r"\b([A-Z]\w*)\(", lambda kind: f"dj.policies.{kind[1]}(", call(_drawn(policy)))
    random = type(policy).__name__ == "DKVGreedy"
    small = "tiny-sdar" if policy in dj.policies.BLOCK_CAUSAL else "tiny-llada"
    text = EXAMPLE.format(model=small, policy=made, sampler=RANDOM if random else "")
    text = text.replace("block=8", "block=4") if small == "tiny-sdar" else text
    return f"import jax\n{text}" if random else text


def picture(policy: dj.policies.Policy) -> str:
    """An SVG of the positions that each step of a small generation computes and reads.

    Of policies with a layer of their own a panel for each layer, or for layers that do the same.
    """
    run, layers = recording(policy)
    panels = merged(layers)
    height, width = (CELL * extent for extent in run.computed.shape)
    top = LABEL * (len(panels) > 1)
    columns = min(len(panels), 2)
    drawn = []
    for i, (name, layer) in enumerate(panels):
        x, y = i % columns * (width + GAP), i // columns * (height + top + GAP)
        label = f'<text x="0" y="-5" font-size="11" font-family="sans-serif" fill="#888">{name}</text>'
        cells = panel(layers, layer, run.changed)
        drawn.append(f'<g transform="translate({x} {y + top})">{label if name else ""}{cells}</g>')
    lines = -(-len(panels) // columns)
    whole = columns * (width + GAP) - GAP, lines * (height + top + GAP) - GAP
    size = f'width="{2 * width}" viewBox="0 0 {whole[0]} {whole[1]}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(drawn)}</svg>\n'


def merged(layers: Layers) -> list[tuple[str, int]]:
    """A name for each panel, and its first layer: consecutive layers that do the same share one."""
    count = layers.whole.shape[1]
    same = lambda n: all(np.array_equal(array[:, n], array[:, n - 1]) for array in layers)
    firsts = [n for n in range(count) if n == 0 or not same(n)]
    ends = [*firsts[1:], count]
    name = lambda first, end: f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"
    return [
        (name(first, end) if len(firsts) > 1 else "", first) for first, end in zip(firsts, ends, strict=True)
    ]


def panel(layers: Layers, layer: int, changed: Bool[np.ndarray, "t l"]) -> str:
    """The cells of one panel, with a dot at tokens that changed, and the line in front of the response."""
    whole, updated, age, attended = (array[:, layer] for array in layers)
    cells = []
    for step, position in np.ndindex(whole.shape):
        x, y, old, share = CELL * position, CELL * step, int(age[step, position]), attended[step, position]
        side = f'x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}"'
        if whole[step, position]:
            cells.append(f'<rect {side} fill="{COMPUTED}"/>')
        elif updated[step, position]:
            cells.append(f'<rect {side} fill="{UPDATED}"/>')
        elif old > 0 and share > 0:
            pale = f' fill-opacity="{share:.2g}"' if share < 1 else ""
            cells.append(f'<rect {side} fill="{color(old)}"{pale}/>')
        if changed[step, position]:
            cells.append(f'<circle cx="{x + CELL // 2}" cy="{y + CELL // 2}" r="2" fill="#fff"/>')
    height, width = (CELL * extent for extent in whole.shape)
    begin = width - CELL * RESPONSE - 0.5
    return "".join(cells) + f'<path d="M{begin} 0V{height}" stroke="#888" stroke-width="1.5"/>'


def color(age: int) -> str:
    """From yellow to red by the age of what is read."""
    return f"hsl({48 - 48 * min(age, STALEST) / STALEST:.0f} 85% 60%)"


@functools.cache
def model(name: str) -> dj.Model:
    """A bundled model that is watched."""
    return dj.load(dj.bundled.path(name))


def recording(policy: dj.policies.Policy) -> tuple[Recording, Layers]:
    """Runs the example of a policy. Layers count as one if the policy has none of its own: all do the same.

    One width holds every step, as it is compiled faster.
    """
    code = example(policy).replace("trace=True", "trace=True, widths=(1024,), interventions=watches")
    code = re.sub(r"^(model|policy) = .*$", "", code, flags=re.MULTILINE)
    watcher = None if policy.only_sets else Watcher(_drawn(policy))
    lm = model("tiny-sdar" if policy in dj.policies.BLOCK_CAUSAL else "tiny-llada")
    names: dict[str, Any] = {"model": lm, "watches": watcher.interventions if watcher else ()}
    names["policy"] = watcher.policy if watcher else _drawn(policy)
    exec(code, names)
    run = Recording.of(names["out"].trace, 0)
    if watcher:
        return run, watcher.layers(run, lm.spec)
    return run, Layers(*(a[:, None] for a in (run.computed, run.computed, run.age, run.read * policy.reuses)))


def _drawn(policy: dj.policies.Policy) -> dj.policies.Policy:
    return dataclasses.replace(policy, **DRAWN.get(type(policy).__name__, {}))
