"""The model `dllm_jax` in the real lm_eval, offline, on local task files and data."""

import dataclasses
import json
import logging
import math
import shutil
import sys

import jax
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

import dllm_jax as dj
from dllm_jax import samplers
from dllm_jax.decoding.chat import chat_ids
from dllm_jax.eval.harness.arguments import read_arguments
from dllm_jax.eval.results import record
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.state.sliding import Sliding
from dllm_jax.state.text import Rendered, encode_pair

pytest.importorskip("lm_eval", reason="lm-evaluation-harness: install the 'harness' extra (lm_eval)")
pytestmark = pytest.mark.filterwarnings("ignore")  # lm_eval's and its dependencies' own

ROWS = [
    {"question": "b=407;T=211;z=830;k=566;T=", "answer": "211", "choices": ["407", "211"], "gold": 1},
    {"question": "ab=407;T=211;iz=830;ab=", "answer": "407", "choices": ["407", "830"], "gold": 0},
    {"question": "aob=407;T=211;iez=830;T=", "answer": "211", "choices": ["211", "830"], "gold": 0},
]
GENERATE = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLL = """
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with a data file and task files."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "recall.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in (("tiny_generate", GENERATE), ("tiny_choose", CHOOSE), ("tiny_roll", ROLL)):
        head = f'task: {name}\ndataset_path: json\ntest_split: test\ndoc_to_text: "{{{{question}}}}"\n'
        cache = f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder / 'cache'}}}\n"
        (folder / f"{name}.yaml").write_text(head + cache + text)
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")


@pytest.fixture(scope="module")
def lm():
    return model()


def model(**arguments):
    from dllm_jax.eval.harness.model import DllmJax

    usual = {"pretrained": "tiny-llada", "length": 4, "block": 2, "batch_size": 2, "draws": 32}
    return DllmJax(**usual | arguments)


def evaluate(lm, names, folder, **options):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    settings = {"tasks": names, "apply_chat_template": True, "bootstrap_iters": 0, **options}
    return lm_eval.simple_evaluate(lm, task_manager=manager, **settings)


def test_requests_are_cached_for_the_template_that_renders_them(lm):
    """lm_eval's key of them is `tokenizer_name`: variables of the template and its text are in it."""
    assert lm.tokenizer_name == model().tokenizer_name
    assert lm.tokenizer_name.startswith("tiny-llada__")
    thinking = model(enable_thinking=True)
    assert len({lm.tokenizer_name, thinking.tokenizer_name, model(enable_thinking=False).tokenizer_name}) == 3
    edited, name = model(), lm.tokenizer_name
    edited.tokenizer.chat_template += "{# edited #}"
    assert edited.tokenizer_name != name
    other = model()
    other.tokenizer.add_tokens(["<new>"])
    assert other.tokenizer_name != name


def test_generation_and_choice_are_solved_and_the_result_is_reproducible(lm, tasks):
    found = evaluate(lm, ["tiny_generate", "tiny_choose"], tasks)
    assert found["results"]["tiny_generate"]["exact_match,none"] == 1
    assert found["results"]["tiny_choose"]["acc,none"] == 1
    info = lm.get_model_info()["dllm_jax"]
    assert info["decoding"]["policy"] == "Policy()"
    assert info["totals"]["generate_until"]["requests"] == 3
    likelihoods = info["totals"]["loglikelihood"]
    assert (likelihoods["requests"], likelihoods["failed"]) == (6, 0)
    assert likelihoods["forwards"] >= 6
    assert info["model"]["identity"].startswith("sha256:")
    with pytest.raises(NotImplementedError, match="has no meaning here"):
        evaluate(lm, ["tiny_roll"], tasks, apply_chat_template=False)


def instances(*args):
    from lm_eval.api.instance import Instance

    return [Instance("generate_until", {}, arguments, i) for i, arguments in enumerate(args)]


def test_every_prompt_and_context_begins_once(lm):
    begun, chat = model(add_bos=True), lm.apply_chat_template([{"role": "user", "content": "a"}])
    for text in ("a=", chat):
        for made, count in ((lm, int(text == chat)), (begun, 1)):
            bos = made.tokenizer.bos_token_id
            for ids in (made._request(0, text, {}).prompt, made._pair(text, "b")[0]):
                assert (ids.count(bos), ids[:1] == (bos,)) == (count, bool(count))


