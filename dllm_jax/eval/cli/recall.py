"""`python -m dllm_jax.eval recall`."""

from dllm_jax.eval.benchmarks import recall
from dllm_jax.eval.cli.common import DEFAULTS, Flat, evaluate
from dllm_jax.eval.cli.needle import DEPTHS
from dllm_jax.eval.results import heatmap


def run_recall(
    common: Flat = DEFAULTS,
    lengths: tuple[int, ...] = (64, 256, 1024),
    depths: tuple[float, ...] = DEPTHS,
    repeats: int = 4,
) -> int:
    """The embedded models' own needle task: a pair among pairs and filler, by prompt length and depth.

    Args:
      common: model and decoding.
      lengths: of prompts, in tokens.
      depths: in percent.
      repeats: examples for each length and depth.
    """
    settings = {"lengths": lengths, "depths": depths, "repeats": repeats}
    run = lambda runner, journal: recall.evaluate(runner, lengths, depths, repeats, common.seed, journal)
    common = common.with_length(recall.RESPONSE)
    return evaluate(common, "recall", settings, run, heatmap.draw)
