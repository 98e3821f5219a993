"""`forbid`, `allow` and `constraints`: what is not allowed is never decoded, and counts for no confidence."""

import ast
import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import decoders

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.report import UnfilledWarning
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.features.constraints import AllowedTokens
from dllm_jax.engine.loop import denoise
from dllm_jax.testing.runs import compilations
from tests import examples, run_blocks
from tests.models import FAMILIES, WIDE, frequencies, generated, prompts, tiny
from tests.policy_cases import matrix
from tests.test_generate_many import all_alone
from tests.test_stops import ENOUGH, made, metaspace

S = samplers
CHOICES = ((1, 2, 3), (1, 5, 6), (4,))
FILLED = {(1, 2, 3), (1, 5, 6), (4, 9, 9)}
WORDS = S.OneOf(2, CHOICES, fill=9)
ALLOW = [[1, 2], None, {5}, [7, 3, 59], None, range(20, 30), np.array([9, 7]), (1,)]
NEVER = (3, 57)
OPTIONS = dict(length=8, block=4, widths=WIDE)
EVERY = [
    S.Confidence(alg="margin"), S.Confidence(alg="entropy", temperature=0.5, top_k=3, top_p=0.9),
    S.Confidence(cfg_scale=0.5, confidence_eos_eot_inf=True), S.RandomOrder(), S.CertaintyPrior(),
    S.DreamSchedule(alg_temp=0.3, temperature=0.3), S.Threshold(0.2), S.Factor(), S.EBSampler(), S.KLASS(),
    S.WINO(), S.PCSampler(frequencies()), S.Dynamic(), S.Sequential(), S.Edit(0.1, 0.1),
    S.Threshold(0.5, early_commit=S.EarlyCommit(early=0.1)),
]  # fmt: skip
KEY = dict(key=jax.random.key(1))


def sets(allow=ALLOW, never=NEVER) -> np.ndarray:
    """The allowed tokens of each position as booleans."""
    table = np.ones((len(allow), 61), bool)
    for row, ids in zip(table, allow, strict=True):
        row[[i for i in range(61) if ids is not None and i not in set(ids)]] = False
    table[:, list(never)] = False
    return table


def suited(sampler: S.Sampler) -> dict:
    return KEY if sampler.draws else {}


@pytest.mark.parametrize(
    "sampler", EVERY, ids=lambda s: type(s).__name__ + "-commit" * (s.early_commit is not None)
)
def test_every_sampler_decodes_what_is_allowed(sampler):
    words = [None, None, None, None, None, *ALLOW[5:]]
    options = dict(forbid=[10, 57], allow=words, constraints=WORDS) | suited(sampler)
    out = generated("llada", sampler=sampler, **options)
    answer = np.asarray(out.tokens)[:, -8:]
    assert {tuple(row[2:5].tolist()) for row in answer} <= FILLED
    assert np.take_along_axis(sets(words, never=(10, 57, 59)), answer.T, axis=1).all()


def test_confidences_are_those_of_the_allowed_tokens():
    out = generated(forbid=NEVER, allow=ALLOW)
    before = jnp.asarray(out.trace.tokens[0])
    padding = jnp.asarray(before != 57)
    logits = np.where(sets(), np.asarray(dj.forward(tiny("llada"), before, padding))[:, -8:], -np.inf)
    chance = np.exp(logits - logits.max(-1, keepdims=True))
    chance /= chance.sum(-1, keepdims=True)
    chance[..., 59] = 0
    np.testing.assert_allclose(out.trace.score[0, :, -8:-4], chance.max(-1)[:, :4], atol=1e-5)
    np.testing.assert_array_equal(out.trace.proposed[0, :, -8:-4], chance.argmax(-1)[:, :4])


