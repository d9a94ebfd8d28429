"""Errors of the wire, and the classes by which a handler's errors are treated."""

from __future__ import annotations


class WireError(ValueError):
    """A message or body that cannot be what it claims to be."""


class BodyLost(RuntimeError):
    """The bytes of a body are gone or damaged; the group is rolled again from its prompt."""


class Poison(Exception):
    """The handler cannot ever do this message: straight to the dead letters, no second try."""


class Fatal(Exception):
    """The job cannot go on: the reason is shown and the job fails."""
