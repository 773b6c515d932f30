"""The certificates of a person, as files: written in one step, found again, and unharmed by what else is in the folder."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...errors import ConfigurationError, cause
from ...quantities import counted
from .certificates import Certificate, Identity
from .expiry import changes, refused_because, why_none

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
        found = self.own(identity)
        return found if isinstance(found, Certificate) and not refused_because(found) else None

    def own(self, identity: Identity) -> Certificate | str | None:
        """Return what is stored for an identity: a certificate, why it is none, or ``None`` where there is nothing."""
        found = self.read(self.file(identity))
        return None if isinstance(found, Certificate) and found.identity.key != identity.key else found

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
        own = self.own(identity)
        if isinstance(own, Certificate):
            reason = refused_because(own)
            return reason and f"its certificate does not count: {reason}"
        if own is not None:
            return f"its certificate is damaged ({own})"
        certificates, damaged = self.others(identity)
        unreadable = f", and {counted(damaged, 'file')} in its folder cannot be read" if damaged else ""
        return why_none(certificates, identity) or f"there is no certificate{unreadable}"

    def others(self, identity: Identity) -> tuple[list[Certificate], int]:
        """Return the certificates of the same model in the same type that counted once, or elsewhere, and how many files are none."""
        found = [self.read(file) for file in sorted(self.folder.glob("*.json"))]
        others = [one for one in found if isinstance(one, Certificate) and of_same_model(one.identity, identity)]
        # One without changes counts under its own name: this file was renamed.
        certificates = [one for one in others if changes(one.identity, identity) and not refused_because(one)]
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

    Raises:
        ConfigurationError: Where the variable names the home of nobody.

    Example:
        >>> certificate_store({"OPENMED_NB_DATA": "notes/data"}).folder.as_posix()
        'notes/data/certificates'
    """
    named = environ.get(DATA_VARIABLE)
    try:
        folder = Path(named).expanduser() if named else usual_folder()
    except RuntimeError as error:  # So pathlib says that a person has no home.
        what = f"{DATA_VARIABLE} is {named!r}, and that home is not known."
        raise ConfigurationError(what, f"Set {DATA_VARIABLE} to the full path of a folder.") from error
    return CertificateStore(folder / "certificates")


def usual_folder() -> Path:
    """Return the system's place for what a program keeps for a person."""
    import platformdirs

    return platformdirs.user_data_path("openmed_nb", appauthor=False)
