"""What checkpoints are decoded with by default: their own settings, alike on command lines and in Python."""

import inspect
import io
import json
import re
import shutil
import sys

import jax
import numpy as np
import pytest

import dllm_jax as dj
from bench import asked
from dllm_jax import __main__ as command
from dllm_jax.checkpoint.conversion import convert
from dllm_jax.checkpoint.exporting import export
from dllm_jax.commands.options import DecodingArguments
from dllm_jax.decoding.options import ConversationOptions
from dllm_jax.demo import trains
from tests import refuses
from tests.models import FAMILIES, tiny

VALUE = "aob=407;T=211;iez=830;T="
FIRST = [(name, trains.QUESTION, trains.ANSWER) for name in dj.bundled.TEXT + dj.bundled.BLOCK_CAUSAL]
FIRST += [(name, VALUE, "211") for name in dj.bundled.TEXT]
FIRST += [(name, trains.QUESTION, trains.ANSWER) for name in dj.bundled.NOISE]


def loaded(name: str):
    path = dj.bundled.path(name)
    return dj.load(path), dj.load_tokenizer(path)


def said(text: str):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(("name", "question", "answer"), FIRST)
def test_the_first_conversation_is_right_and_the_same_everywhere(
    name, question, answer, tmp_path, monkeypatch, capsys
):
    """`dllm-jax chat`, `dllm-jax generate` and `dj.chat` without options."""
    model, tokenizer = loaded(name)
    key = jax.random.key(0) if name in dj.bundled.NOISE else None
    assert dj.chat(model, tokenizer, said(question), key=key) == answer
    monkeypatch.setattr(sys, "argv", ["dllm-jax", "chat", name])
    monkeypatch.setattr(sys, "stdin", io.StringIO(question + "\n"))
    assert command.main() == 0
    assert capsys.readouterr().out == answer + "\n"
    file, answers = tmp_path / "asked.txt", tmp_path / "answers.jsonl"
    file.write_text(question)
    monkeypatch.setattr(sys, "argv", ["dllm-jax", "generate", str(file), str(answers), "--model", name])
    assert command.main() == 0
    assert json.loads(answers.read_text().splitlines()[1])["answer"] == answer


def test_the_docstring_of_chat_and_help_texts_say_the_defaults():
    names = vars(dj.policies) | vars(dj.samplers)
    for name in ("length", "block", "policy", "sampler"):
        entry = re.search(rf"^ +{name}: (.*?)^ +\w+: ", dj.chat.__doc__, re.MULTILINE | re.DOTALL)
        told = re.search(rf'^    {name}: .*?"""(.*?)"""', inspect.getsource(DecodingArguments), re.M | re.S)
        for text in (entry[1], told[1]):
            value = re.search(r"Default: the checkpoint's, else\s+[`']?([\w.()]+\b\)?)", text)
            said = eval(value[1], names)
            usual = getattr(ConversationOptions, name)
            assert (said() if isinstance(said, type) else said) == usual, text


