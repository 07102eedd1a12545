"""What the embedded server serves, and where: the options of ``asyncrl serve``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError, require_count
from asyncrl.learning.modelfolder import find_model

__all__ = ["ServerOptions"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What is served, and where."""

    model: Path
    """Folder with a model of the Llama family and its tokenizer, or a name of the Hugging Face hub that is in the local
    cache."""
    host: str = "127.0.0.1"
    """Anything but loopback needs ``api_key``."""
    port: int = 30_000
    """0: chosen by the system."""
    threads: int = 1
    dtype: str = "float32"
    context_length: int | None = None
    """None: the model's own."""
    max_running_requests: int = 128
    max_total_tokens: int | None = None
    """Tokens in the KV pool; None: a gigabyte, at most 65,536."""
    api_key: str | None = None
    exit_with_stdin: bool = False
    """End when standard input does."""
    random_seed: int = 0
    max_body_bytes: int = 32 * 2**20
    """Of one request; a prompt of a million tokens takes about 7 million."""

    def __post_init__(self) -> None:
        if self.host not in _LOOPBACK and not self.api_key:
            raise ConfigError.for_value(
                "--host", self.host, f"one of {', '.join(_LOOPBACK)}, or be used with an API key"
            )
        if not 0 <= self.port <= 65_535:
            raise ConfigError.for_value("--port", self.port, "between 0 and 65535")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError.for_value("--dtype", self.dtype, "float32, bfloat16 or float16")
        require_count("--threads", self.threads, least=1)
        require_count("--max-running-requests", self.max_running_requests, least=1)
        for key, value in (("context-length", self.context_length), ("max-total-tokens", self.max_total_tokens)):
            if value is not None:
                require_count(f"--{key}", value, least=2)
        object.__setattr__(self, "model", find_model(self.model, key="--model"))
