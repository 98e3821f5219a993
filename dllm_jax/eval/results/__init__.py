"""Results of evaluations: records, their files, comparison and display."""
