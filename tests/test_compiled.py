"""Programs for accelerators that are not there: their bytes, what compilers make of them, printed tables.

Those for TPUs need the package libtpu (`pip install --no-deps "libtpu==0.0.42.*"`), nothing else.
"""

import dataclasses
import importlib.util
import json
import pathlib
import re

import pytest

import dllm_jax as dj
from bench.compiled import recorded, traffic
from bench.compiled.launches import Launches
from bench.compiled.program import Case, compile_case, scope_of, skipped, step_totals
from bench.compiled.traffic import FREE
from dllm_jax import policies
from pallas_kernels.attention.xla import AGAIN
from tests import DATA, table

RESULTS = pathlib.Path(__file__).parents[1] / "bench" / "results"
NO_LIBTPU = "libtpu is not installed: nothing compiles for a TPU (`pip install libtpu`, see .ci/run)"

PROGRAM = (DATA / "example.hlo").read_text()
LAYER = 1024 * 512 * 2
SMALL = 8 * 512 * 2


def test_bytes_are_those_of_slices_and_of_updates_in_place():
    """What lies in VMEM is not counted, nor the rest of a stack that is sliced or updated."""
    entry = traffic.program(PROGRAM)
    (loop,) = entry.inner
    moved = {m.instruction.name: (m.read, m.written) for m in loop.moves if m.read or m.written}
    assert moved == {
        "%weights": (LAYER, LAYER),  # sliced out of the stack
        "%small": (LAYER, SMALL),
        "%prefetched": (LAYER, 0),
        "%evicted": (0, LAYER),  # out of VMEM
        "%written": (SMALL + 4, SMALL),  # and the index
    }
    assert loop.bytes == 5 * LAYER + 3 * SMALL + 4
    assert loop.trips == 4
    assert entry.bytes == 2 * 4 * LAYER
    copies = {m.instruction.name for loop in entry.walk() for m in loop.moves if m.copies}
    assert copies == {"%turned", "%weights", "%prefetched"}, "copies are what only moves an array"


def test_a_ragged_product_reads_the_experts_that_rows_are_sent_to():
    """As kernels do: a TPU's, whose operands end in rows and experts, and ours, whose begin with all rows."""
    call = "%small = bf16[1,8,512]{2,1,0} custom-call(%weights)"
    assert call in PROGRAM
    ours = 'custom-call(%weights, %index, %stack), metadata={op_name="jit(f)/experts_down/pallas_call"}'
    others = "custom-call(%index, %weights, %stack)"
    for name, of, part in (("ragged-dot-none.3", others, 0.25), ("ours", ours, 0.25), ("other", others, 1)):
        experts = f"%{name} = bf16[8,512]{{1,0}} {of}"
        text = PROGRAM.replace(call, experts).replace("%stack, %small,", f"%stack, %{name},")
        (loop,) = traffic.program(text, read={1024: 0.25}.__getitem__).inner
        (read,) = [m.read for m in loop.moves if m.instruction.name == f"%{name}"]
        assert read == 4 + LAYER + part * 4 * LAYER


@pytest.mark.parametrize("op", ["custom-call-update", "call-update"])
def test_an_offloaded_gather_reads_what_it_returns(op):
    begin = op.replace("update", "start")
    start = f'%begun = ((), (), (s32[1]{{0:S(2)}})) {begin}(), backend_config={{"offload":"OFFLOAD_GATHER"}}'
    operands, result = "(bf16[1024,512]{1,0}, s32[]{})", "bf16[8,512]{1,0}"
    update = f"%rows = ({operands}, {result}) {op}(%begun, %weights, %index)"
    line = next(line for line in PROGRAM.splitlines() if " %small = " in line)
    (loop,) = traffic.program(PROGRAM.replace(line, f"{line}\n  {start}\n  {update}")).inner
    moved = {m.instruction.name: (m.read, m.written) for m in loop.moves}
    assert (moved["%begun"], moved["%rows"]) == ((0, 0), (SMALL + 4, SMALL))


