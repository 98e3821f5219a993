"""What recorded generations look like: in a terminal, and as a page that runs nothing of its data."""

import base64
import dataclasses
import hashlib
import io
import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import jax
import numpy as np
import pytest
import rich.console

import dllm_jax as dj
from dllm_jax.decoding.watch.grid import END, grid
from dllm_jax.decoding.watch.recording import Recording
from dllm_jax.engine.features.trace import Trace
from dllm_jax.engine.stats import Stats
from tests import refuses
from tests.models import tiny

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MASK = 9
# A prompt of two tokens and three masks. The second sequence waits in step 2, and revokes a token in step 3.
TOKENS = np.array(
    [
        [[1, 2, 9, 9, 9], [3, 2, 9, 9, 9]], [[1, 2, 9, 4, 9], [3, 2, 6, 9, 9]],
        [[1, 2, 5, 4, 9], [3, 2, 6, 9, 9]], [[1, 2, 5, 4, 0], [3, 2, 9, 7, 8]],
    ]
)  # fmt: skip
WIDENED = np.array([[[1, 1, 1]] * 2, [[0, 0, 1], [0, 0, 0]], [[0, 0, 0], [0, 1, 1]]], dtype=bool)
ACTIVE = np.array([[True, True], [True, False], [True, True]])
COMPUTED = np.array(
    [[[1, 1, 1, 1, 1]] * 2, [[0, 0, 1, 1, 0], [0] * 5], [[0, 0, 1, 0, 1], [0, 1, 1, 1, 1]]], dtype=bool
)
READ = np.ones(COMPUTED.shape, bool)
READ[1, 0, 3:] = False  # one of which is computed
SCORE = np.where(TOKENS[1:] != TOKENS[:-1], np.array([0.5, 0.75, 1.0])[:, None, None], -np.inf)
SCORE[2, 1, 2] = -np.inf


def recorded(ids: np.ndarray = TOKENS) -> dj.Output:
    """An output made by hand: what it shows is known without a model."""
    proposed = np.where(np.isneginf(SCORE), ids[0, 0, 2], ids[1:])
    room = lambda a: np.concatenate([a, a[-1:]])  # as inside of jit, for one step more than ran
    score = SCORE.astype(np.float32)
    parts = ids, COMPUTED, READ, proposed, score, ACTIVE, WIDENED
    trace = Trace(*(room(part) for part in parts), np.int32(3))
    stats = Stats(*(np.array([3, 2]) for _ in Stats._fields))
    return jax.tree.map(jax.numpy.asarray, dj.Output(ids[-1], stats, trace))


class Named:
    """A tokenizer with the given texts."""

    all_special_ids = (0,)

    def __init__(self, *texts: str):
        self.texts = texts

    def decode(self, ids, **options):
        return self.texts[ids[0]]

    def convert_ids_to_tokens(self, token):
        return self.texts[token]


LETTERS = Named("<eos>", *"abcdefgh", "<mask>")


def test_a_recording_tells_when_and_from_what_tokens_were_decoded():
    first, second = (Recording.of(recorded().trace, i) for i in (0, 1))
    assert (first.mask_id, first.steps, first.to_fill.tolist()) == (MASK, 3, [2, 3, 4])
    assert first.decoded_at.tolist() == [0, 0, 2, 1, 3]
    assert first.age.tolist() == [[0] * 5, [1, 1, 0, 0, 1], [2, 2, 0, 1, 0]]
    assert first.read.tolist() == [[True] * 5, [True, True, True, False, False], [True] * 5]
    # The step for which it waited is none of its own; what was made a mask again is not decoded.
    assert second.steps == 2
    assert second.decoded_at.tolist() == [0, 0, 0, 2, 2]
    assert second.age.tolist() == [[0] * 5, [1, 0, 0, 0, 0]]
    still = (trace := recorded().trace)._replace(tokens=np.broadcast_to(trace.tokens[:1], trace.tokens.shape))
    assert Recording.of(still, 0).mask_id == MASK, "known without a decoded token"
    assert Recording.of(still, 0).decoded_at.tolist() == [0] * 5
    never = dataclasses.replace(first, computed=first.computed & False)
    assert never.age.tolist() == [[-1] * 5] * 3, "what no step has computed has no age"


def test_the_grid_has_a_line_per_step():
    lines = str(grid(Recording.of(recorded().trace, 0), LETTERS)).splitlines()
    assert [line.split() for line in lines] == [
        ["0", *"···"], ["1", "·", "d", "·"], ["2", "e", "d", "·"], ["3", "e", "d", END],
    ]  # fmt: skip


def printed(width: int, named=LETTERS, **options) -> str:
    console = rich.console.Console(
        file=io.StringIO(), width=width, color_system="truecolor", force_terminal=True
    )
    dj.show(recorded(), named, console=console, **options)
    return console.file.getvalue()


def plain(text: str) -> list[list[str]]:
    """Lines without colors, as words."""
    return [line.split() for line in str(rich.text.Text.from_ansi(text)).splitlines()]