@matrix(
    "family, policy",
    FAMILIES,
    [policies.DualCache(), policies.DKVDecode()],
    today=[("dream", policies.DualCache())],
)
def test_all_ways_to_say_it_and_to_ask_are_one(family, policy):
    model = tiny(family)
    ids, mask = prompts(model, (9, 6))
    options = OPTIONS | dict(policy=policy, sampler=S.Threshold(0.2), group=1)
    ask = lambda **more: dj.generate(model, ids, prompt_mask=mask, **options | more)
    plain = ask(forbid=set(NEVER), allow=ALLOW)
    own = [ALLOW, None]
    for more, rows in (
        (dict(allow=sets()), slice(None)),
        (dict(allow=sets(never=()), sampler=S.Threshold(0.2, suppress_tokens=NEVER)), slice(None)),
        (dict(allow=own, forbid=list(NEVER)), 0),
        (dict(allow=np.stack([sets(), sets(never=(), allow=[None] * 8)])), 0),
        (dict(allow=ALLOW, forbid=NEVER, buckets=dj.buckets.Ladder((12,))), slice(None)),
    ):
        np.testing.assert_array_equal(np.asarray(ask(**more).tokens)[rows], np.asarray(plain.tokens)[rows])
    traced = jax.jit(lambda allow: ask(allow=allow).tokens)(jnp.asarray(sets()))
    np.testing.assert_array_equal(traced, plain.tokens)
    asked = [
        dict(prompt=ids[0].tolist(), forbid=NEVER, allow=ALLOW),
        dict(prompt=ids[1, 3:].tolist(), constraints=WORDS),
        dict(prompt=ids[1, 3:].tolist(), allow=ALLOW),
    ]  # fmt: skip
    found = all_alone(model, asked, buckets=dj.buckets.Ladder((9,)), **options)
    np.testing.assert_array_equal(found[0].tokens[0], plain.tokens[0])
    *_, last = dj.stream(model, ids, prompt_mask=mask, forbid=NEVER, allow=ALLOW, **options)
    np.testing.assert_array_equal(last.tokens, plain.tokens)


def test_templates_have_sets_of_their_own_and_block_causal_models_too():
    model = tiny("sdar", block_size=4)
    mask = model.spec.mask_id
    short, long = [mask, 5, mask, mask], [4, mask, mask, mask, mask, 8]
    allow = [[[7], [], [13, 12], None], [None, [1], None, None, [12, 13], None]]
    words = S.OneOf(2, ((2, 3), (13,)), fill=13)
    out = dj.infill(model, [short, long], allow=allow, forbid=[12], widths=WIDE)
    (third,) = dj.infill(model, [long], constraints=words, widths=WIDE).tokens.tolist()
    assert tuple(third[2:4]) in {(2, 3), (13, 13)}
    first, second = np.asarray(out.tokens)
    assert first[2:5].tolist() == [7, 5, 13]
    assert second[[0, 1, 4, 5]].tolist() == [4, 1, 13, 8]
    assert first[5] not in (12, mask)
    with pytest.raises(ValueError, match=r"must agree with given text: \[59, 8\] has none"):
        dj.infill(model, [long], constraints=dataclasses.replace(words, start=4))


@dataclasses.dataclass(frozen=True)
class Later(S.Constraint):
    """Tokens of the first half wait for those of the second; the last one is allowed nothing, ever."""

    def allowed(self, canvas, index):
        half = canvas.layout.prompt + 4
        ready = ~jnp.any(canvas.masked & (canvas.position >= half) & (canvas.position < half + 3), axis=1)
        may = jnp.where(index < half, ready[:, None], index < half + 3)
        return jnp.broadcast_to(may[..., None], (*index.shape, canvas.spec.vocab))


@dataclasses.dataclass(frozen=True)
class Hole(S.Constraint):
    """The second position is allowed nothing, ever."""

    def allowed(self, canvas, index):
        may = (index != canvas.layout.prompt + 1)[..., None]
        return jnp.broadcast_to(may, (*index.shape, canvas.spec.vocab))


