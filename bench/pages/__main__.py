"""Writes the measured tables into README and docs; with `--check`, lists the stale pages instead.

python -m bench.pages
"""

import sys

import tyro

from bench.pages.tables import stale, written
from dllm_jax.command_line import run


def main(check: bool = False):
    """Writes the tables of all pages.

    Args:
      check: Only name the pages whose tables are stale, and end with status 1 if there are any.
    """
    for page in (found := stale()):
        print(page)
        if not check:
            page.write_text(written(page))
    sys.exit(1 if check and found else 0)


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