def test_tokens_are_colored_by_step_or_by_confidence(monkeypatch):
    by_step, by_confidence = printed(80), printed(80, confidence=True)
    assert "38;2;60;90;220m d" in by_step.replace("m", "m ")  # decoded first
    assert "38;2;145;105;125m d" in by_confidence.replace("m", "m ")  # half sure
    assert plain(by_step) == plain(by_confidence)
    monkeypatch.setattr(sys.modules[__name__], "SCORE", np.log(SCORE, where=SCORE > 0, out=SCORE.copy()))
    assert printed(80, confidence=True) == by_confidence, "an entropy is a negative number"


def test_a_terminal_obeys_no_token():
    text = printed(200, Named("<eos>", *"abc", "\x1b[2J", "\n\t", *"fgh", "<mask>"))
    assert "\x1b[2J" not in text
    assert plain(text)[-1] == ["3", "⏎→", "\\x1b[2J", END]
    # Parts of characters have the names of the tokenizer.
    half = Named("<eos>", *"abc", "\N{REPLACEMENT CHARACTER}", *"efgh", "<mask>")
    half.convert_ids_to_tokens = lambda token: "Ãģ"
    assert plain(printed(200, half))[-1] == ["3", "e", "Ãģ", END]


class Parts(HTMLParser):
    """What a browser would find: scripts, styles, their attributes, and all other text."""

    def __init__(self, text: str):
        super().__init__()
        self.found, self.inside, self.text = [], None, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append([tag, dict(attrs), ""])
        self.inside = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.found[-1][2] += data
        else:
            self.text += data

    def of(self, tag: str) -> list[tuple[dict, str]]:
        return [(attrs, text) for name, attrs, text in self.found if name == tag]


def data(page: str) -> list[dict]:
    return json.loads(Parts(page).of("script")[0][1])["panels"]


HOSTILE = (
    "<eos>", "</script><script>window.ran=1</script>", "<!--<script>",
    "--></style><img src=x onerror=window.ran=1>", "@SCRIPT@ @DATA@", "\u2028\u2029&lt;\"'\x00\ud800",
    "\x1b[2J]]>", "${window.ran=1}`", "\N{ARABIC LETTER ALEF}\N{RIGHT-TO-LEFT OVERRIDE}", "<mask>",
)  # fmt: skip


def test_no_token_or_name_is_markup():
    harmless = Parts(dj.side_by_side({"a": recorded()}, LETTERS))
    page = dj.side_by_side({HOSTILE[1]: recorded()}, Named(*HOSTILE))
    parts = Parts(page)
    shape = lambda parts: [found for found in parts.found if found[1].get("id") != "data"]
    assert shape(parts) == shape(harmless)
    assert parts.text == harmless.text
    assert page.isascii() or page.encode("utf-8")  # it can be written to a file
    (panel,) = data(page)
    assert panel["name"] == HOSTILE[1]
    pieces = {int(i): text for i, (text, _) in panel["pieces"].items()}
    assert pieces == {i: HOSTILE[i] for i in (0, 1, 2, 4, 5, 9)}
    one, other = data(dj.side_by_side({"a": recorded(), "b": recorded()}, LETTERS, sequence=1))
    assert (one["name"], other["name"]) == ("a", "b")
    np.testing.assert_array_equal(replayed(one), TOKENS[[0, 1, 3], 1])


def test_a_page_runs_its_own_script_and_loads_nothing():
    page = recorded().to_html(LETTERS)
    parts = Parts(page)
    _, (_, script) = parts.of("script")
    ((_, style),) = parts.of("style")
    digest = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    meta = {attrs["http-equiv"]: attrs["content"] for attrs, _ in parts.of("meta") if "http-equiv" in attrs}
    assert meta["Content-Security-Policy"] == (
        f"default-src 'none'; script-src 'sha256-{digest(script)}'; style-src 'sha256-{digest(style)}'"
    )
    assert "http:" not in page
    assert "https:" not in page
    assert "innerHTML" not in script
    assert not [attrs for _, attrs, _ in parts.found if {"src", "href", "style"} & attrs.keys()]


def replayed(panel: dict) -> np.ndarray:
    """The tokens after every step, as the script of the page finds them."""
    states = [list(panel["tokens"])]
    for step in panel["steps"]:
        states.append(list(states[-1]))
        for position, token, _ in step["wrote"]:
            states[-1][position] = token
    return np.array(states)


def test_a_page_holds_every_step_of_a_generation():
    model = tiny("llada")
    policy = dj.policies.WindowDiffusion(window=2, active=3, refresh_every=4)
    out = dj.generate(model, np.arange(6)[None], length=8, block=4, policy=policy, trace=True)
    (panel,) = data(out.to_html())
    np.testing.assert_array_equal(replayed(panel), out.trace.tokens[:, 0])
    for name in ("computed", "read"):
        found = np.zeros(out.trace.computed[:, 0].shape, bool)
        for row, step in zip(found, panel["steps"], strict=True):
            for first, behind in zip(step[name][::2], step[name][1::2], strict=True):
                row[first:behind] = True
        assert not found.all(), "a page that says nothing would pass too"
        np.testing.assert_array_equal(found, getattr(out.trace, name)[:, 0])
    (position, token, confidence), *_ = panel["steps"][0]["wrote"]
    assert confidence == pytest.approx(float(out.trace.score[0, 0, position]), abs=1e-4)
    assert panel["pieces"][str(token)] == [str(token), False]
    assert panel["stats"]["computed_tokens"] == int(out.stats.computed_tokens[0])
    assert panel["mask"] == model.spec.mask_id
    assert len(panel["steps"][0]["proposed"]) == 3  # of the block's other masks


