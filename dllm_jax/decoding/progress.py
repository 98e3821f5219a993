"""A bar for generations that take long."""

import math

import numpy as np

from dllm_jax.decoding.output import Output
from dllm_jax.decoding.request import Request
from dllm_jax.decoding.stream import snapshots
from dllm_jax.nn.mesh import AnyMesh
from dllm_jax.nn.model import Model
from dllm_jax.state import host

UPDATES = 64  # about so many per generation


def watched(model: Model, request: Request, mesh: AnyMesh | None) -> Output:
    """Answers a request, with a bar of decoded tokens on standard error.

    Args:
      model: the model.
      request: what is asked.
      mesh: that the request is spread over.

    Raises:
      ValueError: as `stream.snapshots`.
    """
    import rich.console  # slow, and used by this alone
    import rich.progress as bars

    # A sampler may need fewer steps than its schedule: the bar counts tokens.
    every = math.ceil(request.layout.steps / UPDATES)
    pieces = snapshots(model, request, mesh, every)
    columns = (
        bars.TextColumn("denoising"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("tokens, {task.fields[steps]} steps"),
        bars.TimeRemainingColumn(),
    )
    tokens, valid = host.everywhere(request.inputs.tokens), host.everywhere(request.inputs.valid)
    total = int(np.sum((tokens == model.spec.mask_id) & valid))
    with bars.Progress(*columns, console=rich.console.Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, steps=0)
        for snapshot in pieces:
            bar.update(task, advance=int(snapshot.decoded.sum()), steps=snapshot.steps)
    assert snapshot.output is not None, "the last snapshot"
    return snapshot.output
