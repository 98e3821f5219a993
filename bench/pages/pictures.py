"""Pictures of policies: the tokens that each step of a small generation recomputes and reuses."""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np

import dllm_jax as dj
from dllm_jax.decoding.watch.recording import Recording
from dllm_jax.published.expressions import call

CELL = 9  # of a picture, in pixels
COMPUTED, STALEST = "#3f6fd1", 16  # steps of age from which on colours do not change
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
    """An SVG of the positions that each step of a small generation computes and reads."""
    run = recording(policy)
    cells = []
    for step, position in np.ndindex(run.computed.shape):
        x, y, age = CELL * position, CELL * step, int(run.age[step, position])
        if age == 0 or (age > 0 and policy.reuses and run.read[step, position]):
            side = f'width="{CELL - 1}" height="{CELL - 1}"'
            cells.append(f'<rect x="{x}" y="{y}" {side} fill="{colour(age)}"/>')
        if run.changed[step, position]:
            cells.append(f'<circle cx="{x + CELL // 2}" cy="{y + CELL // 2}" r="2" fill="#fff"/>')
    height, width = (CELL * extent for extent in run.computed.shape)
    begin = width - CELL * RESPONSE - 0.5
    cells.append(f'<path d="M{begin} 0V{height}" stroke="#888" stroke-width="1.5"/>')
    size = f'width="{2 * width}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(cells)}</svg>\n'


def colour(age: int) -> str:
    """Blue where a position is computed, else from yellow to red by the age of what is read."""
    return COMPUTED if age == 0 else f"hsl({48 - 48 * min(age, STALEST) / STALEST:.0f} 85% 60%)"


@functools.cache
def model(name: str) -> dj.Model:
    """A model that is watched; its programs run once, so they are compiled in a hurry."""
    jax.config.update("jax_disable_most_optimizations", True)
    return dj.load(dj.bundled.path(name))


def recording(policy: dj.policies.Policy) -> Recording:
    """Runs the example of a policy; one width holds every step, as it is compiled faster."""
    code = example(policy).replace("trace=True", "trace=True, widths=(1024,)")
    names: dict[str, Any] = {}
    small = "tiny-sdar" if policy in dj.policies.BLOCK_CAUSAL else "tiny-llada"
    exec(re.sub(r"^model = .*$", "", code, flags=re.MULTILINE), names | {"model": model(small)}, names)
    return Recording.of(names["out"].trace, 0)


def _drawn(policy: dj.policies.Policy) -> dj.policies.Policy:
    return dataclasses.replace(policy, **DRAWN.get(type(policy).__name__, {}))
