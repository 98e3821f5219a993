"""Text in, text out, with the checkpoint's own chat template."""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol, Unpack, cast, runtime_checkable

import jinja2
import jinja2.meta
import numpy as np
from jaxtyping import Bool, Int

from dllm_jax.decoding.buckets import Ladder, check_ladder
from dllm_jax.decoding.generate import generate
from dllm_jax.decoding.options import (
    ConversationOptions,
    GenerateOptions,
    check_options,
    generation_defaults,
    options_of,
    shows,
)
from dllm_jax.decoding.output import Output
from dllm_jax.decoding.stops import StopTexts, decode_answers, listed_texts
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import check_argument, shown
from dllm_jax.options.hints import NOTHING, warn
from dllm_jax.state import host
from dllm_jax.state.host import AnyArray
from dllm_jax.state.inputs import Prompts, padded_together
from dllm_jax.state.text import (
    NAMED,
    PICTURES,
    Disguise,
    Rendered,
    check_members,
    check_texts,
    encode_rendered,
    texts_of,
    with_texts,
)

Message = dict[str, Any]
Messages = list[Message] | list[list[Message]]
PARTS = "role", "content"
LITERALS = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""")  # words in a template
ROLES = {"system", "user", "assistant", "tool"}
WITHOUT_THINKING = "a2d-qwen3", "a2d-qwen2", "a2d-llama"  # an empty think block stands before their answers
NO_SYSTEM = "system role not supported"  # words by which templates refuse it, in lower case
RULE = 'must be messages {"role": "user", "content": "..."}, or a list of such conversations'


@runtime_checkable
class ConversationProcessor(Protocol):
    """Interface of processors for conversations with images, such as `dllm_jax.vision.Processor`."""

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, which turns answers into text."""
        ...

    @property
    def suppress_tokens(self) -> tuple[int, ...]:
        """Token ids that an answer never holds."""
        ...

    def encode(self, model: Model, conversations: list[list[Message]], ladder: Ladder | None) -> Prompts:
        """Prompts up to where the answers begin, of a length of the ladder if there is one."""
        ...


@shows(options_of("chat"), ConversationOptions)
def chat(
    model: Model,
    tokenizer: Any,
    messages: Messages,
    *,
    enable_thinking: bool | None = None,
    template: Mapping[str, Any] | None = None,
    **options: Unpack[GenerateOptions],
) -> "str | list[str] | ChatOutput":
    """Answers a conversation, or a batch of conversations.

    Length, block, steps, policy and sampler are those of the checkpoint unless they are given
    (`generation_defaults`): its generation_config.json may name them.

    Args:
      model: Model from `load`.
      tokenizer: Tokenizer of the checkpoint, from `load_tokenizer` or transformers' `AutoTokenizer`. For
        prompts with images, a processor from `dllm_jax.vision.Processor.load`.
      messages: Messages [{"role": "user", "content": "..."}, ...], or a list of such conversations. A message
        of role "system" comes first; a template that refuses it as iLLaDA's gets its text before the user
        message after it. With a processor, messages may hold images: {"role": "user",
        "content": "<image>\\nWhat is it?", "images": ["cat.png"]}.
      stop: Texts at which the answer ends; they are not part of it. Decoding ends there too (`StopTexts`).
      enable_thinking: Variable of Qwen3-like chat templates. Default: the template's own choice, and False of
        A2D models, which are trained without thinking.
      template: Further variables of the chat template by name.
      length: Number of tokens to generate. Default: the checkpoint's, else 128.
      block: Block length; None is one block, or the model's own. Default: the checkpoint's, else 32, or None
        for a model with blocks, and for samplers that 32 does not suit (`generation_defaults`).
      policy: Cache policy. Default: the checkpoint's, else `DualCache()`; `Policy()` without a mask token,
        and for samplers that need exact keys and values.
      sampler: Remasking strategy. Default: the checkpoint's, else `Threshold(0.9)`, or `EntropyNoise()`
        without a mask token.
      logprobs: Number of most likely tokens to return with log-probabilities (`generate`), together with the
        tokens and statistics of the answer. Default: the text alone.
      forbid: Ids that are never unmasked, see `generate`; those that a processor suppresses join them.
      buckets: Bucket lengths for prompts, see `generate`.
      **options: Options of `generate` (steps, key, ...), except for `prompt_mask`, `prompt_embeds`,
        `prefix` and `trace`.

    Returns:
      The answer without special tokens, up to its first end or stop; a list of answers for a batch. With
      `logprobs`, a `ChatOutput`: answer, and output of `generate`.

    Raises:
      ValueError: An empty or invalid conversation, a tokenizer without a chat template, images that do not
        go with their message, or another invalid argument (`generate`).
      TypeError: An option that `chat` does not have.
      FileNotFoundError: There is no such file of an image.
      ImportError: A message has images, and Pillow is not installed.
      FloatingPointError: Logits held NaN or infinity, with nonfinite="raise".

    Examples:
      >>> model = dj.load(dj.bundled.path("tiny-llada"))
      >>> tokenizer = dj.load_tokenizer(dj.bundled.path("tiny-llada"))
      >>> question = [{"role": "user", "content": "aob=407;T=211;iez=830;T="}]
      >>> dj.chat(model, tokenizer, question)
      '211'
      >>> dj.chat(model, tokenizer, question, logprobs=1).output.stats.length.tolist()
      [8]
    """
    check_options("chat", options, "enable_thinking", "template")
    asked = prepare_chat(model, tokenizer, messages, options, enable_thinking, template)
    out = generate(model, asked.prompt, **asked.options)
    responses = host.everywhere(out.tokens)[:, asked.prompt.shape[1] :]
    answers = decode_answers(model, asked.tokenizer, responses, asked.stops)
    text = answers[0] if asked.single else answers
    return text if options.get("logprobs") is None else ChatOutput(text, out)


