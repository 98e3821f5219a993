"""What int8 matrices change in the embedded models' answers: tokens, accuracy, logits.

    python -m bench.int8 --json bench/results/int8_cpu.json

The same held-out prompts, decoded with the checkpoint's weights and with `weights="int8"`, one token per
step. A row per model, task and policy.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import tyro

import dllm_jax as dj
from bench.shared import runner
from bench.shared.models import size
from dllm_jax import embedded, policies
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.checkpoint.verification import compare_logits
from dllm_jax.decoding.chat import decode_answers
from dllm_jax.demo.measure import Questions
from dllm_jax.tasks import Chain, FewShot, exact, examples, needle

# Title, task, size of an example, and length and block of the responses.
TASKS = (
    ("chain", Chain(), 7, 32, 4),
    ("needle, 128 tokens", *needle(128), 4, 2),
    ("few-shot", FewShot(), 5, 4, 2),
)
POLICIES = (policies.Policy(), policies.DualCache())
CHUNK = 64  # prompts decoded together
SEED = 17


def rows(prompts: int) -> Iterator[runner.Row]:
    """Measures one row after another."""
    for name in embedded.TEXT:
        path = embedded.path(name)
        tokenizer = read_tokenizer(path)
        models = {held: dj.load(path, weights=held) for held in (None, "int8")}
        for title, task, of_size, length, block in TASKS:
            drawn = examples(task, SEED, of_size, prompts, "held_out")
            questions = Questions.of(tokenizer, drawn, models[None].spec.eos_id)
            logits = (_first_step(model, questions, length) for model in models.values())
            first = compare_logits(*logits, top_k=1)
            for policy in POLICIES:
                responses = [_decode(model, questions, policy, length, block) for model in models.values()]
                answers = [decode_answers(models[None], tokenizer, one) for one in responses]
                right = [np.mean(exact(one, drawn)) for one in answers]
                yield {
                    "model": name,
                    "task": title,
                    "policy": repr(policy),
                    "prompts": prompts,
                    "length": length,
                    "block": block,
                    "dtype": str(models[None].dtype),
                    "bytes": size(models[None]),
                    "bytes_int8": size(models["int8"]),
                    "accuracy": float(right[0]),
                    "accuracy_int8": float(right[1]),
                    "same_tokens": float(np.mean(responses[0] == responses[1])),
                    "same_answers": float(np.mean((responses[0] == responses[1]).all(axis=1))),
                    "first_step": dataclasses.asdict(first),
                }


def _decode(
    model: dj.Model, questions: Questions, policy: policies.Policy, length: int, block: int
) -> np.ndarray:
    """The responses [prompts length]."""
    parts = []
    for start in range(0, len(questions.examples), CHUNK):
        piece = slice(start, start + CHUNK)
        out = dj.generate(
            model,
            questions.prompt[piece],
            prompt_mask=questions.mask[piece],
            length=length,
            block=block,
            policy=policy,
        )
        parts.append(np.asarray(out.tokens)[:, questions.prompt.shape[1] :])
    return np.concatenate(parts)


def _first_step(model: dj.Model, questions: Questions, length: int) -> np.ndarray:
    """Logits [prompts * length, v] of the first step's masks, of at most `CHUNK` prompts."""
    prompt, spec = questions.prompt[:CHUNK], model.spec
    canvas = np.concatenate([prompt, np.full((len(prompt), length), spec.mask_id, prompt.dtype)], axis=1)
    valid = np.concatenate([questions.mask[:CHUNK], np.ones((len(prompt), length), bool)], axis=1)
    predictors = slice(prompt.shape[1] - spec.shifted, canvas.shape[1] - spec.shifted)
    return np.asarray(dj.forward(model, canvas, valid), np.float32)[:, predictors].reshape(-1, spec.vocab)


COLUMNS: runner.Columns = {
    "model": lambda row: row["model"],
    "task": lambda row: row["task"],
    "policy": lambda row: row["policy"],
    "right": lambda row: f"{row['accuracy']:.1%}",
    "right, int8": lambda row: f"{row['accuracy_int8']:.1%}",
    "same tokens": lambda row: f"{row['same_tokens']:.1%}",
    "same answers": lambda row: f"{row['same_answers']:.1%}",
    "first step: same best token": lambda row: f"{row['first_step']['agreement']:.1%}",
    "KL, nats": lambda row: f"{row['first_step']['kl']:.2g}",
}


def main(prompts: int = 256, json: runner.JsonFile = None):
    """Decodes, writes and prints."""
    where = runner.provenance("float32") | {"seed": SEED, "weights": "int8"}
    runner.run(rows(prompts), COLUMNS, json, lambda rows: where | {"rows": rows})


if __name__ == "__main__":
    tyro.cli(main)