def test_positions_without_an_allowed_token_wait():
    for sampler in (
        S.Threshold(0.0),
        S.Threshold(0.0, early_commit=S.EarlyCommit(early=0, middle=0, late=0)),
    ):
        with pytest.warns(
            UnfilledWarning, match=r"allow a mask no token in sequences \[0, 1\], which end with 2 masks"
        ):
            out = generated(block=8, constraints=[Later()], sampler=sampler)
        np.testing.assert_array_equal(out.stats.unfilled_tokens, [1, 1])
        at = np.asarray(out.trace.tokens)[:, :, -8:]
        left = np.array([[59] * 4 + [0] * 3 + [59], [0] * 7 + [59]])[:, None]
        np.testing.assert_array_equal(at[[1, -1]] == 59, np.broadcast_to(left == 59, (2, 2, 8)))
        assert out.stats.finite.all()


def test_masks_that_waited_are_computed_by_d2cache():
    choices = tuple((n, *range(n + 1, n + 8)) for n in (10, 20))
    out = generated(block=8, policy=dj.policies.D2Cache(k=2, p=0.0), constraints=[S.OneOf(0, choices)])
    assert out.stats.unfilled_tokens.tolist() == [0, 0]
    assert {tuple(answer) for answer in np.asarray(out.tokens)[:, -8:].tolist()} <= set(choices)


@pytest.mark.filterwarnings("ignore::dllm_jax.decoding.report.UnfilledWarning")
def test_a_hole_is_no_end_of_text_and_every_way_to_ask_counts_it():
    """Masks behind an end-of-text are filled, the one in front of it is not."""
    model = tiny("llada")
    ids = prompts(model, (9,))[0].tolist()
    options = dict(
        length=8, block=8, stop_at_eos=True, sampler=S.Threshold(0.0), allow=[None] * 2 + [[57]] + [None] * 5
    )
    hole = [Hole()]
    out = dj.generate(model, ids, constraints=hole, **options)
    answer = np.asarray(out.tokens)[0, -8:]
    assert (answer == 59).tolist() == [False, True, *[False] * 6]
    assert out.stats.unfilled_tokens.tolist() == [1]
    *_, last = dj.stream(model, ids, constraints=hole, **options)
    ((_, alone),) = dj.generate_many(model, ids, constraints=hole, **options)
    for found in (last.output, alone):
        np.testing.assert_array_equal(found.tokens, out.tokens)
        assert found.stats.unfilled_tokens.tolist() == [1]
    assert dj.generate(model, ids, **options).stats.unfilled_tokens is None
    full = dj.generate(model, ids, constraints=S.OneOf(0, ((1, 2),)), **options)
    assert full.stats.unfilled_tokens.tolist() == [0]


OVERLAPS = [
    ([S.OneOf(0, [[50, 51], [52, 53]]), S.OneOf(1, [[54]])], "1 to 1"),
    ([S.OneOf(0, [[50, 51], [52, 53]]), S.OneOf(1, [[51, 1]])], "1 to 1"),  # one choice of two
    ([S.OneOf(2, [[1]]), S.OneOf(0, [[50, 51], [52, 53, 1]])], "2 to 2"),  # filled up with end-of-text
    ([S.OneOf(0, [[1, 2, 3]]), S.OneOf(4, [[4]]), S.OneOf(2, [[3, 5, 6]])], "4 to 4"),
]


@pytest.mark.parametrize(("constraints", "places"), OVERLAPS)
def test_choices_that_contradict_each_other_are_refused(constraints, places):
    model = tiny("llada")
    for several in (constraints, constraints[::-1]):
        with pytest.raises(ValueError, match=rf"choices hold .* no choice of OneOf.* at positions {places}"):
            dj.generate(model, [[1, 2]], length=8, constraints=several)
    template = [[*[model.spec.mask_id] * 8]]
    with pytest.raises(ValueError, match=f"at positions {places}. Remove the choice"):
        dj.infill(model, template, constraints=constraints)


