"""Encryption at rest of the SSD tier: AES-256-GCM under a key of the folder, derived from the operator's key file."""

import hmac
from pathlib import Path
from typing import TYPE_CHECKING

from moonserve.protocol.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext

KEY_FILE_BYTES = 32
_PURPOSE_OBJECTS = b"moonserve objects at rest"
_PURPOSE_CHECK = b"moonserve key check"


class AesGcm:
    """Encryption at rest: encrypts and decrypts objects under a key that only this folder uses. Thread-safe."""

    name = "aes-256-gcm"

    def __init__(self, operator_key: bytes, folder_id: bytes) -> None:
        """Raises ConfigError if the package `cryptography` is missing."""
        try:
            from cryptography.hazmat.primitives import ciphers
            from cryptography.hazmat.primitives.ciphers import algorithms, modes
        except ImportError as error:
            raise ConfigError(
                "encryption at rest needs the package cryptography: pip install 'moonserve[encryption]'"
            ) from error
        self._cipher, self._mode = ciphers.Cipher, modes.GCM
        self._algorithm = algorithms.AES(_derive_key(operator_key, _PURPOSE_OBJECTS + folder_id))
        self.key_check = _derive_key(operator_key, _PURPOSE_CHECK + folder_id)[:16].hex()
        """Detects a wrong key before the first object is read; reveals nothing about the right one."""

    def seal(self, nonce: bytes, associated: bytes, plain: memoryview, sealed: memoryview) -> bytes:
        """Encrypts `plain` into `sealed`, separate memory of the same length. Returns the tag."""
        encryptor: AEADEncryptionContext = self._cipher(self._algorithm, self._mode(nonce)).encryptor()
        encryptor.authenticate_additional_data(associated)
        encryptor.update_into(plain, sealed)
        encryptor.finalize()
        return encryptor.tag

    def open(self, nonce: bytes, associated: bytes, tag: bytes, sealed: memoryview, plain: memoryview) -> bool:
        """Decrypts `sealed` into `plain`. If it returns False, the content of `plain` is not valid."""
        from cryptography.exceptions import InvalidTag

        decryptor = self._cipher(self._algorithm, self._mode(nonce, tag)).decryptor()
        decryptor.authenticate_additional_data(associated)
        decryptor.update_into(sealed, plain)
        try:
            decryptor.finalize()
        except InvalidTag:
            return False
        return True


def read_key(path: Path) -> bytes:
    """Reads a key of 32 bytes, raw or in hexadecimal. Raises ConfigError for anything else."""
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


def _derive_key(operator_key: bytes, purpose: bytes) -> bytes:
    """Derives a key by HMAC as a pseudo-random function. The operator's key is uniformly random: no extraction."""
    return hmac.digest(operator_key, purpose, "sha256")
