"""Prompts of LLaDA-V: the published template, and token ids with a place for each image."""

from collections.abc import Callable, Sequence
from typing import Any

from dllm_jax.options import shown
from dllm_jax.state.text import PICTURES, Rendered, check_text, encode_rendered

IMAGE = "<image>"
PLACE = -200  # instead of an id: an image
SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the "
    "user provides, and assist the user with a variety of tasks using natural language."
)
BEGIN = "<|startoftext|>"
HEADER = "<|start_header_id|>{role}<|end_header_id|>\n\n"
END = "<|eot_id|>"
ROLES = ("system", "user", "assistant")
# Never predicted where an answer is decoded: end of text, begin of text, and both ends of a header.
SUPPRESSED = ("<|endoftext|>", BEGIN, "<|start_header_id|>", "<|end_header_id|>")
RULE = (
    'must be {"role": "user", "content": "<image>\\n...", "images": [...]}, or have a list of parts '
    '{"type": "image", "image": ...} (or "image_url") and {"type": "text", "text": "..."} as its content'
)


def rendered(
    messages: Sequence[dict[str, Any]], plain: Callable[[str], str] = lambda text: text
) -> tuple[str, list[Any]]:
    """The published template around a conversation, up to where the answer begins, and its images in order.

    A first message of the role "system" takes the place of the published one.

    Args:
      messages: Messages with placeholders and images.
      plain: Function of each text of a message, between its placeholders.

    Raises:
      ValueError: no messages, what is none, or placeholders that do not match the images; names the message.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages={shown(messages)} must be at least one message, each of which {RULE}")
    contents = [_content(message, i) for i, message in enumerate(messages)]
    turns = [(message["role"], text) for message, (text, _) in zip(messages, contents, strict=True)]
    # The published system prompt, unless the conversation brings its own.
    if turns[0][0] != "system":
        turns.insert(0, ("system", SYSTEM))
    written = lambda text: IMAGE.join(map(plain, text.strip().split(IMAGE)))
    text = "".join(HEADER.format(role=role) + written(content) + END for role, content in turns)
    images = [image for _, pictures in contents for image in pictures]
    return BEGIN + text + HEADER.format(role="assistant"), images


def _content(message: Any, index: int) -> tuple[str, list[Any]]:
    """The text of a message, with placeholders, and its images."""
    name = f"messages[{index}]"
    if not isinstance(message, dict) or message.get("role") not in ROLES or "content" not in message:
        raise ValueError(f"{name}={shown(message)} {RULE}; roles: {', '.join(ROLES)}")
    if others := (PICTURES - {"images"}) & message.keys():
        raise ValueError(f"{name} has {sorted(others)}, which no processor here reads: it {RULE}")
    content, images = message["content"], message.get("images", [])
    if isinstance(content, str):
        # Text with placeholders, and images with it.
        if not isinstance(images, list | tuple):
            raise ValueError(f"{name}: images={shown(images)} must be a list")
        text = content
    else:
        # Or a list of parts, in which every image stands where it belongs.
        parts = [_part(part) for part in content] if isinstance(content, list | tuple) else None
        if "images" in message or parts is None or None in [kind for kind, _ in parts]:
            raise ValueError(f"{name}={shown(message)} {RULE}")
        images = [value for kind, value in parts if kind == "image"]
        text = "".join(IMAGE if kind == "image" else value for kind, value in parts)
        # Images first is the published layout: "<image> <image>\n" and the text.
        if images and all(kind == "image" for kind, _ in parts[: len(images)]):
            text = " ".join([IMAGE] * len(images)) + "\n" + text[len(IMAGE) * len(images) :]
    check_text(f"{name}['content']", text)
    if text.count(IMAGE) != len(images):
        given = f"{text.count(IMAGE)} placeholders {IMAGE} and {len(images)} images"
        raise ValueError(f"{name} has {given}: every image needs one")
    return text, list(images)


def _part(part: Any) -> tuple[str | None, Any]:
    """The kind of a part, "image" or "text", and the image or text; None for what is no part."""
    kind, url = (part.get("type"), part.get("image_url")) if isinstance(part, dict) else (None, None)
    if kind == "image" and "image" in part:
        return kind, part["image"]
    if kind == "text" and isinstance(part.get("text"), str):
        return kind, part["text"]
    # As OpenAI's clients spell an image.
    url = url.get("url") if isinstance(url, dict) else url
    return ("image", url) if kind == "image_url" and isinstance(url, str) else (None, None)


def prompt_ids(tokenizer: Any, text: str | Rendered, drop_first_id: bool = True) -> list[int]:
    """Token ids of a rendered prompt, `PLACE` where an image stands.

    Args:
      tokenizer: Tokenizer whose `encode` is used, piece by piece between the images.
      text: Text of `rendered`, with the stretches in which special tokens are plain text, if any.
      drop_first_id: leave out the first id after every image, usually the line break. The reference
        implementation takes it to be a begin-of-text that its tokenizer does not add, so published numbers
        are without it; False is the form that the model was trained on.
    """
    # Pieces are encoded one by one, as the released code does: no token spans an image.
    whole = Rendered(text) if isinstance(text, str) else text
    first, *others = (encode_rendered(tokenizer, piece) for piece in whole.split(IMAGE))
    return first + [i for ids in others for i in (PLACE, *(ids[1:] if drop_first_id else ids))]