def test_attention_to_retained_pairs_reads_those_of_its_layer():
    """Of the five arrays of numbers the last two hold the pairs of all layers."""
    call = "custom-call(%weights)"
    for scope, part in (("ragged_attention", 0.25), ("attention", 1)):
        source = f'metadata={{op_name="jit(f)/{scope}/pallas_call"}}'
        ours = f"custom-call(%weights, %weights, %weights, %index, %stack, %stack), {source}"
        (loop,) = traffic.program(PROGRAM.replace(call, ours), retained=0.25).inner
        (read,) = [m.read for m in loop.moves if m.instruction.name == "%small"]
        assert read == 3 * LAYER + 4 + part * 2 * 4 * LAYER


@pytest.mark.parametrize(("of_it", "scope"), [(0, "refresh"), (1, "refresh"), (2, "refresh"), (2, AGAIN)])
def test_a_step_leaves_out_what_only_a_refresh_or_hidden_slots_run(of_it, scope):
    """Most of the loop's operations, that is: compilers move a refresh's into the loop around it."""
    text = PROGRAM
    for i, name in enumerate(("%small", "%written", "%weights")):
        source = "step/while/body/" + (f"{scope}/" if i < of_it else "") + "product"
        line = next(line for line in text.splitlines() if f" {name} = " in line)
        text = text.replace(line, f'{line}, metadata={{op_name="{source}"}}')
    entry = traffic.program(text)
    own, inside = 2 * 4 * LAYER, 4 * entry.inner[0].bytes
    assert step_totals(entry, skipped("full")) == (own + (0 if scope == AGAIN else inside), 0, 0)
    assert step_totals(entry, skipped("reuse")) == (own + (0 if of_it == 2 else inside), 0, 0)
    left_out = lambda loop: bool(scope_of(loop, skipped("reuse")))
    waiting = dataclasses.replace(entry, inner=(dataclasses.replace(entry.inner[0], trips=None),))
    outside, inner = (sum(m.instruction.op not in FREE for m in one.moves) for one in (entry, *entry.inner))
    assert Launches.of(entry, left_out) == (outside + (0 if of_it == 2 else 4 * inner), 0)
    assert Launches.of(waiting, left_out) == (outside + (0 if of_it == 2 else inner), 1)


def test_launches_of_a_layer_are_those_that_one_more_layer_adds():
    two, three = Launches(kernels=2 * 15 + 36, waits=2 + 1), Launches(kernels=3 * 15 + 36, waits=3 + 1)
    expected = dict(kernels_per_layer=15, waits_per_layer=1, kernels_outside=36, waits_outside=1)
    assert three.by_layer(two, layers=2) == expected


def test_a_step_runs_one_of_the_widths_of_an_update():
    """The widest counts, and what is no update besides."""
    entry = traffic.program(PROGRAM)
    (inner,), loops = entry.inner, []
    for source, trips in (("step/update_8/", 1), ("step/update_16/", 2), ("step/", 4)):
        of = lambda move, source=source: dataclasses.replace(move.instruction, source=f"{source}product")
        moves = tuple(dataclasses.replace(move, instruction=of(move)) for move in inner.moves)
        loops.append(dataclasses.replace(inner, moves=moves, trips=trips))
    step = dataclasses.replace(entry, inner=tuple(loops))
    assert step_totals(step, skipped("full")).bytes == entry.bytes + 6 * inner.bytes


def test_few_layers_of_two_kinds_have_both_and_denoise_noise():
    """As many as the published order allows, or every second one; the block is the model's own."""
    of = lambda layers: Case("h100", "Policy", shape="diffusiongemma-26b-a4b", layers=layers)
    full = {layers: of(layers).spec.gemma.full for layers in (2, 4, 7, 30)}
    assert full == {2: (1,), 4: (1, 3), 7: (5,), 30: (5, 11, 17, 23, 29)}
    plan = of(2).run().request(dj.abstract(of(2).spec)).plan
    assert (plan.layout.block, type(plan.sampler).__name__) == (256, "EntropyNoise")
    assert (
        Case("h100", "Policy").run().request(dj.abstract(Case("h100", "Policy").spec)).plan.layout.block == 32
    )


