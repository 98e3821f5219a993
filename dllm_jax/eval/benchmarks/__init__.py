"""What is asked: LongBench, needles, recall, the small tasks."""
