"""LongBench's metrics against scores of the authors' code; no decoding."""

import json

from dllm_jax.eval.benchmarks.longbench import metrics
from dllm_jax.eval.benchmarks.longbench.tasks import TASKS
from tests.replay.case import Case
from tests.replay.compare import closely


def longbench(case: Case):
    """Every pair's score, per reference and in all, and the data set's."""
    s = case.settings
    s.describes("metric", "first_line_only")  # what `TASKS` has under the name of the data set
    task, classes = TASKS[s["dataset"]], s.get("all_classes") or ()
    scores = []
    for pair in s["pairs"]:
        name, prediction = json.dumps(pair["prediction"]), pair["prediction"]
        for reference, recorded in zip(pair["references"], pair["per_reference"], strict=True):
            closely(name, task.score(prediction, [reference], classes), recorded, tolerance=1e-12)
        scores.append(task.score(prediction, pair["references"], classes))
        closely(name, scores[-1], pair["score"], tolerance=1e-12)
        if "score_levenshtein" in pair:
            similarity = metrics.edit_similarity(prediction, pair["references"][0], alignment="indel")
            closely(f"{name} (Levenshtein)", similarity, pair["score_levenshtein"], tolerance=1e-12)
    closely("data set", metrics.data_set_score(scores), s["dataset_score"], tolerance=1e-9)


METHODS = {"longbench-metrics": longbench}
