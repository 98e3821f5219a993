"""Meshes of all devices: the same tokens as one device, and the time of a shape's generation on each."""

import dataclasses
import warnings
from collections.abc import Iterator

import jax
import numpy as np

import dllm_jax as dj
from dllm_jax.check import timing
from dllm_jax.check.report import Finding, failed
from dllm_jax.check.speed import Geometry, SpeedCase, speed_request, timed_policies
from dllm_jax.check.steps import program
from dllm_jax.check.weights import random_model
from dllm_jax.decoding.placement import place, runs_on
from dllm_jax.nn.mesh import ReplicationWarning

AXES = ("tp", "dp")  # weights and heads; sequences


def device_findings(
    spec: dj.ModelSpec, dtype: str, geometry: Geometry, axes: tuple[str, ...] = AXES
) -> Iterator[Finding]:
    """Per axis: are the tokens of a bundled model those of one device, and how long does a shape take?

    Args:
      spec: Spec of the model that is timed.
      dtype: Dtype of its weights.
      geometry: Geometry of its generations; the first prompt is used, with a sequence per device.
      axes: Axis names of the meshes, one axis each.
    """
    devices = jax.local_devices()
    count = len(devices)
    if count == 1:
        yield Finding("meshes", "one device: there is nothing to divide")
        return
    alone = _tokens(None)
    alone_takes: float | None = None
    for axis in (None, *axes):
        title = f"one of {count}" if axis is None else f"{axis}={count}"
        try:
            mesh = None if axis is None else jax.make_mesh((count,), (axis,), devices=devices)
            if mesh is not None:
                equal = bool((_tokens(mesh) == alone).all())
                text = "the tokens of one device" if equal else "other tokens than one device's"
                yield Finding(f"{title}, tokens", text, equal)
            case = SpeedCase(timed_policies(spec)[1], geometry.prompts[0], count)
            taken = _time(spec, dtype, case, geometry, mesh)
            text = f"{taken.median:.2f} s for {count} sequences"
            if mesh is not None and alone_takes is not None:
                text += f", {alone_takes / taken.median:.2f} times as fast as one"
            alone_takes = taken.median if mesh is None else alone_takes
            yield Finding(f"{title}, time", text, None, {"seconds": dataclasses.asdict(taken)})
        except Exception as error:  # the other axes are looked at all the same
            yield failed(title, error)


def _tokens(mesh: jax.sharding.Mesh | None) -> np.ndarray:
    """Of a bundled model in float32 with a cache; a sequence per device."""
    with warnings.catch_warnings():
        # What its four heads do not divide lies on all devices, which is no fault of theirs.
        warnings.simplefilter("ignore", ReplicationWarning)
        model = dj.load(dj.bundled.path("tiny-llada"), dtype="float32", mesh=mesh)
    ids = np.random.default_rng(0).integers(5, 40, (jax.local_device_count(), 16))
    return np.asarray(dj.generate(model, ids, length=16, block=4, policy=dj.policies.DualCache()).tokens)


def _time(
    spec: dj.ModelSpec, dtype: str, case: SpeedCase, geometry: Geometry, mesh: jax.sharding.Mesh | None
) -> timing.Time:
    """Of a generation; what does not fit on one device is an error that says so."""
    model = random_model(spec, dtype)
    if mesh is not None:
        where = jax.tree.map(lambda leaf: leaf.sharding, dj.abstract(spec, dtype, mesh).params)
        model = dj.Model(jax.device_put(model.params, where), spec)
    asked = speed_request(model, case, geometry)
    placed = place(model, asked, asked.inputs.tokens)
    with runs_on(placed):
        return timing.timed(program(placed.model, placed).run, 3)
