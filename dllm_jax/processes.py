"""What one of several processes does for all of them."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils


def by_the_first(act: Callable[[], None], failed: str, meanwhile: Callable[[], object] = lambda: None):
    """Lets the first process act, and all others wait until it is done.

    Args:
      act: Function that the first process calls.
      failed: Beginning of the message on the other processes if it raises, "X was not written".
      meanwhile: Function that all processes call, the first one after `act`, if there are several: such as
        what is left of collective operations that `act` takes part in.

    Raises:
      Exception: on the first process, what stopped it.
      OSError: on the others, if the first one failed.
    """
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            act()
        except Exception as error:  # the others must hear of it, or they would wait for ever
            failure = error
    if jax.process_count() > 1:
        meanwhile()
        stopped = multihost_utils.broadcast_one_to_all(np.int32(failure is not None))
        if stopped and failure is None:
            failure = OSError(f"{failed}: the first process failed, and says why")
    if failure is not None:
        raise failure