def test_choices_that_overlap_and_agree_are_all_kept():
    """Whatever is unmasked first: each choice goes with one of the others."""
    texts = S.OneOf(0, ((1, 2, 3), (1, 5, 6), (4, 2, 3)))
    ends, middle = S.OneOf(1, ((2, 3, 7), (2, 3, 8), (5, 6, 7))), S.OneOf(2, ((3,), (6,)))
    found = set()
    for seed, sampler in enumerate(
        (S.Threshold(0.0), S.RandomOrder(temperature=2.0), S.Confidence(temperature=2.0)) * 4
    ):
        out = generated(constraints=[texts, ends, middle], sampler=sampler, key=jax.random.key(seed))
        np.testing.assert_array_equal(out.stats.unfilled_tokens, [0, 0])
        found |= {tuple(row) for row in np.asarray(out.tokens)[:, -8:-4].tolist()}
    right = {(1, 2, 3, 7), (1, 2, 3, 8), (1, 5, 6, 7), (4, 2, 3, 7), (4, 2, 3, 8)}
    assert len(found) > 1
    assert found <= right


def test_a_program_without_constraints_is_the_same():
    """Empty constraints add no feature to the plan, so that the step folds over nothing of theirs."""
    model = tiny("llada")
    ids, mask = prompts(model, (9, 6))
    request = lambda **options: prepare(model, ids, prompt_mask=mask, **OPTIONS, **options)
    names = lambda request: request.plan.by_name.keys()
    program = lambda request: str(denoise.trace(model, request.inputs, request.plan).jaxpr)
    off, plain, on = request(forbid=(), allow=None, constraints=()), request(), request(forbid=[3])
    assert program(off) == program(plain) != program(on)
    assert names(on) - names(plain) == {AllowedTokens.name}


def test_tokens_one_by_one_and_drafts_keep_to_the_sets():
    model, mask = tiny("nemotron"), tiny("nemotron").spec.mask_id
    options = dict(
        length=8, forbid=NEVER, allow=[None if ids is None else list(ids) for ids in ALLOW], logprobs=1
    )
    one_by_one, drafted = (
        dj.generate(model, [[1, 2, 3]], sampler=sampler, trace=True, **options)
        for sampler in (S.Autoregressive(), S.SelfSpeculation(block=4))
    )
    answer = np.asarray(drafted.tokens)[:, -8:]
    np.testing.assert_array_equal(answer, np.asarray(one_by_one.tokens)[:, -8:])
    assert np.take_along_axis(sets(), answer.T, axis=1).all()
    assert mask not in answer
    np.testing.assert_allclose(drafted.logprobs.log_prob, one_by_one.logprobs.log_prob, atol=1e-4)
    word = dict(length=8, constraints=WORDS, sampler=S.Autoregressive())
    assert tuple(dj.generate(model, [[1, 2, 3]], **word).tokens[0, 5:8].tolist()) in FILLED
    with pytest.raises(ValueError, match="constraints= is not supported by SelfSpeculation: they would read"):
        dj.generate(model, [[1, 2, 3]], **word | dict(sampler=S.SelfSpeculation(block=4)))


