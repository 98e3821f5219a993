"""The demonstration's question: by way of which stops does a train go?

The bundled models know no language. They follow links between letters (`dllm_jax.tasks.Chain`), so the stops
of this line go by their initials.
"""

import re

STOPS = (
    *("Paris", "Lyon", "Geneva", "Milan", "Venice", "Zagreb", "Budapest", "Warsaw"),
    *("Krakow", "Dresden", "Hamburg", "Copenhagen", "Stockholm", "Turku", "Riga", "Frankfurt"),
)
# The links in no order, and where to begin.
QUESTION = "B>W;F>P;R>F;K>D;T>R;H>C;C>S;S>T;Z>B;L>G;G>M;W>K;D>H;P>L;M>V;V>Z;P>"
ANSWER = "P>L;L>G;G>M;M>V;V>Z;Z>B;B>W;"


def train_route(answer: str) -> list[str]:
    """The stops that an answer names, the first one included; what is no link is left out."""
    names: dict[str, str] = {stop[0]: stop for stop in STOPS}
    links: list[tuple[str, str]] = re.findall(r"(\w)>(\w)", answer)
    first = [before for before, _ in links[:1]]
    return [names.get(stop, stop) for stop in [*first, *(after for _, after in links)]]
