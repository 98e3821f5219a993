"""Ctrl-C while a command still imports: one line and exit status 130, as in `command_line.run` afterwards.

This is imported before all else, and imports little itself.
"""

import os
import signal
import sys
import threading

STATUS = 130  # of a program that SIGINT ended, as in shells
SCRIPTS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "convert")


def is_command() -> bool:
    """Whether Python runs a command of this project, which has begun to import."""
    (program,) = sys.argv[:1] or ("",)
    if program != "-m":
        folder, name = os.path.split(os.path.realpath(program))
        return (folder == SCRIPTS and name.endswith(".py")) or name.removesuffix(".exe") == "dllm-jax"
    # Until Python has found the module, whose name stands before the arguments: apart, or as in "-mbench".
    package = sys.orig_argv[-len(sys.argv)].partition(".")[0]
    return package.rpartition("-m")[2] in ("dllm_jax", "bench")


def end(*_: object):
    """Ends the process, which has nothing yet that would be lost."""
    os.write(2, b"interrupted\n")
    os._exit(STATUS)


def raise_again():
    """Lets Ctrl-C raise `KeyboardInterrupt` from here on."""
    if signal.getsignal(signal.SIGINT) is end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Programs of other people keep their handlers.
usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if usual and threading.current_thread() is threading.main_thread() and is_command():
    signal.signal(signal.SIGINT, end)
