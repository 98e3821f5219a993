"""Watches a generation layer by layer: the tokens that each layer recomputes, updates and retains."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float

import dllm_jax as dj
from dllm_jax.decoding.watch.recording import Recording
from dllm_jax.policies import Policy

PLACES = "v", "mlp_output"  # of the network: values, which are cached, and the end of a layer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Watch(dj.Intervention):
    """An intervention that changes nothing, and reports where its place of the network is computed.

    Attributes:
      report: Function of place, layer, step and canvas positions (l at padding), which is called on the host.
    """

    report: Callable = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Any, layer: Any, position: Any, step: Any) -> Any:
        jax.debug.callback(self.report, self.place, layer, step[0], position[0])
        return x


class Layers(NamedTuple):
    """The tokens of one sequence that each layer of each step recomputed, updated and attended to.

    Attributes:
      whole: tokens whose MLP it computed.
      updated: tokens whose values it computed.
      age: steps since `whole`, -1 before.
      attended: share of the KV heads that may attend to a token, whose pairs they retain.
    """

    whole: Bool[np.ndarray, "t n l"]
    updated: Bool[np.ndarray, "t n l"]
    age: Float[np.ndarray, "t n l"]
    attended: Float[np.ndarray, "t n l"]


class Watcher:
    """Collects reports of a generation with one sequence; `interventions` and `policy` make them."""

    def __init__(self, policy: Policy):
        self.computed: dict[str, set[tuple[int, int, int]]] = {place: set() for place in PLACES}
        self.retained: dict[tuple[int, int], list[int]] = {}  # by step and layer, a position for each head
        kind = type(policy)
        reports = {
            "layer": _reporting_pairs(kind, self),
            "retained": _reporting_retained(kind, self),
            "choice": _reporting_choice(kind, self),
            "widths": _of_a_large_model(kind),
        }
        methods = {name: method for name, method in reports.items() if method}
        fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
        self.policy = type(kind.__name__, (kind,), methods)(**fields)
        plain = (dj.Intervention.steer(place, 0.0) for place in PLACES)
        of = lambda watch: {field.name: getattr(watch, field.name) for field in dataclasses.fields(watch)}
        self.interventions = tuple(Watch(**of(watch), report=self.add) for watch in plain)

    def add(self, place: str, layer: Any, step: Any, position: Any):
        """Adds positions at which a layer computed a place."""
        self.computed[place] |= {(int(step), int(layer), int(place_)) for place_ in position}

    def layers(self, run: Recording, spec: dj.ModelSpec) -> Layers:
        """The reports as arrays over the steps of a recording."""
        jax.effects_barrier()
        steps, length = run.computed.shape
        marks = np.zeros((len(PLACES), steps, spec.layers, length + 1), bool)
        for place, computed in zip(marks, self.computed.values(), strict=True):
            at, layer, position = np.array(sorted(computed)).T
            place[at, layer, np.minimum(position, length)] = True
        updated, whole = marks[..., :length]
        step = np.arange(steps)[:, None, None]
        last = np.maximum.accumulate(np.where(whole, step, -1), axis=0)
        attended = np.repeat(run.read[:, None].astype(float), spec.layers, axis=1)
        for t, n in np.ndindex(steps, spec.layers):
            if (slots := self._retained_by(t, n)) is not None:
                share = np.minimum(np.bincount(slots, minlength=length + 1)[:length] / spec.kv_heads, 1)
                attended[t, n] = np.where(self._may_evict(run, t), share, attended[t, n])
        return Layers(whole, updated, np.where(last < 0, -1, step - last), attended)

    def _retained_by(self, step: int, layer: int) -> list[int] | None:
        """Positions of the pairs that a layer's heads attend to in a step; None for all of them."""
        chosen = [t for t, n in self.retained if n == layer and t <= step]
        exact = isinstance(self.policy, dj.policies.MAGE) and step in chosen  # it attends, then chooses
        return None if exact or not chosen else self.retained[max(chosen), layer]

    def _may_evict(self, run: Recording, step: int) -> Bool[np.ndarray, "l"]:
        """Positions that a layer attends to only if it retains their pairs."""
        if isinstance(self.policy, dj.policies.SparseDLLM):
            return ~run.computed[step]
        if isinstance(self.policy, dj.policies.MAGE):
            return np.arange(run.read.shape[1]) < np.flatnonzero(run.computed[step])[0]
        return np.arange(run.read.shape[1]) < run.to_fill[0]


def _reporting_pairs(kind: type, watcher: Watcher) -> Callable | None:
    """`Policy.layer` that also reports the positions whose pairs the layer's heads hold."""
    if not issubclass(kind, (dj.policies.MaskKV, dj.policies.EvictPrompt)):
        return None

    def layer(self, layer, x, cache, rows, canvas):
        x, cache = kind.layer(self, layer, x, cache, rows, canvas)
        pairs = getattr(cache.shared, "pairs", cache.shared)
        jax.debug.callback(report, layer.index, canvas.step[0], pairs.runs[:, 0], pairs.position[0])
        return x, cache

    def report(index, step, runs, position):
        positions = [int(p) for start, size in runs[index] for p in position[start : start + size]]
        watcher.retained[int(step), int(index)] = positions

    return layer


def _reporting_retained(kind: type, watcher: Watcher) -> Callable | None:
    """`SparseDLLM.retained` that also reports what a layer retains for all its heads."""
    if not issubclass(kind, dj.policies.SparseDLLM):
        return None

    def retained(self, layer, q, k, canvas, slots):
        retained = kind.retained(self, layer, q, k, canvas, slots)
        jax.debug.callback(
            report, layer.index, canvas.step[0], self._fills(canvas)[0], retained[0, 0], layer.spec.kv_heads
        )
        return retained

    def report(index, step, fills, retained, heads):
        if fills:
            watcher.retained[int(step), int(index)] = [int(p) for p in retained for _ in range(heads)]

    return retained


def _reporting_choice(kind: type, watcher: Watcher) -> Callable | None:
    """`MAGE.choice` that also reports what each head chooses, in the step that enters a block."""
    if not issubclass(kind, dj.policies.MAGE):
        return None

    def choice(self, layer, score, canvas, slots):
        choice = kind.choice(self, layer, score, canvas, slots)
        enters = canvas.enters_model_block[0, 0]
        jax.debug.callback(report, layer.index, canvas.step[0], enters, choice[0])
        return choice

    def report(index, step, enters, choice):
        if enters:
            watcher.retained[int(step), int(index)] = [int(p) for p in choice.flatten()]

    return choice


def _of_a_large_model(kind: type) -> Callable | None:
    """`ElasticCache.widths` as of large models: of small ones a step computes everything and keeps some."""
    if not issubclass(kind, dj.policies.ElasticCache):
        return None
    return lambda self, spec, layout: (4 * self.window,)
