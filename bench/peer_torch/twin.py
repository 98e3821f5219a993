"""Hugging Face transformers' Llama or Qwen2 in torch, as a masked-diffusion decoder without a cache."""

import dataclasses
from collections.abc import Callable
from typing import Any

import transformers

import dllm_jax as dj
from bench.shared.measure import Run

CLASSES = {"llada": ("LlamaConfig", "LlamaForCausalLM"), "dream": ("Qwen2Config", "Qwen2ForCausalLM")}
MISSING = "bench.peer_torch compares with torch: pip install torch (see the 'oracle' extra)"


@dataclasses.dataclass(frozen=True)
class Twin:
    """Their model.

    Attributes:
      torch: the module.
      network: the causal language model.
      body: its layers, compiled or not.
      how: "eager" or "torch.compile".
    """

    torch: Any
    network: Any
    body: Callable[..., Any]
    how: str

    def wait(self) -> None:
        """Blocks until the device is idle."""
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()

    def logits(self, tokens: Any, positions: slice) -> Any:
        """Logits of some positions; all positions attend to all."""
        batch, length = tokens.shape
        mask = self.torch.zeros(
            (batch, 1, length, length), dtype=self.network.dtype, device=self.network.device
        )
        hidden = self.body(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        return self.network.lm_head(hidden[:, positions])

    def generate(self, tokens: Any, run: Run, spec: dj.ModelSpec) -> Any:
        """Decodes the most confident masks of the block in each step; tokens [b l], the response masked."""
        torch, shift = self.torch, int(spec.shifted)
        per_step = run.length // run.steps
        for start in range(run.prompt, run.prompt + run.length, run.block):
            block = slice(start, start + run.block)
            for _ in range(run.block // per_step):
                logits = self.logits(tokens, slice(start - shift, start - shift + run.block)).float()
                probability, token = torch.softmax(logits, dim=-1).max(dim=-1)
                masked = tokens[:, block] == spec.mask_id
                surest = torch.where(masked, probability, -1.0).topk(per_step, dim=-1).indices
                sequence = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
                tokens[sequence, start + surest] = token[sequence, surest]
        return tokens


def network(spec: dj.ModelSpec, dtype: Any, **options: Any) -> Any:
    """A torch model of these shapes with random weights; `options` go into its config."""
    config, made = CLASSES[spec.family]
    described = getattr(transformers, config)(
        vocab_size=spec.vocab,
        hidden_size=spec.width,
        intermediate_size=spec.hidden,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_base},
        tie_word_embeddings=spec.tied,
        use_cache=False,
        **options,
    )
    return getattr(transformers, made)(described).to(dtype).eval()


def twin(spec: dj.ModelSpec, dtype: str, compiled: bool | None) -> Twin:
    """Their model with random weights, on the GPU if there is one.

    Raises:
      SystemExit: torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise SystemExit(MISSING) from error
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = network(spec, getattr(torch, dtype), attn_implementation="sdpa")
    found = Twin(torch, made, made.model, "eager")
    wanted = torch.cuda.is_available() if compiled is None else compiled
    return _through_compiler(found) if wanted else found


def _through_compiler(eager: Twin) -> Twin:
    """Uses torch.compile if it works; otherwise `how` says why not."""
    torch = eager.torch
    found = dataclasses.replace(eager, body=torch.compile(eager.network.model), how="torch.compile")
    tokens = torch.zeros((1, 8), dtype=torch.long, device=eager.network.device)
    try:
        with torch.inference_mode():
            found.logits(tokens, slice(None))
    except Exception as error:  # many causes: no compiler, an old GPU, unsupported operations
        return dataclasses.replace(eager, how=f"eager (torch.compile: {type(error).__name__})")
    return found