def test_constraints_that_leave_no_token_or_are_none_are_refused():
    model = tiny("llada")
    free = [None] * 8
    for options, message in (
        (dict(allow=[[], *free[1:]]), "leave no token to position 0 of sequence 0"),
        (dict(allow=[*free[1:], [3, 59]], forbid=[3]), "leave no token to position 7 of sequence 0"),
        (dict(allow=[free, [*free[1:], [57]]], sampler=S.Confidence(logits_eos_inf=True)), "of sequence 1"),
        (dict(forbid=range(61)), "leave no token.* take one out of forbid"),
        (dict(forbid=[61]), r"forbid holds 61, outside the vocabulary \[0, 61\)"),
        (dict(forbid="ab"), "forbid='ab' must be values"),
        (dict(allow=free[1:]), "allow has 7 entries: it must be Bool.*length=8"),
        (
            dict(allow=[free]),
            "allow has 1 lists; expected one list per sequence: 2",
        ),
        (dict(allow=[[-1], *free[1:]]), r"allow\[0\]=\[-1\] must be"),
        (dict(allow=np.ones((7, 61), bool)), r"allow has shape \(7, 61\) and dtype bool"),
        (dict(allow=np.ones((8, 61))), "dtype float64"),
        (dict(constraints=[S.Confidence()]), "constraints=.* must be a list of Constraint"),
        (dict(constraints=S.OneOf(6, CHOICES)), "start=6 and the longest choice, 3 tokens, reach beyond"),
        (
            dict(constraints=WORDS, forbid=[3]),
            r"choices hold \(1, 2, 3\), filled up to \[1, 2, 3\], which forbid",
        ),
        (dict(constraints=WORDS, allow=[None] * 4 + [[9, 3]] + [None] * 3), r"choices hold \(1, 5, 6\)"),
        (
            dict(constraints=S.OneOf(0, ((1,), (2, 2))), sampler=S.Confidence(logits_eos_inf=True)),
            r"to \[1, 57\]",
        ),
        (dict(constraints=S.OneOf(0, ((59,),))), "choices or fill hold 59"),
    ):
        with pytest.raises(ValueError, match=message):
            dj.generate(model, [[1, 2], [3, 4]], length=8, **options)


def accepted(automaton: S.Automaton, length: int) -> set[tuple[int, ...]]:
    """All texts of a length that the automaton accepts, found one by one."""
    table, kinds = automaton.following, automaton.kinds
    end = lambda text: functools.reduce(lambda state, token: table[state, kinds[token]], text, 0)
    texts = itertools.product(range(len(kinds)), repeat=length)
    return {text for text in texts if automaton.accepting[end(text)]}


@pytest.mark.parametrize("seed", range(30))
def test_an_automaton_allows_what_accepted_texts_have_and_no_two_that_contradict(seed):
    """Of random automata and half-filled texts: compared with all accepted texts."""
    rng, length = np.random.default_rng(seed), 5
    states, tokens = int(rng.integers(3, 6)), 4
    following = np.vstack([rng.integers(0, states, (states - 1, tokens)), np.full(tokens, states - 1)])
    accepting = np.append(rng.random(states - 1) < 0.5, False)
    one = S.Regex(S.Automaton(following, np.arange(tokens), accepting))
    texts = sorted(accepted(one.automaton, length))
    if not texts:
        assert one.automaton.shortest is None or one.automaton.shortest != length
        return
    assert one.automaton.shortest <= length
    for text in rng.permutation(texts)[:4]:
        masked = rng.random(length) < 0.7
        agree = [t for t in texts if all(m or a == b for m, a, b in zip(masked, t, text, strict=True))]
        may, waits = map(
            np.asarray, one.possible(jnp.asarray(text), jnp.asarray(masked), jnp.ones(length, bool))
        )
        for i in np.flatnonzero(masked):
            assert {t[i] for t in agree} == set(np.flatnonzero(may[i]))
        # All that is unmasked at once is of some text; something can always be unmasked.
        at_once = np.flatnonzero(masked & ~waits)
        assert len(at_once) or not masked.any()
        chosen = itertools.product(*(np.flatnonzero(may[i]) for i in at_once))
        assert set(chosen) == {tuple(t[i] for i in at_once) for t in agree}


