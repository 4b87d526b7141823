"""Seeds that found bugs, and what those were. Each bug has a test of its own beside what it was in, too: a seed's world
changes with the product."""

from __future__ import annotations

FOUND: dict[int, str] = {
    45: "the last tokens of a request went into a stream that its gateway had given up: it waited for its time limit",
    180: "a restarted conductor that knew nobody yet ended a request at its first token in an internal error",
    654: "a placement named an incarnation whose successor the gateway knew already: its first token went nowhere",
    936: "a request was placed with a worker whose stream had just broken, and that left before it was open again",
}
