"""Options of the SGLang rollout engine: servers, requests, and transport of new weights."""

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import SplitResult, urlsplit

from slime_tis.errors import quoted
from slime_tis.options.fields import Limits, check_fields, flag, option
from slime_tis.options.flags import flags_of

sglang_option = partial(option, group="SGLang servers", needs=("--rollout-engine=sglang",))

MAX_HOST = 253
"""Characters of a host name, by RFC 1035."""
PREFIX = "--sglang-"
OWN_FLAGS = {
    "api-key": "put the key into the environment variable that --sglang-api-key-env names",
    "admin-api-key": (
        "put the key into the environment variable that --sglang-admin-api-key-env names"
    ),
    "model-path": "servers get the --hf-checkpoint",
    "host": "servers listen on this machine alone",
    "port": "choose the first of the ports with --sglang-base-port",
}
"""Server flags that the run sets itself, and what to do instead."""
SECRET_FLAG = re.compile(
    r"(.*-)?(api-?key|keyfile-p\w*|watermark-key\w*|(private|secret|access|auth)-key|passw\w*|"
    r"passphrase|secret|credentials?|(auth|access|hf|bearer|api)-token)s?(-\w)?"
)
"""Names of server flags whose value nobody may see."""
VARIABLE = "-env"
"""Ending of such a flag if its value names an environment variable."""

WEIGHT_TRANSPORTS = {
    "distributed": "slime_tis.trainer.engines.servers.weights.distributed:DistributedSync",
    "disk": "slime_tis.trainer.engines.servers.weights.disk:DiskSync",
}
"""Classes by value of --sglang-weight-sync; they implement `weights.protocol.WeightSync`."""
if TYPE_CHECKING:
    WeightTransport = str
else:
    WeightTransport = Literal[tuple(WEIGHT_TRANSPORTS)]


