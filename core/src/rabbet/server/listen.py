"""The listening socket: bound before the engine loads, so that a port in use is said at once."""

from __future__ import annotations

import contextlib
import socket
import ssl
import stat
from pathlib import Path

from rabbet._util.files import read_bytes
from rabbet.config.schema import ServerConfig
from rabbet.errors import ConfigError

__all__ = ["address_of", "bind", "check_tls", "release", "url_of"]

_BACKLOG = 2048


def bind(server: ServerConfig) -> socket.socket:
    """A socket that listens.

    Raises:
        ConfigError: If ``--uds`` names a file that is no socket.
        OSError: If the address is taken, forbidden or unknown.
    """
    if server.uds:
        return _bind_unix(Path(server.uds))
    host = server.host or "0.0.0.0"
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, server.port))
        listener.listen(_BACKLOG)
    except (OSError, TypeError) as error:
        listener.close()
        # A name that has no form in ASCII.
        raise (error if isinstance(error, OSError) else OSError(str(error))) from None
    return listener


def _bind_unix(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"--uds {path} exists and is no socket; choose another path", field="uds")
        _remove_if_dead(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_if_dead(path: Path) -> None:
    """Remove what a killed server left; the socket of a living one stays, and binding to it fails."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def check_tls(server: ServerConfig) -> None:
    """Load certificate and key.

    Raises:
        ConfigError: If they cannot be used, with the cause.
    """
    if server.ssl_certfile is None:
        return
    try:
        for name in (server.ssl_certfile, server.ssl_keyfile or ""):
            read_bytes(name, limit=1 << 20)
        # Without a password given, OpenSSL would ask for it on a terminal where nobody is.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password="")
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--ssl-certfile {server.ssl_certfile} and --ssl-keyfile {server.ssl_keyfile} cannot be used: {cause}; both "
            "must be PEM files, the key without a password and that of the certificate",
            field="ssl_certfile",
        ) from error


def release(server: ServerConfig, listener: socket.socket) -> None:
    """Close the socket, and remove its file."""
    listener.close()
    if server.uds:
        Path(server.uds).unlink(missing_ok=True)


def address_of(server: ServerConfig) -> str:
    """What was asked for, for messages."""
    return server.uds or f"{server.host or '0.0.0.0'}:{server.port}"


def reach_of(server: ServerConfig) -> str:
    """Who else finds it, for the line that says where it is: empty where ``--host`` or a socket file says it."""
    if server.uds or (server.host or "0.0.0.0") not in ("0.0.0.0", "::"):
        return ""
    return f" (and at every address of this machine, {'with' if server.api_key else 'without'} a key)"


def url_of(server: ServerConfig, listener: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    if server.uds:
        return f"unix:{server.uds}"
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    scheme = "https" if server.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{server.root_path}"
