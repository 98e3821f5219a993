"""Models as arguments of exported programs (`jax.export`): their static part as bytes, and back.

    export = jax.export.export(jax.jit(run), platforms=("cpu", "tpu", "cuda"), disabled_checks=CHECKS)
    data = export(model, ids).serialize()
    jax.export.deserialize(data).call(model, ids)

`import dllm_jax` registers models and the results of a generation; serializing needs the package flatbuffers.
A generation says in which order the axes of its cache lie in memory (`dllm_jax.xla.order`), by a custom call
for whose meaning in other versions of XLA JAX gives no guarantee: `CHECKS` is the consent to it. Programs for
several platforms hold XLA's attention (`load(..., implementation="xla")`): every platform's branch is lowered
for all of them, and neither kernels nor cuDNN's call can be.
"""

import dataclasses
import json
from typing import Any

from jax import export

from dllm_jax.nn.int8 import Int8Matrix
from dllm_jax.nn.low_rank import LowRankMatrix
from dllm_jax.nn.mesh import MeshRules
from dllm_jax.nn.model import Generation, Model
from dllm_jax.nn.spec import ModelSpec
from pallas_kernels.choice import Entry

CHECKS = (export.DisabledSafetyCheck.custom_call("LayoutConstraint"),)


def _model_to_bytes(static: tuple[Any, ...]) -> bytes:
    spec, implementation, rules, _ = static
    if isinstance(implementation, tuple):
        implementation = [dataclasses.asdict(entry) for entry in implementation]
    return json.dumps([dataclasses.asdict(spec), implementation, dataclasses.asdict(rules)]).encode()


def _model_from_bytes(data: bytes) -> tuple[Any, ...]:
    spec, implementation, rules = json.loads(data)
    if isinstance(implementation, list):
        implementation = tuple(Entry.of_fields(fields) for fields in implementation)

    # JSON has no tuples, and lists would make the rules unhashable.
    names = {axis: tuple(listed) for axis, listed in rules.items()}
    return ModelSpec.of_fields(spec), implementation, MeshRules(**names), Generation()


export.register_pytree_node_serialization(
    Model,
    serialized_name="dllm_jax.Model",
    serialize_auxdata=_model_to_bytes,
    deserialize_auxdata=_model_from_bytes,
)
export.register_pytree_node_serialization(
    Int8Matrix,
    serialized_name="dllm_jax.Int8Matrix",
    serialize_auxdata=lambda static: b"",
    deserialize_auxdata=lambda data: (),
)
export.register_pytree_node_serialization(
    LowRankMatrix,
    serialized_name="dllm_jax.LowRankMatrix",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)
