"""Fills a JSON form: the keys are given, values are limited to digits or to a list of words.

python examples/form.py --model tiny-llada
"""

import argparse
import json

import dllm_jax as dj
from dllm_jax.samplers import OneOf

QUESTION = "aob=407;T=211;iez=830;T="
DIGITS = "0123456789"
WORDS = ['"train"', '"tram" ', '"bus"  ']  # of one length: blanks after a value change no JSON
FORM = ('{"T": ', 3, ', "by": ', WORDS, "}")  # text that is given, a number of digits, or words


def main(name: str, question: str) -> dict:
    """Prints the filled form, and returns it as an object."""
    path = dj.bundled.path(name) if name.startswith("tiny-") else name
    model, tokenizer = dj.load(path), dj.load_tokenizer(path)
    ids = lambda text: tokenizer.encode(text, add_special_tokens=False)
    message = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]

    # The template, and the allowed tokens of each of its positions: None for given text, and for words.
    template, allow, constraints = [*prompt], [None] * len(prompt), []
    for part in FORM:
        if isinstance(part, str):
            template += ids(part)
        elif isinstance(part, int):
            allow += (
                [None] * (len(template) - len(allow)) + [ids(DIGITS[part > 1 :])] + [ids(DIGITS)] * (part - 1)
            )
            template += [model.spec.mask_id] * part
        else:
            words = tuple(tuple(ids(word)) for word in part)
            constraints.append(OneOf(len(template), words, fill=ids(" ")[0]))
            template += [model.spec.mask_id] * max(map(len, words))
    allow += [None] * (len(template) - len(allow))
    out = dj.infill(model, [template], allow=allow, constraints=constraints)
    text = tokenizer.decode(out.tokens[0, len(prompt) :].tolist())
    print(text)
    return json.loads(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="tiny-llada", help="a bundled model, a directory or a hub id")
    parser.add_argument("--question", default=QUESTION)
    given = parser.parse_args()
    main(given.model, given.question)
