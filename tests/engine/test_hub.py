"""Resolving a model's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import hub
from protocol.errors import ConfigError


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve_model(str(tmp_path)) == tmp_path


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file"):
        hub.resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["./missing/model", "missing", "a/b/c", "/nowhere/at/all"])
def test_what_is_neither_folder_nor_hub_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a hub name"):
        hub.resolve_model(name)


def test_a_failed_download_is_one_clear_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_name: str, *, allow_patterns: list[str]) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"someone/model .*OSError: no route to host"):
        hub.resolve_model("someone/model")


def test_a_download_gives_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda _name, *, allow_patterns: str(tmp_path)
    )
    assert hub.resolve_model("someone/model") == tmp_path
