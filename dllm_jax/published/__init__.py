"""Published settings."""