class ChatOutput(NamedTuple):
    """Answer and output of `chat` with `logprobs`.

    Attributes:
      text: The answer, or a list of answers for a batch.
      output: Tokens, log-probabilities and statistics of the generation.
    """

    text: str | list[str]
    output: Output


class AskedChat(NamedTuple):
    """Conversations as `generate` takes them.

    Attributes:
      prompt: Prompts, left-padded.
      options: Options of `generate`: those that were given, and those that follow from the conversations.
      tokenizer: Tokenizer of the answers.
      stops: Stop texts; None if there are none.
      single: Whether there is one conversation, which is no batch.
    """

    prompt: AnyArray
    options: dict[str, Any]
    tokenizer: Any
    stops: StopTexts | None
    single: bool


def prepare_chat(
    model: Model,
    tokenizer: Any,
    messages: Messages,
    options: GenerateOptions,
    enable_thinking: bool | None,
    template: Mapping[str, Any] | None,
) -> AskedChat:
    """Encodes conversations; arguments and errors are those of `chat`."""
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_argument("enable_thinking", enable_thinking, bool | None)
    asked, passed = ConversationOptions(**options), generation_defaults(model, **options)
    processor = (
        tokenizer
        if isinstance(tokenizer, ConversationProcessor) and not isinstance(tokenizer, type)
        else None
    )
    tokenizer = tokenizer if processor is None else processor.tokenizer
    check_tokenizer(tokenizer)
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages={shown(messages)} {RULE}")
    stops = StopTexts(tokenizer, texts) if (texts := listed_texts(asked.stop)) else None
    single = bool(messages) and isinstance(messages[0], dict)
    conversations = cast(list[list[Message]], [messages] if single else messages)
    if not conversations:
        raise ValueError("messages are empty: there is no conversation to answer")
    thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    variables: Any = NOTHING if template is None else template
    variables = {**variables, **thinking} if isinstance(variables, Mapping) else variables
    if processor is None:
        variables = with_defaults(variables, model.spec)
        prompts = Prompts(*encode_chats(tokenizer, conversations, model.spec.eos_id, variables), None)
    elif variables:
        raise ValueError(
            f"template={shown(variables)} is not supported by a processor: its template is fixed"
        )
    else:
        if asked.buckets is not None:
            check_ladder("buckets", asked.buckets)
        prompts = processor.encode(model, conversations, asked.buckets)
    passed |= dict(prompt_mask=prompts.mask, prompt_embeds=prompts.embeds, stop=stops or ())
    if processor is not None:
        passed["forbid"] = (*asked.forbid, *processor.suppress_tokens)
    return AskedChat(prompts.ids, passed, tokenizer, stops, single)


