"""NIXL's progress threads poll without a pause, which takes a core from every server. With this module on the import
path they rest between two polls. NIXL's Python API has no setting for that."""

import contextlib

_REST_US = 100

with contextlib.suppress(ImportError):
    from nixl_cu12 import _bindings  # type: ignore[import-not-found]

    class _Resting(_bindings.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, _REST_US if name == "pthrDelay" else value)

    _bindings.nixlAgentConfig = _Resting
