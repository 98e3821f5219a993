"""Draws a GIF of generations side by side (`dj.animate`): by default the picture at the head of the README.

    python examples/animate.py --out docs/figures/side-by-side.gif
    python examples/animate.py --model GSAI-ML/LLaDA-8B-Instruct --prompt "Why is the sky blue?" \\
        --length 64 --block 16 --policy DualCache mine:DriftCache --sampler "Threshold(0.9)" --out answer.gif

All policies answer the same question. Needs the extras `figures` and `vision`.
"""

import argparse
from pathlib import Path
from typing import Any

import jax

import dllm_jax as dj
from dllm_jax import expressions
from dllm_jax.command_line import run
from dllm_jax.demo import trains

HEADING = "By which stops does the train go from Paris?"


def main(arguments: argparse.Namespace):
    """Answers the question under every policy, and draws how."""
    bundled = arguments.model in dj.bundled.NAMES
    path = dj.bundled.path(arguments.model) if bundled else arguments.model
    model, tokenizer = dj.load(path, dtype=arguments.dtype), dj.load_tokenizer(path)
    chat = [{"role": "user", "content": arguments.prompt}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    options: dict[str, Any] = dict(length=arguments.length, block=arguments.block, trace=True)
    options |= dict(sampler=expressions.typed_sampler(arguments.sampler), key=jax.random.key(0))
    outputs = {
        "Policy(), exact" if text == "Policy()" else text: dj.generate(
            model, [prompt], policy=expressions.typed_policy(text), **options
        )
        for text in arguments.policy
    }
    about: dict[str, Any] = {"heading": f"{Path(arguments.model).name} answers"}
    if arguments.prompt == trains.QUESTION:
        (answer,) = dj.decode_answers(model, tokenizer, next(iter(outputs.values())).tokens[:, len(prompt) :])
        about: dict[str, Any] = {"heading": HEADING, "caption": ", ".join(trains.train_route(answer)[1:])}
    dj.animate(outputs, tokenizer, arguments.out, question=arguments.prompt, **about)
    print(f"wrote {arguments.out}, {arguments.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-llada", help="bundled model, directory or hub id")
    parser.add_argument("--dtype", help="dtype of the weights; default: the checkpoint's")
    parser.add_argument("--prompt", default=trains.QUESTION, help="message of the user")
    parser.add_argument("--policy", nargs="+", default=["Policy()", "DualCache()"], help="constructor calls")
    parser.add_argument("--sampler", default="Confidence()", help="constructor call")
    parser.add_argument("--length", type=int, default=32, help="number of tokens to generate")
    parser.add_argument("--block", type=int, default=8, help="block length")
    parser.add_argument("--out", type=Path, default=Path("runs/side-by-side.gif"))
    run(lambda: main(parser.parse_args()))
