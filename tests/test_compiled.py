"""Programs for accelerators that are not there: the account of their bytes, and what compilers make of them.

Those for TPUs need the package libtpu (`pip install --no-deps "libtpu==0.0.42.*"`), nothing else.
"""

import importlib.util
import json
import pathlib
import textwrap

import pytest

from bench.compiled import traffic
from bench.compiled.program import Case, compile_case, step_totals
from bench.compiled.targets import TARGETS
from dllm_jax import policies

RESULTS = pathlib.Path(__file__).parents[1] / "bench" / "results"
NO_LIBTPU = "libtpu is not installed: nothing compiles for a TPU (`pip install libtpu`, see .ci/run)"

PROGRAM = textwrap.dedent("""\
    HloModule example, is_scheduled=true

    %fused_slice (p0: bf16[4,1024,512], p1: s32[]) -> bf16[1024,512] {
      %p0 = bf16[4,1024,512]{2,1,0} parameter(0)
      %p1 = s32[] parameter(1)
      %zero = s32[] constant(0)
      %part = bf16[1,1024,512]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,1024,512}
      ROOT %out = bf16[1024,512]{1,0} bitcast(%part)
    }

    %fused_write (q0: bf16[4,1024,512], q1: bf16[1,8,512], q2: s32[]) -> bf16[4,1024,512] {
      %q0 = bf16[4,1024,512]{2,1,0} parameter(0)
      %q1 = bf16[1,8,512]{2,1,0} parameter(1)
      %q2 = s32[] parameter(2)
      %none = s32[] constant(0)
      ROOT %new = bf16[4,1024,512]{2,1,0} dynamic-update-slice(%q0, %q1, %q2, %none, %none)
    }

    %until (state: (s32[], bf16[4,1024,512])) -> pred[] {
      %state = (s32[], bf16[4,1024,512]{2,1,0}) parameter(0)
      %i = s32[] get-tuple-element(%state), index=0
      %four = s32[] constant(4)
      ROOT %less = pred[] compare(%i, %four), direction=LT
    }

    %body (carry: (s32[], bf16[4,1024,512])) -> (s32[], bf16[4,1024,512]) {
      %carry = (s32[], bf16[4,1024,512]{2,1,0}) parameter(0)
      %index = s32[] get-tuple-element(%carry), index=0
      %stack = bf16[4,1024,512]{2,1,0} get-tuple-element(%carry), index=1
      %weights = bf16[1024,512]{1,0} fusion(%stack, %index), kind=kLoop, calls=%fused_slice
      %small = bf16[1,8,512]{2,1,0} custom-call(%weights), custom_call_target="product"
      %prefetched = bf16[1024,512]{1,0:T(8,128)S(1)} copy(%weights)
      %written = bf16[4,1024,512]{2,1,0} fusion(%stack, %small, %index), kind=kLoop, calls=%fused_write
      ROOT %next = (s32[], bf16[4,1024,512]{2,1,0}) tuple(%index, %written)
    }

    ENTRY %main (a: bf16[4,1024,512]) -> bf16[4,1024,512] {
      %a = bf16[4,1024,512]{2,1,0} parameter(0)
      %turned = bf16[4,1024,512]{1,2,0} copy(%a)
      %start = (s32[], bf16[4,1024,512]{2,1,0}) tuple(%zero.1, %turned)
      %loop = (s32[], bf16[4,1024,512]{2,1,0}) while(%start), condition=%until, body=%body
      ROOT %result = bf16[4,1024,512]{2,1,0} get-tuple-element(%loop), index=1
    }
""")
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
        "%written": (SMALL + 4, SMALL),  # and the index
    }
    assert loop.bytes == 4 * LAYER + 3 * SMALL + 4
    assert loop.trips == 4
    assert entry.bytes == 2 * 4 * LAYER
    copies = {m.instruction.name for loop in entry.walk() for m in loop.moves if m.copies}
    assert copies == {"%turned", "%weights", "%prefetched"}, "copies are what only moves an array"


