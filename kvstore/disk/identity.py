"""Identity of a folder (`folder.json`), its lock and its encryption. Blocking; errors are ConfigErrors at startup."""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.disk.files import replace_durably
from kvstore.disk.format import FORMAT_VERSION
from protocol.errors import ConfigError

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
        self._algorithm = algorithms.AES(_derived(operator_key, _PURPOSE_OBJECTS + folder_id))
        self.key_check = _derived(operator_key, _PURPOSE_CHECK + folder_id)[:16].hex()
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


def _derived(operator_key: bytes, purpose: bytes) -> bytes:
    """Derives a key by HMAC as a pseudo-random function. The operator's key is uniformly random: no extraction."""
    return hmac.digest(operator_key, purpose, "sha256")


NO_CIPHER = "none"
_FILE = "folder.json"
_LOCK = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Content of `folder.json`."""

    format: int
    folder_id: str  # 16 random bytes in hexadecimal
    cipher: str
    key_check: str
    numbers_below: int  # all segment numbers ever used are below this


def lock(path: Path) -> int:
    """Creates the folder if needed and locks it until the file descriptor is closed. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path / _LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"SSD folder {path} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"SSD folder {path} is in use by another process") from error
    return fd


def identify(path: Path, key_file: Path | None, *, used: bool) -> tuple[Identity, AesGcm | None]:
    """Returns the identity, created for a new folder; a `used` folder must have one. Raises ConfigError."""
    key = read_key(key_file) if key_file else None
    try:
        identity = read(path)
    except FileNotFoundError:
        if used:
            raise ConfigError(f"{path} holds segments but no {_FILE}: restore it, or empty the folder") from None
        return _new(path, key)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path / _FILE} cannot be read: {error}") from error
    return identity, _cipher_of(identity, path, key)


def read(path: Path) -> Identity:
    """Reads the identity. Raises OSError, or ValueError or TypeError for an invalid file."""
    identity = Identity(**json.loads((path / _FILE).read_text()))
    if len(bytes.fromhex(identity.folder_id)) != 16 or not isinstance(identity.numbers_below, int):
        raise ValueError("it is damaged")
    return identity


def write(path: Path, identity: Identity) -> None:
    """Replaces the identity atomically and durably. Raises OSError."""
    replace_durably(path / _FILE, json.dumps(asdict(identity)))


def _new(path: Path, key: bytes | None) -> tuple[Identity, AesGcm | None]:
    folder_id = secrets.token_bytes(16)
    cipher = AesGcm(key, folder_id) if key else None
    identity = Identity(
        format=FORMAT_VERSION,
        folder_id=folder_id.hex(),
        cipher=cipher.name if cipher else NO_CIPHER,
        key_check=cipher.key_check if cipher else "",
        numbers_below=1,
    )
    try:
        write(path, identity)
    except OSError as error:
        raise ConfigError(f"SSD folder {path} cannot be written to: {error.strerror}") from error
    return identity, cipher


def _cipher_of(identity: Identity, path: Path, key: bytes | None) -> AesGcm | None:
    if identity.format != FORMAT_VERSION:
        raise ConfigError(f"{path} has format {identity.format}, this version reads {FORMAT_VERSION}: empty it")
    if identity.cipher == NO_CIPHER:
        if key:
            raise ConfigError(f"{path} is not encrypted: empty it, or leave out the key file")
        return None
    if identity.cipher != AesGcm.name or not key:
        raise ConfigError(f"{path} is encrypted with {identity.cipher}: its key file is needed")
    cipher = AesGcm(key, bytes.fromhex(identity.folder_id))
    if cipher.key_check != identity.key_check:
        raise ConfigError(f"{path} was encrypted with another key than the key file's")
    return cipher
