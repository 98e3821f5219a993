"""A character tokenizer with LLaDA's special tokens and chat template, for models small enough to ship."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, MASK = "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>"
HEADER, END_HEADER, EOT, UNKNOWN = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|unk|>"
SPECIAL = (BOS, EOS, MASK, HEADER, END_HEADER, EOT, UNKNOWN)
WORDS = ("\n\n", "user", "assistant", "system")  # one token each, so that the template is short
CHARACTERS = ("\n", "\t", *(chr(code) for code in range(32, 127)))
VOCAB = {token: i for i, token in enumerate((*SPECIAL, *WORDS, *CHARACTERS))}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    f"{HEADER}{{{{ message['role'] }}}}{END_HEADER}\n\n{{{{ message['content'] | trim }}}}{EOT}"
    "{% endfor %}{% if add_generation_prompt %}"
    f"{HEADER}assistant{END_HEADER}\n\n"
    "{% endif %}"
)


def build(phrases: Sequence[str] = ()) -> Tokenizer:
    """Builds the tokenizer: printable ASCII by character, and <|unk|> for anything else.

    Args:
      phrases: texts that are one token each, with the ids after `VOCAB`'s; such as a system prompt that
        would be long in characters.
    """
    vocab = VOCAB | {phrase: len(VOCAB) + i for i, phrase in enumerate(phrases)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    # Phrases before words, words before characters: the first alternative that matches wins.
    pattern = "|".join((*map(re.escape, phrases), *WORDS, r"[\s\S]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")  # pyright: ignore
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def save(directory: Path, phrases: Sequence[str] = ()):
    """Writes tokenizer.json and tokenizer_config.json, which `transformers.AutoTokenizer` loads offline.

    The class is named as every transformers since 4.0 knows it; 5.x would write a name that 4.x does not.
    """
    directory.mkdir(parents=True, exist_ok=True)
    build(phrases).save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "unk_token": UNKNOWN,
        "additional_special_tokens": [MASK, HEADER, END_HEADER, EOT],
        "padding_side": "left",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
