"""Loading a checkpoint as a `Model`, filled unit by unit on the device."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.checkpoint.dtypes import choose, choose_weights
from dllm_jax.checkpoint.files import check_integrity
from dllm_jax.checkpoint.generation import generation_of
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.checkpoint.names.rope import MOST_POSITIONS
from dllm_jax.checkpoint.sharded import Source, Stored
from dllm_jax.checkpoint.source import open_checkpoint, opened, require_finite, resized_source
from dllm_jax.nn.int8 import Weights, placements
from dllm_jax.nn.mesh import MeshRules, context_mesh
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import Params, abstract, abstract_vision, form_of_layers
from dllm_jax.nn.sharding import WIDE, default_device, warn_of_replicas
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveFloat, PositiveInt, check_argument, check_names, short_help
from pallas_kernels import Implementation
from pallas_kernels.choice import Evidence, check_implementation
from pallas_kernels.evidence import asked_for, known


@short_help
def load(
    path: str | os.PathLike[str],
    dtype: Any = None,
    mesh: Mesh | None = None,
    rope_factor: float = 1.0,
    check_finite: bool = False,
    implementation: Implementation | Mapping[str, Implementation] | None = None,
    separate_layers: bool | None = None,
    weights: Weights | None = None,
    rules: MeshRules = MeshRules(),
    verify: bool = False,
    vocab: int | None = None,
    revision: str | None = None,
    family: Family | None = None,
    **unknown: Never,
) -> Model:
    """Loads a checkpoint from a Hugging Face directory, the hub or a converted directory.

    No weights are ever initialized, and besides the model only one layer (or the embedding, or the head) is
    in memory at a time. Each process reads only what its own devices hold; to quantize, all inputs of its
    output channels.

    Args:
      path: Hugging Face directory (config.json, safetensors), directory written by `convert`, or hub id
        "org/name". The format is detected from the files.
      dtype: float32 or bfloat16, by name ("bf16", "fp32" and "f32" too) or as `jnp.bfloat16`; None keeps the
        stored dtype (that of the matrices if there are several, and bfloat16 for float16). Weights that other
        tools quantized (fp8, GPTQ, AWQ, compressed-tensors) are dequantized while they are read.
      mesh: Mesh of devices that share the model and its batches, all Auto or all Explicit. None uses the
        mesh of `jax.set_mesh`, or the default device.
      rope_factor: Factor of the rotary base (NTK scaling, LongLLaDA arXiv:2506.14429), and of the limit on
        positions.
      check_finite: Whether to check every weight for NaN and infinity.
      implementation: Kernels of attention, eviction and experts ("xla", "pallas", "cudnn" or others, see
        `Model`), or of single operations, `{"attention": "cudnn", "experts": "pallas"}`, and XLA's of the
        others; None takes what is known to be right and fastest on the devices (`dj.explain_kernels` lists
        it).
      separate_layers: Whether each layer has its own arrays (True) or all are stacked (False), the two forms
        of the weights; None takes what the devices read faster: stacked in small models, and on TPUs unless
        there are experts; otherwise separate, as layers of different shapes have to be. Tokens do not depend
        on it.
      weights: "int8" quantizes the matrices of the decoder's layers (not routers), of DiffusionGemma's
        self-conditioning and of a vocabulary head of its own to int8 (`dllm_jax.nn.int8`), which takes half
        their memory in bfloat16; outputs can differ slightly because of rounding. None keeps the stored form:
        a directory converted to int8 loads as int8, any other one in `dtype`.
      rules: Sharding rules that say what each axis of the mesh splits; the default knows "dp", "data" and
        "batch" (sequences), "tp", "model" and "tensor" (heads, MLP width, vocabulary), "ep" and "expert"
        (experts) and "fsdp" (parameters and sequences).
      verify: Whether to compare spec.json and the files of all parameters with their stored hashes first,
        which reads them once more. Directories that `convert` wrote have hashes.
      vocab: Truncate the vocabulary to this size (first rows of the embedding and head). LLaDA-V's authors
        run it with `len(tokenizer)` = 126349. None keeps all rows of the checkpoint.
      revision: Branch, tag or commit of a hub id; None takes the main branch.
      family: Description of a model type that the library does not know (`Family`, docs/adding-a-family.md).

    Warns:
      dllm_jax.checkpoint.dtypes.DtypeWarning: several stored dtypes, or float16, and `dtype` None.
      dllm_jax.nn.mesh.ReplicationWarning: parameters that cannot be split as the rules say, or axes of the
        mesh without a rule, by name.
      dllm_jax.checkpoint.config.MaskTokenWarning: no file of an A2D or Fast-dLLM v2 model names the mask
        token.
      dllm_jax.checkpoint.config.BlockSizeWarning: config.json of an SDAR, Fast-dLLM v2 or DreamReasoner model
        names no block size.
      UserWarning: the directory holds a LoRA adapter, or model.safetensors next to an index that leaves
        it out; neither is read.
      pallas_kernels.evidence.ImplementationWarning: kernels that are said to be the fastest, and are wrong on
        this device.

    Returns:
      the model.

    Raises:
      FileNotFoundError: no such directory and no such hub id, or files are missing.
      NotADirectoryError: the path is a file's.
      ValueError: unsupported config or dtype, tensors missing, unmapped or misshaped, a damaged file,
        a factor that is not positive or that the model does not take, an unknown implementation, a mesh
        without any axis that the rules know, of axes of mixed types, or another than that of `jax.set_mesh`,
        `weights` that are neither None nor "int8", stacked layers of a model whose layers differ, a `vocab`
        beyond the rows or without a special token, a revision of a directory, files that are not as written
        or of which no hash is known (verify), or (check_finite, int8) tensors with NaN or infinity; each by
        name.
      TypeError: an argument that `load` does not have.

    Examples:
      >>> model = dj.load(dj.bundled.path("tiny-llada"))
      >>> model.spec.layers, str(model.dtype)
      (4, 'float32')
    """
    check_names("load", unknown, set(inspect.signature(load).parameters) - {"unknown"})
    verify = check_argument("verify", verify, bool)
    mesh = usable_mesh(mesh, rules)
    check_argument("rope_factor", rope_factor, PositiveFloat)
    check_finite = check_argument("check_finite", check_finite, bool)
    separate_layers = check_argument("separate_layers", separate_layers, bool | None)
    vocab = check_argument("vocab", vocab, PositiveInt | None)
    source = open_checkpoint(path, revision, family)
    source = source if vocab is None else resized_source(source, vocab)
    # Everything that can be refused is refused before a weight is read.
    generation = generation_of(source.path)
    asked = asked_for(implementation) if isinstance(implementation, Mapping) else implementation
    check_implementation(asked)
    chosen = evidence_for(mesh) if asked is None else asked
    empty = Model({}, scale_rope(source.spec, rope_factor), chosen, rules)  # refuses before it reads
    target = choose(dtype, source.dtypes, str(source.path), source.matrices)
    form = choose_weights(weights, source.weights, str(source.path))
    if verify:
        check_integrity(source.path)
    warn_of_replicas(source.spec, mesh, rules)
    params, vision = fill(source, target, mesh, check_finite, separate_layers, form, rules)
    return dataclasses.replace(
        empty, params=params, vision=vision, origin=source.path, quantized=source.quantized,
        generation=generation,
    )  # fmt: skip


def evidence_for(mesh: Mesh | None) -> Evidence | None:
    """Returns the evidence about implementations on the devices of a model; None if there is none."""
    return known(default_device() if mesh is None else mesh.devices.flat[0]) or None


def usable_mesh(mesh: Mesh | None, rules: MeshRules) -> Mesh | None:
    """The mesh to put a model on: the one that is passed, or that of `jax.set_mesh`.

    Raises:
      ValueError: none of its axes is known to the rules, or it is another one than that of `jax.set_mesh`.
    """
    check_argument("mesh", mesh, Mesh | None, ', such as jax.make_mesh((8,), ("tp",))')
    check_argument("rules", rules, MeshRules, ", such as dj.MeshRules()")
    context = context_mesh()
    if context is not None and mesh is not None and context != mesh:
        raise ValueError(f"mesh={mesh} is not {context}, the mesh of jax.set_mesh: pass one of them")
    if context is not None and not isinstance(context, Mesh):
        raise ValueError("a checkpoint cannot be loaded inside of a traced program")
    mesh = context if mesh is None else mesh
    if mesh is not None:
        rules.check(mesh)
    return mesh


def scale_rope(spec: ModelSpec, factor: float) -> ModelSpec:
    """The spec with rotary base and limit on positions multiplied (NTK scaling, LongLLaDA arXiv:2506.14429).

    Raises:
      ValueError: the factor is not a positive finite number, or the frequencies are scaled already.
    """
    factor = check_argument("rope_factor", factor, PositiveFloat)
    if factor != 1 and spec.rope_scaling is not None:
        scaled = f"{spec.rope_scaling.kind}, factor {spec.rope_scaling.factor:g}"
        raise ValueError(
            f"rope_factor={factor} is not supported here: rotary frequencies of the checkpoint are scaled "
            f"already ({scaled}). Change them in the config.json of the Hugging Face directory instead."
        )

    if factor != 1 and spec.gemma is not None:
        raise ValueError(
            f"rope_factor={factor} is not supported by {spec.family}: its layers have two rotary embeddings. "
            "Change rope_parameters in the config.json of the Hugging Face directory instead."
        )

    # LongLLaDA multiplies the base and nothing else; here no arithmetic reads the limit, only a warning does.
    reach = spec.positions and min(max(1, int(spec.positions * factor)), MOST_POSITIONS)
    try:
        return dataclasses.replace(spec, rope_base=spec.rope_base * factor, positions=reach)
    except ValueError as error:
        raise ValueError(f"rope_factor={factor} is too large or too small: {error}") from None


def fill(
    source: Source,
    dtype: np.dtype,
    mesh: Mesh | None = None,
    check_finite: bool = False,
    separate_layers: bool | None = None,
    weights: Weights | None = None,
    rules: MeshRules = MeshRules(),
) -> tuple[Params, Params | None]:
    """Parameters of an opened checkpoint on the device or the mesh, and a tower's; arguments as of `load`."""
    spec, weights = source.spec, weights or source.weights
    platform = (default_device() if mesh is None else mesh.devices.flat[0]).platform
    separate_layers = form_of_layers(spec, separate_layers, platform)
    place = functools.partial(placements, weights=weights, mesh=mesh, platform=platform, rules=rules)
    where = functools.partial(place, spec)
    # Stacked layers are allocated once and filled in place; separate ones are kept as they come.
    trees: dict[bool, Params] = {False: {"layers": []}, True: {"layers": []}}  # the decoder's, a tower's
    put: dict[bool, Callable[..., Any]] = {}
    described = lambda: {False: abstract(spec, dtype, weights), True: abstract_vision(spec, dtype)}
    for of_vision, shapes in ({} if separate_layers else described()).items():
        if shapes is not None:
            trees[of_vision]["layers"], put[of_vision] = _stack(shapes["layers"], where)
    for unit, parameters in opened(source, dtype, weights):
        placed: dict[str, Any] = {
            leaf: jax.tree.map(Stored.on_devices, stored, place(spec.at(unit.layer), leaf, stacked=False))
            for leaf, stored in parameters.items()
        }
        placed |= {leaf: placed[leaf].astype(jnp.float32) for leaf in WIDE if leaf in placed}
        if check_finite:
            require_finite(unit, placed, _is_finite, source)
        tree = trees[unit.of_vision]
        if unit.layer is None:
            tree.update(placed)
        elif separate_layers:
            tree["layers"].append(placed)
        else:
            # The number is an argument, not a constant: one program fills all layers.
            tree["layers"] = put[unit.of_vision](tree["layers"], placed, jnp.int32(unit.layer))
    return trees[False], None if spec.vision is None else trees[True]