def test_numbers_that_json_has_not_are_left_out_and_a_notebook_shows_the_page_in_a_frame():
    out = recorded()
    ((tag, attrs, _),) = Parts(out._repr_html_()).found
    assert (tag, attrs["sandbox"], attrs["srcdoc"]) == ("iframe", "allow-scripts", str(out.to_html()))
    assert out._replace(trace=None)._repr_html_() is None
    stats = out.stats._replace(cache_ratio=np.array([np.nan, 0]))
    score = out.trace.score.at[0, 0, 3].set(np.nan)
    (panel,) = data(out._replace(stats=stats, trace=out.trace._replace(score=score)).to_html())
    assert panel["stats"]["cache_ratio"] is None
    assert panel["steps"][0]["wrote"] == [[3, 4, None]]


@pytest.mark.usefixtures("unannotated")
def test_outputs_that_cannot_be_shown_are_refused():
    out = recorded()
    for call, message in (
        (lambda: out._replace(trace=None).to_html(LETTERS), "trace=True"),
        (lambda: dj.show(out._replace(trace=None), LETTERS), "trace=True"),
        (lambda: out.to_html(LETTERS, sequence=2), "sequence=2 must be 0 to 1"),
        (lambda: out.to_html(LETTERS, sequence=-1), "sequence=-1 must be"),
        (lambda: out.to_html(str), "tokenizer=<class 'str'> must be"),
        (lambda: dj.side_by_side({}, LETTERS), "one output or more"),
        (lambda: dj.side_by_side([out], LETTERS), "one output or more"),
        (lambda: dj.side_by_side({"a": out.tokens}, LETTERS), r"outputs\['a'\]"),
        (lambda: jax.tree.map(lambda a: a[None], out).to_html(LETTERS), "one by one"),
    ):
        refuses(message, call)
    refuses("outside of jit", jax.jit(lambda out: out.to_html()), out)


def drawn(tmp_path, page: str, view: str = "") -> Parts:
    """The page as Chromium draws it; fails on any message in the browser's console."""
    (file := tmp_path / "page.html").write_text(page, encoding="utf-8")
    command = BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"
    logged = "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"
    run = subprocess.run(
        [*command, *logged, file.as_uri() + view], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "CONSOLE" not in run.stderr, run.stderr
    return Parts(run.stdout)


def notes(parts: Parts) -> list[str]:
    return [attrs["data-note"] for attrs, _ in parts.of("span") if "data-note" in attrs]


needs_a_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")


@needs_a_browser
def test_a_browser_draws_layers_and_left_out_positions_and_runs_nothing_of_the_data(tmp_path):
    texts = [text.replace("\ud800", "") for text in HOSTILE]  # halves of pairs are in no dump of the DOM
    page = dj.side_by_side({HOSTILE[3]: recorded(), "b": recorded()}, Named(*texts))
    parts = drawn(tmp_path, page)
    assert len(parts.of("script")) == 2
    assert not parts.of("img")
    assert HOSTILE[3] in parts.text  # the name, as text
    assert "step 3 of 3" in parts.text
    maps = [attrs["aria-label"].split(":")[0] for attrs, _ in parts.of("canvas")]
    assert maps == 2 * [f"Map of positions and {what}" for what in ("steps", "layers")]
    assert "Layers at step 3" in parts.text
    assert "neither computed nor attended to" in parts.text
    assert notes(parts)[1] == f"position 3: “{HOSTILE[4]}”, step 1, confidence 0.500"


@needs_a_browser
def test_a_browser_draws_candidates_of_a_step_that_the_address_names(tmp_path):
    # A prompt with a placeholder of an image, which is no token of any tokenizer.
    ids = np.where(TOKENS == 2, dj.EMBEDS_PLACEHOLDER, TOKENS)
    out = recorded(ids)
    whole = out._replace(trace=out.trace._replace(read=out.trace.read | True))
    parts = drawn(tmp_path, whole.to_html(LETTERS), "#step=1&color=confidence&candidates=1")
    assert "step 1 of 3" in parts.text
    assert "attended to" not in parts.text
    assert "▦" in parts.text
    assert [note.split(";")[-1].strip() for note in notes(parts)] == [
        "candidate “e”, confidence 0.750", "position 3: “d”, step 1, confidence 0.500", "position 4: masked",
    ]  # fmt: skip
    assert "token candidate" in [attrs.get("class") for attrs, _ in parts.of("span")]
