"""Errors for people: what was wrong, the numbers, what to do."""


class Failure(Exception):
    """An error for people, in one message: what was wrong, the numbers, what to do."""


class ConfigError(Failure, ValueError):
    """A setting that cannot be used: which field, its value, and what would be accepted."""
