"""Benchmarks: LongBench, needles, recall, the small tasks."""
