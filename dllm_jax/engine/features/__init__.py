"""Features: additions of a request, a sampler or blocks to the steps of a run (`assembly`)."""
