"""Report of `moonserve profile`, as text for people. Owns the format; measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from conductor.cost.compute import DecodeFit, PrefillFit
from conductor.cost.residuals import ErrorReport
from deploy.terminal.output import rate
from protocol.profile import DecodeProfile, PrefillProfile

_FORMULAE = {
    "prefill": "t(n, p) = c0 + c1·(n−p) + c2·(n²−p²) seconds for n prompt tokens, p of them cached",
    "decode": "t(b, c) = c0 + c1·b + c2·c seconds for a step of b sequences with c tokens of context in all",
}
_ARGUMENTS = {"prefill": ("n", "p"), "decode": ("b", "c")}


def as_text(prefill: PrefillFit, decode: DecodeFit, rates: Mapping[str, float]) -> str:
    """Returns the report. `rates`: bytes per second by name of the measured path."""
    width = max(map(len, rates))
    lines = [
        *_FORMULAE.values(),
        "",
        f"{'':8}{'c0':>12}{'c1':>12}{'c2':>12}{'points':>8}{'p50':>8}{'p90':>8}{'max':>8}",
        _row("prefill", prefill.profile, prefill.errors),
        _row("decode", decode.profile, decode.errors),
        "",
        *_worst("prefill", prefill.errors),
        *_worst("decode", decode.errors),
        "",
        *(f"{name:{width}}  {rate(bytes_s)}" for name, bytes_s in rates.items()),
    ]
    return "\n".join(lines)


def _row(name: str, profile: PrefillProfile | DecodeProfile, errors: ErrorReport) -> str:
    coefficients = "".join(f"{c:12.3e}" for c in (profile.c0, profile.c1, profile.c2))
    shares = "".join(f"{share:8.1%}" for share in (errors.p50, errors.p90, errors.max))
    return f"{name:8}{coefficients}{errors.num_points:8}{shares}"


def _worst(name: str, errors: ErrorReport) -> Iterator[str]:
    first, second = _ARGUMENTS[name]
    yield f"{name}, worst:{first:>6}{second:>9}{'measured':>13}{'predicted':>13}{'error':>9}"
    for one in errors.worst:
        times = f"{one.measured_s * 1e3:10.2f} ms{one.predicted_s * 1e3:10.2f} ms"
        yield f"{'':{len(name) + 8}}{one.at[0]:>5}{one.at[1]:>9}{times}{one.relative:+9.1%}"