def encode_chats(
    tokenizer: Any, conversations: list[list[Message]], pad_id: int, template: Mapping[str, Any] = NOTHING
) -> tuple[Int[np.ndarray, "b p"], Bool[np.ndarray, "b p"]]:
    """Returns left-padded prompts and their padding mask; arguments and errors are those of `chat_ids`."""
    if not conversations:
        raise ValueError("messages are empty: there is no conversation to answer")
    names = ["messages"] if len(conversations) == 1 else [f"messages[{i}]" for i in range(len(conversations))]
    pairs = zip(conversations, names, strict=True)
    ids = padded_together(
        [_chat_ids(tokenizer, messages, template, name) for messages, name in pairs], pad_id
    )
    warn_of_unread(tokenizer, template)
    warn_of_roles(tokenizer, conversations)
    return ids


def chat_ids(
    tokenizer: Any, conversation: list[Message], template: Mapping[str, Any] = NOTHING, name: str = "messages"
) -> list[int]:
    """Encodes a conversation under the chat template, up to where the answer begins.

    Special tokens come from the template alone: those that a message spells are plain text.

    Args:
      tokenizer: Tokenizer of the checkpoint, with a chat template.
      conversation: Messages with "role" and "content".
      template: Variables of the chat template by name, such as {"enable_thinking": False}.
      name: Name of the conversation in errors.

    Raises:
      ValueError: an empty or invalid conversation, a message with images, a text with a lone surrogate, a
        template that refuses the conversation or rewrites a special token of a message, or a tokenizer
        without a chat template.
    """
    ids = _chat_ids(tokenizer, conversation, template, name)
    warn_of_unread(tokenizer, template)
    warn_of_roles(tokenizer, [conversation])
    return ids


def _chat_ids(
    tokenizer: Any, conversation: list[Message], template: Mapping[str, Any], name: str
) -> list[int]:
    """`chat_ids`, without a warning."""
    if not isinstance(conversation, list | tuple):
        raise ValueError(f"{name}={shown(conversation)} {RULE}")
    if not conversation:
        raise ValueError(f"{name} are empty: a conversation needs at least one message")
    for message in conversation:
        if isinstance(message, dict) and (pictured := PICTURES & message.keys()):
            (key, *_) = sorted(pictured)
            raise ValueError(
                f"{name} hold {key}={shown(message[key])}, which a tokenizer cannot read: pass "
                'images as "images": [...], dj.vision.Processor.load(path) in place of the tokenizer, and a '
                "model with a vision tower"
            )
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in PARTS):
            raise ValueError(f"{name} hold {shown(message)}: they {RULE}")
    if tokenizer.chat_template is None:
        raise ValueError(
            "the tokenizer has no chat template: use generate() with ids, or an instruct checkpoint"
        )
    rendered = render(tokenizer, conversation, template, name, add_generation_prompt=True)
    return encode_rendered(tokenizer, rendered)


def render(
    tokenizer: Any,
    conversation: list[Message],
    template: Mapping[str, Any],
    name: str = "messages",
    **how: Any,
) -> Rendered:
    """Returns the text of a conversation under the chat template, and where special tokens are plain text.

    Args:
      tokenizer: Tokenizer of the checkpoint, with a chat template.
      conversation: Messages with "role" and "content".
      template: Variables of the chat template by name.
      name: Name of the conversation in errors.
      **how: Further arguments of `apply_chat_template`.

    Raises:
      ValueError: the template refuses the conversation or rewrites a special token that a message spells, or
        a text holds a lone surrogate.
    """
    _check_template(template)
    check_texts(name, conversation)
    conversation = _with_system_in_user(tokenizer, conversation, name)

    def apply(messages: list[Message], variables: Mapping[str, Any]) -> str:
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, **variables, **how)
        except jinja2.TemplateError as error:
            raise ValueError(f"{name} are refused by the chat template: {str(error)[:200]}") from None

    text = apply(conversation, template)
    variables = {key: value for key, value in template.items() if key not in NAMED}
    given = [each for _, each in texts_of([conversation, variables])]
    disguise = Disguise.of(tokenizer, [text, str(tokenizer.chat_template), *given])
    if not any(map(disguise.concerns, given)):
        return Rendered(text)

    # Disguised messages show which special tokens are the template's. A template that looks for its own words
    # in messages may take another branch for them; then these stay, or what spells no special token.
    words = {a or b for a, b in LITERALS.findall(str(tokenizer.chat_template)) if len(a or b) > 1}
    find, traced = disguise.pattern.findall, [text]
    for hide in (disguise.hide, functools.partial(disguise.hide_but, words), disguise.hide_special):
        messages = [_hidden(message, hide, disguise) for message in conversation]
        traced.append(apply(messages, {**template, **with_texts(variables, hide)}))
        certain = hide != disguise.hide_special or find(traced[-1]) == find(traced[-2])
        if certain and disguise.show(traced[-1]) == text:
            return disguise.rendered(text, traced[-1])
    if find(traced[2]) == find(text):
        return Rendered(text)  # nothing of a message has become a special token
    _refuse_rewritten(name, conversation, disguise, text)


