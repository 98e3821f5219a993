"""LLaDA-V's recordings: views of images, tower and projector, prompts, and generations from them."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.nn.arithmetic import guided
from dllm_jax.nn.layer import unembed
from dllm_jax.nn.parameters import separate
from dllm_jax.vision import AnyRes, Pad, open_image, tower
from dllm_jax.vision.images import normalized
from dllm_jax.vision.processor import spliced
from dllm_jax.vision.prompt import PLACE, prompt_ids, rendered
from tests.replay.case import Case, load
from tests.replay.compare import Differs, closely, exactly
from tests.replay.stepping import log_of, logged, states

LOGITS = 5e-4
ONE_TENSOR = "one tensor of rank 4"  # of several images, which then have no newline
DESCRIPTION = """
    checks image_grid_pinpoints image_mode image_size_wh image_sizes_wh input inputs_embeds_sha256 kind
    min_argmax_gap numpy pillow pixel_dtype prompt_seed robustness source_function tile_hash tile_shapes
    tokenizer tolerance transformers writes_into_prompt_slots
"""  # of a recording, besides those of all methods
SPECIAL = {
    "<|startoftext|>": 126080, "<|start_header_id|>": 126346, "<|end_header_id|>": 126347,
    "<|eot_id|>": 126348,
}  # fmt: skip


def _model(case: Case) -> dj.Model:
    return load(case.folder.parents[1] / "models" / "llada-v-tiny", "float32")


def _sha256(views: np.ndarray) -> list[str]:
    return [hashlib.sha256(np.ascontiguousarray(view).tobytes()).hexdigest() for view in views]


def preprocess(case: Case):
    """Pixels of every view bit for bit, and what every token is made of."""
    s, vision = case.settings, _model(case).spec.vision
    s.describes(*DESCRIPTION.split())
    image = open_image(case.folder.parents[1] / s["image"], convert=False)
    padded = s.only("image_aspect_ratio", "anyres_max_4", "pad") == "pad"
    views = Pad(newline=True) if padded else AnyRes()
    pixels = views.pixels(image, vision)
    channels = normalized(pixels).transpose(0, 3, 1, 2)
    exactly("pixel_shape", channels.shape[-4:] if not padded else channels.shape, s["pixel_shape"][-4:])
    exactly("tile_sha256", _sha256(channels.astype("<f4")), s["tile_sha256"])
    exactly("tile_u8_sha256", _sha256(pixels.transpose(0, 3, 1, 2)), s["tile_u8_sha256"])
    exactly("u8_sum", pixels.sum(axis=(1, 2, 3), dtype=np.int64), case.arrays["u8_sum"])
    source, weight = views.merge(image.size, vision)
    if padded:
        counts = len(source), len(Pad().merge(image.size, vision).source)
        return exactly("tokens", counts, [s[f"n_image_tokens_{kind}_input"] for kind in ("list", "stacked")])
    width, height = AnyRes().canvas(image.size, vision)
    exactly("best_resolution", (width, height), s["best_resolution"])
    exactly("grid_wh", (width // vision.image, height // vision.image), s["grid_wh"])
    rows, columns = s["feature_rows"], s["feature_cols_without_newline"]
    exactly("tokens", [len(source), vision.patches + rows * (columns + 1)], [s["n_image_tokens"]] * 2)
    exactly("n_base", vision.patches, s["n_base"])
    exactly("interpolated", bool((weight[:, 1:] > 0).any()), s["interpolated"])
    newline = source[:, 0] < 0
    exactly("newline_positions", np.flatnonzero(newline), case.arrays["newline_positions"])
    parts = np.stack([source // vision.patches, source % vision.patches], axis=-1)
    made = (parts * weight[..., None]).sum(axis=1)
    closely("token_source", np.where(newline[:, None], -7777, made), case.arrays["token_source"])


def vision(case: Case):
    """Embeddings, layers and features of the tower, and what the projector makes of them."""
    model, arrays = _model(case), case.arrays
    case.settings.describes(*DESCRIPTION.split(), "weights")
    params, spec = separate(model.vision), model.spec.vision
    pixels = jnp.asarray(normalized(arrays["pixels_u8"].transpose(0, 2, 3, 1)))
    x = jax.jit(tower.patch_embeddings, static_argnums=1)(params, spec, pixels)
    layer = jax.jit(tower.encoder_layer, static_argnums=1)
    rows = arrays["rows"]
    closely("embeddings", x[:, rows], arrays["embeddings_rows"])
    for i, weights in enumerate(params["layers"]):
        x = layer(weights, spec, x)
        closely(f"layer {i}", x[:, rows], arrays[f"layer{i}_rows"])
    closely("features", tower.encode_pictures(params, spec, pixels), arrays["features"])
    closely("projected", tower.project(params, x), arrays["projected"])
    views = tower.view_embeddings(params, spec, arrays["pixels_u8"].transpose(0, 2, 3, 1), 3)
    closely("views", views[:2], arrays["projected"])


class _Characters:
    """The recordings' tokenizer: a character is its number, special tokens have LLaDA's ids."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        ids = []
        while text:
            special = next((word for word in SPECIAL if text.startswith(word)), None)
            ids.append(ord(text[0]) if special is None else SPECIAL[special])
            text = text[len(special or text[0]) :]
        return ids