def test_a_stream_and_generate_take_the_same_settings():
    model, tokenizer = loaded("tiny-llada")
    *_, last = dj.stream_chat(model, tokenizer, said(VALUE))
    assert last.text == "211"
    whole = dj.chat(model, tokenizer, said(VALUE), logprobs=1)
    assert whole.text == "211"
    ids = tokenizer.apply_chat_template(said(VALUE), add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    out = dj.generate(model, ids, **dj.generation_defaults(model, logprobs=1))
    np.testing.assert_array_equal(out.tokens, whole.output.tokens)
    assert whole.output.logprobs.top_tokens.shape[-1] == 1
    assert whole.output.stats.length.tolist() == [8]


def test_given_options_win_and_settings_for_open_lengths_give_way():
    model, _ = loaded("tiny-llada")
    defaults = lambda **given: dj.generation_defaults(model, **given)
    open_length, fixed = dict(length=8, max_length=56, block=8), dict(length=32, block=32)
    assert defaults().items() >= (open_length | dict(stop_at_eos=True)).items()
    assert type(defaults()["sampler"]) is dj.samplers.DAEDAL
    assert defaults(policy=dj.policies.PrefixCache())["max_length"] == 56
    assert defaults(max_length=64).items() >= (open_length | dict(max_length=64)).items()
    assert defaults(max_length=None).items() >= fixed.items()
    elastic = dj.policies.ElasticCache()
    for given in (dict(length=16), dict(block=None), dict(steps=8), dict(policy=elastic), dict(allow=[None])):
        found = defaults(**given)
        assert found.items() >= (fixed | given).items()
        assert found["sampler"] == dj.samplers.Threshold(0.9)
        assert "max_length" not in found
    assert defaults(sampler=dj.samplers.Confidence())["policy"] == dj.policies.DualCache()
    assert defaults(length=None, policy=None) == defaults()
    with pytest.raises(
        TypeError, match=r"generation_defaults\(\) got .* 'gen_length'. Did you mean length=8"
    ):
        dj.generation_defaults(model, gen_length=8)
    with pytest.raises(ValueError, match="sampler='x' must be a Sampler"):
        dj.generation_defaults(model, sampler="x")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_that_says_nothing_gets_the_recommended_settings(family):
    model = tiny(family)
    found = dj.generation_defaults(model, length=8)
    block = None if model.spec.context.has_blocks else 32
    wanted = dict(length=8, block=block, policy=dj.policies.DualCache(), sampler=dj.samplers.Threshold(0.9))
    assert found == wanted | dict(stop_at_eos=True)
    out = dj.generate(model, [[5, 6, 7]], **found)
    assert not np.any(np.asarray(out.tokens) == model.spec.mask_id)


def test_a_length_without_whole_blocks_is_one_block_for_samplers_that_need_them():
    model, sampler = tiny("llada"), dj.samplers.Confidence()
    assert dj.generation_defaults(model, length=100, sampler=sampler)["block"] is None
    assert dj.generation_defaults(model, length=96, sampler=sampler)["block"] == 32
    assert dj.generation_defaults(model, length=100)["block"] == 32


def test_samplers_that_need_exact_keys_get_them():
    model = tiny("sdar")
    for sampler in (dj.samplers.S2D2(), dj.samplers.Autoregressive()):
        assert dj.generation_defaults(model, sampler=sampler)["policy"] == dj.policies.Policy()


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of tiny-llada, and what writes its settings."""
    folder = tmp_path / "model"
    shutil.copytree(dj.bundled.path("tiny-llada"), folder)

    def write(**settings):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "dllm_jax": settings}))
        return folder

    return write


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(policy="DualKash"), r"dllm_jax\.policy='DualKash': .*Did you mean DualCache"),
        (dict(policy="os:Path"), r"dllm_jax\.policy='os:Path': "),
        (dict(policy=3), r"dllm_jax\.policy=3: call=3 must be"),
        (dict(length=0), r"dllm_jax\.length=0: length=0 must be"),
        (dict(block="Sliding(0)"), r"dllm_jax\.block='Sliding\(0\)': "),
        (
            dict(lenght=3),
            r"dllm_jax\.lenght is no option\. Options: length, block, steps, policy, ",
        ),
        (dict(growing=dict(length=4)), r"dllm_jax\.growing must have length, max_length and a sampler"),
        (dict(growing=[]), r"dllm_jax\.growing=\[\] must be an object"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_file_and_key(checkpoint, settings, message):
    refuses(f"generation_config.json: {message}", dj.load, checkpoint(**settings))


def test_settings_survive_saving_converting_and_training(checkpoint, tmp_path):
    folder = checkpoint(length=4, block=2, policy="PrefixCache", sampler="Factor(2.0)")
    model = dj.load(folder)
    wanted = dj.generation_defaults(model)
    assert wanted["sampler"] == dj.samplers.Factor(2.0)
    convert(folder, tmp_path / "converted")
    export(tmp_path / "converted", tmp_path / "exported")
    dj.save_hf(model, tmp_path / "saved")
    for name in ("converted", "exported", "saved"):
        assert dj.generation_defaults(dj.load(tmp_path / name)) == wanted, name
    trained = jax.jit(lambda model: jax.tree.map(lambda leaf: leaf * 1, model))(model)
    assert dj.generation_defaults(trained) == wanted
    assert jax.tree.structure(trained) == jax.tree.structure(loaded("tiny-llada")[0])


@pytest.mark.exhaustive
def test_the_table_of_what_models_can_be_asked_is_measured_again():
    for name in ("tiny-llada", "tiny-dream"):
        model, tokenizer = loaded(name)
        kind = next(kind for kind in asked.KINDS if kind.title.startswith("chain"))
        assert asked.measure(kind, model, tokenizer, 16) == 1


def test_ids_that_one_types_are_a_prompt():
    for name in dj.bundled.NAMES:
        model = dj.load(dj.bundled.path(name))
        assert model.spec.mask_id > 100
        options = {"block": 2} if model.spec.has_mask_token else {"key": jax.random.key(0)}
        dj.generate(model, [[1, 2, 3]], length=2, **options)
