"""Running an evaluation: settings, batches, answers, the journal."""
