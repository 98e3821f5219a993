"""Answers a file of prompts, one per line, with a progress bar; what is answered is appended to another file.

python examples/many_prompts.py questions.txt answers.jsonl --model tiny-llada
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer

import dllm_jax as dj
from dllm_jax.command_line import run


def asked(questions: Path, answers: Path, tokenizer) -> Iterator[tuple[str, list[int]]]:
    """The questions that have no answer yet, with their token ids; they are read as they are needed."""
    lines = answers.read_text(encoding="utf-8").splitlines() if answers.exists() else []
    done = {json.loads(line)["question"] for line in lines}
    with questions.open(encoding="utf-8") as file:
        for question in filter(None, map(str.strip, file)):
            if question not in done:
                message = [{"role": "user", "content": question}]
                ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
                yield question, ids["input_ids"]


def main(questions: Path, answers: Path, name: str, slots: int, length: int, block: int):
    """Answers what is left to answer; an interrupted run goes on where it was."""
    path = dj.bundled.path(name) if name.startswith("tiny-") else name
    model, tokenizer = dj.load(path), AutoTokenizer.from_pretrained(path)
    policy, sampler = dj.policies.DualCache(), dj.samplers.Threshold(0.9)
    left = list(asked(questions, answers, tokenizer))
    flight = dj.generate_many(
        model,
        [ids for _, ids in left],
        slots=slots,
        progress=True,
        errors="return",
        length=length,
        block=block,
        policy=policy,
        sampler=sampler,
        stop_at_eos=True,
    )
    with answers.open("a", encoding="utf-8") as file, flight:
        for index, out in flight:
            said = {"error": str(out)} if isinstance(out, Exception) else {
                "answer": tokenizer.decode(out.tokens[0, -length:], skip_special_tokens=True),
                "forwards": int(out.stats.nfe[0]),
            }  # fmt: skip
            file.write(json.dumps({"question": left[index][0], **said}) + "\n")
            file.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="tiny-llada", help="a bundled model, a directory or a hub id")
    parser.add_argument("--slots", type=int, default=8, help="sequences in flight")
    parser.add_argument("--length", type=int, default=32, help="response positions")
    parser.add_argument("--block", type=int, default=8, help="positions decoded together")
    given = parser.parse_args()
    asks = lambda: main(given.questions, given.answers, given.model, given.slots, given.length, given.block)
    run(asks, f"interrupted: {given.answers} holds the answers so far. Run the same command again to go on")
