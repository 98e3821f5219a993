"""The checks of `dllm_jax.testing` find what they are there to find, and say where."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import policies, samplers, testing
from dllm_jax.state.cache import KV
from dllm_jax.testing import check_policy, check_sampler, checks, combinations, tiny
from dllm_jax.testing.combinations import Combination
from tests import DOCS
from tests.policy_cases import EXHAUSTIVE, every_pair

PLACE = r"step \d+, sequence \d+, position \d+"


class AsItsMates(policies.DualCache):
    """Refreshes whenever a sequence of the batch is behind the others."""

    def select(self, cache, canvas):
        behind = jnp.min(canvas.step) < canvas.step
        return super().select(cache, canvas) | behind[:, None]


class ByPadding(policies.DualCache):
    """Refreshes by the length of the longest prompt of its batch."""

    def select(self, cache, canvas):
        return super().select(cache, canvas) | canvas.every_n_steps(1 + canvas.layout.prompt % 3)


class Unmasked(policies.Policy):
    """Attends to padding too."""

    def layer(self, layer, x, cache, rows, canvas):
        q, k = layer.qk(x, rows.index)
        cache, now = cache.update(rows, KV(k, layer.value(x)))
        return layer.finish(x, layer.attention(q, now.k, now.v)[0]), cache


class ByWidth(policies.DualCache):
    """Computes something else in steps of another width than its own."""

    def layer(self, layer, x, cache, rows, canvas):
        x, cache = super().layer(layer, x, cache, rows, canvas)
        return x if rows.full or rows.index.shape[1] == canvas.layout.block else 2 * x, cache


@pytest.mark.parametrize(
    ("policy", "limit", "check", "message"),
    [
        (policies.DualCache(), policies.DualCache(), checks.exact_limit, PLACE),
        (policies.Policy(), None, checks.reuse_is_exact_while_nothing_changes, None),
        (AsItsMates(), None, checks.batch_mates_change_nothing, PLACE),
        (ByPadding(), None, checks.alone_as_in_a_batch, "computed"),
        (Unmasked(), None, checks.padding_is_inert, PLACE),
        (ByWidth(), None, checks.widths_change_nothing, PLACE),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_broken_policy_is_told_by_the_check_that_it_breaks(policy, limit, check, message):
    run = lambda: check_policy(policy, limit=limit, checks=[check])
    if message is None:  # nothing is known of its lossless settings
        run()
        return
    with pytest.raises(
        AssertionError, match=f"{type(policy).__name__}, llada: {check.__name__}: .*{message}"
    ):
        run()


class Broken(ByPadding):
    """Cannot be copied, and counts padding."""

    def __deepcopy__(self, memo):
        raise TypeError("no copies")


def test_an_exception_in_one_check_hides_no_failure_of_another():
    asked = checks.one_program_per_setting, checks.alone_as_in_a_batch
    with pytest.raises(AssertionError, match=r"alone_as_in_a_batch: .*computed") as raised:
        check_policy(Broken(), checks=asked)
    assert "Broken, llada: one_program_per_setting: TypeError: no copies" in str(raised.value)
    assert isinstance(raised.value.__cause__, TypeError)


class BlockAlone(policies.DualCache):
    """Attends to everything, but on block-causal models to the current block alone."""

    def init(self, spec, layout, batch, dtype):
        if spec.causal_context:
            raise ValueError("BlockAlone does not support causal contexts")
        return super().init(spec, layout, batch, dtype)

    def reads(self, cache, canvas):
        return canvas.block if canvas.spec.block_size else canvas.everything


def test_every_kind_of_model_is_checked_or_named(monkeypatch):
    """Stands in for the lists of checks, whose own tests are those of our policies."""
    monkeypatch.setattr(testing, "POLICY_CHECKS", (checks.nothing_leaves_the_device_inside,))
    monkeypatch.setattr(testing, "KIND_CHECKS", kinds := (checks.exact_limit,))
    limit = dict(limit=BlockAlone(), limit_options=dict(sampler=samplers.Threshold(0.0)))
    with pytest.raises(AssertionError) as raised:
        check_policy(BlockAlone(), **limit)
    (line,) = str(raised.value).splitlines()
    assert re.match(f"BlockAlone, sdar: exact_limit: {PLACE}.*need not be `rows.full`", line)

    tested = check_policy(BlockAlone())  # without a limit
    assert list(tested) == list(testing.FAMILIES)
    assert tested["llada"] == tested["sdar"] == f"{len(kinds)} check"
    assert tested["nemotron"] == "not supported: BlockAlone does not support causal contexts"


def test_a_sampler_that_leaves_masks_is_told_where():
    with pytest.raises(AssertionError, match=r"only_scored_masks_are_decoded: .*(still masked|max_steps)"):
        check_sampler(checks.Frozen(), checks=[checks.only_scored_masks_are_decoded])


# -- what goes with what ---------------------------------------------------------------------------------

OF_TODAY = [
    Combination(policies.DKVPD(), samplers.Factor(), "Dream"),
    Combination(policies.WindowDiffusion(), samplers.EBSampler(), "sliding block"),
    Combination(policies.D2Cache(), samplers.Sequential(), "block-causal"),
    Combination(policies.Policy(), samplers.Edit(), "Nemotron"),
    Combination(policies.SparseDLLM(), samplers.WINO(), "LLaDA"),
]
AXES = combinations.POLICIES, combinations.SAMPLERS, combinations.PLACES
of_combination = lambda c: f"{type(c.policy).__name__}-{type(c.sampler).__name__}-{c.place}"


@pytest.mark.parametrize(
    "one", [Combination(*c) for c in every_pair(*AXES)] if EXHAUSTIVE else OF_TODAY, ids=of_combination
)
def test_a_combination_decodes_or_is_refused_before_its_first_step(one):
    if why := one.refusal():
        with pytest.raises(ValueError, match=re.escape(why)):
            one.run()
    else:
        out = one.run()
        assert not (np.asarray(out.tokens) == tiny(combinations.PLACES[one.place][0]).spec.mask_id).any()


@pytest.mark.exhaustive
def test_the_page_says_what_goes_with_what():
    assert combinations.tables() in (DOCS / "compatibility.md").read_text()


def test_every_policy_and_sampler_is_in_the_table():
    page = (DOCS / "compatibility.md").read_text()
    assert all(f"\n| `{type(policy).__name__}` | " in page for policy in combinations.POLICIES)
    kinds = {kind for kind in vars(samplers).values() if isinstance(kind, type)}
    asked = {kind for kind in kinds if issubclass(kind, samplers.Sampler) and not inspect.isabstract(kind)}
    assert {type(sampler) for sampler in combinations.SAMPLERS} == asked
    # What a policy's row refuses, no sampler's row promises.
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| `")]
    promised = {sampler: policies for sampler, *_, policies in (row for row in rows if len(row) == 4)}
    pairs = [(row[0], name) for row in rows if len(row) == 3 for name in re.findall(r"(`\w+`) \(", row[2])]
    assert ("`FOCUS`", "`Edit`") in pairs
    for policy, sampler in pairs:
        cell = promised.get(sampler, f"all but {policy}")
        assert (policy in re.findall(r"`\w+`", cell)) == cell.startswith("all"), policy


def test_docstrings_of_samplers_name_the_policies_of_the_table():
    """Those that work, where the table lists them; none that fails elsewhere."""
    page, named = (DOCS / "compatibility.md").read_text(), 0
    for sampler in combinations.SAMPLERS:
        said = re.search(r"Works with .*?[.:](?= )", " ".join(inspect.getdoc(type(sampler)).split()))
        row = re.search(rf"^\| `{type(sampler).__name__}` \|.*\| ([^|]*) \|$", page, re.MULTILINE)
        cell = row[1] if row else "all"
        listed = set(re.findall(r"\w+", cell)) if cell.startswith("`") else set()
        others = set(re.findall(r"`(\w+)`", cell.removeprefix("all but"))) - listed
        told = set(re.findall(r"`(\w+)", said[0])) if said else set()
        assert told == listed if listed else not told & others, sampler
        named += bool(listed)
    assert named == 6


def test_policies_under_others_have_no_layers_of_their_own():
    """As docstrings of `EvictPrompt` and `SuffixDropout` say."""
    for policy in combinations.POLICIES:
        for kind in (policies.EvictPrompt, policies.SuffixDropout):
            if policy.only_sets:
                kind(policy=policy)
            else:
                with pytest.raises(ValueError, match="it has its own layer"):
                    kind(policy=policy)


def test_a_model_made_in_a_traced_function_is_no_tracer_afterwards():
    made = lambda: tiny("llada", positions=4321).params["head"]
    jax.eval_shape(made)
    assert np.isfinite(made()).all()
