"""Encryption at rest: AES-256-GCM per object, under a key that only this folder uses.

The folder's key is derived from the operator's key and the folder's random id, and a nonce is a segment and a page.
Segment numbers are never used again and the log only grows, so no nonce is used twice under one key; a copy of the
folder's id does not help either, since then it is the same folder. Knows no files but the key's.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext

KEY_FILE_BYTES = 32
_PURPOSE_OBJECTS = b"moonserve objects at rest"
_PURPOSE_CHECK = b"moonserve key check"


class AesGcm:
    """Seals and opens objects of one folder. Safe to use from several threads."""

    name = "aes-256-gcm"

    def __init__(self, operator_key: bytes, folder_id: bytes) -> None:
        """Raises ConfigError without the package `cryptography`."""
        try:
            from cryptography.hazmat.primitives.ciphers import algorithms
        except ImportError as error:
            raise ConfigError(
                "encryption at rest needs the package cryptography: pip install 'moonserve[encryption]'"
            ) from error
        self._algorithm = algorithms.AES(_derived(operator_key, _PURPOSE_OBJECTS + folder_id))
        self.key_check = _derived(operator_key, _PURPOSE_CHECK + folder_id)[:16].hex()
        """Tells a wrong key before the first object; says nothing about the right one."""

    def seal(self, nonce: bytes, associated: bytes, plain: memoryview, sealed: memoryview) -> bytes:
        """Encrypts `plain` into `sealed`, which is as long and another memory. Returns the tag."""
        from cryptography.hazmat.primitives.ciphers import Cipher, modes

        encryptor: AEADEncryptionContext = Cipher(self._algorithm, modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(associated)
        encryptor.update_into(plain, sealed)
        encryptor.finalize()
        return encryptor.tag

    def open(
        self, nonce: bytes, associated: bytes, tag: bytes, sealed: memoryview, plain: memoryview
    ) -> bool:
        """Decrypts `sealed` into `plain`. When False, nothing of what lies in `plain` may be believed."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, modes

        decryptor = Cipher(self._algorithm, modes.GCM(nonce, tag)).decryptor()
        decryptor.authenticate_additional_data(associated)
        decryptor.update_into(sealed, plain)
        try:
            decryptor.finalize()
        except InvalidTag:
            return False
        return True


def read_key(path: Path) -> bytes:
    """32 bytes, as they are or in hexadecimal. Raises ConfigError for anything else."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"key file {path} cannot be read: {error.strerror}") from error
    if len(content) == KEY_FILE_BYTES:
        return content
    try:
        key = bytes.fromhex(content.decode().strip())
    except ValueError:
        key = b""
    if len(key) != KEY_FILE_BYTES:
        raise ConfigError(
            f"key file {path} must hold {KEY_FILE_BYTES} bytes, raw or in hexadecimal:"
            f" openssl rand -hex {KEY_FILE_BYTES} > {path}"
        )
    return key


def _derived(operator_key: bytes, purpose: bytes) -> bytes:
    """HMAC as a pseudo-random function; the operator's key is uniformly random, so nothing need be extracted."""
    return hmac.digest(operator_key, purpose, "sha256")
