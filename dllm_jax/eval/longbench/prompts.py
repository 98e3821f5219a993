"""LongBench's prompts: the published templates, truncation in the middle, the chat template's exceptions.

The templates are data of the benchmark and read from its own file, `dataset2prompt.json` (in `config/` of
github.com/THUDM/LongBench), so that they are the published ones to the letter.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

from dllm_jax.checkpoint.files import sha256
from dllm_jax.eval import utf8
from dllm_jax.eval.longbench.data import Sample
from dllm_jax.eval.longbench.tasks import TASKS, Task

FILE = "dataset2prompt.json"


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Templates with {context} and, unless it is a summary, {input}.

    Attributes:
      templates: text by task.
      sha256: of the file they come from.
    """

    templates: dict[str, str]
    sha256: str

    @staticmethod
    def read(path: Path) -> "Prompts":
        """From the published file.

        Raises:
          FileNotFoundError: it is not there.
          ValueError: it is no UTF-8 or not an object of strings, or a template lacks {context}.
        """
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: take {FILE} from config/ of LongBench's repository"
            )
        templates = utf8.read_json(path)
        if not isinstance(templates, dict) or not all(isinstance(t, str) for t in templates.values()):
            raise ValueError(f"{path}: expected an object of task names and templates")
        for name in set(templates) & set(TASKS):
            if "{context}" not in templates[name]:
                raise ValueError(f"{path}: the template of {name!r} has no {{context}}")
        return Prompts(templates, sha256(path))

    def ids(self, task: Task, sample: Sample, tokenizer: Any, max_length: int | None) -> list[int]:
        """Token ids of a sample's prompt.

        Args:
          task: the data set.
          sample: the question.
          tokenizer: of the checkpoint, from transformers.
          max_length: tokens of the filled template beyond which its middle is cut out; None never cuts.

        Raises:
          ValueError: the file has no template for the task.
        """
        if task.name not in self.templates:
            raise ValueError(f"{FILE} has no template for {task.name!r}")
        fields = {"{context}": sample.context, "{input}": sample.input}
        text = re.sub(r"\{(?:context|input)\}", lambda found: fields[found[0]], self.templates[task.name])
        text = text if max_length is None else truncate(text, tokenizer, max_length)
        if task.chat and tokenizer.chat_template is not None:
            message = [{"role": "user", "content": text}]
            return list(
                tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)[
                    "input_ids"
                ]
            )
        return list(tokenizer(text)["input_ids"])


def truncate(text: str, tokenizer: Any, max_length: int) -> str:
    """The text with its middle cut out so that about `max_length` tokens remain.

    The first and the last int(max_length / 2) tokens are decoded apart, without special tokens, and joined;
    the joined text may come to a few tokens more or less, as published.

    Raises:
      ValueError: max_length below 2.
    """
    if max_length < 2:
        raise ValueError(f"max_length={max_length} must be at least 2")
    ids = tokenizer(text)["input_ids"]
    if len(ids) <= max_length:
        return text
    half = max_length // 2
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
