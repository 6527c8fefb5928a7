"""What the SGLang options refuse, and how addresses are read."""

import pytest

from slime_tis.trainer.configs.servers import is_loopback, normalized_url, server_config

SECRET = "hunter2-secret"


def test_defaults_name_no_server():
    config = server_config("sglang")
    assert config.server_urls == ()
    assert config.router_url is None


def test_a_run_without_servers_is_refused():
    with pytest.raises(ValueError, match="no server is named"):
        server_config("sglang").check_has_servers()


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", SECRET)
    assert server_config("sglang", launch=1).keys["--sglang-api-key-env"] == SECRET


def test_the_key_is_not_shown(monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", SECRET)
    config = server_config("sglang", launch=1)
    assert config.keys["--sglang-api-key-env"] == SECRET
    assert SECRET not in repr(config)


@pytest.mark.parametrize("value", [None, ""], ids=["absent", "empty"])
def test_another_variable_without_a_value_is_no_key(value, monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", SECRET)
    monkeypatch.delenv("OTHER_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("OTHER_KEY", value)
    assert server_config("sglang", api_key_env="OTHER_KEY").keys["--sglang-api-key-env"] is None


def test_a_key_instead_of_its_variable_is_refused():
    with pytest.raises(ValueError, match="not the key") as refusal:
        server_config("sglang", api_key_env=SECRET)
    assert SECRET not in str(refusal.value)


REFUSED = {
    "two sources": (
        {"url": ("http://a:1",), "launch": 2},
        "--sglang-url is http://a:1 and --sglang-launch is 2; servers come from one source",
    ),
    "one URL twice": ({"url": ("http://a:1", "http://A:1/")}, "names http://a:1 2 times"),
    "a router without a port": (
        {"router_ip": "10.0.0.1"},
        "--sglang-router-ip is 10.0.0.1 and --sglang-router-port None; give both",
    ),
    "sync address of all": (
        {"sync_address": "0.0.0.0"},
        "is '0.0.0.0' but must be an address that servers reach",
    ),
    "a flag of the run": (
        {"launch": 1, "server_args": ("--tp-size", "2", "--port=1")},
        "has --port, which the run sets itself; choose the first of the ports",
    ),
    "a key under a short form": (
        {"launch": 1, "server_args": ("--api", SECRET)},
        "has --api, which the run sets itself",
    ),
    "a password": (
        {"launch": 1, "server_args": ("--ssl-keyfile-password", SECRET)},
        (
            "has --ssl-keyfile-password, but a secret would be seen in the list of processes, in"
            " config.yaml and in reports; put it into an environment variable and name that:"
            " --sglang-ssl-keyfile-password-env VARIABLE."
        ),
    ),
    "a token": (
        {"launch": 1, "server_args": ("--hf-token", SECRET)},
        "--sglang-hf-token-env VARIABLE",
    ),
    "a password for a variable": (
        {"launch": 1, "server_args": ("--ssl-keyfile-password-env", SECRET)},
        (
            "has --ssl-keyfile-password-env, but what follows is not the name of an environment"
            " variable"
        ),
    ),
    "a variable that is not set": (
        {
            "launch": 1,
            "server_args": ("--ssl-keyfile-password-env", "NO_SUCH_VARIABLE"),
        },
        "the environment variable NO_SUCH_VARIABLE is not set; set it to the secret.",
    ),
    "a URL that steers": (
        {"url": ("http://a\x1b[2J:1",)},
        r"--sglang-url is 'http://a\x1b[2J:1' but must be http://HOST:PORT",
    ),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_impossible_options_are_refused(given, message):
    with pytest.raises(ValueError) as refusal:
        server_config("sglang", **given)
    assert message in str(refusal.value)
    assert str(refusal.value).endswith(".")
    assert SECRET not in str(refusal.value)


NORMALIZED_URLS = {
    "http://127.0.0.1:30000": "http://127.0.0.1:30000",
    "http://127.0.0.1:30000/": "http://127.0.0.1:30000",
    " HTTPS://Host.Example/sglang/ ": "https://host.example/sglang",
    "http://[::1]:30000": "http://[::1]:30000",
}


@pytest.mark.parametrize(("url", "normalized"), NORMALIZED_URLS.items(), ids=NORMALIZED_URLS)
def test_urls_are_normalized(url, normalized):
    assert normalized_url(url, "--sglang-url") == normalized
    assert server_config("sglang", url=(url,)).server_urls == (normalized,)


@pytest.mark.parametrize(
    ("ip", "url"),
    [("10.0.0.1", "http://10.0.0.1:3000"), ("fd00::1", "http://[fd00::1]:3000")],
    ids=["IPv4", "IPv6"],
)
def test_the_url_of_a_router(ip, url):
    assert server_config("sglang", router_ip=ip, router_port=3000).router_url == url


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.0.1", "localhost", "[::1]"])
def test_addresses_of_this_machine(host):
    assert is_loopback(f"http://{host}:1")


@pytest.mark.parametrize("host", ["10.0.0.1", "localhost.example"])
def test_addresses_of_other_machines(host):
    assert not is_loopback(f"http://{host}:1")


# most look like a flag that is refused: --host, a password, a token
@pytest.mark.parametrize(
    "flags",
    [
        ("--mem-fraction-static", "0.7"),
        ("--disable-cuda-graph",),
        ("--host-memory-ratio=2",),
        ("--ssl-keyfile", "key.pem"),
        ("--bucket-time-to-first-token", "1"),
        ("--tokenizer-path", "t"),
    ],
    ids=lambda flags: flags[0],
)
def test_other_flags_of_servers_pass(flags):
    config = server_config("sglang", launch=1, server_args=flags)
    assert config.server_args == flags


REFUSED_URLS_KEEP_SECRETS = {
    "an address with a port": "127.0.0.1:30000",
    "FTP": "ftp://host:1",
    "port 0": "http://host:0",
    "half an IPv6 address": "http://[::1",
    "a password": f"http://user:{SECRET}@host:1",
    "a query": f"http://host:1/?key={SECRET}",
}


@pytest.mark.parametrize("url", REFUSED_URLS_KEEP_SECRETS.values(), ids=REFUSED_URLS_KEEP_SECRETS)
def test_refused_urls_keep_secrets(url):
    with pytest.raises(ValueError, match=r"^--sglang-url") as refusal:
        server_config("sglang", url=(url,))
    assert SECRET not in str(refusal.value)