def test_repeats_of_a_request_draw_each_for_itself(lm):
    hot, seen = model(sampler="Confidence(temperature=9.0)"), []
    hot.cache_hook.add_partial = lambda kind, args, answer: seen.append(answer)
    text = lm.apply_chat_template([{"role": "user", "content": ROWS[0]["question"]}])
    found = hot.generate_until(instances(*[(text, {"until": ["\n"]})] * 3))
    assert len({*found}) > 1
    assert sorted(seen) == sorted(found)


def test_until_strings_cut_and_requests_are_cached_as_they_finish(lm, tmp_path):
    text = lm.apply_chat_template([{"role": "user", "content": ROWS[0]["question"]}])
    assert lm.generate_until(instances((text, {"until": ["211"]}), (text, {"until": "x"}))) == ["", "211"]
    other = model(journal=str(tmp_path / "journal.jsonl"))
    seen = []
    other.cache_hook.add_partial = lambda kind, args, answer: seen.append((kind, args, answer))
    assert other.generate_until(instances((text, {"until": ["\n"]}))) == ["211"]
    assert seen == [("generate_until", (text, {"until": ["\n"]}), "211")]
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 2  # with its origin
    again = model(journal=str(tmp_path / "journal.jsonl"))
    assert again.generate_until(instances((text, {"until": ["\n"]}))) == ["211"]
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 2  # with its origin


def test_a_multiple_choice_is_decoded_under_a_constraint(lm):
    text = lm.apply_chat_template([{"role": "user", "content": ROWS[0]["question"]}])
    asked = ({"choices": ["407", "211"]}, {"choices": ["566", "xy"]}, {"choices": ["longer than 4"]})
    first, other, _ = (lm._request(i, text, task) for i, task in enumerate(asked))
    assert lm.runner.key(first) != lm.runner.key(other)
    found = lm.generate_until(instances(*((text, task) for task in asked[:2])))
    assert found[0] == "211"
    assert found[1] in ("566", "xy")
    with pytest.raises(RuntimeError, match=r"1 of 1 requests failed.*Increase length"):
        lm.generate_until(instances((text, asked[2])))


def test_likelihoods_are_cached_and_journalled_as_they_finish_and_one_too_long_is_impossible(
    tmp_path, monkeypatch
):
    arguments = dict(journal=str(tmp_path / "journal.jsonl"), max_positions=10, draws=32)
    pairs = [(("a", "m"), [40, 41], [42]), (("b", "m"), [40], [43]), (("c", "m"), [40] * 10, [42])]
    pairs.append((("another a", "m"), [40, 41], [42]))  # the same request under another name
    first, seen = model(**arguments), []
    first.cache_hook.add_partial = lambda kind, args, found: seen.append((kind, args, found))
    with pytest.raises(RuntimeError, match=r"1 of 4 requests failed.*11 positions; max_positions=10"):
        first._loglikelihood_tokens(pairs)
    found = {args: answer for kind, args, answer in seen if kind == "loglikelihood"}
    assert found.keys() == {pairs[i][0] for i in (0, 1, 3)}
    first.journal.close()  # as the end of its process does
    monkeypatch.setattr("dllm_jax.eval.run.likelihoods.log_likelihood", None)  # nothing is computed any more
    again = model(**arguments, failures="empty")
    impossible = {pairs[2][0]: (-math.inf, False)}
    assert again._loglikelihood_tokens(pairs) == [(found | impossible)[args] for args, *_ in pairs]
    assert again.get_model_info()["dllm_jax"]["totals"]["loglikelihood"]["failed"] == 1


def test_likelihoods_do_not_depend_on_the_batch_and_greedy_is_what_decoding_gives(lm):
    encode = lambda text: tuple(lm.tok_encode(text))
    chat = lambda text: encode(lm.apply_chat_template([{"role": "user", "content": text}]))
    end = lm.lm.model.spec.eot_id
    pairs = [(chat(row["question"]), (*encode(row["answer"]), end)) for row in ROWS[::2]]
    request = lambda pair: (("", ""), list(pair[0]), list(pair[1]))
    guessed = -3 * math.log(10)  # three digits
    together = lm._loglikelihood_tokens([request(pair) for pair in pairs])
    alone = [lm._loglikelihood_tokens([request(pair)])[0] for pair in pairs]
    for (nats, greedy), (nats_alone, greedy_alone) in zip(together, alone, strict=True):
        assert nats == pytest.approx(nats_alone, abs=1e-4)
        assert nats > guessed
        assert greedy is greedy_alone is True
    wrong = lm._loglikelihood_tokens([request((pairs[0][0], (*encode("407"), end)))])[0]
    assert wrong[0] < guessed
    assert wrong[1] is False


