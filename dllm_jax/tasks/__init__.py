"""Small tasks with one right answer: made from a seed, held out by construction, scored exactly."""

from dllm_jax.tasks.base import Example as Example
from dllm_jax.tasks.base import Split as Split
from dllm_jax.tasks.base import Task as Task
from dllm_jax.tasks.base import exact as exact
from dllm_jax.tasks.base import examples as examples
from dllm_jax.tasks.curriculum import Curriculum as Curriculum
from dllm_jax.tasks.curriculum import Stage as Stage
from dllm_jax.tasks.curriculum import encode_batch as encode_batch
from dllm_jax.tasks.pictured import ReadNumbers as ReadNumbers
from dllm_jax.tasks.recall import Recall as Recall
from dllm_jax.tasks.recall import asked_pair as asked_pair
from dllm_jax.tasks.recall import needle as needle
from dllm_jax.tasks.scoring import accuracy as accuracy
from dllm_jax.tasks.scoring import answers as answers
from dllm_jax.tasks.scoring import prompt_arrays as prompt_arrays
from dllm_jax.tasks.text import Chain as Chain
from dllm_jax.tasks.text import FewShot as FewShot
from dllm_jax.tasks.text import Sorting as Sorting
