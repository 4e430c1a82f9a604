"""``rabbet-sdk certify``: runs the suite on what is installed and writes the certificate that ``rabbet plugins list`` shows."""

from __future__ import annotations

import datetime
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rabbet.registry.certificate import SCHEMA, manifest_digest, wheel_digest, wheel_digest_of
from rabbet_sdk import SUITE_VERSION
from rabbet_sdk.check import CheckResult
from rabbet_sdk.conformance.subject import find_entry

__all__ = ["CertifyError", "certificate_of", "write_certificate"]


class CertifyError(Exception):
    """There is nothing that a certificate could be bound to; the message says what to install."""


def certificate_of(result: CheckResult, *, arch: str, wheel: Path | None = None) -> dict[str, Any]:
    """The certificate of a run, as ``rabbet.registry.certificate`` reads it.

    Args:
        result: The run; a failed one gives a certificate too, which says so.
        arch: Architecture of the device that it ran on; empty for what no device bears on.
        wheel: The wheel that was installed; compared with the installation.

    Raises:
        CertifyError: If the installation is editable, or is not the wheel's.
    """
    entry = find_entry(result.plugin)
    distribution = entry.entry_point.dist if entry.entry_point is not None else None
    digest = wheel_digest(distribution) if distribution is not None else None
    if digest is None:
        raise CertifyError(
            f"{entry.distribution} {entry.version} is installed in editable form, which has no wheel to bind a certificate "
            "to; build it (python -m build --wheel), install the wheel, and certify that"
        )
    if wheel is not None and wheel_digest_of(wheel) != digest:
        raise CertifyError(
            f"what is installed as {entry.distribution} {entry.version} is not {wheel}; install it first"
        )
    return {
        "schema": SCHEMA,
        "kind": entry.kind,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "wheel_digest": digest,
        "manifest_digest": manifest_digest(distribution) if distribution is not None else None,
        "suite_version": SUITE_VERSION,
        "contract": result.contract,
        "device": result.device,
        "arch": arch,
        "torch": _installed("torch"),
        "python": platform.python_version(),
        "counts": {name: count for name, count in result.counts.items() if name != "pending"},
        "worst_error": result.worst_error,
        "claims_covered": list(result.covered),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def write_certificate(certificate: dict[str, Any], directory: Path) -> Path:
    """Write ``KIND-NAME.json`` into ``directory``, beside certificates for other architectures; returns the file."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{certificate['kind']}-{certificate['name']}.json"
    known: list[dict[str, Any]] = []
    if file.is_file():
        read = json.loads(file.read_text(encoding="utf-8"))
        known = [
            item for item in (read if isinstance(read, list) else [read]) if item.get("arch") != certificate["arch"]
        ]
    everything = [*known, certificate]
    file.write_text(json.dumps(everything if len(everything) > 1 else certificate, indent=1) + "\n", encoding="utf-8")
    return file


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