def test_equal_columns_are_one_class_and_end_of_text_follows_an_accepted_text():
    spec = tiny("llada").spec
    transitions = {7: {1: 8, 2: 8, spec.mask_id: 8}, 8: {3: 7}}
    automaton = S.Automaton.of(transitions, 7, {8}, spec, "ab")
    assert automaton.following.shape == (4, 4)
    assert automaton.kinds[1] == automaton.kinds[2] != automaton.kinds[spec.mask_id] == automaton.kinds[5]
    assert automaton.shortest == 1
    model, (ids, mask) = tiny("llada"), prompts(tiny("llada"))
    for sampler in (S.WINO(), S.RandomOrder(), S.Threshold(0.0)):
        options = dict(prompt_mask=mask, length=6, block=3, sampler=sampler, widths=WIDE) | suited(sampler)
        out = dj.generate(model, ids, constraints=S.Regex(automaton), **options)
        for row in np.asarray(out.tokens)[:, -6:].tolist():
            text = "".join({1: "a", 2: "a", 3: "b", spec.eos_id: "$"}[token] for token in row)
            assert re.fullmatch(r"a(ba)*\$*", text)
    # Another automaton of this shape finds the program.
    other = S.Automaton.of({7: {4: 8, 5: 8}, 8: {3: 7}}, 7, {8}, spec, "cd")
    with compilations() as compiled:
        found = dj.generate(model, ids, constraints=S.Regex(other), **options)
    assert not compiled
    assert set(np.asarray(found.tokens)[:, -6].tolist()) <= {4, 5}
    with pytest.raises(ValueError, match=r"pattern='ab' has at least 1 tokens: start=6 leaves 0 positions"):
        dj.generate(model, ids, length=6, constraints=S.Regex(automaton, start=6))
    with pytest.raises(ValueError, match=r"pattern='ab' has no text of its tokens"):
        dj.generate(model, ids, length=6, constraints=S.Regex(S.Automaton.of({}, 0, set(), spec, "ab")))
    with pytest.raises(ValueError, match=r"automaton has 61 tokens, the model 62"):
        dj.generate(tiny("llada", vocab=62), ids, length=6, constraints=S.Regex(automaton))
    large = dataclasses.replace(spec, vocab=10**6)
    with pytest.raises(ValueError, match="has 202 states for 1000000 tokens: the product must be at most"):
        S.Automaton.of({i: {} for i in range(200)}, 0, set(), large, "x")


def test_the_page_limits_answers_to_a_pattern_and_a_schema(capsys):
    outlines_core = pytest.importorskip("outlines_core")
    assert outlines_core
    printed = run_blocks([block for block in examples("how-to/generating.md") if "Regex.of" in block])
    date, form = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", date)
    assert set(ast.literal_eval(form)) == {"n", "ok"}
    tokenizer, spec = printed["tokenizer"], printed["model"].spec
    for pattern, states in ((".{0,200}", 203), ("[^a]{0,200}", 203), (".*", 3)):  # none takes seconds
        assert len(S.Regex.of(pattern, tokenizer, spec).automaton.accepting) == states
    with pytest.raises(ValueError, match=r"Regex does not support diffusion-gemma: .* no mask token"):
        S.Regex.of("a", tokenizer, tiny("diffusion-gemma").spec)
    spelled = r'tokens of whole characters do not spell all .* some of the bytes \["\\xc'
    rust = "Rust's crate regex does not take one of its escapes or classes"
    for pattern, reason in (
        ("é", spelled), (r"\p{Greek}", spelled), (r"a\p{Geek}", rust), (r"\q", rust),
        ("[0-9", "unterminated character set"),
    ):  # fmt: skip
        named = f"pattern={re.escape(repr(pattern))} is not supported: {reason}"
        with pytest.raises(ValueError, match=named):
            S.Regex.of(pattern, tokenizer, spec)


def texts_of(automaton, letters: dict[int, str], length: int) -> set[str]:
    """Texts that an automaton accepts, of at most so many tokens."""
    states = automaton.following, automaton.kinds
    reached, texts = {(0, "")}, set()
    for _ in range(length + 1):
        texts |= {text for state, text in reached if automaton.accepting[state]}
        after = {(int(states[0][q, states[1][i]]), text + letters[i]) for q, text in reached for i in letters}
        reached = {each for each in after if each[0] != len(automaton.accepting) - 1}
    return texts


