"""Certificate authority for tests, made with the openssl command."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from moonserve.protocol.process.tls import TlsFiles
from moonserve.transfer import TransferOptions
from tests.processes import binary

_NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
_MAY_SIGN = "-addext keyUsage=critical,keyCertSign,cRLSign"  # without it Python 3.13 rejects all its certificates


@dataclass(frozen=True)
class Files:
    """TLS files of one engine."""

    certificate: Path
    key: Path
    authority: Path

    @property
    def tls(self) -> TlsFiles:
        """The files in the form that processes take."""
        return TlsFiles(self.certificate, self.key, self.authority)

    @property
    def flags(self) -> tuple[str, ...]:
        """Command-line flags for `moonserve serve` and for every process."""
        named = {"--tls-certificate": self.certificate, "--tls-key": self.key, "--tls-authority": self.authority}
        return tuple(str(part) for pair in named.items() for part in pair)

    def transfer_options(self) -> TransferOptions:
        return TransferOptions(transports=("tcp",), tls=self.tls)


class Authority:
    """Certificate authority in a folder. `name` distinguishes the files of several authorities."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = name
        self.certificate, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        openssl(
            f"req -x509 {_NEW_KEY} -days 2 -subj /CN={name} {_MAY_SIGN} -keyout {self._key} -out {self.certificate}"
        )

    def sign(self, name: str, *, days: int = 2, names: str = "") -> Files:
        """Makes a certificate for an engine. `names`: a subjectAltName such as "IP:127.0.0.1"."""
        stem = self._folder / f"{self._name}-{name}"
        request, certificate, key = (Path(f"{stem}.{kind}") for kind in ("csr", "pem", "key"))
        extension = f"-addext subjectAltName={names}" if names else ""
        openssl(f"req {_NEW_KEY} -subj /CN={name} {extension} -keyout {key} -out {request}")
        openssl(
            f"x509 -req -in {request} -CA {self.certificate} -CAkey {self._key} "
            f"-copy_extensions copy -days {days} -out {certificate}"
        )
        return Files(certificate, key, self.certificate)


def openssl(command: str) -> None:
    subprocess.run(["openssl", *command.split()], check=True, capture_output=True)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Shared authority for all tests that need no other."""
    binary("openssl")
    return Authority(tmp_path_factory.mktemp("authority"))
