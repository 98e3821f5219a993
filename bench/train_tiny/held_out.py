"""Held-out prompts that recipes are measured on, and the numbers that cards report of them."""

import dataclasses

from dllm_jax import tasks
from dllm_jax.samplers import Confidence, Dynamic, EntropyNoise, Sampler


@dataclasses.dataclass(frozen=True)
class HeldOutPrompts:
    """So many prompts of one kind, with their length of responses and block; None is the whole response.

    `guess` is the fraction that a model gets right which knows the form but not the look-up; `title` what
    cards call it, the task's name if empty.
    """

    task: tasks.Task
    size: int
    prompts: int
    length: int
    guess: float = 0.0
    batch: int = 32
    block: int | None = None
    title: str = ""
    sampler: Sampler = Confidence()

    @property
    def words(self) -> str:
        """The size, in words."""
        match self.task:
            case tasks.Chain(letters=letters):
                return f"{self.size} steps in a ring of {letters} letters"
            case tasks.FewShot(kinds=kinds):
                return f"{self.size} examples of each of {kinds} kinds"
            case tasks.Recall(asked=asked):
                return f"{asked} of {self.size} pairs"
            case tasks.ReadNumbers():
                return f"1 of {self.size} numbers"
            case _:
                return f"{self.size} letters"


def _needle(tokens: int, prompts: int) -> HeldOutPrompts:
    task, pairs = tasks.needle(tokens)
    batch = max(4, min(64, 8192 // tokens))
    return HeldOutPrompts(task, pairs, prompts, 4, 1 / pairs, batch, title="needle")


def _few_shot(prompts: int, **options: int) -> HeldOutPrompts:
    task = tasks.FewShot(**options)
    return HeldOutPrompts(task, 5, prompts, 4, 1 / task.kinds)


HELD_OUT = (
    *(_needle(tokens, 256) for tokens in (64, 128, 256, 512, 1024)),
    *(HeldOutPrompts(tasks.Chain(), 7, 256, 32, block=block) for block in (4, 8, 32)),
    _few_shot(256),
    _few_shot(256, kinds=8),
    HeldOutPrompts(tasks.Chain(8, values=12), 7, 256, 32, block=4, title="chain among values"),
    HeldOutPrompts(tasks.Chain(20), 16, 256, 72, block=4, title="chain of 16"),
    HeldOutPrompts(*tasks.needle(256, 8), 256, 56, block=4, title="needles"),
    HeldOutPrompts(tasks.Sorting(), 16, 256, 24, block=4),
)
BLOCKWISE = (
    *(
        dataclasses.replace(kind, block=4)
        for kind in HELD_OUT
        if kind.block in (None, 4) and kind.task.name != "sorting"
    ),
    HeldOutPrompts(tasks.Chain(), 7, 256, 32, block=4, title="chain, `Dynamic(0.9)`", sampler=Dynamic(0.9)),
)
PICTURED = tuple(
    HeldOutPrompts(tasks.ReadNumbers(digits=1, scattered=True), size, 256, 2, 1 / size)
    for size in (1, 2, 3, 5)
)
CAREFUL = EntropyNoise(bound=0.02)  # as generation_config.json says
NOISE = (
    HeldOutPrompts(tasks.Recall(asked=7, digits=1, filler=6), 8, 256, 32, title="values", sampler=CAREFUL),
    HeldOutPrompts(tasks.Chain(), 7, 256, 32, sampler=CAREFUL),
    HeldOutPrompts(tasks.Chain(), 7, 256, 32, title="chain, `EntropyNoise()`", sampler=EntropyNoise()),
)
LONGER = tuple(_needle(tokens, 32) for tokens in (1536, 2048))
BEYOND = (
    *LONGER,
    HeldOutPrompts(tasks.Chain(letters=32), 7, 64, 32),
    HeldOutPrompts(tasks.Chain(), 10, 64, 41),
    _few_shot(64, kinds=9),
)