@dataclass(frozen=True, kw_only=True)
class SGLangConfig:
    """Running servers, a router, or servers to launch, and how the run uses them."""

    sglang_url: tuple[str, ...] | None = sglang_option(None, metavar="URL")
    """Running SGLang servers, as http://HOST:PORT."""
    sglang_router_ip: str | None = sglang_option(None, metavar="ADDRESS")
    """Address of a running SGLang router; weights go to the servers that it names."""
    sglang_router_port: Annotated[int | None, Limits(ge=1, le=65_535)] = sglang_option(None)
    """Port of the router."""
    sglang_launch: Annotated[int | None, Limits(ge=1, le=1_024)] = sglang_option(None)
    """Number of servers to start on this machine and stop at the end."""
    sglang_server_args: tuple[str, ...] | None = sglang_option(
        None, metavar="WORD", needs=("--sglang-launch",)
    )
    """Flags of launched servers; other flags --sglang-NAME are passed to them as --NAME."""
    sglang_python: str | None = sglang_option(None, metavar="PYTHON", needs=("--sglang-launch",))
    """Python interpreter of the environment that has sglang; unset: this program's."""
    sglang_base_port: Annotated[int, Limits(ge=1, le=65_535)] = sglang_option(
        30000, needs=("--sglang-launch",)
    )
    """First port of launched servers; ports in use are skipped."""
    sglang_log_dir: str | None = sglang_option(None, metavar="DIR", needs=("--sglang-launch",))
    """Directory for the output of launched servers; unset: output_dir."""
    sglang_startup_timeout: Annotated[float, Limits(gt=0, le=1_000_000)] = sglang_option(600.0)
    """Longest wait for servers to start, in seconds."""
    sglang_request_timeout: Annotated[float, Limits(gt=0, le=1_000_000)] = sglang_option(600.0)
    """Longest wait for one answer, in seconds."""
    sglang_concurrency: Annotated[int, Limits(ge=1, le=65_536)] = sglang_option(64)
    """Requests in flight per server."""
    sglang_max_retries: Annotated[int, Limits(ge=0, le=1_000)] = sglang_option(5)
    """Retries of a request after a server failure."""
    sglang_recovery_timeout: Annotated[float, Limits(gt=0, le=1_000_000)] = sglang_option(120.0)
    """Longest wait without any server, in seconds; then the run saves and stops."""
    sglang_weight_sync: WeightTransport = sglang_option("distributed")
    """Transport of weights: broadcast over NCCL (gloo without GPUs), or safetensors on a shared
    disk."""
    sglang_weight_dir: str | None = sglang_option(
        None, metavar="DIR", needs=("--sglang-weight-sync=disk",)
    )
    """Directory for weights, shared with the servers; unset: `sglang_weights` in output_dir."""
    sglang_sync_address: str | None = sglang_option(
        None, metavar="ADDRESS", needs=("--sglang-weight-sync=distributed",)
    )
    """Address at which servers reach this program; unset: the interface that faces the servers."""
    sglang_bucket_mb: Annotated[int, Limits(ge=1, le=1_000_000)] = sglang_option(512)
    """Weights sent or written at once, MiB."""
    sglang_api_key_env: str = sglang_option("SGLANG_API_KEY", metavar="NAME")
    """Environment variable with the servers' API key."""
    sglang_admin_api_key_env: str = sglang_option("SGLANG_ADMIN_API_KEY", metavar="NAME")
    """Environment variable with the servers' admin key; without it, the API key is used."""

    def __post_init__(self) -> None:
        check_fields(self)
        _check_sources(self)
        if self.sglang_sync_address in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"--sglang-sync-address is {quoted(self.sglang_sync_address)} but must be an"
                " address that servers reach."
            )
        check_server_args(self.sglang_server_args or ())
        for name in ("sglang_api_key_env", "sglang_admin_api_key_env"):
            if not getattr(self, name).isidentifier():  # maybe the key itself: it is not repeated
                raise ValueError(
                    f"{flag(name)} must be the name of an environment variable, such as"
                    " SGLANG_API_KEY, not the key."
                )

    @property
    def server_urls(self) -> tuple[str, ...]:
        """The normalized URLs of `sglang_url`; empty if it is unset."""
        return tuple(normalized_url(url) for url in self.sglang_url or ())

    @property
    def bucket_bytes(self) -> int:
        """Weights sent or written at once, in bytes."""
        return self.sglang_bucket_mb << 20

    @property
    def router_url(self) -> str | None:
        """The router's URL, or None without one."""
        if self.sglang_router_ip is None:
            return None
        return f"http://{bracketed(self.sglang_router_ip)}:{self.sglang_router_port}"

    @property
    def api_key(self) -> str | None:
        """The key in the environment variable; None if that is unset or empty. Never log it."""
        return os.environ.get(self.sglang_api_key_env) or None

    @property
    def admin_api_key(self) -> str | None:
        """The admin key in its environment variable, None if unset or empty. Never log it."""
        return os.environ.get(self.sglang_admin_api_key_env) or None

    def check_has_servers(self) -> None:
        """Refuses a configuration that names no server."""
        if not _sources(self):
            raise ValueError(
                "--rollout-engine is sglang but no server is named; add --sglang-url URL,"
                " --sglang-router-ip with --sglang-router-port, or --sglang-launch N."
            )


def normalized_url(url: str, flag: str = "--sglang-url") -> str:
    """Returns a URL without trailing slash and with the host in lower case.

    Raises:
        ValueError: The URL is malformed, or has credentials or a query.
    """
    parts = split_url(url)
    if (
        parts is None
        or not url.isprintable()
        or parts.scheme not in ("http", "https")
        or not parts.hostname
    ):
        raise ValueError(
            f"{flag} is {quoted(shown_url(url))} but must be http://HOST:PORT or https://HOST:PORT."
        )
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            f"{flag} for {parts.hostname} holds a user name, password or query, which logs and"
            " config.yaml would show; put a secret into an environment variable, for"
            " --sglang-api-key-env or a --custom-rm-path function."
        )
    host = bracketed(parts.hostname)
    if parts.port is not None:
        host += f":{parts.port}"
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"


