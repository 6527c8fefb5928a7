"""Options of engines that sample on servers: servers, requests, and transport of new weights.

An option is declared once, as a field of `ServerConfig`. Each engine of SERVER_ENGINES has it as
`--ENGINE-FIELD`.
"""

import dataclasses
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from slime_tis.errors import quoted
from slime_tis.options.fields import Limits, check_fields, flag, option
from slime_tis.options.flags import flags_of
from slime_tis.options.values import Option, declare_options
from slime_tis.trainer.configs.server_engines import SERVER_ENGINES, ServerEngineEntry

server_option = partial(option, group="servers")

MAX_HOST = 253
"""Characters of a host name, by RFC 1035."""
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
"""Classes by value of --ENGINE-weight-sync; they implement `weights.protocol.WeightSync`."""
# Type checkers take no computed Literal; at run time it lists the choices of the flag.
if TYPE_CHECKING:
    WeightTransport = str
else:
    WeightTransport = Literal[tuple(WEIGHT_TRANSPORTS)]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Running servers of an engine, a router, or servers to launch, and how the run uses them.

    Docstrings and `needs` of fields are those of the flags; {engine} and {title} are replaced.
    """

    engine: str
    """Name in SERVER_ENGINES; the prefix of the flags."""
    url: tuple[str, ...] | None = server_option(None, metavar="URL")
    """Running {title} servers, as http://HOST:PORT."""
    router_ip: str | None = server_option(None, metavar="ADDRESS")
    """Address of a running {title} router; weights go to the servers that it names."""
    router_port: Annotated[int | None, Limits(ge=1, le=65_535)] = server_option(None)
    """Port of the router."""
    launch: Annotated[int | None, Limits(ge=1, le=1_024)] = server_option(None)
    """Number of servers to start on this machine and stop at the end."""
    server_args: tuple[str, ...] | None = server_option(
        None, metavar="WORD", needs=("--{engine}-launch",)
    )
    """Flags of launched servers; flags --{engine}-NAME are added to them as --NAME."""
    python: str | None = server_option(None, metavar="PYTHON", needs=("--{engine}-launch",))
    """Python interpreter of the environment that has {engine}; unset: this program's."""
    base_port: Annotated[int, Limits(ge=1, le=65_535)] = server_option(
        30000, needs=("--{engine}-launch",)
    )
    """First port of launched servers; ports in use are skipped."""
    log_dir: str | None = server_option(None, metavar="DIR", needs=("--{engine}-launch",))
    """Directory for the output of launched servers; unset: output_dir."""
    startup_timeout: Annotated[float, Limits(gt=0, le=1_000_000)] = server_option(600.0)
    """Longest wait for servers to start, in seconds."""
    request_timeout: Annotated[float, Limits(gt=0, le=1_000_000)] = server_option(600.0)
    """Longest wait for one answer, in seconds."""
    concurrency: Annotated[int, Limits(ge=1, le=65_536)] = server_option(64)
    """Requests in flight per server."""
    max_retries: Annotated[int, Limits(ge=0, le=1_000)] = server_option(5)
    """Retries of a request after a server failure."""
    recovery_timeout: Annotated[float, Limits(gt=0, le=1_000_000)] = server_option(120.0)
    """Longest wait without any server, in seconds; then the run saves and stops."""
    weight_sync: WeightTransport = server_option("distributed")
    """Transport of weights: broadcast over NCCL (gloo without GPUs), or safetensors on a shared
    disk."""
    weight_dir: str | None = server_option(
        None, metavar="DIR", needs=("--{engine}-weight-sync=disk",)
    )
    """Directory for weights, shared with the servers; unset: `{engine}_weights` in output_dir."""
    sync_address: str | None = server_option(
        None, metavar="ADDRESS", needs=("--{engine}-weight-sync=distributed",)
    )
    """Address at which servers reach this program; unset: the interface that faces the servers."""
    bucket_mb: Annotated[int, Limits(ge=1, le=1_000_000)] = server_option(512)
    """Weights sent or written at once, MiB."""
    api_key_env: str = server_option("", metavar="NAME")
    """Environment variable with the servers' API key."""
    admin_api_key_env: str | None = server_option(None, metavar="NAME")
    """Environment variable with the servers' admin key; without it, the API key is used."""

    def __post_init__(self) -> None:
        check_fields(self, prefix=self.engine)
        _check_sources(self)
        if self.sync_address in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"{self.flag('sync_address')} is {quoted(self.sync_address)} but must be an address"
                " that servers reach."
            )
        check_server_args(self.engine, self.server_args or ())
        for key_flag, name in self._key_variables().items():
            if not name.isidentifier():  # maybe the key itself: it is not repeated
                raise ValueError(
                    f"{key_flag} must be the name of an environment variable, such as"
                    f" {self.engine.upper()}_API_KEY, not the key."
                )

    def flag(self, name: str) -> str:
        """The flag of a field: `--sglang-url` for `url`."""
        return flag(f"{self.engine}_{name}")

    @property
    def entry(self) -> ServerEngineEntry:
        """The engine."""
        return SERVER_ENGINES[self.engine]

    @property
    def server_urls(self) -> tuple[str, ...]:
        """The normalized URLs of `url`; empty if it is unset."""
        return tuple(normalized_url(url, self.flag("url")) for url in self.url or ())

    @property
    def bucket_bytes(self) -> int:
        """Weights sent or written at once, in bytes."""
        return self.bucket_mb << 20

    @property
    def router_url(self) -> str | None:
        """The router's URL, or None without one."""
        if self.router_ip is None:
            return None
        return f"http://{bracketed(self.router_ip)}:{self.router_port}"

    @property
    def keys(self) -> dict[str, str | None]:
        """The API key and the admin key by the flags of their variables. Never log them.

        A key is None if its environment variable is unset or empty.
        """
        variables = self._key_variables()
        return {key_flag: os.environ.get(name) or None for key_flag, name in variables.items()}

    def _key_variables(self) -> dict[str, str]:
        variables = {self.flag("api_key_env"): self.api_key_env}
        if self.admin_api_key_env is not None:
            variables[self.flag("admin_api_key_env")] = self.admin_api_key_env
        return variables

    def check_has_servers(self) -> None:
        """Refuses a configuration that names no server."""
        if not _sources(self):
            raise ValueError(
                f"--rollout-engine is {self.engine} but no server is named; add {self.flag('url')}"
                f" URL, {self.flag('router_ip')} with {self.flag('router_port')}, or"
                f" {self.flag('launch')} N."
            )


