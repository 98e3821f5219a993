"""Small tasks with one right answer: made from a seed, held out by construction, scored exactly."""

from dllm_jax.tasks.base import Example, Split, Task, accuracy, answers, exact, examples, prompt_arrays
from dllm_jax.tasks.curriculum import Curriculum, Stage, encode_batch
from dllm_jax.tasks.pictured import ReadNumbers
from dllm_jax.tasks.text import Chain, FewShot, Recall, Sorting, asked_pair, needle

__all__ = [
    "Chain", "Curriculum", "Example", "FewShot", "ReadNumbers", "Recall", "Sorting", "Split", "Stage",
    "Task", "accuracy", "answers", "asked_pair", "encode_batch", "exact", "examples", "needle",
    "prompt_arrays",
]  # fmt: skip
