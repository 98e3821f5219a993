"""Watches a generation of an embedded model: while it runs, in the terminal, and as a page for browsers.

python examples/watch.py --out runs/watch
"""

import argparse
from pathlib import Path

from transformers import AutoTokenizer

import dllm_jax as dj

QUESTION = [{"role": "user", "content": "aob=407;T=211;iez=830;T="}]
POLICIES = (dj.policies.Policy(), dj.policies.DualCache(), dj.policies.DKVDecode())


def main(out: Path):
    """Streams an answer, prints its steps, and writes one page per policy and one of all of them."""
    path = dj.embedded.path("tiny-llada")
    model, tokenizer = dj.load(path), AutoTokenizer.from_pretrained(path)
    encoded = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)
    prompt = encoded["input_ids"]
    options = {"length": 4, "block": 2, "trace": True}

    # While it runs: what is decoded so far, after every denoising step.
    runs = {}
    for policy in POLICIES:
        print(f"\n{policy}")
        for snapshot in dj.stream(model, [prompt], every=1, policy=policy, **options):
            text = tokenizer.decode(snapshot.tokens[0, len(prompt) :])
            surest = snapshot.confidence[snapshot.decoded].max()
            print(f"step {snapshot.steps[0]}, block {snapshot.block}: {text}  (confidence {surest:.2f})")
        runs[str(policy)] = snapshot.output

    # Afterwards: a line per step in the terminal, and pages without network for the browser.
    dj.show(runs["DualCache()"], tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    (out / "answer.html").write_text(runs["DualCache()"].to_html(tokenizer), encoding="utf-8")
    (out / "policies.html").write_text(dj.side_by_side(runs, tokenizer), encoding="utf-8")
    print(f"wrote {out / 'answer.html'} and {out / 'policies.html'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/watch"), help="folder of the pages")
    main(parser.parse_args().out)