def server_config(engine: str, **values: object) -> ServerConfig:
    """Returns the config of an engine; other fields have the engine's defaults."""
    fields: dict[str, Any] = {"engine": engine, **SERVER_ENGINES[engine].defaults, **values}
    return ServerConfig(**fields)


def server_options(engine: str) -> dict[str, Option]:
    """Returns the options of an engine, as `declare_options` does for a config."""
    entry = SERVER_ENGINES[engine]
    options = {}
    for field in declare_options([ServerConfig]).values():
        if field.name == "engine" or field.name in entry.absent:
            continue
        name = f"{engine}_{field.name}"
        needs = field.needs or ("--rollout-engine={engine}",)
        options[name] = dataclasses.replace(
            field,
            name=name,
            default=entry.defaults.get(field.name, field.default),
            help=field.help.replace("{title}", entry.title).replace("{engine}", engine),
            group=f"{entry.title} servers",
            needs=tuple(need.replace("{engine}", engine) for need in needs),
        )
    return options


def normalized_url(url: str, flag: str) -> str:
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
            " config.yaml would show; put a secret into an environment variable, for an option"
            " such as --sglang-api-key-env or a --custom-rm-path function."
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


def _sources(config: ServerConfig) -> dict[str, object]:
    """Returns the flags that name servers, with the values to show in messages."""
    urls = [shown_url(url) for url in config.url or ()]
    named = {
        config.flag("url"): " ".join(urls) or None,
        config.flag("router_ip"): config.router_ip,
        config.flag("launch"): config.launch,
    }
    return {source: value for source, value in named.items() if value is not None}


def _check_sources(config: ServerConfig) -> None:
    urls = config.server_urls
    url_flag = config.flag("url")
    for url in urls:
        if urls.count(url) > 1:
            raise ValueError(
                f"{url_flag} names {url} {urls.count(url)} times; name each server once."
            )
        if len(urlsplit(url).hostname or "") > MAX_HOST:
            raise ValueError(f"{url_flag} has a host name with more than {MAX_HOST} characters.")
    named = [f"{source} is {value}" for source, value in _sources(config).items()]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)}; servers come from one source; keep one of them.")
    ip = config.router_ip
    port = config.router_port
    if (ip is None) != (port is None):
        raise ValueError(
            f"{config.flag('router_ip')} is {ip} and {config.flag('router_port')} {port}; give both"
            " or neither."
        )
    if ip is None:
        return
    # A port, a path or a user name in the address would become another part of the URL.
    is_host = split_url(f"http://{bracketed(ip)}") == SplitResult("http", bracketed(ip), "", "", "")
    if not is_host or len(ip) > MAX_HOST or any(character.isspace() for character in ip):
        raise ValueError(
            f"{config.flag('router_ip')} is {quoted(shown_url(ip))} but must be an address or a"
            " host name."
        )


def check_server_args(engine: str, args: Sequence[str]) -> None:
    """Refuses secrets, and flags that the run sets, also in the short forms of argparse."""
    args_flag = flag(f"{engine}_server_args")
    own_flags = SERVER_ENGINES[engine].own_flags
    beginning, *flags = flags_of(args)
    if beginning.values:
        raise ValueError(
            f"{args_flag} begins with {quoted(args[0])} but must begin with a flag, such as"
            " --tp-size."
        )
    for one in flags:
        given = f"{args_flag} has {one.name}"
        name = one.name[2:].replace("_", "-").lower()
        if SECRET_FLAG.fullmatch(name) and name not in own_flags:
            raise ValueError(
                f"{given}, but a secret would be seen in the list of processes, in config.yaml and"
                " in reports; put it into an environment variable and name that:"
                f" --{engine}-{name}{VARIABLE} VARIABLE."
            )
        _check_variable(given, name, one.values)
        for own, instead in own_flags.items():
            # argparse accepts any unique beginning of a flag's name.
            if own.startswith(one.name[2:]) and len(one.name) > 3:
                raise ValueError(f"{given}, which the run sets itself; {instead}.")


def _check_variable(given: str, name: str, values: Sequence[str]) -> None:
    """Refuses a flag for a secret's variable if that is unset; messages never show the value."""
    if not (name.endswith(VARIABLE) and SECRET_FLAG.fullmatch(name.removesuffix(VARIABLE))):
        return
    variable = "".join(values[:1])
    if not variable.isidentifier():
        raise ValueError(
            f"{given}, but what follows is not the name of an environment variable; give its name."
        )
    if not os.environ.get(variable):
        raise ValueError(
            f"{given}, but the environment variable {variable} is not set; set it to the secret."
        )
