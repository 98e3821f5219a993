"""Published settings, and policies and samplers read from text."""
