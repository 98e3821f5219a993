"""The characters of the tasks: each kind has a job of its own, so that prompts can be read by eye."""

LETTERS = "bcdfghjklmnpqrstvwxzBCDFGHJKLMNPQRSTVWXZ"  # no vowels: no accidental words
DIGITS = "0123456789"
FILLER = "aeiou"
