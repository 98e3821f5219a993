"""`python -m dllm_jax.eval {tasks,longbench,needle,recall,images,tune,reproduce,compare,merge,lm_eval}`."""

import importlib.util
import inspect
import sys

from dllm_jax.command_line import keep_programs, run, run_subcommand, with_new_names
from dllm_jax.eval.cli import commands
from dllm_jax.eval.cli.reproduce import run_reproduce
from dllm_jax.eval.cli.tune import run_tune

NAMES = ("tasks", "longbench", "needle", "recall", "images", "compare", "merge")
COMMANDS = {name: getattr(commands, f"run_{name}") for name in NAMES}
COMMANDS |= {"tune": run_tune, "reproduce": run_reproduce}
USAGE = "dllm-jax eval COMMAND [OPTIONS]      (or python -m dllm_jax.eval)"
ABOUT = "Evaluates checkpoints and cache policies, and compares and tunes their settings."
RENAMED = {
    "--batch": "--slots",
    "--behind": "--answer-after",
    "--count": "--limit",
    "--first": "--first-round",
    "--part": "--shard",
    "--sizes": "--difficulty",
}


def run_lm_eval() -> int:
    """Runs lm-evaluation-harness with these models (needs the extra `harness`)."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError("lm_eval is not installed: pip install '.[harness]' in a clone")
    from dllm_jax.eval.harness import model as harness

    return harness.main(sys.argv[2:])


def main() -> int:
    """Entry point."""
    keep_programs()
    if sys.argv[1:2] == ["lm_eval"]:  # whose options are those of another program
        return run_lm_eval()
    known = COMMANDS | {"lm_eval": run_lm_eval}
    told = {name: (inspect.getdoc(function) or "").partition("\n")[0] for name, function in known.items()}
    return run_subcommand(with_new_names(sys.argv[1:], RENAMED), USAGE, ABOUT, told, COMMANDS.__getitem__)


if __name__ == "__main__":
    run(main, "interrupted: run the same command again to go on")
