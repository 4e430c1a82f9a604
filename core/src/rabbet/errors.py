"""The tree of Rabbet's exceptions, and what a front end needs to answer with them.

RabbetError
|- ClientError (ValueError)           the request is wrong; HTTP 4xx
|  |- InvalidRequestError             400
|  |  `- ContextLengthError           400, code ``context_length_exceeded``
|  `- ModelNotFoundError              404
|- OverloadedError                    503, try again later
|- ConfigError (ValueError)           the start-up options are wrong; exit status 2
|  `- RemovedOptionError              an option that is gone, with what replaced it
|- WeightsError                       a checkpoint is missing, corrupt or does not fit the model
|- PluginError                        a plugin is unknown, broken, refused or in conflict
|  |- UnknownPluginError
|  |- DuplicatePluginError
|  |- PluginPolicyError
|  |- IncompatiblePluginError
|  |- PluginLoadError
|  |- PluginRefusedError
|  `- CompositionMismatchError
`- ServerError                        our fault; HTTP 5xx
   |- RequestFailedError              this one request failed; the engine lives
   `- EngineDeadError                 the engine process is gone
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rabbet.contracts.support import Refusal

__all__ = [
    "ClientError",
    "CompositionMismatchError",
    "ConfigError",
    "ContextLengthError",
    "DuplicatePluginError",
    "EngineDeadError",
    "IncompatiblePluginError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "OverloadedError",
    "PluginError",
    "PluginLoadError",
    "PluginPolicyError",
    "PluginRefusedError",
    "RabbetError",
    "RemovedOptionError",
    "RequestFailedError",
    "ServerError",
    "UnknownPluginError",
    "WeightsError",
    "shorten",
]

_MAX_VALUE_CHARS = 64
_MAX_LINE_CHARS = 2000


def shorten(value: object) -> str:
    """``repr(value)`` cut to 64 characters, so that a hostile value cannot flood a message."""
    # Large containers are not rendered in full first: the repr alone could take seconds.
    if isinstance(value, str | bytes | list | tuple) and len(value) > _MAX_VALUE_CHARS:
        value = value[:_MAX_VALUE_CHARS]
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        text = f"a very long {type(value).__name__}"
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


class RabbetError(Exception):
    """Base of every error that Rabbet raises on purpose. A line that is too long, for all that a user wrote, is cut."""

    def __init__(self, message: str = "") -> None:
        lines = message.split("\n") if len(message) > _MAX_LINE_CHARS else [message]
        cut = [f"{line[:600]} ... {line[-300:]}" if len(line) > _MAX_LINE_CHARS else line for line in lines]
        super().__init__("\n".join(cut))


class ClientError(RabbetError, ValueError):
    """The caller's request is wrong.

    Attributes:
        field: Name of the offending field as the caller spelt it, or None.
        value: The offending value, or None.
        code: Machine-readable code of the OpenAI error object, or None.
        status: HTTP status.
    """

    status = 400

    def __init__(self, message: str, *, field: str | None = None, value: Any = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.code = code


class InvalidRequestError(ClientError):
    """A field of the request has a wrong type or lies outside its range."""


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output do not fit into the context."""

    def __init__(self, message: str, *, field: str | None = None, value: Any = None) -> None:
        super().__init__(message, field=field, value=value, code="context_length_exceeded")


class ModelNotFoundError(ClientError):
    """The request names a model that this server does not serve."""

    status = 404

    def __init__(self, message: str, *, value: Any = None) -> None:
        super().__init__(message, field="model", value=value, code="model_not_found")


class OverloadedError(RabbetError):
    """The queue is full; nothing was accepted and the caller may try again.

    Attributes:
        retry_after_s: Seconds after which a new try makes sense.
    """

    status = 503

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConfigError(RabbetError, ValueError):
    """An option is unknown, has a bad value, or contradicts another one.

    Attributes:
        field: Dotted path of the option, e.g. ``cache.block_size``, or None.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class RemovedOptionError(ConfigError):
    """An option that older engines had; the message says what replaced it."""


class WeightsError(RabbetError):
    """A checkpoint cannot be used.

    Attributes:
        file: Path of the file concerned, or None.
        tensor: Name of the tensor concerned, or None.
    """

    def __init__(self, message: str, *, file: str | None = None, tensor: str | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.tensor = tensor


class PluginError(RabbetError):
    """Base of everything that can be wrong with a plugin.

    Attributes:
        kind: Kind of plugin, e.g. ``attention``, or None.
        name: Name of the plugin within its kind, or None.
    """

    def __init__(self, message: str, *, kind: str | None = None, name: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.name = name


class UnknownPluginError(PluginError):
    """No installed plugin of that kind has that name."""


class DuplicatePluginError(PluginError):
    """Two distributions provide the same name of the same kind."""


class PluginPolicyError(PluginError):
    """An allow or deny rule forbids the plugin, or matches nothing."""


class IncompatiblePluginError(PluginError):
    """The plugin was written for another version of its contract, or for another build of torch."""


class PluginLoadError(PluginError):
    """Importing or registering a chosen plugin failed; ``__cause__`` holds the original error."""


class PluginRefusedError(PluginError):
    """A plugin that was named explicitly cannot serve this model on this machine.

    Attributes:
        refusals: Every reason, in the order in which the plugin gave them.
    """

    def __init__(
        self, message: str, *, kind: str | None = None, name: str | None = None, refusals: Sequence[Refusal] = ()
    ) -> None:
        super().__init__(message, kind=kind, name=name)
        self.refusals = tuple(refusals)


class CompositionMismatchError(PluginError):
    """A process holds other plugins than the process that decided."""


class ServerError(RabbetError):
    """Something on our side failed.

    Attributes:
        request_id: The request concerned, or None.
        plugin: ``kind/name`` of the plugin in which it happened, or None.
    """

    status = 500

    def __init__(self, message: str, *, request_id: str | None = None, plugin: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.plugin = plugin


class RequestFailedError(ServerError):
    """One request failed while it was served; the others go on."""


class EngineDeadError(ServerError):
    """The engine process has ended or does not answer; no request can be served any more."""

    status = 503