@pytest.mark.parametrize("target", ["v6e", "v5e"])
@pytest.mark.parametrize("policy", policies.ALL, ids=lambda policy: type(policy).__name__)
def test_a_generation_compiles_for_tpus(policy, target, request):
    """No copy of weights or of the cache, in loops or at entry; collectives only where chips share layers."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip(NO_LIBTPU)
    # Usually one policy for a slice, and one for a chip that changes with the policies' code.
    name, tp = type(policy).__name__, 4 if target == "v5e" else 1
    others = sorted({type(p).__name__ for p in policies.ALL} - {"Policy", "DualCache"})
    code = pathlib.Path(policies.__file__).parent.rglob("*.py")
    other = others[sum(path.stat().st_size for path in code) % len(others)]
    usual = {("v5e", "DualCache"), ("v6e", other)}
    if (target, name) not in usual and not request.config.getoption("exhaustive"):
        pytest.skip(f"{name} for {target} is not in turn; --exhaustive compiles all of them")
    # One width of partial steps: each costs as much time, and stores and reads in the same ways.
    case = Case(target, name, layers=2, prompt=224, length=32, block=16, tp=tp, widths=(64,))
    row, _ = compile_case(case)
    copied = [c for c in row["loop_copies"] + row["entry_copies"] if c["bytes"] in _sizes(case)]
    assert not copied
    assert row["fits"]
    assert (row["full_step"]["collectives_per_layer"] > 0) == (tp > 1)


def test_a_generation_compiles_for_a_described_gpu():
    """With our kernels, which the newest jax may lower otherwise or not at all."""
    if not any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
        pytest.skip("jax's CUDA plugin is not installed: nothing compiles for a GPU (see .ci/run)")
    case = Case("h100", "DualCache", layers=1, prompt=224, length=32, block=16, implementation="pallas")
    row, program = compile_case(case)
    assert row["fits"]
    assert row["reuse_step"]["waits_per_layer"] == row["full_step"]["waits_per_layer"] == 0
    assert re.search(r'custom_call_target="\S*(triton|mosaic_gpu)', program), "no kernel of ours is called"


def _sizes(case: Case) -> set[int]:
    """Bytes per chip of stacked matrices and of a layer's, and of the stacked keys."""
    spec, length = case.spec, case.prompt + case.length
    matrices = [spec.width * spec.heads * spec.head_dim, spec.width * spec.mlp_width]
    pairs = length * spec.kv_heads * spec.head_dim
    return {2 * n * size // case.tp for n in (1, spec.layers) for size in matrices} | {
        2 * spec.layers * pairs // case.tp
    }


# Of the reuse step and the full step; policies that are above those of their file have their own: some read
# attention weights, which cuDNN does not give, or keep other pairs for each head.
BARS = table("bars")


# Whose loops copy something: activations of full steps, and of some policies a layer's pairs.
COPYING = {
    "compiled_v6e": {"EvictPrompt"},
    "compiled_h100_shipped": {"DLLMCache", "SPACache", "MaskKV", "ElasticCache"},
}


@pytest.mark.parametrize("name", BARS)
def test_recorded_programs_are_within_their_bars(name):
    """What was compiled, of which commit, and that no row failed; the file is made by bench.compiled."""
    document = json.loads((RESULTS / f"compiled_{name}.json").read_text())
    assert document["commit"], "results say which commit they are of"
    assert {"jax", "jaxlib", "date", "dtype"} <= set(document)
    for row in document["rows"]:
        assert "error" not in row, row
        assert row["fits"]
        target, policy = row["target"], row["policy"]
        pairs = f"{target} {policy}", f"{target} {row['implementation']}", f"dp {row['dp']}"
        keys = *pairs, policy, row["shape"], target, "all"
        most_reuse, most_full = next(BARS[name][key] for key in keys if key in BARS[name])
        if "reuse_step" in row:
            assert row["reuse_step"]["ratio"] <= most_reuse, row["policy"]
        assert row["full_step"]["ratio"] <= most_full, row["policy"]