@jax.jit
def _is_finite(array: Float[Array, "..."]) -> Bool[Array, ""]:
    # On the devices, so that all processes come to the same answer.
    return jnp.isfinite(array).all()


def _stack(
    shapes: dict[str, Any], placement: Callable[..., Any]
) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Stacked layers of zeros, and the program that fills one of them in place: no stack is held twice."""
    where = {leaf: placement(leaf, stacked=True) for leaf in shapes}
    (arrays, tree), (places, of_places) = jax.tree.flatten(shapes), jax.tree.flatten(where)
    put = jax.jit(_set_layer, donate_argnames="layers", out_shardings=where)
    return _empty(tree, tuple(arrays), of_places, tuple(places))(), put


@functools.lru_cache(maxsize=32)
def _empty(tree: Any, arrays: tuple[Any, ...], of_places: Any, places: tuple[Any, ...]) -> Callable[..., Any]:
    """The program that makes arrays of zeros, one for all checkpoints of a shape."""
    zeros = lambda: tree.unflatten([jnp.zeros(array.shape, array.dtype) for array in arrays])
    return jax.jit(zeros, out_shardings=of_places.unflatten(places))


def _set_layer(layers: dict[str, Any], new: dict[str, Any], layer: Int[Array, ""]) -> dict[str, Any]:
    put = lambda stack, array: jax.lax.dynamic_update_index_in_dim(stack, array, layer, 0)
    return jax.tree.map(put, layers, new)
