"""Tells XLA's compilers what they do not find out: a function for each place that would cost time or memory.

None of these functions changes what is computed. Each docstring says the symptom, where it was seen, the cost
before and after, and the test that fails without the function. Callers keep one line, and the package imports
no other part of the library.

- `order`: the order in which the axes of an array lie in memory.
- `loops`: loops of at most one trip in place of branches, and work in turns.
- `dependencies`: what has to be computed before something else.
- `stacks`: reading and writing one layer's part of arrays that hold all layers.
- `products`: matrix products and divisions.
- `reductions`: counts, places and maxima, in few kernels.
- `partitioner`: programs over a mesh.

Quirks that are part of an operation lie with it in `pallas_kernels` (`attention/xla.py`, `experts/xla.py`,
`topk_evict/xla.py`). How consecutive steps of one kind share a loop is told in `dllm_jax.engine.loop`.

Costs are of LLaDA-8B in bfloat16, prompt 1024, unless a docstring says otherwise. "Of the roofline" means the
bytes of a step, relative to those of `dllm_jax.roofline`, by the compiler's account (`bench.compiled`). TPU
programs of jaxlib 0.10.2 were compiled by libtpu 0.0.42.
"""
