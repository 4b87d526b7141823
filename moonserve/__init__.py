"""Disaggregated prefill/decode serving of large language models. `python -m moonserve` is the command."""

from pathlib import Path

_CHECKOUT = Path(__file__).parent.parent
if (_CHECKOUT / "pyproject.toml").exists():  # the packages lie beside this folder; an installed wheel has them in it
    __path__.append(str(_CHECKOUT))
