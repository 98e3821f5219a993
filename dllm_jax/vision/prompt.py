"""Prompts of LLaDA-V: the published template, and token ids with a place for each image."""

from collections.abc import Sequence
from typing import Any

from dllm_jax.options import shown

IMAGE = "<image>"
PLACE = -200  # in the place of an id: an image
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
    '{"type": "image", "image": ...} and {"type": "text", "text": "..."} as its content'
)


def rendered(messages: Sequence[dict[str, Any]]) -> tuple[str, list[Any]]:
    """The published template around a conversation, up to where the answer begins, and its images in order.

    A first message of the role "system" takes the place of the published one.

    Raises:
      ValueError: no messages, what is none, or placeholders that do not match the images; names the message.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages={shown(messages)} must be at least one message, each of which {RULE}")
    contents = [_content(message, i) for i, message in enumerate(messages)]
    turns = [(message["role"], text) for message, (text, _) in zip(messages, contents, strict=True)]
    if turns[0][0] != "system":
        turns.insert(0, ("system", SYSTEM))
    text = "".join(HEADER.format(role=role) + content.strip() + END for role, content in turns)
    images = [image for _, own in contents for image in own]
    return BEGIN + text + HEADER.format(role="assistant"), images


def _content(message: Any, index: int) -> tuple[str, list[Any]]:
    """The text of a message, with placeholders, and its images."""
    name = f"messages[{index}]"
    if not isinstance(message, dict) or message.get("role") not in ROLES or "content" not in message:
        raise ValueError(f"{name}={shown(message)} {RULE}; roles: {', '.join(ROLES)}")
    content, images = message["content"], message.get("images", [])
    if isinstance(content, str):
        if not isinstance(images, list | tuple):
            raise ValueError(f"{name}: images={shown(images)} must be a list")
        _check_places(name, content.count(IMAGE), len(images))
        return content, list(images)
    if "images" in message or not isinstance(content, list | tuple) or not all(map(_is_part, content)):
        raise ValueError(f"{name}={shown(message)} {RULE}")
    texts = [part["text"] for part in content if part["type"] == "text"]
    images = [part["image"] for part in content if part["type"] == "image"]
    _check_places(name, sum(text.count(IMAGE) for text in texts) + len(images), len(images))

    # Images first is the published layout: "<image> <image>\n" and the text. Otherwise parts follow as given.
    kinds = [part["type"] for part in content]
    if kinds == ["image"] * len(images) + ["text"] * len(texts):
        places = " ".join([IMAGE] * len(images)) + "\n" * bool(images)
        return places + "".join(texts), images
    return "".join(IMAGE if part["type"] == "image" else part["text"] for part in content), images


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type") not in ("image", "text"):
        return False
    return "image" in part if part["type"] == "image" else isinstance(part.get("text"), str)


def _check_places(name: str, places: int, images: int):
    if places != images:
        raise ValueError(
            f"{name} has {places} placeholders {IMAGE} and {images} images: every image needs one"
        )


def prompt_ids(tokenizer: Any, text: str, drop_first_id: bool = True) -> list[int]:
    """Token ids of a rendered prompt, `PLACE` where an image stands.

    Args:
      tokenizer: whose `encode` is used, piece by piece between the images.
      text: from `rendered`.
      drop_first_id: leave out the first id behind every image, usually the line break. The released code
        takes it to be a begin-of-text that its tokenizer does not add, so published numbers are without it;
        False is the form that the model was trained on.
    """
    first, *others = (list(tokenizer.encode(piece, add_special_tokens=False)) for piece in text.split(IMAGE))
    return first + [i for ids in others for i in (PLACE, *(ids[1:] if drop_first_id else ids))]
