"""Settings that a conversation is decoded with by default: the checkpoint's own, or the usual ones."""

from typing import Any, Unpack

from dllm_jax.decoding.options import ConversationOptions, GenerateOptions, check_options
from dllm_jax.nn.model import Model
from dllm_jax.options import check_argument
from dllm_jax.policies.base import Policy
from dllm_jax.samplers import EntropyNoise

USUAL = {
    name: getattr(ConversationOptions, name)
    for name in ("length", "block", "policy", "sampler", "stop_at_eos")
}
# None is no value of these; with one of those an answer's length is not open.
UNSET = ("length", "policy", "sampler")
OF_ONE_LENGTH = {"length", "max_length", "block", "steps", "sampler", "suffix", "allow", "constraints"}


def generation_defaults(model: Model, **options: Unpack[GenerateOptions]) -> dict[str, Any]:
    """Returns the options of `chat` with the values that it takes for those that are left out.

    They are the settings in the checkpoint's generation_config.json (docs/how-to/loading.md), or else
    length=128, block=32, `DualCache()` and `Threshold(0.9)`; block-causal models have their own blocks.
    Settings for answers that find their own length count while nothing is given that fixes it: length, block,
    steps, sampler, suffix, allow or constraints. A sampler that needs exact keys and values gets `Policy()`.
    Models without a mask token get `Policy()` and `EntropyNoise()`, which draws: pass a key.

    `chat`, `stream_chat`, `dllm-jax chat` and `dllm-jax generate` decode with them. `generate` does so if it
    is passed them: without options it decodes exactly.

    Args:
      model: Model returned by `load`.
      **options: Options that are given; they stay.

    Raises:
      TypeError: An option that `generate` does not have.

    Examples:
      >>> model = dj.load(dj.bundled.path("tiny-sdar"))
      >>> options = dj.generation_defaults(model, length=8)
      >>> options["sampler"], dj.generate(model, [[40, 41]], **options).tokens.shape
      (Threshold(threshold=0.9), (1, 10))
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_options("generation_defaults", options)
    given: dict[str, Any] = {k: v for k, v in options.items() if v is not None or k not in UNSET}
    own_blocks: dict[str, Any] = {"block": None} if model.spec.context.has_blocks else {}
    if not model.spec.has_mask_token:
        own_blocks |= {"policy": Policy(), "sampler": EntropyNoise()}
    complete: dict[str, Any] = USUAL | own_blocks | dict(model.generation.fixed) | given
    growing = dict(model.generation.growing)
    fixed = {name for name in given.keys() & OF_ONE_LENGTH if name != "max_length" or given[name] is None}
    if growing and not fixed and complete["policy"].fixed_within_blocks:
        complete |= growing | given
    sampler = complete["sampler"]
    if "policy" not in given and (sampler.procedure.verifies_causally or sampler.procedure.block is not None):
        complete["policy"] = Policy()
    length, block = complete["length"], complete["block"]
    uneven = sampler.whole_blocks and isinstance(block, int) and isinstance(length, int) and length % block
    if "block" not in given and (sampler.procedure.block is not None or uneven):
        complete["block"] = None
    return complete