def test_special_tokens_are_plain_text_but_for_those_of_the_template(lm):
    mask, end = lm.tokenizer.convert_tokens_to_ids(["<|mdm_mask|>", "<|eot_id|>"])
    talk = [{"role": "user", "content": "what is <|mdm_mask|> and <|eot_id|>?"}]
    text = lm.apply_chat_template(talk)
    assert lm.tok_encode(text) == chat_ids(lm.tokenizer, talk)
    assert lm.tok_encode(text).count(end) == 1
    raw = "<|eot_id|> <|mdm_mask|>="
    assert not {mask, end} & set(lm.tok_encode(raw))
    assert lm.tokenizer.decode(lm.tok_encode(raw)) == raw
    for context in (text, raw):
        given, continuation = lm._encode_pair(context, "<|mdm_mask|>2")
        whole = lm.tokenizer.decode(lm.tok_encode(context)) + "<|mdm_mask|>2"
        assert lm.tokenizer.decode(given + continuation) == whole
        assert mask not in given + continuation
    answers = lm.generate_until(instances((text, {"until": ["\n"]}), (raw, {"until": ["\n"]})))
    assert all(isinstance(answer, str) for answer in answers)
    literal = dataclasses.replace(lm.arguments, special_tokens=True)
    lm.arguments, before = literal, lm.arguments
    assert lm.tok_encode(raw)[0] == end
    lm.arguments = before


def test_a_request_that_cannot_be_read_fails_alone(lm, tasks):
    """With and without a chat template, of both kinds; what lm_eval itself makes of its requests is kept."""
    from lm_eval.api.instance import Instance

    bad, good, until = "T=1;\ud83dT=", ROWS[0]["question"], {"until": ["\n"]}
    chat = lambda text: lm.apply_chat_template([{"role": "user", "content": text}])
    for ask in (str, chat):
        strange = {"until": ["\n", "\udce9"]}
        with pytest.raises(RuntimeError, match=r"1 of 2 .* until\[1\] holds the lone surrogate U.DCE9"):
            lm.generate_until(instances((ask(good), until), (ask(good), strange)))
        asked = instances(*((ask(text), until) for text in (good, bad, good)))
        with pytest.raises(RuntimeError, match=r"1 of 3 .*U.D83D at position 4, half of a character"):
            lm.generate_until(asked)
        pairs = (ask(good), "2"), (ask(bad), "2"), (ask(good), "\ud83d"), ("", "2")
        empty = model(failures="empty")
        found = empty.generate_until(asked)
        assert (found[0], found[1]) == (found[2], "")
        likelihoods = empty.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
        assert [math.isfinite(nats) for nats, _ in likelihoods] == [True, False, False, True]
    again = chat(good)
    assert lm.tok_encode(again) == chat_ids(lm.tokenizer, [{"role": "user", "content": good}])

    # No text is one of a template's by chance: a character more, and it is plain text.
    assert lm.tok_encode("x" + again)[0] == lm.tok_encode("x")[0]
    assert not {3, 4, 5} & set(lm.tok_encode(again + "x"))
    for text in ("\ue001\ue002<|eot_id|>", "\ue000\ue001<|eot_id|>\ue001\ue000"):
        assert 5 not in lm.tok_encode(text)
        assert lm.tokenizer.decode(lm.tok_encode(chat(text))).count("<|eot_id|>") == 2


def test_the_same_text_may_be_an_example_and_the_question(lm):
    talk = [{"role": role, "content": "<|eot_id|>"} for role in ("user", "assistant", "user")]
    assert lm.tok_encode(lm.apply_chat_template(talk)) == chat_ids(lm.tokenizer, talk)


