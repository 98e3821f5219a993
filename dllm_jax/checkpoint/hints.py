"""What people pass that is no checkpoint of ours: says what it is and what to do."""

from pathlib import Path

from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.staging import left_behind

EMBEDDED = Path(__file__).parents[1] / "embedded"
ADAPTER = "adapter_config.json"
INT8 = "load the original checkpoint; dj.load(..., weights='int8') holds its matrices in int8"


def of_nothing(path: Path) -> str:
    """A hint for a path that does not exist; "" if nothing is known of it."""
    if len(path.parts) == 1 and (EMBEDDED / path.name).is_dir():
        return f"; the embedded checkpoint of this name is dj.load(dj.embedded.path({path.name!r}))"
    if old := left_behind(path):
        return f"; a run that was killed while it replaced it left the old one as {old}: rename it back"
    return ""


def of_file(path: Path) -> str:
    """A hint for a path that is a file; "" if nothing is known of it."""
    if path.suffix == ".gguf":
        return f"; a GGUF file, whose weights are quantised for llama.cpp, is not read: {INT8}"
    if path.suffix in (".safetensors", ".json"):
        return f"; pass its directory, {path.parent}"
    return ""


def of_directory(path: Path) -> str:
    """A hint for a directory that is no checkpoint; "" if nothing is known of it."""
    tensors = {file.name for file in path.glob("*.safetensors")}
    if (path / ADAPTER).is_file() and tensors <= {"adapter_model.safetensors"}:
        return (
            f"; {ADAPTER} says that it is a LoRA adapter: merge it into its base model first "
            "(peft: merge_and_unload, then save_pretrained), and load that directory"
        )
    if gguf := sorted(file.name for file in path.glob("*.gguf")):
        return f"; {', '.join(gguf)}: GGUF, whose weights are quantised for llama.cpp, is not read: {INT8}"
    return ""


def check_variant(config: Config):
    """Raises ValueError for relatives of the supported models, which would be read as those or refused oddly.

    Raises:
      ValueError: quantised weights, or a mixture of experts.
    """
    values = config.values
    if values.get("quantization_config") is not None:
        given = values["quantization_config"]
        method = given.get("quant_method") if isinstance(given, dict) else given
        raise ValueError(f"{config.where}: quantization_config ({method!r}) is not supported: {INT8}")
    architectures = values.get("architectures")
    names = [values.get("model_type"), *(architectures if isinstance(architectures, list) else [])]
    if "num_experts" in values or any("moe" in str(name).lower() for name in names):
        raise ValueError(
            f"{config.where}: a mixture of experts (LLaDA-MoE) is not supported; supported are the dense "
            "models: LLaDA-8B, LLaDA-1.5 and Dream"
        )
