"""The certificates of a person, as files: written in one step, found again, and unharmed by what else is in the folder."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...errors import ConfigurationError, cause
from ...quantities import counted
from .certificates import Certificate, Identity, changes, expired_because

DATA_VARIABLE = "OPENMED_NB_DATA"
"""The folder of what is kept for the person; where it is not set, the system's own place for such things."""


class CertificateStore:
    """The certificates of a person, a file each; what is no certificate among them is left alone.

    Args:
        folder: Where they are; made when the first is stored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, identity: Identity) -> Certificate | None:
        """Return the certificate that counts for an identity, ``None`` where there is none."""
        found = self.read(self.file(identity))
        return found if isinstance(found, Certificate) and not changes(found.identity, identity) else None

    def store(self, certificate: Certificate) -> Path:
        """Write a certificate in one step, in the place of an older one of the same identity; return its file.

        Raises:
            ConfigurationError: Where it cannot be written.
        """
        file, text = self.file(certificate.identity), json.dumps(certificate.to_dict(), indent=2)
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as aside:
                part = Path(aside) / file.name
                part.write_text(text, "utf-8")
                part.replace(file)
        return file

    def remove(self, identity: Identity) -> bool:
        """Remove the certificate of an identity; return whether there was one.

        Raises:
            ConfigurationError: Where it cannot be removed.
        """
        file = self.file(identity)
        there = file.is_file()
        if there:
            with self.writing():
                file.unlink(missing_ok=True)
        return there

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what a file system says into an error with a remedy.

        Raises:
            ConfigurationError: Where the folder cannot be written.
        """
        try:
            yield
        except OSError as error:
            what = f"Certificates cannot be kept in {str(self.folder)!r}: {cause(error)}."
            raise ConfigurationError(what, f"Set {DATA_VARIABLE} to a folder that can be written.") from error

    def explain(self, identity: Identity) -> str:
        """Return why no certificate counts for an identity, in words; empty where one does."""
        if self.find(identity):
            return ""
        own = self.read(self.file(identity))
        if isinstance(own, str):
            return f"its certificate is damaged ({own})"
        certificates, damaged = self.others(identity)
        if certificates:
            nearest = min(certificates, key=lambda one: (len(changes(one.identity, identity)), one.date))
            return f"its certificate expired: {expired_because(nearest, identity)}"
        return "there is no certificate" + (
            f", and {counted(damaged, 'file')} in its folder cannot be read" if damaged else ""
        )

    def others(self, identity: Identity) -> tuple[list[Certificate], int]:
        """Return the certificates of the same model in the same type, and how many files are no certificates."""
        found = [self.read(file) for file in sorted(self.folder.glob("*.json"))]
        certificates = [one for one in found if isinstance(one, Certificate) and of_same_model(one.identity, identity)]
        return certificates, sum(isinstance(one, str) for one in found)

    def file(self, identity: Identity) -> Path:
        """Return where the certificate of an identity is stored."""
        return self.folder / f"{identity.key}.json"

    def read(self, file: Path) -> Certificate | str | None:
        """Return the certificate of a file, why it is none, or ``None`` where there is no file."""
        try:
            return Certificate.of(json.loads(file.read_text("utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            return cause(error)


def of_same_model(one: Identity, other: Identity) -> bool:
    """Tell whether two identities are of one model in one type: by its name, or where that differs by its weights."""
    return one.dtype == other.dtype and (one.model == other.model or one.weights == other.weights)


def certificate_store(environ: Mapping[str, str]) -> CertificateStore:
    """Return the store of the person whose environment this is.

    Example:
        >>> certificate_store({"OPENMED_NB_DATA": "notes/data"}).folder.as_posix()
        'notes/data/certificates'
    """
    import platformdirs

    named = environ.get(DATA_VARIABLE)
    folder = Path(named).expanduser() if named else platformdirs.user_data_path("openmed_nb", appauthor=False)
    return CertificateStore(folder / "certificates")