def test_a_length_between_blocks_is_rounded_up_and_the_answer_cut(lm):
    text = lm.apply_chat_template([{"role": "user", "content": ROWS[0]["question"]}])
    shorter = type(lm).of(lm.arguments, dataclasses.replace(lm.runner, decoding=Decoding(3, 2)), None)
    asked = instances((text, {"until": ["\n"]}))
    assert shorter.generate_until(asked) == [answer[:3] for answer in lm.generate_until(asked)]
    assert shorter.entries["generate_until"][0]["tokens_with_eos"] == 4


def test_answers_that_grow_are_those_of_the_task(lm):
    """Answers longer than what they begin with, `until` strings, and a task with too long answers."""
    grows = model(length=2, max_length=8, sampler="DAEDAL(expansion=2;checked=2)", policy="DualCache")
    text = lm.apply_chat_template([{"role": "user", "content": ROWS[0]["question"]}])
    asked = instances((text, {"until": ["\n"]}), (text, {"until": ["1"]}))
    assert grows.generate_until(asked) == lm.generate_until(asked) == ["211", "2"]
    own_length = model(length=None, max_length=8, sampler="DAEDAL(expansion=2;checked=2)")
    longer = instances((text, {"max_gen_toks": 16}))
    with pytest.raises(ValueError, match="max_length=8 must be at least length=16"):
        own_length.generate_until(longer)


def test_answers_of_many_lengths_share_programs(lm):
    of = lambda length: [(("", ""), [40, 41], [42 + i % 8 for i in range(length)])]
    compiled, after_the_first = [], None
    seen = lambda name, *_, **__: compiled.append(name) if name.endswith("mlir_module_duration") else None
    jax.monitoring.register_event_duration_secs_listener(seen)
    try:
        for length in (9, 10, 12, 15):
            lm._loglikelihood_tokens(of(length))
            after_the_first = len(compiled) if length == 9 else after_the_first
    finally:
        jax.monitoring.unregister_event_duration_listener(seen)
    assert len(compiled) == after_the_first > 0