# Of a layer at most, in partial and full steps: (kernels, kernels). ElasticCache's without drift.
LAUNCHES = {"all": (24, 40), "MaskKV": (24, 56), "EvictPrompt": (24, 56), "ElasticCache": (58, 48)}


def test_recorded_layers_launch_few_kernels_and_wait_for_nothing():
    """As `load` chooses on an H100; of block-causal models under the policies that they have."""
    rows = json.loads((RESULTS / "compiled_h100_shipped.json").read_text())["rows"]
    named = {row["policy"].split("(")[0] for row in rows}
    assert named == {type(policy).__name__ for policy in (*policies.ALL, *policies.BLOCK_CAUSAL)}
    for row in rows:
        partial, full = LAUNCHES.get(row["policy"].split("(")[0], LAUNCHES["all"])
        # A step that enters a block computes two, and may choose what its other steps read.
        for kind, most in (("reuse", partial), ("enter", partial + 12), ("full", full)):
            if step := row.get(f"{kind}_step"):
                assert step["kernels_per_layer"] <= most, (row["policy"], kind)
                assert step["waits_per_layer"] == 0, (row["policy"], kind)


def test_recorded_programs_copy_little_and_slices_exchange_little():
    """At most two all-reduces per layer, and a handful per step; a gathered weight would be a copy too."""
    rows_of = lambda name: json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    for name, copying in COPYING.items():
        rows = [row for row in rows_of(name) if row["shape"] == "llada-8b"]
        assert not any(row["entry_copies"] for row in rows)
        assert {row["policy"] for row in rows if row["loop_copies"]} == copying
        assert all(copy["bytes"] < 2**24 for row in rows for copy in row["loop_copies"])
    # What layers left for the last one to compute would grow with their number.
    rows = [row for row in rows_of("compiled_h100_32_layers") if row["batch"] == 1]
    assert len(rows) == 8
    assert all(row["temporaries"] < row["arguments"] / 8 for row in rows)
    slices = [row for row in rows_of("compiled_several_chips") if row["target"] != "h100"]
    assert {(row["target"], row["dp"]) for row in slices} == {("v5e", 1), ("v5e", 2), ("v5p", 1)}
    for row in (row for row in slices if row["policy"] in ("Policy", "DualCache")):
        assert row["full_step"]["collectives_per_layer"] * row["layers"] <= 2 * row["layers"] + 10
        # Activations, and in full steps the pairs of sequences that take turns.
        small = lambda copy: copy["bytes"] < 3 * 2**20
        assert all(
            small(c) or c["of"].endswith("full_step/cond/branch_0_fun/reshape") for c in row["loop_copies"]
        )


def test_recorded_denoising_steps_move_less_than_a_third_more_than_they_must():
    """But for encoding passes on a described H100, which write their scores; and no call copies a matrix."""
    rows = json.loads((RESULTS / "compiled_blocks.json").read_text())["rows"]
    rows = [row for row in rows if row["shape"] == "diffusiongemma-26b-a4b"]
    most = {
        ("h100", "Policy"): 1.7,
        ("h100", "D2Cache"): 2.1,
        ("h100", "DLLMCache"): 1.7,
        ("v6e", "Policy"): 1.3,
    }
    assert {(row["target"], row["policy"]) for row in rows} == most.keys()
    for row in rows:
        assert row["reuse_step"]["ratio"] < 1.3
        assert row["full_step"]["ratio"] < most[row["target"], row["policy"]]
        assert row["entry_copies"] == []


def test_recorded_programs_are_printed(capsys):
    """A line each, also of one that does not fit; tests/test_docs.py holds the page to the files."""
    files = sorted(RESULTS.glob("compiled_*.json"))
    recorded.main(tuple(files))
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == sum(len(json.loads(file.read_text())["rows"]) for file in files)
    assert any("RESOURCE_EXHAUSTED" in line for line in lines)
