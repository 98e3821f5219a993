"""`dllm-jax generate`: answers a file of prompts, one per line; answers are appended to another file."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

import dllm_jax as dj
from dllm_jax.eval.run.files import read_text
from dllm_jax.eval.run.settings import Checkpoint
from dllm_jax.options import Options, PositiveInt
from dllm_jax.published import expressions


@dataclasses.dataclass(frozen=True)
class Arguments(Options):
    """Options of `dllm-jax generate`."""

    questions: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="QUESTIONS")]
    """Text file with a prompt on each line."""
    answers: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ANSWERS")]
    """JSON Lines file of the answers."""
    checkpoint: Annotated[Checkpoint, tyro.conf.arg(name="")] = Checkpoint()
    """Checkpoint that answers."""
    policy: Annotated[str, tyro.conf.arg(metavar="POLICY")] = "DualCache"
    """Cache policy, as a constructor call: 'DKVDecode(refresh_every=8)'."""
    sampler: Annotated[str, tyro.conf.arg(metavar="SAMPLER")] = "Threshold(0.9)"
    """Sampler (remasking strategy), as a constructor call."""
    length: PositiveInt = 32
    """Number of tokens to generate for each prompt."""
    max_length: PositiveInt | None = None
    """Maximum number of tokens of an answer that grows from --length on ('DAEDAL()'). Default: none grows."""
    block: PositiveInt = 8
    """Block length."""
    slots: PositiveInt = 8
    """Number of sequences that decode together."""


def main(asked: Annotated[Arguments, tyro.conf.arg(name="")]) -> int:
    """Answers a file of prompts by continuous batching.

    Each line of the first file is a message of a user. Each answer is a line of JSON in the second file. Run
    the same command again to continue: answered prompts are passed over, failed ones are asked again.
    """
    try:
        return 1 if answer(asked) else 0
    except KeyboardInterrupt:
        again = f"interrupted: {asked.answers} holds the answers so far. Run the same command again to go on"
        raise KeyboardInterrupt(again) from None


def answer(asked: Arguments) -> int:
    """Appends answers and failures to the journal; returns the number of failures."""
    policy, sampler = expressions.policy(asked.policy), expressions.sampler(asked.sampler)
    lines = read_text(asked.questions).split("\n")
    settings = {name: getattr(asked, name) for name in ("policy", "sampler", "length", "block")}
    settings |= {} if asked.max_length is None else {"max_length": asked.max_length}
    # Answers in another dtype count as answers; of the other options those that differ from the default.
    own, usual = vars(asked.checkpoint) | {"dtype": None, "weights": None}, vars(Checkpoint())
    settings |= {name: value for name, value in own.items() if name == "model" or value != usual[name]}
    failures = 0
    with dj.Journal(asked.answers) as journal:
        # A question that occurs twice is asked twice; one that was answered with these settings is not.
        left = journal.left(filter(None, map(str.strip, lines)), settings=settings)
        lm = asked.checkpoint.open(identify=False)
        prompts = [lm.chat_ids(one.item) for one in left]
        options = {name: getattr(asked, name) for name in ("length", "max_length", "block", "slots")}
        options |= {"policy": policy, "sampler": sampler, "stop_at_eos": True}
        flight = dj.generate_many(lm.model, prompts, progress=True, errors="return", **options)
        with flight:
            for index, out in flight:
                if isinstance(out, Exception):
                    journal.fail(left[index], out)
                    failures += 1
                else:
                    response = out.tokens[:, -(asked.max_length or asked.length) :]
                    (text,) = dj.decode_answers(lm.model, lm.tokenizer, response)
                    journal.answer(left[index], text, forwards=int(out.stats.nfe[0]))
    return failures
