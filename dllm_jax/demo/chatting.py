"""`dllm-jax chat PATH`: a conversation in a terminal, in which masks turn into text."""

import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import numpy as np
import rich.console
import rich.live
import rich.text
import tyro

import dllm_jax as dj
from dllm_jax.commands.options import DecodingArguments
from dllm_jax.decoding.chat import Message, check_tokenizer, encode_chats
from dllm_jax.decoding.watch.grid import END
from dllm_jax.decoding.watch.recording import harmless, pieces
from dllm_jax.engine.features.prefix import Prefix, reads_causally, refusal
from dllm_jax.eval.run.settings import LanguageModel
from dllm_jax.options import PositiveInt

MASK = "░"
EncodedChat = tuple[np.ndarray, np.ndarray]  # a prompt and its padding mask
PATH = (
    "A bundled model (tiny-llada, tiny-dream, tiny-sdar, tiny-sdar-moe, tiny-gemma), a directory or a hub id."
)


@dataclasses.dataclass(frozen=True)
class ChatArguments(DecodingArguments):
    """Options of `dllm-jax chat`, besides those that it shares with `generate`."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH", help=PATH)] = (
        dataclasses.field()
    )
    every: PositiveInt = 1
    """Redraw every N denoising steps."""


def main(arguments: Annotated[ChatArguments, tyro.conf.arg(name="")]) -> int:
    """Answers messages typed into a terminal, or lines of standard input, and shows masks turning into text.

    In a terminal Ctrl-C stops an answer, Ctrl-D or an empty message ends the conversation. Where standard
    output is no terminal, answers alone are printed. Lines of a pipe are turns of one conversation; for
    independent prompts use `dllm-jax generate`. A line that cannot be read, such as one that is no UTF-8,
    gets an error on standard error. Others are answered, and the exit code is 1.
    """
    if sys.stdin is None:
        raise ValueError(
            "standard input is closed, but chat reads messages from it: use a terminal or a pipe"
        )
    console = rich.console.Console()
    conversation = ChatConversation.open(arguments)
    messages: list[Message] = []
    if arguments.system is not None:
        messages.append({"role": "system", "content": arguments.system})
    prefix: Prefix | None = None
    turns, failed = 0, False
    for number, text in enumerate(_typed(console), start=1):
        messages.append({"role": "user", "content": text})
        try:
            prompts = conversation.encode(messages)
        except ValueError as error:
            print(f"error: message {number}: {error}", file=sys.stderr)
            messages.pop()
            failed = True
            continue
        answer, prefix = conversation.answer(console, prompts, turns, prefix)
        messages.append({"role": "assistant", "content": answer})
        turns += 1
    return int(failed)


def _typed(console: rich.console.Console) -> Iterator[str]:
    """Messages of the user, until an empty one or the end of the input."""
    # Lines of a pipe are messages as they are: no prompt is printed for them.
    if not sys.stdin.isatty():
        yield from filter(None, (line.removeprefix("\ufeff").strip() for line in _piped()))
        return
    while True:
        try:
            text = console.input("[bold]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not text:
            return
        yield text


def _piped() -> Iterator[str]:
    """Lines of standard input, with lone surrogates in place of bytes that cannot be decoded."""
    if (binary := getattr(sys.stdin, "buffer", None)) is None:
        yield from sys.stdin
        return
    for line in binary:
        yield line.decode(sys.stdin.encoding, errors="surrogateescape")


@dataclasses.dataclass(frozen=True)
class ChatConversation:
    """A model, its tokenizer, and how answers are decoded.

    Attributes:
      lm: Model with its tokenizer and the variables of its chat template.
      options: Keyword arguments of `stream`.
      seed: Seed of the draws; each answer has its own.
    """

    lm: LanguageModel
    options: dict[str, Any]
    seed: int

    @classmethod
    def open(cls, arguments: ChatArguments) -> "ChatConversation":
        """Loads what the arguments name; raises as `load` and the constructors of policy and sampler do."""
        arguments.given()  # refused before anything is loaded
        lm = arguments.open(identify=False)
        check_tokenizer(lm.tokenizer)
        # The conversation grows: its lengths share programs.
        options = arguments.options(lm) | {"every": arguments.every, "buckets": dj.buckets.DEFAULT}
        return cls(lm, options, arguments.seed)

    def encode(self, messages: list[Message]) -> EncodedChat:
        """The prompt of a conversation and its padding mask; errors are those of `chat_ids`."""
        return encode_chats(self.lm.tokenizer, [messages], self.lm.model.spec.eos_id, self.lm.template)

    def answer(
        self, console: rich.console.Console, prompts: EncodedChat, turn: int, prefix: Prefix | None
    ) -> tuple[str, Prefix | None]:
        """Prints the answer to a conversation; Ctrl-C leaves it as far as it is.

        Args:
          console: Console to print to.
          prompts: Conversation so far, as `encode` returned it.
          turn: Number of the answer, from 0.
          prefix: Conversation up to the last answer, as this function returned it.

        Returns:
          the answer; and the computed conversation up to it, None if the model cannot reuse one.
        """
        prompt, mask = prompts
        if self.reuses:
            causal, ladder = reads_causally(self.lm.model.spec, self.options["sampler"]), dj.buckets.DEFAULT
            prefix = dj.prefill(self.lm.model, prompt, prefix=prefix, causal=causal, buckets=ladder)

        # The first answer is that of `generate` with this seed; later turns draw again.
        key = jax.random.key(self.seed) if turn == 0 else jax.random.fold_in(jax.random.key(self.seed), turn)
        start, shown = time.perf_counter(), prompt.shape[1]
        snapshot = None
        given = (
            {"prompt": prompt, "prompt_mask": mask} if prefix is None else {"prompt": [[]], "prefix": prefix}
        )
        snapshots = dj.stream(self.lm.model, key=key, **given, **self.options)
        # The picture goes when the answer is there, which may be longer than the screen.
        with rich.live.Live(console=console, transient=True, auto_refresh=False) as live:
            try:
                for snapshot in snapshots:
                    if console.is_terminal:
                        live.update(self._picture(snapshot, shown), refresh=True)
            except KeyboardInterrupt:
                snapshots.close()
                if not sys.stdin.isatty():  # nobody there could type the next message
                    raise
        if snapshot is None:
            return "", prefix

        # Masks are left where Ctrl-C stopped an answer: it ends at the first of them.
        masked = self.lm.model.spec.undecided(snapshot.tokens[:, shown:])
        decoded = np.where(masked, self.lm.model.spec.eos_id, snapshot.tokens[:, shown:])
        (text,) = dj.decode_answers(self.lm.model, self.lm.tokenizer, decoded, self.options.get("stop"))
        console.print(harmless(text), markup=False, highlight=False, soft_wrap=True)
        if console.is_terminal:
            seconds, computed = time.perf_counter() - start, 0 if prefix is None else prefix.computed_tokens
            console.print(_cost(snapshot, seconds, computed), style="dim", highlight=False)
        return text, prefix

    @property
    def reuses(self) -> bool:
        """Whether a turn begins with what the last one computed (`prefill`)."""
        return refusal(self.lm.model, self.options["policy"], self.options["sampler"]) is None

    def _picture(self, snapshot: dj.Snapshot, shown: int) -> rich.text.Text:
        """The response as far as it is decoded; what has just been decoded is bright.

        Of the ends after the last other token one is shown: an answer that may grow has many.
        """
        response, ends = snapshot.tokens[0, shown:], self.lm.model.spec.ends_of_turn
        said = np.flatnonzero(~np.isin(response, ends))
        tokens = response[: said[-1] + 2 if said.size else 1].tolist()
        new = snapshot.decoded[0, shown : shown + len(tokens)]
        known = pieces(self.lm.tokenizer, set(tokens))
        picture, text = rich.text.Text(), ""
        for token, just_decoded in zip(tokens, new, strict=True):
            if self.lm.model.spec.undecided(token):
                picture.append(MASK, style="dim")
            elif known[token].special:
                picture.append(END, style="dim")
                text = "dim"  # what follows an end is no part of the answer
            else:
                picture.append(harmless(known[token].text), style="bold cyan" if just_decoded else text)
        return picture


def _cost(snapshot: dj.Snapshot, seconds: float, prefilled: int = 0) -> str:
    """One line about what an answer took, with tokens that were computed before it."""
    time_taken = f"{snapshot.steps[0]} steps, {seconds:.1f} s"
    if not isinstance(snapshot.output, dj.Output):
        return f"stopped after {time_taken}"
    stats = snapshot.output.stats
    computed, ratio = int(stats.computed_tokens[0]) + prefilled, float(stats.cache_ratio[0])
    return f"{time_taken}, {computed} computed tokens, {ratio:.0%} of tokens reused"
