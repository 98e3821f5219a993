"""Needle in a haystack: a fact hidden in a long text, asked for at the end.

Both published protocols share the geometry: the haystack is cut to the prompt's length in tokens minus a
buffer, and the needle is inserted at token int(length * depth / 100) of it. The tasks of lm_eval (RULER) hide
numbers instead, at depths that they draw.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from dllm_jax.eval.benchmarks.metrics import levenshtein
from dllm_jax.eval.run.files import read_json, read_text
from dllm_jax.eval.run.runner import EvalRequest, Runner
from dllm_jax.options import NonNegativeInt, Options, shown
from dllm_jax.state.text import decode, encode_plain

RESPONSE = 128  # positions, where no length is given
Scoring = Literal["rouge", "keyword"]


@dataclasses.dataclass(frozen=True)
class Needle(Options):
    """Sentence to hide, its question, and the score of answers.

    Attributes:
      text: Sentence, inserted verbatim.
      question: Question for the template.
      keyword: Word that occurs in right answers ("keyword" scoring).
      template: Template of the prompt, with {context} and {question}.
      buffer: tokens of the length reserved for template and answer.
      scoring: "rouge": ROUGE-1 F of needle and answer with stemming, as DuoAttention (arXiv:2410.10819) takes
        it; "keyword": 1 if the keyword occurs, else a fifth of the edit similarity, as LongLLaDA
        (arXiv:2506.14429) and OpenCompass take it.
    """

    text: str
    question: str
    keyword: str
    template: str
    buffer: NonNegativeInt = 200
    scoring: Scoring = "rouge"

    def __post_init__(self):
        super().__post_init__()
        if "{context}" not in self.template:
            raise ValueError(f"template={shown(self.template)} has no {{context}}")

    def prompt(self, haystack: Sequence[int], length: int, depth: float, tokenizer: Any) -> str:
        """The prompt's text.

        Args:
          haystack: token ids; repeated if they are too few.
          length: tokens of haystack, needle and buffer together.
          depth: Depth of the needle in percent; 100 puts it at the end.
          tokenizer: Tokenizer of the checkpoint.

        Raises:
          ValueError: an empty haystack, a length with no room for it, or a depth outside [0, 100].
        """
        # What is left of the length when needle, template and answer have theirs.
        needle = encode_plain(tokenizer, self.text)
        room = length - self.buffer - len(needle)
        if room < 1 or not haystack:
            raise ValueError(
                f"length={length} leaves {room} tokens for the haystack (buffer {self.buffer}, needle "
                f"{len(needle)}) of {len(haystack)}; at least one is needed"
            )
        if not 0 <= depth <= 100:
            raise ValueError(f"depth={depth} must lie in [0, 100]")
        # Cut in tokens and put together again as text, like both published protocols.
        hay = (list(haystack) * -(-room // len(haystack)))[:room]
        at = int(len(hay) * depth / 100)
        context = decode(tokenizer, [*hay[:at], *needle, *hay[at:]], special=True)
        # In one pass, so that braces in the haystack stay what they are.
        fields = {"{context}": context, "{question}": self.question}
        return re.sub(r"\{(?:context|question)\}", lambda match: fields[match[0]], self.template)

    @property
    def references(self) -> tuple[str, ...]:
        """References against which answers are scored."""
        return (self.text,) if self.scoring == "rouge" else (self.keyword, self.text)

    def score(self, answer: str) -> float:
        """Score of an answer in [0, 1]; needs packages of the `eval` extra."""
        if self.scoring == "rouge":
            from rouge_score.rouge_scorer import RougeScorer

            scorer = RougeScorer(["rouge1"], use_stemmer=True)
            return float(scorer.score(self.text, answer)["rouge1"].fmeasure)
        if self.keyword in answer:
            return 1.0
        # OpenCompass: white space aside, a fifth of the similarity at most without the keyword.
        return 0.2 * levenshtein(*(re.sub(r"\s+", "", text) for text in (answer, self.text)))


_SANDWICH = "the best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
DUO_ATTENTION = Needle(
    text=f"\n\nRemember, {_SANDWICH}\n\n",
    question="what is the best thing to do in San Francisco?\n\n"
    "Answer: The best thing to do in San Francisco is",
    keyword="eat a sandwich and sit in Dolores Park",
    template="<|im_start|> This is a very long story book: <book> {context} </book>.\n\n"
    "Question: Based on the content of the book, {question}",
)


def read_needle(path: Path) -> Needle:
    """Reads a needle from a JSON object with text, question, keyword and template.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not UTF-8 or JSON, or a field is missing, unknown or not a string; names the file.
    """
    fields, wanted = read_json(path), {"text", "question", "keyword", "template"}
    if not isinstance(fields, dict) or set(fields) != wanted:
        raise ValueError(f"{path}: expected an object with exactly {', '.join(sorted(wanted))}")
    if not all(isinstance(value, str) for value in fields.values()):
        raise ValueError(f"{path}: every field must be a string")
    return Needle(**fields)


def haystack(path: Path) -> str:
    """The text of a file, or of a folder's .txt files in order of their names.

    Raises:
      FileNotFoundError: no such file, or no .txt file in the folder.
      ValueError: no text, or not UTF-8; names file and line.
    """
    # In the order of names, not in that of the file system.
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"{path} is no text file and no folder of .txt files")
    text = "".join(map(read_text, files))
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return text


def needle_requests(
    runner: Runner, needle: Needle, text: str, lengths: Sequence[int], depths: Sequence[float], chat: bool
) -> list[EvalRequest]:
    """One request per cell of the grid, a group per length.

    Args:
      runner: the model with its settings.
      needle: Needle to hide.
      text: Text of the haystack.
      lengths: Lengths of prompts, in tokens of the model's tokenizer.
      depths: Depths of the needle, in percent.
      chat: Whether prompts are wrapped in the chat template.

    Raises:
      ValueError: no length or depth, or one that `Needle.prompt` refuses.
    """
    if not lengths or not depths:
        raise ValueError(f"{lengths=} and {depths=}: there is nothing to evaluate")
    tokenizer, response = runner.lm.tokenizer, runner.decoding.length or RESPONSE
    # The haystack is encoded once; every cell cuts its own length of it.
    hay = encode_plain(tokenizer, text)
    plain = functools.partial(encode_plain, tokenizer, add_special_tokens=True)
    encode = runner.lm.chat_ids if chat else plain
    made = []
    for length, depth in itertools.product(lengths, depths):
        ids = tuple(encode(needle.prompt(hay, length, depth, tokenizer)))
        request = EvalRequest(f"{length} at {depth:g} %", ids, response, group=f"length {length}")
        made.append(request._replace(references=needle.references, score=needle.score, cell=(length, depth)))
    return made
