"""Replays recorded decode traces through the public API; `python -m tests.replay DIR`."""
