"""The settings of the directory: what this scheduler says of itself, and to which others."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from paceline.channel import Security, is_loopback
from paceline.names import check_address
from pydantic import Field, field_validator, model_validator
from service_kit.security import check_tls_files, read_token
from service_kit.settings import ServiceSettings, StringList

from scheduler_service.directory.places import one_spelling


class DirectorySettings(ServiceSettings):
    """A service that is listed in a directory, and tells its peers of itself."""

    OTHER_SECRETS: ClassVar[frozenset[str]] = frozenset({"peer_token"})
    SECRET_FILES: ClassVar[tuple[str, ...]] = (*ServiceSettings.SECRET_FILES, "peer_token_file")

    # The directory of a fleet
    advertise: str = Field(
        default="",
        max_length=512,
        description="HOST:PORT where clients reach this scheduler; with TLS, HOST as its certificate has it."
        " Turns on the directory, from which clients that know one scheduler learn of the others",
    )
    advertise_tls_name: str = Field(
        default="",
        max_length=255,
        description="name in the certificate, where that is not HOST of --advertise: several schedulers can"
        " have one certificate, and addresses that nobody knows before they start",
    )
    peer: StringList = Field(
        default=(),
        description="address of another scheduler of the directory, or a DNS name of several; repeat it",
    )
    peer_tls_ca: Path | None = Field(
        default=None,
        description="PEM certificate authority of the peers; implies TLS to them, with tls-cert as the own"
        " certificate",
    )
    peer_token_file: Path | None = Field(default=None, description="file with the token sent to peers")

    @field_validator("advertise")
    @classmethod
    def _one_spelling(cls, address: str) -> str:
        return one_spelling(address) if address else ""

    @model_validator(mode="after")
    def _reachable(self) -> DirectorySettings:
        check_tls_files(self.peer_security)
        if self.peer and not self.advertise:
            raise ValueError("--peer needs --advertise, the address that peers learn of this scheduler")
        if self.advertise_tls_name and not (self.advertise and self.tls_cert):
            raise ValueError("--advertise-tls-name needs --advertise and --tls-cert")
        for address in self.peer:
            check_address(address)
        return self

    @property
    def advertised_tls_name(self) -> str:
        """The name that the directory gives for this scheduler's certificate; empty without TLS."""
        host = self.advertise.rpartition(":")[0].strip("[]")
        return (self.advertise_tls_name or host) if self.tls_cert else ""

    @property
    def peer_security(self) -> Security:
        """TLS files and token of the connections to peers.

        Raises ValueError if the token file is unreadable or empty, the token is given twice, or a TLS
        certificate is given without its key.
        """
        token = self._sent_token(self.peer_token_file, "peer_token")
        if self.peer_tls_ca is None:
            return Security(token=token)
        return Security(self.peer_tls_ca, self.tls_cert, self.tls_key, token)

    def check_secrets(self) -> None:
        """As `ServiceSettings`, and of the token for peers."""
        super().check_secrets()
        _ = self.peer_security

    def security_warnings(self) -> list[str]:
        """As `ServiceSettings`, and one for plaintext connections to peers on other machines."""
        warnings = super().security_warnings()
        if self.peer_tls_ca is None and (far := [one for one in self.peer if not is_loopback(one)]):
            warnings.append(
                f"plaintext to peers beyond this machine ({', '.join(far)}): their token can be read on the"
                " way, and anybody there can answer in their place; --peer-tls-ca closes it"
            )
        return warnings

    def _sent_token(self, file: Path | None, name: str) -> str:
        """The token in a file or a secret; "" without either. Raises ValueError if it is given twice."""
        token, secret = read_token(file), self._secrets.get(name, "")
        if token and secret:
            flag = name.replace("_", "-")
            raise ValueError(f"the {flag} is given twice: --{flag}-file and a secret")
        return token or secret
