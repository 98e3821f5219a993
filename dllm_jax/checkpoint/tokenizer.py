"""The tokenizer of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoTokenizer, PretrainedConfig


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint's directory.

    For a model type that transformers does not know, `AutoTokenizer` reads config.json as a plain
    configuration, and warns that the model may not work. Given that configuration, it does not.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if config.get("model_type", "llama") in CONFIG_MAPPING:
        return AutoTokenizer.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, config=PretrainedConfig.from_dict(config))
