"""Certificates: what a conformance suite proved of a plugin, and whether that still holds for what is installed here.

The side that makes them uses ``wheel_digest``, ``wheel_digest_of`` and ``manifest_digest``; core reads them with
``read_certificates`` and ``proof_of``. Nothing here imports a plugin.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from rabbet._util.files import read_text
from rabbet._util.installed import is_editable
from rabbet.contracts.kinds import MANIFEST_GROUP
from rabbet.contracts.registration import normalise_name
from rabbet.registry.entry import Entry
from rabbet.registry.policy import canonical_distribution

__all__ = [
    "CERTIFICATE",
    "SCHEMA",
    "Certificate",
    "Proof",
    "manifest_digest",
    "package_directory",
    "proof_of",
    "read_certificates",
    "wheel_digest",
    "wheel_digest_of",
]

CERTIFICATE = "certificate.json"
"""Name of the file in a plugin's package."""
SCHEMA = 1
_OUTCOMES = ("passed", "failed", "crashed", "timeout", "xfailed", "unclaimed", "unavailable")
_TEXTS = ("kind", "name", "distribution", "version", "wheel_digest", "contract")
_DEFAULT_DIRECTORY = Path("~/.config/rabbet/certificates")

ProofState = Literal["none", "certified", "stale", "failed", "unverifiable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """One run of a suite.

    Attributes:
        kind: Kind of plugin.
        name: Its name.
        distribution: Its owner.
        version: Version of the owner.
        wheel_digest: ``wheel_digest`` of what was tested.
        contract: Version of the contract, such as ``1.0``.
        arch: What it ran on, such as ``sm_90`` or ``avx512``; empty for what no device bears on.
        counts: Cases by outcome: each of passed, failed, crashed, timeout, xfailed, unclaimed, unavailable.
        source: File that it was read from.
        fields: The whole document.
        problem: Why it cannot be used, or an empty string.
    """

    kind: str = ""
    name: str = ""
    distribution: str = ""
    version: str = ""
    wheel_digest: str = ""
    contract: str = ""
    arch: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    source: Path
    fields: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def failures(self) -> int:
        """Cases that failed, crashed or did not end."""
        return sum(self.counts.get(outcome, 0) for outcome in ("failed", "crashed", "timeout"))

    @property
    def badge(self) -> str:
        """What it says, in one line of counts."""
        passed, unclaimed = self.counts.get("passed", 0), self.counts.get("unclaimed", 0)
        counts = f"{passed} pass, {self.failures} fail, {unclaimed} unclaimed"
        return " · ".join(part for part in (f"{self.kind} {self.contract}", self.arch, counts) if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What the certificates of one contribution are worth here.

    Attributes:
        state: ``none``: there is no certificate; ``certified``; ``stale``: of another wheel, version or contract;
            ``failed``: the suite found failures, or nothing passed; ``unverifiable``: damaged, or the installation
            has no wheel to compare with.
        reason: Why it is not ``certified``; empty if it is.
        certificate: The one that decided, or None.
    """

    state: ProofState
    reason: str = ""
    certificate: Certificate | None = None

    @property
    def badge(self) -> str:
        """For tables: empty without a certificate; anything but ``certified`` stands in front."""
        text = self.certificate.badge if self.certificate is not None and not self.certificate.problem else ""
        return text if self.state in ("none", "certified") else ": ".join(part for part in (self.state, text) if part)


def wheel_digest(distribution: Distribution) -> str | None:
    """sha256 over the sorted ``path,hash`` rows of RECORD; None for editable installations, which have no wheel.

    Rows of the metadata, of compiled caches, of a certificate and of what lies outside the packages (scripts) are
    left out: they differ with the installer. Equal to ``wheel_digest_of`` the wheel that was installed.
    """
    if is_editable(distribution):
        return None
    return _digest((file.as_posix(), file.hash.value if file.hash else "") for file in distribution.files or ())


def wheel_digest_of(path: Path) -> str:
    """The same digest, of a wheel file.

    Raises:
        ValueError: If the file is no wheel, or holds no RECORD.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(item for item in archive.namelist() if item.endswith(".dist-info/RECORD"))
            text = archive.read(name).decode()
    except (OSError, zipfile.BadZipFile, StopIteration, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no wheel: {error or 'it holds no RECORD'}") from error
    import csv

    rows = [(row[0], row[1].partition("=")[2]) for row in csv.reader(text.splitlines()) if len(row) > 1]
    digest = _digest(rows)
    if digest is None:
        raise ValueError(f"{path} holds no files but metadata")
    return digest


def manifest_digest(distribution: Distribution) -> str | None:
    """sha256 of the manifest's bytes; None if the distribution has none."""
    for point in distribution.entry_points:
        if point.group == MANIFEST_GROUP:
            package, _, file = point.value.partition(":")
            folder = package_directory(distribution, package)
            if folder is not None and (folder / file).is_file():
                return hashlib.sha256((folder / file).read_bytes()).hexdigest()
    return None


def read_certificates(entry: Entry, directory: Path | None = None) -> tuple[Certificate, ...]:
    """The certificates of one contribution: of its package, then of the operator's directory.

    A file holds one document or a list of them (one for each architecture). Never raises: what is damaged comes back
    with its ``problem``.

    Args:
        entry: The contribution.
        directory: The operator's; ``~/.config/rabbet/certificates`` by default. Files are named ``KIND-NAME.json``.
    """
    found: list[Certificate] = []
    distribution = entry.entry_point.dist if entry.entry_point is not None else None
    folder = package_directory(distribution, entry.value.partition(":")[0].partition(".")[0])
    if folder is not None:
        # A package may hold certificates of several contributions.
        found += [item for item in _read(folder / CERTIFICATE) if item.problem or _is_for(item, entry)]
    own = (directory or _DEFAULT_DIRECTORY).expanduser() / f"{entry.kind}-{entry.name}.json"
    found += _read(own)
    return tuple(found)


def proof_of(entry: Entry, *, arch: str | None = None, directory: Path | None = None) -> Proof:
    """What is proved of a contribution as it is installed.

    Args:
        entry: The contribution.
        arch: Only certificates of this architecture count; None takes any.
        directory: As for ``read_certificates``.
    """
    certificates = [
        item for item in read_certificates(entry, directory) if arch is None or item.problem or item.arch == arch
    ]
    if not certificates:
        return Proof(state="none", reason="it has no certificate" + (f" for {arch}" if arch else ""))
    distribution = entry.entry_point.dist if entry.entry_point is not None else None
    digest = wheel_digest(distribution) if distribution is not None else None
    proofs = [_judge(entry, certificate, digest) for certificate in certificates]
    # A failure of this very wheel outweighs a success of it: it is the same code.
    order = ("failed", "certified", "stale", "unverifiable")
    return min(proofs, key=lambda proof: order.index(proof.state))


def _judge(entry: Entry, certificate: Certificate, digest: str | None) -> Proof:
    state: ProofState = "certified"
    reason = ""
    if certificate.problem:
        state, reason = "unverifiable", f"{certificate.source}: {certificate.problem}"
    elif not _is_for(certificate, entry):
        of = f"{certificate.kind}/{certificate.name} of {certificate.distribution}"
        state, reason = "unverifiable", f"{certificate.source} is of {of}"
    elif digest is None:
        state, reason = "unverifiable", "it is not installed from a wheel, so nothing says that this code was tested"
    elif certificate.wheel_digest != digest:
        state, reason = "stale", f"the certificate is of another wheel ({certificate.version})"
    elif certificate.contract != entry.contract:
        state, reason = "stale", f"certified for contract {certificate.contract}, used under {entry.contract}"
    elif certificate.failures or not certificate.counts["passed"]:
        state, reason = "failed", f"its suite counted {certificate.counts['passed']} pass, {certificate.failures} fail"
    return Proof(state=state, reason=reason, certificate=certificate)


def _is_for(certificate: Certificate, entry: Entry) -> bool:
    same_owner = canonical_distribution(certificate.distribution) == canonical_distribution(entry.distribution)
    name = normalise_name(entry.kind, certificate.name)
    return same_owner and (certificate.kind, name) == (entry.kind, entry.name)


def _read(path: Path) -> list[Certificate]:
    if not path.is_file():
        return []
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        return [Certificate(source=path, problem=f"cannot be read: {error}")]
    return [_parse(document, path) for document in (content if isinstance(content, list) else [content])]


def _parse(document: Any, path: Path) -> Certificate:
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return Certificate(source=path, problem=f"no certificate of schema {SCHEMA}")
    for key in _TEXTS:
        if not isinstance(document.get(key), str):
            return Certificate(source=path, problem=f"its field {key!r} must be text, not {document.get(key)!r}")
    counts: Any = document.get("counts")
    for outcome in _OUTCOMES:
        value = counts.get(outcome) if isinstance(counts, dict) else None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            return Certificate(source=path, problem=f"its field 'counts.{outcome}' must be a count, not {value!r}")
    arch = document.get("arch") or ""
    if not isinstance(arch, str):
        return Certificate(source=path, problem=f"its field 'arch' must be text, not {arch!r}")
    texts = {key: document[key] for key in _TEXTS}
    return Certificate(**texts, arch=arch, counts=counts, source=path, fields=document)


def package_directory(distribution: Distribution | None, package: str) -> Path | None:
    """Where a distribution's top-level package lies; locates, never imports."""
    if distribution is not None and (folder := Path(str(distribution.locate_file(package)))).is_dir():
        return folder
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


def _digest(rows: Iterable[tuple[str, str]]) -> str | None:
    kept = []
    for text, value in rows:
        parts = PurePosixPath(text).parts
        if len(parts) > 2 and parts[0].endswith(".data") and parts[1] in ("purelib", "platlib"):
            parts = parts[2:]
        outside = not parts or parts[0] in ("..", "/") or parts[0].endswith(".data")
        if outside or "__pycache__" in parts or parts[-1] == CERTIFICATE:
            continue
        if not any(part.endswith(".dist-info") for part in parts):
            kept.append(f"{'/'.join(parts)},{value}")
    return hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest() if kept else None
