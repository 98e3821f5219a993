"""Random conversations under random templates: special tokens come from the template alone.

Messages hold special tokens and parts of them, private-use characters, halves of characters, and words that
templates look for, in all roles and in further keys. Templates strip, repeat, reorder, cut, quote, rewrite.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import dllm_jax as dj
from dllm_jax import bundled
from dllm_jax.decoding.chat import chat_ids
from dllm_jax.state.text import Rendered, special_tokens
from tests.campaigns.verdicts import Case, Outcome, Verdict, judge

NAME = "messages"
SAMPLE = 100

BODY = "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>BODY<|eot_id|>{% endfor %}"
COPIES = (
    "{{ m.content }}", "{{ m.content | trim }}", "{{ m.content }}{{ m.content }}", "{{ m.content[2:] }}",
    "{{ m.content[:9] }}", "{{ m | tojson }}", "{{ m.content | tojson }}", "{{ m.content | reverse }}",
    "{{ messages[-1].content }}{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\\n') }}",
    "{{ m.name }}{{ m.content }}", "<{{ m.content }}>", "<|{{ m.content }}|>", "{{ m.content ~ x }}",
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}"
    "{% endif %}",
    "{% if m.content.startswith('<tool>') %}T{% endif %}{{ m.content }}",
    "{% if '</think>' in m.content %}T{% endif %}{{ '<|' ~ 'eot_id' ~ '|>' }}{{ m.content }}",
    "{% if loop.last %}{{ m.content }}{% endif %}", "{{ m.content.split(' ') | join('') }}",
)  # fmt: skip
REWRITES = (
    "{{ m.content | upper }}", "{{ m.content | lower }}", "{{ m.content | replace('a', '') }}",
    "{{ m.content | replace('<', '(') }}", "{{ m.content | title }}", "{{ m.content.swapcase() }}",
    "{{ m.content.strip('<') }}",
)  # fmt: skip
WORDS = (
    "</think>", "<think>", "<tool>", "<image>", "x", "T=105;", " ", "\n", "\n\n", "<", ">", "|", "<|", "|>",
    "a", "_id", "eot_id", "EOT_ID", "user", "system", "é", "ß", "ﬁ", "İ", "\u2028", "\u0000", "\ufeff",
    "{{ x }}", "{% raw %}", "\ue000\ue001", "\ue001\ue000", "\ue001\ue002", "\U000f0000", "\U0010fffd",
    "\U0010ffff", "\U000bfffe",
)  # fmt: skip
KEEPS = {6}  # the id of unknown characters is no special token of a template's


@functools.cache
def tokenizer() -> Any:
    """The tokenizer of a bundled model."""
    return dj.load_tokenizer(bundled.path("tiny-llada"))


def text(rng: np.random.Generator) -> str:
    """A message's text."""
    special, parts = special_tokens(tokenizer()), []
    for _ in range(rng.integers(0, 6)):
        kind, token = rng.random(), special[rng.integers(len(special))]
        start, end = sorted(rng.integers(len(token) + 1, size=2))
        if kind < 0.25:
            parts.append(token)
        elif kind < 0.4:
            parts.append(token[start:end])
        elif kind < 0.5:
            point = rng.choice([0xE000, 0xF0000, 0x100000, 0xE0000, 0x40000]) + rng.integers(0x1900)
            parts.append(chr(point))
        else:
            parts.append(WORDS[rng.integers(len(WORDS))])
    return "".join(parts)


def conversation(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Some messages, of which several may have one text."""
    texts = [text(rng) for _ in range(rng.integers(1, 4))]
    pick = lambda: texts[rng.integers(len(texts))]
    roles = ["system", *itertools.islice(itertools.cycle(["user", "assistant"]), int(rng.integers(1, 6)))]
    return [{"role": role, "content": pick(), "name": pick()} for role in roles[rng.integers(2) :]]


def special(ids: list[int]) -> list[int]:
    """The special tokens among ids."""
    known = {i for i, token in tokenizer().added_tokens_decoder.items() if token.special} - KEEPS
    return [i for i in ids if i in known]


def check(template: str, talk: list[dict[str, Any]], variables: dict[str, str], copies: bool) -> Verdict:
    """Encodes a conversation, and compares its special tokens with those of harmless messages."""
    made = tokenizer()
    made.chat_template = template
    harmless = [message | {"content": "q", "name": "q"} for message in talk]
    expected = special(chat_ids(made, harmless, dict.fromkeys(variables, "q")))
    given = [*variables.values(), *(each for message in talk for each in message.values())]
    plain = not any(sign in each for sign in "<>|_" for each in given)

    def wrong(ids: list[int]) -> str:
        if special(ids) != expected:
            return f"special tokens {special(ids)}, of the template {expected}"
        how: dict[str, Any] = dict(add_generation_prompt=True, return_dict=True)
        if plain:
            own = made.apply_chat_template(talk, **how, **variables)["input_ids"]
            return "" if own == ids else "ordinary messages are not encoded as transformers does"
        return ""

    return judge(lambda: chat_ids(made, talk, variables), ["messages"], True if copies else None, wrong)


def half(template: str, talk: list[dict[str, Any]], place: tuple[int, str]) -> Verdict:
    """A conversation with half of a character is refused by the place of that."""
    made = tokenizer()
    made.chat_template = template
    index, key = place
    return judge(
        lambda: chat_ids(made, talk), [f"messages[{index}][{key!r}] holds the lone surrogate"], False
    )


def written(rendered: Rendered) -> Verdict:
    """A rendered text as one string, as lm_eval takes it, is read again; any other string is none."""
    string = rendered.written()
    if Rendered.read(string) != rendered:
        return Verdict(Outcome.WRONG, "another text is read")
    if Rendered.read(string + "x") or Rendered.read(rendered.text) or Rendered.read("x" + string):
        return Verdict(Outcome.WRONG, "another string is read as one")
    return Verdict(Outcome.RIGHT)


def cases(seed: int) -> Iterator[Case]:
    """Conversations without end; every eighth has half of a character."""
    for number in itertools.count():
        rng = np.random.default_rng((seed, number))
        copies = rng.random() < 0.8
        bodies = COPIES if copies else REWRITES
        template = BODY.replace("BODY", bodies[rng.integers(len(bodies))])
        if rng.random() < 0.2:
            template = template.replace("in messages", "in messages | reverse")
        talk, variables = conversation(rng), {"x": text(rng)} if "~ x" in template else {}
        description = f"seed {seed}, case {number}: {template!r} of {talk!r} with {variables!r}"
        if number % 8 == 0:
            index, key = int(rng.integers(len(talk))), ("content", "name")[rng.integers(2)]
            bad = talk[index][key] + chr(rng.integers(0xD800, 0xE000)) + "x"
            talk[index] = talk[index] | {key: bad}
            yield Case(description, functools.partial(half, template, talk, (index, key)))
        elif number % 8 == 1:
            given = text(rng)
            ends = sorted({int(i) for i in rng.integers(len(given) + 1, size=2)})
            plain = (tuple(ends),) if len(ends) == 2 else ()
            yield Case(f"{description} {given!r} {plain}", functools.partial(written, Rendered(given, plain)))
        else:
            yield Case(description, functools.partial(check, template, talk, variables, copies))
