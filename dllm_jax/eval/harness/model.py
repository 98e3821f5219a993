"""lm-evaluation-harness: the model `dllm_jax`.

lm_eval 0.4.13 finds models only in its own package and its registry; it has no entry points. Importing this
module registers the model; `python -m dllm_jax.eval lm_eval ...` does so and runs lm_eval's command line.
"""

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import normalize_gen_kwargs  # pyright: ignore[reportMissingImports]

from dllm_jax.decoding.chat import render, warn_of_unread
from dllm_jax.eval.harness import arguments as harness_args
from dllm_jax.eval.results import record
from dllm_jax.eval.results.schema import Entry
from dllm_jax.eval.run.answering import Answering, failure
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.likelihoods import Likelihood, Pair
from dllm_jax.eval.run.runner import EvalRequest, Runner
from dllm_jax.eval.run.settings import rendering
from dllm_jax.options import local_path
from dllm_jax.provenance import device
from dllm_jax.state.text import Rendered, check_texts, encode_pair, encode_plain, encode_rendered, mark_plain

LOG = logging.getLogger(__name__)
DEFAULT_LENGTH = 256  # where neither model_args nor the task says how long an answer may be


class DllmJax(TemplateLM):
    """A diffusion model under a cache policy; the arguments are those of `harness_args.HarnessArguments`."""

    def __init__(self, **arguments: Any):
        given = harness_args.read_arguments(arguments)
        journal = None if given.journal is None else Journal(local_path("journal", given.journal))
        self._begin(given, Runner(given.checkpoint.open(), given.decoding), journal)

    @classmethod
    def of(
        cls, arguments: harness_args.HarnessArguments, runner: Runner, journal: Journal | None
    ) -> "DllmJax":
        """One whose answers are a runner's: of a model that is loaded already."""
        made = cls.__new__(cls)
        made._begin(arguments, runner, journal)
        return made

    def _begin(self, arguments: harness_args.HarnessArguments, runner: Runner, journal: Journal | None):
        super().__init__()
        self.arguments, self.runner, self.journal = arguments, runner, journal
        self.lm, self.tokenizer = runner.lm, runner.lm.tokenizer
        warn_of_unread(self.tokenizer, self.lm.template)
        self.entries: dict[str, list[Entry]] = {"generate_until": [], "loglikelihood": []}

        # lm_eval divides requests by rank: all of them are this process's.
        self._rank, self._world_size = 0, 1

    @property
    def eot_token_id(self) -> int:
        """End-of-text."""
        return self.lm.model.spec.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Beginning-of-text, else end-of-text; replaces an empty context."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def max_length(self) -> int | None:
        """lm_eval's name for `max_positions`."""
        return self.arguments.decoding.max_positions

    @property
    def tokenizer_name(self) -> str:
        """Name in the key of lm_eval's cache of requests: prompts are kept for what they were rendered by."""
        return f"{self.lm.name.replace('/', '__')}__{rendering(self.tokenizer, self.lm.template)[:16]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Encodes a text and adds no special tokens; only a chat template's own are recognized in it."""
        return encode_rendered(self.tokenizer, self._rendered(string))

    def _begun(self, ids: list[int]) -> list[int]:
        """The ids after the beginning-of-text that `add_bos` asks for, which a template may have written."""
        begin = self.arguments.prefix(self.tokenizer)
        return ids if ids[: len(begin)] == begin else begin + ids

    def _rendered(self, string: str) -> Rendered:
        """A text of lm_eval with its plain stretches: those of the template, or all of it without one."""
        if (rendered := Rendered.read(string)) is not None:
            return rendered
        return Rendered(string) if self.arguments.special_tokens else mark_plain(self.tokenizer, string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encodes a context and its continuation, in which special tokens are plain text."""
        # Spaces at the end belong to the continuation, as in lm_eval's own models.
        rendered = self._rendered(context)
        first = rendered.part(0, len(rendered.text.rstrip()))
        spaces = rendered.text[len(first.text) :]
        more, by_text = spaces + continuation, self.arguments.boundary == "text"
        return encode_pair(self.tokenizer, first, more, by_text)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders messages by the checkpoint's chat template.

        `tok_encode` tells the text from one without a template (`Rendered.written`). It raises what is wrong
        with messages: lm_eval calls this function before any request, and one request must not end all.
        """
        # Without a generation prompt the last message is the beginning of an answer, to be continued.
        how: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        how["continue_final_message"] = not add_generation_prompt
        try:
            return render(self.tokenizer, chat_history, self.lm.template, **how).written()
        except ValueError as error:
            return Rendered.refusal(error)

    def get_model_info(self) -> dict[str, Any]:
        """Provenance and costs, for lm_eval's result."""
        totals = {"generate_until": record.totals(self.entries["generate_until"])}
        totals |= {"loglikelihood": record.totals(self.entries["loglikelihood"], decoded=())}
        return {"dllm_jax": {**record.provenance(self.runner), "totals": totals}}

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, cut at the task's `until` strings; their length is `length`, or the task's max_gen_toks.

        lm_eval's other names of that number count too: max_new_tokens, max_tokens, max_completion_tokens.

        `generation_kwargs: {choices: ["A", "B"]}` limits answers to these texts (`OneOf`).

        Raises:
          RuntimeError: requests failed and `failures` is "raise"; the others are answered and journalled.
          ValueError: block or steps do not fit the requests' length.
        """
        # Every request becomes one of the runner, with the length that the model or its task gives it.
        prompts = [_or_error(self._request, i, *request.args) for i, request in enumerate(requests)]
        runner = dataclasses.replace(self.runner, progress=not disable_tqdm)
        # What does not fit any request's length is the user's mistake, not the request's failure.
        for length in sorted({prompt.length for prompt in prompts if isinstance(prompt, EvalRequest)}):
            runner.decoding.at(length)  # refused before anything is decoded
        args = [request.args for request in requests]
        entries = self._run("generate_until", runner, prompts, args, "empty answers")
        return [entry["answer"] or "" for entry in entries]

    def _run(
        self, kind: str, answering: Answering[Any], items: list[Any], args: list[Any], instead: str
    ) -> list[Entry]:
        """The entries of items; each finished batch goes to lm_eval's cache, in which failures have no place.

        Args:
          kind: Kind of request, as lm_eval calls it.
          answering: answers the items.
          items: Items of lm_eval's requests; for one that cannot be read the error.
          args: Arguments of each request, the cache's key; several may share a hash.
          instead: Score of failures.
        """
        # The cache takes an answer per request, the journal one per hash.
        asked: dict[str, list[Any]] = {}
        pairs = [pair for pair in zip(items, args, strict=True) if not isinstance(pair[0], Exception)]
        readable = [item for item, _ in pairs]
        for key, (_, known) in zip(answering.keys(readable), pairs, strict=True):
            asked.setdefault(key, []).append(known)

        def add(entries: list[Entry]):
            for entry in (entry for entry in entries if entry["error"] is None):
                answer = entry["answer"]  # JSON turns lm_eval's tuples into lists
                result = tuple(answer) if isinstance(answer, list) else answer
                for known in asked[entry["key"]]:
                    self.cache_hook.add_partial(kind, known, result)

        answered = iter(answering.run(readable, self.journal, add))
        entries = [failure("", item) if isinstance(item, Exception) else next(answered) for item in items]
        self.entries[kind] += entries
        failed = [entry["error"] for entry in entries if entry["error"] is not None]
        if failed:
            message = f"{len(failed)} of {len(entries)} requests failed, the first with {failed[0]}"
            if self.arguments.failures == "raise":
                raise RuntimeError(f"{message}; failures=empty scores them as {instead}")
            LOG.error("%s; they are scored as %s", message, instead)
        return entries

    def _request(self, i: int, context: str, task: dict[str, Any]) -> EvalRequest:
        task = dict(normalize_gen_kwargs(task, DEFAULT_LENGTH))
        length = self.runner.decoding.length or task["max_gen_toks"]
        if task["do_sample"] and not self.runner.decoding.sampler.draws:
            LOG.warning("the task asks for sampling; the model's sampler decides, and does not draw")
        prompt = self._begun(self.tok_encode(context))
        # As lm_eval's own models do, a prompt that is too long loses its beginning.
        taken = len(prompt) + self.runner.decoding.room(length)
        if self.max_length is not None and taken > self.max_length:
            LOG.warning("request %d: the prompt loses its first tokens, %d are too many", i, len(prompt))
            prompt = prompt[taken - self.max_length :]
        stop = () if task["until"] == [None] else tuple(task["until"])
        check_texts("until", stop)
        # An answer ends with its choice.
        encode = lambda text: (*encode_plain(self.tokenizer, text), self.eot_token_id)
        choices = tuple(encode(text) for text in task.get("choices") or ())
        return EvalRequest(str(i), tuple(prompt), length, stop, choices=choices)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(nats, greedy) of each pair of texts, as `_loglikelihood_tokens`."""
        pairs = [_or_error(self._pair, *request.args) for request in requests]
        return self._scored([request.args for request in requests], pairs, disable_tqdm)

    def _pair(self, context: str, continuation: str) -> Pair:
        """A context and its continuation; `prefix_token_id` stands in place of an empty context."""
        if context.strip():
            before, answer = self._encode_pair(context, continuation)
            return tuple(self._begun(before)), tuple(answer)
        continuation = context + continuation
        begin, answer = self.prefix_token_id, tuple(self.tok_encode(continuation))
        return (answer[:1], answer[1:]) if answer[:1] == (begin,) else ((begin,), answer)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """(nats, greedy) of each pair; (-inf, False) where it failed and `failures` is "empty".

        Raises:
          RuntimeError: pairs failed and `failures` is "raise"; the others are computed and journalled.
        """
        pairs = [(tuple(context), tuple(answer)) for _, context, answer in requests]
        return self._scored([texts for texts, *_ in requests], pairs, disable_tqdm)

    def _scored(
        self, texts: list[Any], pairs: Sequence[Pair | Exception], disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        arguments = self.arguments
        sampling = (arguments.draws, arguments.strata, arguments.cfg_scale)
        progress, check = not disable_tqdm, arguments.greedy_check
        scorer = Likelihood(self.lm, arguments.decoding, progress, *sampling, check, arguments.order)
        entries = self._run("loglikelihood", scorer, [*pairs], texts, "impossible answers")
        return [(nats, greedy) for nats, greedy in (e["answer"] or (-math.inf, False) for e in entries)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refused.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError(
            "loglikelihood_rolling has no meaning here: it chains next-token conditionals over windows, "
            "which a masked diffusion model does not define, and its Monte-Carlo bound of a text is no "
            "perplexity to be compared with theirs. Use tasks of type loglikelihood, multiple_choice or "
            "generate_until"
        )


def _or_error(make: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function; returns its result, or the ValueError that it raises."""
    try:
        return make(*arguments)
    except ValueError as error:
        return error


register_model("dllm_jax")(DllmJax)  # no decorator: its type would hide the class's own


def with_device(arguments: list[str]) -> list[str]:
    """The arguments with jax's device for our model unless they name one: lm_eval's is cuda:0."""
    given = {argument.partition("=")[0] for argument in arguments}
    ours = {"dllm_jax", "--model=dllm_jax"} & {*arguments}
    if not ours or {"--device", "--config"} & given:
        return arguments
    return [*arguments, "--device", device().platform]


def main(arguments: list[str]) -> int:
    """lm_eval's command line with the model registered."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    sys.argv = ["lm_eval", *with_device(arguments)]  # where lm_eval reads them
    cli_evaluate()
    return 0