@pytest.mark.parametrize(("offload", "read"), [("GATHER", SMALL + 32), ("SORT", 4 * LAYER + 32)])
def test_a_gather_of_a_sparse_core_reads_what_it_gathers(offload, read):
    """XLA of jax 0.12 embeds so; the table is an argument of the call."""
    table, places, held = "bf16[4096,512]{1,0:T(8,128)}", "s32[8]{0:T(128)}", "s32[4]{0:S(8)}"
    operands, config = f"({table}, {places})", f'{{"offload":"OFFLOAD_{offload}"}}'
    called = f"""
        ENTRY %main (table: bf16[4096,512], places: s32[8]) -> bf16[8,512] {{
          %table = {table} parameter(0)
          %places = {places} parameter(1)
          %go = ((), (), ({held})) custom-call-start(), backend_config={config}
          %update = ({operands}, bf16[8,512]{{1,0}}, ({held})) custom-call-update(%go, %table, %places)
          ROOT %done = bf16[8,512]{{1,0}} custom-call-done(%update)
        }}
    """
    entry = traffic.program(textwrap.dedent(called))
    moved = {m.instruction.name: (m.read, m.written) for m in entry.moves if m.read or m.written}
    assert moved == {"%update": (read, SMALL)}


@pytest.mark.parametrize(
    ("cache", "held"),
    [(0, 0), (3 * SMALL, 2 * SMALL), (3 * LAYER, 3 * LAYER + 2 * SMALL)],
    ids=["none", "small results", "weights too"],
)
def test_a_cache_holds_small_results_of_the_body(cache, held):
    """Written once and read by later instructions: %small, and, where a layer fits, %weights."""
    (loop,) = traffic.program(PROGRAM, cache).inner
    assert loop.cached == held


@pytest.mark.parametrize("of_refresh", [0, 1, 2])
def test_a_reuse_step_leaves_out_loops_that_a_refresh_runs(of_refresh):
    """Most of the loop's operations, that is: compilers move a refresh's into the loop around it."""
    text = PROGRAM
    for i, name in enumerate(("%small", "%written", "%weights")):
        source = "step/while/body/" + ("refresh/" if i < of_refresh else "") + "product"
        line = next(line for line in text.splitlines() if f" {name} = " in line)
        text = text.replace(line, f'{line}, metadata={{op_name="{source}"}}')
    entry = traffic.program(text)
    own, inside = 2 * 4 * LAYER, 4 * entry.inner[0].bytes
    assert step_totals(entry, skip=None) == (own + inside, 0, 0)
    assert step_totals(entry, skip="refresh") == (own + (0 if of_refresh == 2 else inside), 0, 0)


def test_estimates_of_cycles_are_added_up_over_the_trips_of_loops():
    """TPUs' compilers write them beside each instruction."""
    text = PROGRAM
    for name, cycles in (("%turned", 1000), ("%weights", 30), ("%written", 2)):
        line = next(line for line in text.splitlines() if f" {name} = " in line)
        config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
        text = text.replace(line, f"{line}, {config}")
    entry = traffic.program(text)
    assert entry.cycles == 1000
    assert step_totals(entry, skip=None).cycles == 1000 + 4 * 32
    assert step_totals(traffic.program(PROGRAM), skip=None).cycles == 0


@pytest.mark.parametrize("target", ["v6e", "v5e"])
@pytest.mark.parametrize("policy", policies.ALL, ids=lambda policy: type(policy).__name__)
def test_a_generation_compiles_for_tpus(policy, target, request):
    """No copy of weights or of the cache, in loops or at entry; collectives only where chips share layers."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip(NO_LIBTPU)
    # Usually two policies for one chip, one for a slice, and a third that changes with the policies' code.
    name, tp = type(policy).__name__, 4 if target == "v5e" else 1
    others = sorted({type(p).__name__ for p in policies.ALL} - {"Policy", "DualCache"})
    code = pathlib.Path(policies.__file__).parent.rglob("*.py")
    third = others[sum(path.stat().st_size for path in code) % len(others)]
    usual = {("v6e", "Policy"), ("v6e", "DualCache"), ("v5e", "DualCache"), ("v6e", third)}
    if (target, name) not in usual and not request.config.getoption("exhaustive"):
        pytest.skip(f"{name} for {target} is not in turn; --exhaustive compiles all of them")
    case = Case(target, name, layers=2, prompt=224, length=32, block=16, tp=tp)
    row, _ = compile_case(case)
    copied = [c for c in row["loop_copies"] + row["entry_copies"] if c["bytes"] in _sizes(case)]
    assert not copied
    assert row["fits"]
    assert (row["full_step"]["collectives_per_layer"] > 0) == (tp > 1)


def _sizes(case: Case) -> set[int]:
    """Bytes per chip of stacked matrices and of a layer's, and of the stacked keys."""
    spec, length = case.spec, case.prompt + case.length
    matrices = [spec.width * spec.heads * spec.head, spec.width * spec.hidden]
    pairs = length * spec.kv_heads * spec.head
    return {2 * n * size // case.tp for n in (1, spec.layers) for size in matrices} | {
        2 * spec.layers * pairs // case.tp
    }


