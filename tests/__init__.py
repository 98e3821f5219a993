"""The tests, and what checks annotations while they run."""


def checked(annotated):
    """A function or class, checked by beartype; an int is a float, as PEP 484 has it."""
    from beartype import BeartypeConf, beartype  # here, so that `python -m tests.replay` does without

    return beartype(annotated, conf=BeartypeConf(is_pep484_tower=True))