def _with_system_in_user(tokenizer: Any, conversation: list[Message], name: str) -> list[Message]:
    """The conversation with its system text before the first user message, for templates without that role.

    iLLaDA's authors put two newlines between them.

    Raises:
      ValueError: no user message follows the system message.
    """
    if conversation[0]["role"] != "system" or NO_SYSTEM not in str(tokenizer.chat_template).lower():
        return conversation
    system, *others = conversation
    if not others or others[0]["role"] != "user":
        raise ValueError(
            f"{name} have a system message without a user message right after it: the chat template has no "
            "system role, so that its text is put there. Add a user message."
        )
    user = {**others[0], "content": f"{system['content']}\n\n{others[0]['content']}"}
    return [user, *others[1:]]


def _refuse_rewritten(name: str, conversation: list[Message], disguise: Disguise, result: str) -> NoReturn:
    """Raises ValueError: which special tokens are the template's, and which messages', is not known."""
    why = "a special token of this tokenizer, and the template rewrites it. Remove it from the text."
    texts = [(place, text) for place, text in texts_of(conversation, name) if text.strip() not in result]
    texts.sort(key=lambda pair: not pair[0].endswith("['content']"))
    for place, text in texts or texts_of(conversation, name):
        if spelled := disguise.pattern.search(text):
            raise ValueError(f"{place} contains {spelled[0]!r}, {why}")
    parts = dict.fromkeys(map(repr, disguise.pattern.findall(result)))
    raise ValueError(f"{name} contain a part of {', '.join(parts)}, {why}")


def _hidden(message: Message, hide: Callable[[str], str], disguise: Disguise) -> Message:
    """The message with its texts disguised; its role only where that is more than a word."""
    role = hide(message["role"]) if disguise.has_signs(message["role"]) else message["role"]
    return {**with_texts(message, hide), "role": role}


def with_defaults(template: Mapping[str, Any], spec: ModelSpec) -> Mapping[str, Any]:
    """Variables of a model's chat template with those that its authors set unless they are given."""
    if spec.family not in WITHOUT_THINKING or not isinstance(template, Mapping):
        return template
    return {"enable_thinking": False, **template}


def template_variables(name: str, text: str) -> dict[str, Any]:
    """Reads variables of a chat template from an argument that holds a JSON object.

    Raises:
      ValueError: the text is no JSON object.
    """
    with contextlib.suppress(json.JSONDecodeError):
        if isinstance(values := json.loads(text), dict):
            return values
    raise ValueError(f"{name}={shown(text)} must be a JSON object: '{{\"enable_thinking\": false}}'")


def _check_template(template: Mapping[str, Any]):
    """Raises ValueError for what is no mapping from names."""
    if not isinstance(template, Mapping) or not all(isinstance(name, str) for name in template):
        raise ValueError(
            f'template={shown(template)} must be variables by name: {{"enable_thinking": False}}'
        )
    check_texts("template", template)


def warn_of_unread(tokenizer: Any, template: Mapping[str, Any]):
    """Warns of variables that the chat template does not read."""
    # A template that knows no thinking does not think.
    asked = {name for name, value in template.items() if (name, value) != ("enable_thinking", False)}
    if not asked or not isinstance(tokenizer.chat_template, str):
        return
    known = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(tokenizer.chat_template))
    if unread := sorted(asked - known):
        warn(
            f"template variables {', '.join(unread)} have no effect: the chat template reads "
            f"{', '.join(sorted(known))}"
        )


def warn_of_roles(tokenizer: Any, conversations: list[list[Message]]):
    """Warns of roles that are none of the usual ones and that the chat template does not name."""
    given = {message["role"] for conversation in conversations for message in conversation} - ROLES
    known = re.findall(r"""["'](\w+)["']""", str(tokenizer.chat_template))
    if unknown := sorted(given - set(known)):
        warn(
            f"role={unknown[0]!r} is not one that the chat template names: the model has not learned it. Use "
            f"{', '.join(sorted(ROLES))}."
        )


def check_tokenizer(tokenizer: Any):
    """Raises ValueError if a tokenizer is none of transformers' kind."""
    needed = "chat_template", "apply_chat_template", "added_tokens_decoder", "encode", "decode"
    check_members(tokenizer, *needed)