def prompt(case: Case):
    """Rendered prompts and ids with a place for each image."""
    case.settings.describes(*DESCRIPTION.split())
    for recorded in case.settings["cases"]:
        said = [(role, text) for role, text in recorded["messages"] if text is not None]
        turns = [{"role": role, "content": t, "images": [None] * t.count("<image>")} for role, t in said]
        text, _ = rendered(turns)
        if text != recorded["prompt"]:
            raise Differs(f"{recorded['name']}: the prompt is {text!r}, recorded {recorded['prompt']!r}")
        exactly(recorded["name"], prompt_ids(_Characters(), text), recorded["ids"])
        kept = prompt_ids(_Characters(), text, drop_first_id=False)
        exactly("ids in all", len(kept), len(recorded["ids"]) + recorded["ids"].count(PLACE))


def generate(case: Case):
    """The prompt's inputs; tokens, candidates and confidences of every step; the last step's logits."""
    s, arrays, model = case.settings, case.arrays, case.model()
    s.describes(*DESCRIPTION.split(), "prompt_ids")
    s.only("temperature", 0.0)
    s.only("remasking", "low_confidence")
    s.only("generation_suffix")
    s.only("mask_token_id", model.spec.mask_id)
    listed, words = s["stopping_criteria"] or [], s["token_strings"] or {}
    together = s["images_passed_as"] == ONE_TENSOR
    ids, embeds = _inputs(case, model, together)
    sampler = dj.samplers.Confidence(cfg_scale=s["cfg_scale"], suppress_tokens=tuple(s["suppressed_ids"]))
    options = dict(
        prompt_embeds=embeds, length=s["gen_length"], block=s["block_length"], steps=s["steps"],
        sampler=sampler, stop=[words[word] for word in listed], widths=case.widths,
    )  # fmt: skip
    if s["dllm_cache"]:
        return _cached(case, model, ids, options)
    out = dj.generate(model, ids, trace=True, **options)
    trace, p = out.trace, ids.shape[1]
    _compare_steps(case, np.asarray(trace.tokens)[:, 0, p:])
    seen = np.isfinite(arrays["confidence"]) & (arrays["stop_before"] < 0)[:, None]
    closely("confidence", np.asarray(trace.score)[:, 0, p:], arrays["confidence"], where=seen)
    exactly("x0", np.asarray(trace.proposed)[:, 0, p:], arrays["x0"], where=seen)
    answer = np.asarray(out.tokens)[0, p:]
    exactly("output", answer[: len(arrays["output"])], arrays["output"])
    if (answer[len(arrays["output"]) :] != model.spec.eos_id).any():
        raise Differs("what follows a stop is not end-of-text")
    _compare_logits(case, _logits(model, trace.tokens[-2], embeds, s["cfg_scale"], p))