WHOLE = [
    "a|ab", "a+?", "a??b", "", "^ab$", "^a|b", "^(b|^a)$", "(^a)?b", "a(b$)?", "a$|b", r"\Aa[^b]\Z", "[$^a]+",
    "(?i:^A)", "(?P<x>a|b){2}",
]  # fmt: skip
NOT_WHOLE = {
    "a$b": "[$] has a place other than the end", "b^a": r"\^ has a place other than the beginning",
    "(^a)+": r"\^ has",
    "(a$)*": "[$] has", "^*a": r"\^ has", "a(?=b)": "look-ahead", "(?<!a)b": "look-behind",
    r"\bfoo": "word boundaries", r"(a)\1": "references", "(?P<n>a)(?P=n)": "references", "a*+": "possessive",
    "(?>a)": "atomic", "(a)?(?(1)b)": "conditions", "(?#b)a": "comments", "(?x) a": "flag x", "(a": "closing",
    "a)": "closes no group", "a{,3}": "Rust",
}  # fmt: skip


def test_a_pattern_is_that_of_whole_texts_or_is_refused_by_name():
    pytest.importorskip("outlines_core")
    path = dj.bundled.path("tiny-llada")
    tokenizer, spec = dj.load_tokenizer(path), dj.load(path).spec
    letters = {tokenizer.convert_tokens_to_ids(letter): letter for letter in "abc"}
    every = ["".join(text) for n in range(4) for text in itertools.product("abc", repeat=n)]
    for pattern in WHOLE:
        found = texts_of(S.Regex.of(pattern, tokenizer, spec).automaton, letters, 3)
        assert found == {text for text in every if re.fullmatch(pattern, text)}, pattern
    assert texts_of(S.Regex.of(r"\u{61}+b", tokenizer, spec).automaton, letters, 3) == {"ab", "aab"}
    for pattern, reason in NOT_WHOLE.items():
        with pytest.raises(ValueError, match=f"pattern=.* is not supported: .*{reason}"):
            S.Regex.of(pattern, tokenizer, spec)
    with pytest.raises(ValueError, match="pattern=5 must be"):
        S.Regex.of(5, tokenizer, spec)


def test_a_pattern_reads_the_text_that_comes_back():
    """A first token that loses its space; a tokenizer that changes the texts of tokens is refused."""
    pytest.importorskip("outlines_core")
    tokenizer, spec = metaspace(), tiny("llada", vocab=300).spec
    letters = {i: tokenizer.decode([ord("a"), i])[1:] for i in tokenizer.convert_tokens_to_ids(["▁a", "b"])}
    for start, expected in ((0, {"b a", "a a"}), (1, {"b a", " a a"})):
        pattern = "[ab] a" if start == 0 else "b a| a a"
        automaton = S.Regex.of(pattern, tokenizer, spec, start).automaton
        found = set()
        for ids in itertools.product(letters, repeat=2):
            state = 0
            for i in ids:
                state = automaton.following[state, automaton.kinds[i]]
            joined = "".join(letters[i] for i in ids)
            found |= {joined if start else tokenizer.decode(ids)} if automaton.accepting[state] else set()
        assert found == expected
    spaced = made({word: i for i, word in enumerate([*ENOUGH, "."])}, decoders.WordPiece("##", cleanup=True))
    assert S.Regex.of(r"a b\.", spaced, spec).automaton.shortest == 3
    changing = decoders.Sequence([decoders.Fuse(), decoders.Replace("BC", "C")])
    tokenizer = made({letter: i for i, letter in enumerate("aBC")}, changing)
    with pytest.raises(ValueError, match=r"tokenizer=.* is not supported by Regex: it decodes tokens to"):
        S.Regex.of("a", tokenizer, spec)