def is_loopback(url: str) -> bool:
    """Whether a URL's host is this machine's loopback."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bracketed(host: str) -> str:
    """A host as URLs spell it: IPv6 addresses in brackets."""
    if ":" in host and not host.startswith("["):
        return f"[{host}]"
    return host


def split_url(url: str) -> SplitResult | None:
    """Returns the parts of a URL; None if it is malformed."""
    try:
        parts = urlsplit(url.strip())
        has_valid_port = parts.port != 0  # reading the port raises if it is no number
    except ValueError:
        return None
    if not has_valid_port:
        return None
    return parts


def shown_url(url: str) -> str:
    """A URL for a message, without what may be secret."""
    return url.split("?")[0].rsplit("@", 1)[-1]


def _sources(config: SGLangConfig) -> dict[str, object]:
    named = {
        "--sglang-url": " ".join(shown_url(url) for url in config.sglang_url or ()) or None,
        "--sglang-router-ip": config.sglang_router_ip,
        "--sglang-launch": config.sglang_launch,
    }
    return {source: value for source, value in named.items() if value is not None}


def _check_sources(config: SGLangConfig) -> None:
    urls = config.server_urls
    for url in urls:
        if urls.count(url) > 1:
            raise ValueError(
                f"--sglang-url names {url} {urls.count(url)} times; name each server once."
            )
        if len(urlsplit(url).hostname or "") > MAX_HOST:
            raise ValueError(f"--sglang-url has a host name with more than {MAX_HOST} characters.")
    named = " and ".join(f"{source} is {value}" for source, value in _sources(config).items())
    if " and " in named:
        raise ValueError(f"{named}; servers come from one source; keep one of them.")
    ip = config.sglang_router_ip
    port = config.sglang_router_port
    if (ip is None) != (port is None):
        raise ValueError(
            f"--sglang-router-ip is {ip} and --sglang-router-port {port}; give both or neither."
        )
    if ip is None:
        return
    is_host = split_url(f"http://{bracketed(ip)}") == SplitResult("http", bracketed(ip), "", "", "")
    if not is_host or len(ip) > MAX_HOST or any(character.isspace() for character in ip):
        raise ValueError(
            f"--sglang-router-ip is {quoted(shown_url(ip))} but must be an address or a host name."
        )


def check_server_args(args: Sequence[str]) -> None:
    """Refuses secrets, and flags that the run sets, also in the short forms of argparse."""
    beginning, *flags = flags_of(args)
    if beginning.values:
        raise ValueError(
            f"--sglang-server-args begins with {quoted(args[0])} but must begin with a flag, such"
            " as --tp-size."
        )
    for one in flags:
        _check_secret(
            f"--sglang-server-args has {one.name}",
            one.name[2:].replace("_", "-").lower(),
            one.values,
        )
        for own, instead in OWN_FLAGS.items():
            if own.startswith(one.name[2:]) and len(one.name) > 3:
                raise ValueError(
                    f"--sglang-server-args has {one.name}, which the run sets itself; {instead}."
                )


def _check_secret(given: str, name: str, values: Sequence[str]) -> None:
    """Refuses a flag with a secret as its value, and an unset environment variable.

    Messages never show the value.
    """
    if SECRET_FLAG.fullmatch(name) and name not in OWN_FLAGS:
        raise ValueError(
            f"{given}, but a secret would be seen in the list of processes, in config.yaml and in"
            " reports; put it into an environment variable and name that:"
            f" --sglang-{name}{VARIABLE} VARIABLE."
        )
    if name.endswith(VARIABLE) and SECRET_FLAG.fullmatch(name.removesuffix(VARIABLE)):
        variable = "".join(values[:1])
        if not variable.isidentifier():
            raise ValueError(
                f"{given}, but what follows is not the name of an environment variable; give its"
                " name."
            )
        if not os.environ.get(variable):
            raise ValueError(
                f"{given}, but the environment variable {variable} is not set; set it to the"
                " secret."
            )
