"""A process keeps its id and its owner's token over restarts, or says why it cannot."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.registry.identity import FILE_NAME, Identity, load_or_create


def test_the_same_folder_gives_the_same_owner_and_the_highest_epoch(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    first = load_or_create(folder, "store-0")
    assert load_or_create(folder, "store-0") == first
    assert len(first.owner) == 32
    first.with_epoch(9).with_epoch(4)
    assert load_or_create(folder, "store-0").last_epoch == 9
    assert [path.name for path in folder.iterdir()] == [FILE_NAME], "nothing else is left"
    assert stat.S_IMODE((folder / FILE_NAME).stat().st_mode) == 0o600


def test_without_a_folder_each_life_has_its_own_owner() -> None:
    first, second = load_or_create(None, "store-0"), load_or_create(None, "store-0")
    assert first.owner != second.owner
    assert first.with_epoch(5).last_epoch == 5


def test_a_folder_of_another_id_is_refused_with_what_to_do(tmp_path: Path) -> None:
    load_or_create(tmp_path, "store-0")
    with pytest.raises(ConfigError, match=r"belongs to store-0, not to store-1: start with that id"):
        load_or_create(tmp_path, "store-1")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"instance_id": 1, "owner": "x"}', '{"instance_id": "store-0"}']
)
def test_a_damaged_file_is_told_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ConfigError, match=r"identity\.json is damaged; delete it"):
        load_or_create(tmp_path, "store-0")


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep this process's identity"):
        load_or_create(tmp_path / "file", "store-0")


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: load_or_create(tmp_path, "store-0"), range(32)))
    assert len({identity.owner for identity in found}) == 1


def test_a_file_of_a_later_release_is_read(tmp_path: Path) -> None:
    kept = {"instance_id": "store-0", "owner": "x", "colour": "blue"}
    (tmp_path / FILE_NAME).write_text(json.dumps(kept))
    expected = Identity(instance_id="store-0", owner="x", folder=tmp_path)
    assert load_or_create(tmp_path, "store-0") == expected
