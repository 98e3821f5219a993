"""`python -m dllm_jax.eval {tasks,longbench,needle,recall,images,tune,reproduce,compare,merge,lm_eval}`."""

import importlib.util
import inspect
import sys

import tyro

from dllm_jax.command_line import PATHS, keep_programs, run, usage, with_new_names
from dllm_jax.eval.cli import commands
from dllm_jax.eval.cli.reproduce import run_reproduce
from dllm_jax.eval.cli.tune import run_tune

EVALUATIONS = ("tasks", "longbench", "needle", "recall", "images")
COMMANDS = {name: getattr(commands, f"run_{name}") for name in EVALUATIONS}
COMMANDS |= {"tune": run_tune, "reproduce": run_reproduce}
DESCRIPTION = "Evaluates checkpoints and cache policies, and compares and tunes their settings."
RENAMED = {
    "--batch": "--slots",
    "--behind": "--answer-after",
    "--count": "--limit",
    "--first": "--first-round",
    "--part": "--shard",
    "--sizes": "--difficulty",
}
COMMANDS |= {"compare": commands.run_compare, "merge": commands.run_merge}


def run_lm_eval() -> int:
    """Runs lm-evaluation-harness with these models (needs the extra `harness`)."""
    if importlib.util.find_spec("lm_eval") is None:
        print("error: lm_eval is not installed: pip install '.[harness]' in a clone", file=sys.stderr)
        return 2
    from dllm_jax.eval.harness import model as harness

    return harness.main(sys.argv[2:])


def main() -> int:
    """Entry point."""
    keep_programs()
    if sys.argv[1:2] == ["lm_eval"]:
        return run_lm_eval()
    if sys.argv[1:2] in (["-h"], ["--help"]):
        known = COMMANDS | {"lm_eval": run_lm_eval}
        told = {name: (inspect.getdoc(one) or "").partition("\n")[0] for name, one in known.items()}
        print(usage("dllm-jax eval COMMAND [OPTIONS]      (or python -m dllm_jax.eval)", DESCRIPTION, told))
        return 0
    sys.argv[1:] = with_new_names(sys.argv[1:], RENAMED)
    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="python -m dllm_jax.eval", description=DESCRIPTION, registry=PATHS
    )


if __name__ == "__main__":
    run(main, "interrupted: run the same command again to go on")