def test_arguments_are_checked_and_presets_are_overridden(unannotated):
    given = {"pretrained": "x", "preset": "llada-8b-instruct/gsm8k"}
    published = read_arguments(given).decoding
    assert (published.length, published.block, published.steps) == (256, 8, 256)
    chosen = read_arguments(
        given | {"length": 128, "steps": 64, "sampler": "Threshold(0.8;temperature=0.5)"}
    ).decoding
    assert (chosen.length, chosen.block, chosen.steps) == (128, 8, 64)
    assert chosen.sampler == samplers.Threshold(0.8, temperature=0.5)
    assert [read_arguments(given | {"block": b}).decoding.block for b in (4, "Sliding(8;16)")] == [
        4,
        Sliding(8, 16),
    ]
    assert read_arguments(given | {"dtype": "bf16"}).checkpoint.dtype == "bf16"
    thinking = given | {"enable_thinking": True, "chat_template_args": {"x": 1}, "peft": "y"}
    assert read_arguments(thinking).checkpoint.variables == {"x": 1, "enable_thinking": True}
    assert read_arguments(thinking).checkpoint.peft == "y"
    passed = {"batch_size": "4", "max_batch_size": None, "device": jax.default_backend()}
    assert (read_arguments(given | passed).decoding.batch, read_arguments(given).decoding.batch) == (4, 1)
    for wrong, reason in (
        (dict(failures="ignore"), "failures='ignore'"), (dict(preset="gsm8k"), "preset='gsm8k'"),
        (dict(draws=100), "draws=100"), (dict(block="8x"), "block='8x' must be positions"),
        (dict(bucket=0), "bucket=0 must be a whole number of at least 1"),
        (dict(dtype="float16"), "dtype='float16' must be one of 'float32', 'bfloat16'"),
        (dict(batch_size="auto"), "batch_size='auto'.*give a number"),
        (dict(max_batch_size=8), "max_batch_size=8.*no maximum"),
        (dict(lenght=4), "lenght=4 is not among the model arguments: .*length, "),
        (dict(chat_template_args="x"), "chat_template_args='x' must be a JSON object"),
        (dict(device="cuda:7"), "device='cuda:7', but jax computes on"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            read_arguments(given | passed | wrong)
    with pytest.raises(ValueError, match="pretrained is missing"):
        read_arguments({})


def test_the_command_line(tasks, tmp_path, monkeypatch, capsys, caplog):
    from dllm_jax.eval.harness import model as harness

    monkeypatch.setattr(sys, "argv", ["unchanged"])
    arguments = ["--model", "dllm_jax", "--tasks", "tiny_generate", "--include_path", str(tasks)]
    model_args = (
        "pretrained=tiny-llada,policy=DualCache(),sampler=Threshold(0.9;temperature=0.0),length=4,block=2"
    )
    options = ["--model_args", model_args, "--apply_chat_template", "--limit", "1"]
    with caplog.at_level(logging.WARNING, "dllm_jax"):
        assert harness.main([*arguments, *options, "--output_path", str(tmp_path)]) == 0
    assert not [each for each in caplog.records if each.name.startswith("dllm_jax")]  # of a device, say
    assert "tiny_generate" in capsys.readouterr().out
    found = json.loads(next(tmp_path.rglob("results*.json")).read_text())
    with pytest.raises(ValueError, match="is a result of lm_eval"):
        record.read(next(tmp_path.rglob("results*.json")))
    assert found["config"]["dllm_jax"]["decoding"]["policy"] == "DualCache()"
    assert found["config"]["device"] == jax.default_backend()
    for given in (["--device", "cpu"], ["--device=cpu"], ["--config", "a.yaml"]):
        assert harness.with_device([*arguments, *given]) == [*arguments, *given]
    assert harness.with_device(["--model", "hf"]) == ["--model", "hf"]


def joined_tokens(folder) -> str:
    """`tiny-llada` with a tokenizer of which two tokens may span a context and its answer."""
    shutil.copytree(dj.bundled.path("tiny-llada"), folder)
    read = json.loads((folder / "tokenizer.json").read_text())
    vocab, merges = read["model"]["vocab"], [["w", "e"], ["=", "2"]]
    for pair in merges:
        vocab["".join(pair)] = max(vocab.values()) + 1
    read |= {"pre_tokenizer": None, "model": {"type": "BPE", "vocab": vocab, "merges": merges}}
    (folder / "tokenizer.json").write_text(json.dumps(read))
    return str(folder)


@pytest.mark.parametrize(("boundary", "answers"), [("text", ["er", "21", "2"]), ("lm_eval", ["r", "1", ""])])
def test_the_whole_answer_is_scored_where_a_token_spans_both(tmp_path, boundary, answers):
    lm = model(pretrained=joined_tokens(tmp_path / "joined"), boundary=boundary)
    text = lambda ids: lm.tokenizer.decode(list(ids))
    pairs = [("answ", "er"), ("T=", "21"), ("T=", "2")]
    assert [tuple(map(text, lm._pair(*pair))) for pair in pairs] == [
        (context, answer) for (context, _), answer in zip(pairs, answers, strict=True)
    ]
    assert [text(part) for part in lm._pair("x ", "y")] == ["x", " y"]
    assert [text(part) for part in lm._pair(" ", "y")] == [text([lm.prefix_token_id]), " y"]
    if boundary == "text":
        assert [lm._pair("T=211;T=", "2")[1]] == [tuple(lm.tok_encode("2"))]


def test_an_answer_alone_has_no_space_that_is_not_in_its_text():
    """SentencePiece puts a space before each text."""
    base = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate("▁abc\n")} | {"ab": 5}, [("a", "b")])
    )
    base.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    base.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base)
    context, answer = encode_pair(tokenizer, Rendered("ca"), "bc", by_text=True)
    assert tokenizer.convert_ids_to_tokens(context + answer) == ["▁", "c", "a", "b", "c"]


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_the_length_of_an_answer_has_the_names_of_lm_eval(name):
    lm = model(length=None)
    assert lm._request(0, "T=211;T=", {"until": "\n", name: "8"})[2:4] == (8, ("\n",))
    assert lm._request(0, "T=211;T=", {"until": None, name: 8, "max_completion_tokens": 8}).stop == ()


def test_a_task_that_samples_is_named_as_lm_eval_reads_it(lm, caplog):
    for task, warns in (({"temperature": 0.7}, True), ({"temperature": 0.7, "do_sample": False}, False)):
        caplog.clear()
        lm._request(0, "T=211;T=", task)
        assert ("the task asks for sampling" in caplog.text) == warns
