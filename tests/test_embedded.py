import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

import dllm_jax as dj
from dllm_jax import embedded
from dllm_jax.tasks import Recall, accuracy, examples, tokenizer

PUBLISHED = Path(__file__).parent / "goldens/models/llada-tiny/config.json"


@pytest.fixture(scope="module", params=embedded.NAMES)
def where(request):
    return embedded.path(request.param)


@pytest.fixture(scope="module")
def model(where):
    return dj.load(where)


@pytest.fixture(scope="module")
def read(where):
    return AutoTokenizer.from_pretrained(where)


def test_the_directory_is_a_small_published_looking_checkpoint(where):
    names = {file.name for file in where.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    } <= names
    assert sum(file.stat().st_size for file in where.iterdir()) <= 4 * 2**20
    config = json.loads((where / "config.json").read_text())
    assert set(config) >= {*json.loads(PUBLISHED.read_text()), "eot_token_id"}


def test_model_and_tokenizer_agree(model, read):
    spec = model.spec
    assert read.convert_tokens_to_ids([tokenizer.MASK, tokenizer.EOS, tokenizer.EOT]) == [
        spec.mask_id,
        spec.eos_id,
        spec.eot_id,
    ]
    assert len(read) <= spec.vocab


@pytest.mark.parametrize(("pairs", "filler"), [(4, 0), (8, 0), (8, 84)])
def test_the_exact_decoder_recalls_held_out_pairs(model, read, pairs, filler):
    drawn = examples(Recall(filler=filler), 99, pairs, 48, "held_out")
    assert accuracy(model, read, drawn, batch=48, length=4) >= 0.9


def test_it_chats(model, read):
    ask = lambda text: [{"role": "user", "content": text}]
    two = [ask("b=w;t=m;t="), ask("aq=z;iob=w;m=l;ed=h;b=")]
    assert dj.chat(model, read, two, length=4) == ["m", "w"]


def test_fewer_steps_and_cached_decoding_recall_too(model, read):
    drawn = examples(Recall(), 5, 8, 32, "held_out")
    options = {"batch": 32, "length": 4, "block": 2, "policy": dj.policies.DualCache()}
    assert accuracy(model, read, drawn, sampler=dj.samplers.Threshold(threshold=0.9), **options) >= 0.9


def test_the_card_and_the_log_tell_how_it_was_trained(where):
    card = (where / "README.md").read_text()
    for word in ("bench/train_tiny.py", "seed", "steps", "tokens/s", "exact match"):
        assert word in card
    record = json.loads((where / "training_log.json").read_text())
    assert record["log"][-1]["step"] == record["config"]["steps"]
    rows = record["held_out"]
    assert sum(row["count"] for row in rows) == 256
    assert max(row["prompt"] for row in rows) == 128
    assert np.mean([row["exact"] for row in rows]) >= 0.95


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'huge' is not one of tiny-llada"):
        embedded.path("huge")
