"""Watches a generation of a bundled model: while it runs, in the terminal, and as a page for browsers.

python examples/watch.py --out runs/watch
python examples/watch.py --picture docs/figures/page.png    # also photographs the page; needs Chromium
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

import dllm_jax as dj

TRAINS = "B>W;F>P;R>F;K>D;T>R;H>C;C>S;S>T;Z>B;L>G;G>M;W>K;D>H;P>L;M>V;V>Z;P>"  # the way from Paris?
QUESTION = [{"role": "user", "content": TRAINS}]
POLICIES = (dj.policies.Policy(), dj.policies.DualCache(), dj.policies.ElasticCache(window=8))


def main(out: Path, picture: Path | None):
    """Streams an answer, prints its steps, and writes a page of one policy and a page that compares all."""
    path = dj.bundled.path("tiny-llada")
    model, tokenizer = dj.load(path), AutoTokenizer.from_pretrained(path)
    encoded = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)
    prompt = encoded["input_ids"]
    options = {"length": 32, "block": 8, "sampler": dj.samplers.Threshold(0.9), "trace": True}

    # While it runs: what is decoded so far, after every denoising step.
    runs = {}
    for policy in POLICIES:
        name = type(policy).__name__
        print(f"\n{name}")
        for snapshot in dj.stream(model, [prompt], every=1, policy=policy, **options):
            text = tokenizer.decode(snapshot.tokens[0, len(prompt) :])
            surest = snapshot.confidence[snapshot.decoded].max()
            print(f"step {snapshot.steps[0]}, block {snapshot.block}: {text}  (confidence {surest:.2f})")
        runs[name] = snapshot.output

    # Afterwards: a line per step in the terminal, and pages without network for the browser.
    dj.show(runs["DualCache"], tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    (out / "answer.html").write_text(runs["DualCache"].to_html(tokenizer), encoding="utf-8")
    (out / "policies.html").write_text(dj.side_by_side(runs, tokenizer), encoding="utf-8")
    print(f"wrote {out / 'answer.html'} and {out / 'policies.html'}")
    if picture is not None:
        photograph(out / "policies.html", picture)


def photograph(page: Path, picture: Path):
    """Writes a PNG picture of a page at its fourth step, as Chromium draws it."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,640"]
    with tempfile.TemporaryDirectory() as profile:
        taken = f"--screenshot={picture.resolve()}", f"--user-data-dir={profile}"
        subprocess.run(
            [*command, *taken, f"{page.resolve().as_uri()}#step=4"], check=True, capture_output=True
        )
    print(f"wrote {picture}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/watch"), help="folder of the pages")
    parser.add_argument("--picture", type=Path, help="PNG file of a picture of the page that compares")
    arguments = parser.parse_args()
    main(arguments.out, arguments.picture)