def _inputs(case: Case, model: dj.Model, together: bool):
    """Ids and inputs of the prompt, compared with the recorded inputs."""
    s, arrays, spec = case.settings, case.arrays, model.spec
    ratio = s.only("image_aspect_ratio", "anyres_max_4", "pad")
    views = Pad(newline=not together) if ratio == "pad" else AnyRes()
    images = [open_image(case.folder.parents[1] / name, convert=False) for name in s["images"]]
    pixels = [views.pixels(image, spec.vision) for image in images]
    merges = [views.merge(image.size, spec.vision) for image in images]
    found = spliced(arrays["prompt"].tolist(), pixels, merges, spec.vision)
    exactly("positions", [len(found.ids)], [s["prompt_embeds_length"]])
    embeds, rows = None, model.params["embed"][np.maximum(found.ids, 0)]
    if images:
        features = tower.view_embeddings(model.vision, spec.vision, found.pixels, 4)
        embeds = tower.merged(model.vision, features, found.source[None], found.weight[None])
        rows = jnp.where(found.ids[:, None] < 0, embeds[0], rows)
    seen, name = (rows, "") if "inputs_embeds" in arrays else (rows[arrays["inputs_embeds_rows"]], "_sample")
    closely("inputs_embeds", seen, arrays[f"inputs_embeds{name}"])
    return found.ids[None], embeds


def _compare_steps(case: Case, tokens: np.ndarray):
    """Tokens after every step and what each step wrote; behind a known stop the original writes leftovers."""
    arrays = case.arrays
    exactly("steps", [len(tokens) - 1], [case.settings["total_forward_steps"]])
    end = np.where(arrays["stop_before"] < 0, tokens.shape[1], arrays["stop_before"])
    before = np.arange(tokens.shape[1]) < np.concatenate([end[:1], end])[:, None]
    exactly("tokens", tokens, arrays["tokens"], where=before)
    exactly("transfer", tokens[1:] != tokens[:-1], arrays["transfer"], where=before[1:])


class LikeOtherLayers(dj.policies.DLLMCache):
    """dLLM-Cache as its hook for LLaDA-V has it: the first layer refreshes when the others do."""

    def due(self, canvas, first):
        return super().due(canvas, False)


def _cached(case: Case, model: dj.Model, ids, options: dict):
    """Under dLLM-Cache: tokens, the positions of each layer's partial update, and logits."""
    c, arrays = case.settings["dllm_cache"], case.arrays
    policy = LikeOtherLayers(c["prompt_interval_steps"], c["gen_interval_steps"], c["transfer_ratio"])
    case.settings.describes("smallest_selection_margin")
    begun, *run = states(model, ids, policy=logged(policy), **options)
    p = ids.shape[1]
    _compare_steps(case, np.stack([np.asarray(state.canvas.tokens)[0, p:] for state in (begun, *run)]))
    logs = [log_of(state) for state in run]
    stale = np.stack([np.asarray(log.stale)[:, 0, p:] for log in logs])
    partial = ~np.isnan(arrays["selection_margin"])
    exactly("selected", stale, arrays["selected"], where=partial[..., None])
    logits = unembed(model.params, model.spec, jnp.asarray(logs[-1].hidden))
    _compare_logits(case, np.asarray(logits)[0, p:])


def _logits(model: dj.Model, tokens, embeds, cfg_scale: float, prompt: int) -> np.ndarray:
    whole = None if embeds is None else jnp.pad(embeds, ((0, 0), (0, tokens.shape[1] - prompt), (0, 0)))
    logits = dj.forward(model, jnp.asarray(tokens), embeds=whole)
    if cfg_scale:
        masked = np.where(np.arange(tokens.shape[1]) < prompt, model.spec.mask_id, tokens)
        logits = guided(logits, dj.forward(model, masked), cfg_scale)
    return np.asarray(logits)[0, prompt:]


def _compare_logits(case: Case, logits: np.ndarray):
    recorded = case.arrays["logits_last"]
    closely("logits_last", logits, recorded, where=np.isfinite(recorded), tolerance=LOGITS)