# Policies that are above the bars of their file, each with bars of its own: reuse step, full step.
ABOVE = {
    ("v6e", "DLLMCache"): (1.1, 1.3),
    ("v6e", "ElasticCache"): (1.1, 1.3),
    ("v6e", "EvictPrompt"): (1.05, 1.6),
    ("v6e_jax012", "DLLMCache"): (1.05, 1.35),
    ("v6e_jax012", "ElasticCache"): (1.1, 1.45),
    ("v6e_jax012", "MaskKV"): (1.06, 1.5),
    ("v6e_jax012", "EvictPrompt"): (1.05, 1.6),
    # They read attention weights, which cuDNN does not give, or keep other pairs for each head.
    ("h100_cudnn", "MaskKV"): (1.3, 3.3),
    ("h100_cudnn", "ElasticCache"): (1.3, 2.9),
    ("h100_cudnn", "D2Cache"): (1.3, 2.9),
    ("h100_cudnn", "EvictPrompt"): (1.15, 3.2),
}


BARS = {
    "v6e": (1.05, 1.2), "v6e_jax012": (1.05, 1.2), "v6e_width640": (1.05, 1.25), "v6e_dream": (1.05, 1.2),
    "groups": (1.5, 3.8), "v5e_tp4": (1.05, 1.1), "v5e_tp4_more": (1.2, 1.7), "v5e_dp2_tp4": (1.05, 3.6),
    "v5p_tp4": (1.6, 4.6), "h100": (1.45, 3.3), "h100_cudnn": (1.25, 1.75), "h100_cudnn_more": (1.25, 5.8),
    "h100_32_layers": (1.45, 4.2), "h100_batch8": (1.4, 16.0), "h100_batch8_kernels": (1.5, 17.2),
    "h100_pallas": (1.25, 2.0), "h100_dream": (1.45, 2.7), "h100_tp4": (2.05, 4.9),
    "h100_tp4_cudnn": (1.8, 4.9),
}  # fmt: skip


@pytest.mark.parametrize("name", BARS)
def test_recorded_programs_are_within_their_bars(name):
    """What was compiled, of which commit, and that no row failed; the file is made by bench.compiled."""
    document = json.loads((RESULTS / f"compiled_{name}.json").read_text())
    assert document["commit"], "results say which commit they are of"
    assert {"jax", "jaxlib", "date", "dtype"} <= set(document)
    for row in document["rows"]:
        assert "error" not in row, row
        assert row["fits"]
        most_reuse, most_full = ABOVE.get((name, row["policy"]), BARS[name])
        if "reuse_step" in row:
            assert row["reuse_step"]["ratio"] <= most_reuse, row["policy"]
        assert row["full_step"]["ratio"] <= most_full, row["policy"]


@pytest.mark.parametrize(
    ("name", "copying"),
    [
        ("compiled_v6e", {"DLLMCache", "EvictPrompt"}),
        ("compiled_v6e_jax012", {"MaskKV"}),
        # Activations of full steps, and of these policies a layer's pairs.
        ("compiled_h100_cudnn", {"Policy", "DKVPrefill", "SparseDLLM", "DLLMCache", "MaskKV", "EvictPrompt"}),
    ],
)
def test_recorded_programs_copy_nothing_at_entry_and_few_copy_anything_in_loops(name, copying):
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    assert not any(row["entry_copies"] for row in rows)
    assert {row["policy"] for row in rows if row["loop_copies"]} == copying
    assert all(copy["bytes"] < 2**24 for row in rows for copy in row["loop_copies"])


def test_slices_exchange_little_and_gather_nothing():
    """At most two all-reduces per layer, and a handful per step; a gathered weight would be a copy too."""
    for name in ("compiled_v5e_tp4", "compiled_v5e_dp2_tp4", "compiled_v5p_tp4"):
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
            if row["policy"] in ("Policy", "DualCache"):
                assert row["full_step"]["collectives_per_layer"] * row["layers"] <= 2 * row["layers"] + 8
                assert all(copy["bytes"] < 3 * 2**20 for copy in row["loop_copies"])  # activations


def test_unknown_slices_are_refused():
    with pytest.raises(ValueError, match=r"dp=1 x tp=3: v6e slices have \[1, 4, 8\] chips"):
        TARGETS["v6e"].mesh(1, 3)
