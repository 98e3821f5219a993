"""What requests add to the steps of a run, one feature per file; `assembly` says which ones a run has."""
