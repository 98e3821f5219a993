"""Answers a file of prompts, one per line, with a progress bar; what is answered is appended to another file.

python examples/many_prompts.py questions.txt answers.jsonl --model tiny-llada
"""

import argparse
from pathlib import Path

import dllm_jax as dj
from dllm_jax.command_line import run
from dllm_jax.eval.run.files import read_text


def main(questions: Path, answers: Path, name: str, slots: int, length: int, block: int):
    """Answers what is left to answer, failures too; an interrupted run goes on where it was."""
    path = dj.bundled.path(name) if name in dj.bundled.NAMES else name
    lines = read_text(questions).split("\n")
    with dj.Journal(answers) as journal:
        # A question that occurs twice is asked twice; one that was answered with these settings is not.
        asked = filter(None, map(str.strip, lines))
        left = journal.left(asked, settings={"model": name, "length": length, "block": block})
        model, tokenizer = dj.load(path), dj.load_tokenizer(path)
        flight = dj.generate_many(
            model,
            [prompt(tokenizer, one.item) for one in left],
            slots=slots,
            progress=True,
            errors="return",
            length=length,
            block=block,
            policy=dj.policies.DualCache(),
            sampler=dj.samplers.Threshold(0.9),
            stop_at_eos=True,
        )
        with flight:
            for index, out in flight:
                if isinstance(out, Exception):
                    journal.fail(left[index], out)
                else:
                    answer = tokenizer.decode(out.tokens[0, -length:], skip_special_tokens=True)
                    journal.answer(left[index], answer, forwards=int(out.stats.nfe[0]))


def prompt(tokenizer, question: str) -> list[int]:
    """Encodes a question under the chat template."""
    message = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="tiny-llada", help="a bundled model, a directory or a hub id")
    parser.add_argument("--slots", type=int, default=8, help="sequences that decode together")
    parser.add_argument("--length", type=int, default=32, help="tokens to generate")
    parser.add_argument("--block", type=int, default=8, help="block length")
    given = parser.parse_args()
    asks = lambda: main(given.questions, given.answers, given.model, given.slots, given.length, given.block)
    run(asks, f"interrupted: {given.answers} holds the answers so far. Run the same command again to go on")
