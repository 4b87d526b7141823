"""How many tokens a request will produce, from those that finished: by tenant, by length of prompt, or of all.

Its rule: the most particular curve that rests on enough requests answers. Memory is bounded: tenants that finished
nothing for longest are forgotten. Without any data a request is expected to use up its limit, which errs to the safe
side. Pure; knows no instance.
"""

from __future__ import annotations

from protocol.length_curve import Counts, Floats, LengthCurve

ENOUGH = 50  # the median of so many is within 7 ranks (σ = √(n/4) = 3.5, two of them)
MOST_TENANTS = 256  # of 5 KiB each
_NUM_CLASSES = 8  # of prompts: below 64 tokens, then by factors of 4


class OutputLengths:
    """Learns from every finished request."""

    def __init__(self) -> None:
        self._all = LengthCurve()
        self._classes = tuple(LengthCurve() for _ in range(_NUM_CLASSES))
        self._tenants: dict[str, LengthCurve] = {}  # least recently finished first

    def observe(
        self, num_tokens: int, *, max_tokens: int, prompt_tokens: int, tenant: str = ""
    ) -> None:
        """A request finished by itself, or at its limit."""
        stopped = num_tokens >= max_tokens
        curves = [self._all, self._classes[_class_of(prompt_tokens)]]
        if tenant:
            curves.append(self._tenant(tenant))
        for curve in curves:
            curve.observe(num_tokens, stopped=stopped)

    def curve(self, *, prompt_tokens: int, tenant: str = "") -> LengthCurve:
        """The one that knows most about such requests; it keeps learning."""
        own = self._tenants.get(tenant)
        if own is not None and own.num_observed >= ENOUGH:
            return own
        alike = self._classes[_class_of(prompt_tokens)]
        return alike if alike.num_observed >= ENOUGH else self._all

    def expected(self, *, max_tokens: int, prompt_tokens: int, tenant: str = "") -> float:
        """E[output tokens] of a request that has produced none."""
        curve = self.curve(prompt_tokens=prompt_tokens, tenant=tenant)
        return curve.mean(max_tokens)

    def remaining(self, generated: Counts, max_tokens: Counts) -> Floats:
        """E[tokens still to come] of requests that have produced `generated`, whosoever they are; shapes alike."""
        return self._all.mean_remaining(generated, max_tokens)

    def _tenant(self, tenant: str) -> LengthCurve:
        curve = self._tenants.pop(tenant, None) or LengthCurve()
        self._tenants[tenant] = curve
        if len(self._tenants) > MOST_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return curve

    def validate(self) -> None:
        assert len(self._tenants) <= MOST_TENANTS
        assert sum(one.num_observed for one in self._classes) == self._all.num_observed
        for curve in (self._all, *self._classes, *self._tenants.values()):
            curve.validate()


def _class_of(prompt_tokens: int) -> int:
    return min(max((max(prompt_tokens, 1).bit_length() - 5) // 2, 0), _NUM_CLASSES - 1)
