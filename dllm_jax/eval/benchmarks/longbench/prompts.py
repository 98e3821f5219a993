"""LongBench's prompts: the published templates, cut in the middle, and the chat template's exceptions.

The templates are read from the benchmark's own file, `dataset2prompt.json` (in `config/` of
github.com/THUDM/LongBench), so that they are exactly the published ones.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

from dllm_jax.checkpoint.files import sha256
from dllm_jax.decoding.chat import chat_ids
from dllm_jax.eval.benchmarks.longbench.data import Sample
from dllm_jax.eval.benchmarks.longbench.tasks import TASKS, LongBenchTask
from dllm_jax.eval.benchmarks.longbench.truncation import truncate
from dllm_jax.eval.run.files import read_json

FILE = "dataset2prompt.json"


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Templates with {context} and, except for summaries, {input}.

    Attributes:
      templates: by task.
      sha256: of the file.
    """

    templates: dict[str, str]
    sha256: str

    @staticmethod
    def read(path: Path) -> "Prompts":
        """Reads the published file.

        Raises:
          FileNotFoundError: no such file.
          ValueError: it is not UTF-8 or not an object of strings, or a template lacks {context}.
        """
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: take {FILE} from config/ of LongBench's repository"
            )
        templates = read_json(path)
        if not isinstance(templates, dict) or not all(isinstance(t, str) for t in templates.values()):
            raise ValueError(f"{path}: expected an object of task names and templates")
        for name in set(templates) & set(TASKS):
            if "{context}" not in templates[name]:
                raise ValueError(f"{path}: the template of {name!r} has no {{context}}")
        return Prompts(templates, sha256(path))

    def ids(self, task: LongBenchTask, sample: Sample, tokenizer: Any, truncate_to: int | None) -> list[int]:
        """Token ids of a sample's prompt.

        Args:
          task: the data set.
          sample: the question.
          tokenizer: of the checkpoint, from transformers.
          truncate_to: see `truncate`; applied to the filled template. None: never.

        Raises:
          ValueError: the file has no template for the task.
        """
        if task.name not in self.templates:
            raise ValueError(f"{FILE} has no template for {task.name!r}")
        fields = {"{context}": sample.context, "{input}": sample.input}
        text = re.sub(r"\{(?:context|input)\}", lambda found: fields[found[0]], self.templates[task.name])
        text = text if truncate_to is None else truncate(text, tokenizer, truncate_to)
        if task.chat and tokenizer.chat_template is not None:
            return chat_ids(tokenizer, [{"role": "user", "content": text}])
        return list(tokenizer(text)["input_ids"])
