"""What the SGLang options refuse, and how addresses are read."""

import pytest

from slime_tis.trainer.options.sglang import SGLangConfig, is_loopback, normalized_url

SECRET = "hunter2-secret"


def test_defaults_stand_without_a_server() -> None:
    config = SGLangConfig()
    assert (config.server_urls, config.router_url) == ((), None)
    with pytest.raises(ValueError, match="no server is named"):
        config.check_has_servers()


@pytest.mark.parametrize(
    "given",
    [
        {"sglang_url": ("http://127.0.0.1:30000",)},
        {"sglang_router_ip": "10.0.0.1", "sglang_router_port": 3000},
        {"sglang_launch": 2},
    ],
    ids=["URLs", "a router", "servers to start"],
)
def test_one_source_is_enough(given: dict) -> None:
    SGLangConfig(**given).check_has_servers()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"sglang_url": ("http://a:1",), "sglang_launch": 2},
            "--sglang-url is http://a:1 and --sglang-launch is 2; servers come from one source",
        ),
        (
            {"sglang_launch": 1, "sglang_router_ip": "a", "sglang_router_port": 1},
            "--sglang-router-ip is a and --sglang-launch is 1",
        ),
        ({"sglang_url": ("http://a:1", "http://A:1/")}, "names http://a:1 2 times"),
        ({"sglang_router_ip": "10.0.0.1"}, "--sglang-router-ip is 10.0.0.1 and --sglang-router-port None; give both"),
        ({"sglang_router_port": 3000}, "--sglang-router-ip is None and --sglang-router-port 3000; give both"),
        ({"sglang_router_ip": "http://10.0.0.1", "sglang_router_port": 1}, "must be an address or a host name"),
        ({"sglang_router_ip": "a:3000", "sglang_router_port": 1}, "must be an address or a host name"),
        ({"sglang_router_ip": "10.0.0.1", "sglang_router_port": 65536}, "must be 1 to 65535"),
        ({"sglang_base_port": 0}, "--sglang-base-port is 0 but must be 1 to 65535"),
        ({"sglang_launch": 0}, "--sglang-launch is 0 but must be 1 to 1024"),
        ({"sglang_concurrency": 0}, "--sglang-concurrency is 0 but must be 1 to 65536"),
        ({"sglang_bucket_mb": 0}, "--sglang-bucket-mb is 0 but must be 1 to 1000000"),
        ({"sglang_max_retries": -1}, "--sglang-max-retries is -1 but must be 0 to 1000"),
        ({"sglang_startup_timeout": 0.0}, "--sglang-startup-timeout is 0.0 but must be above 0 and at most 1000000"),
        ({"sglang_request_timeout": float("inf")}, "--sglang-request-timeout is inf"),
        ({"sglang_recovery_timeout": float("nan")}, "--sglang-recovery-timeout is nan"),
        ({"sglang_weight_sync": "tensor"}, "is 'tensor' but must be one of distributed, disk"),
        ({"sglang_sync_address": "0.0.0.0"}, "is '0.0.0.0' but must be an address that servers reach"),
        ({"sglang_launch": 1, "sglang_server_args": ("2",)}, "begins with '2' but must begin with a flag"),
        (
            {"sglang_launch": 1, "sglang_server_args": ("--tp-size", "2", "--port=1")},
            "has --port, which the run sets itself; choose the first of the ports",
        ),
        # Spellings that the server's argparse takes too: a beginning, and SGLang's short --model.
        ({"sglang_launch": 1, "sglang_server_args": ("--model", "m")}, "has --model, which the run sets itself"),
        ({"sglang_launch": 1, "sglang_server_args": ("--api", SECRET)}, "has --api, which the run sets itself"),
        ({"sglang_launch": 1, "sglang_server_args": ("--admin-api-key", SECRET)}, "has --admin-api-key, which the run"),
        ({"sglang_launch": 1, "sglang_server_args": (f"--admin-api={SECRET}",)}, "has --admin-api, which the run sets"),
        (
            {"sglang_launch": 1, "sglang_server_args": ("--ssl-keyfile-password", SECRET)},
            "has --ssl-keyfile-password, but a secret would be seen in the list of processes, in config.yaml and in "
            "reports; put it into an environment variable and name that: --sglang-ssl-keyfile-password-env VARIABLE.",
        ),
        ({"sglang_launch": 1, "sglang_server_args": (f"--ssl-keyfile-pass={SECRET}",)}, "has --ssl-keyfile-pass, but"),
        ({"sglang_launch": 1, "sglang_server_args": ("--hf-token", SECRET)}, "--sglang-hf-token-env VARIABLE"),
        (
            {"sglang_launch": 1, "sglang_server_args": ("--ssl-keyfile-password-env", SECRET)},
            "has --ssl-keyfile-password-env, but what follows is not the name of an environment variable",
        ),
        (
            {"sglang_launch": 1, "sglang_server_args": ("--ssl-keyfile-password-env", "NO_SUCH_VARIABLE")},
            "the environment variable NO_SUCH_VARIABLE is not set; set it to the secret.",
        ),
        ({"sglang_url": ("http://a\x1b[2J:1",)}, r"--sglang-url is 'http://a\x1b[2J:1' but must be http://HOST:PORT"),
    ],
    ids=[
        "two sources",
        "a router and a launch",
        "one URL twice",
        "a router without a port",
        "a port without a router",
        "a URL as router",
        "a router with a port in its name",
        "router port 65536",
        "base port 0",
        "no server to launch",
        "concurrency 0",
        "buckets of 0 MiB",
        "-1 retries",
        "startup timeout 0",
        "request timeout infinite",
        "recovery timeout NaN",
        "unknown weight sync",
        "sync address of all",
        "server args begin with a value",
        "a flag of the run",
        "a short form of a flag of the run",
        "a key under a short form",
        "an admin key",
        "an admin key under a short form",
        "a password",
        "a password under a short form",
        "a token",
        "a password for a variable",
        "a variable that is not set",
        "a URL that steers",
    ],
)
def test_refused(given: dict, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        SGLangConfig(**given)
    assert message in str(refusal.value)
    assert str(refusal.value).endswith(".")
    assert SECRET not in str(refusal.value)


def test_server_flags_pass() -> None:
    flags = ("--mem-fraction-static", "0.7", "--disable-cuda-graph", "--host-memory-ratio=2")
    flags += ("--ssl-keyfile", "key.pem", "--bucket-time-to-first-token", "1", "--tokenizer-path", "t")
    assert SGLangConfig(sglang_launch=1, sglang_server_args=flags).sglang_server_args == flags


@pytest.mark.parametrize(
    ("url", "normalized"),
    [
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://127.0.0.1:30000/", "http://127.0.0.1:30000"),
        (" HTTPS://Host.Example/sglang/ ", "https://host.example/sglang"),
        ("http://[::1]:30000", "http://[::1]:30000"),
    ],
    ids=["as it is", "a slash at the end", "capitals and a path", "IPv6"],
)
def test_normalized_url(url: str, normalized: str) -> None:
    assert normalized_url(url) == normalized
    assert SGLangConfig(sglang_url=(url,)).server_urls == (normalized,)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:30000",
        "host",
        "ftp://host:1",
        "http://",
        "http://host:0",
        "http://host:70000",
        "http://host:port",
        "http://[::1",
        f"http://user:{SECRET}@host:1",
        f"http://host:1/?key={SECRET}",
        f"//user:{SECRET}@host",
    ],
    ids=[
        "an address with a port",
        "a host",
        "FTP",
        "no host",
        "port 0",
        "port 70000",
        "a port of text",
        "half an IPv6 address",
        "a password",
        "a query",
        "a password without a scheme",
    ],
)
def test_refused_urls_keep_secrets(url: str) -> None:
    with pytest.raises(ValueError, match=r"^--sglang-url") as refusal:
        SGLangConfig(sglang_url=(url,))
    assert SECRET not in str(refusal.value)


def test_router_url() -> None:
    assert SGLangConfig(sglang_router_ip="10.0.0.1", sglang_router_port=3000).router_url == "http://10.0.0.1:3000"
    assert SGLangConfig(sglang_router_ip="fd00::1", sglang_router_port=3000).router_url == "http://[fd00::1]:3000"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:1", True),
        ("http://127.9.0.1:1", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("http://10.0.0.1:1", False),
        ("http://localhost.example:1", False),
    ],
    ids=["127.0.0.1", "127.9.0.1", "localhost", "::1", "10.0.0.1", "localhost.example"],
)
def test_is_loopback(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected


def test_key_comes_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", SECRET)
    config = SGLangConfig(sglang_launch=1)
    assert config.api_key == SECRET
    assert SECRET not in repr(config)
    assert SGLangConfig(sglang_api_key_env="OTHER_KEY").api_key is None
    monkeypatch.setenv("OTHER_KEY", "")
    assert SGLangConfig(sglang_api_key_env="OTHER_KEY").api_key is None
    with pytest.raises(ValueError, match="not the key") as refusal:
        SGLangConfig(sglang_api_key_env=SECRET)
    assert SECRET not in str(refusal.value)
