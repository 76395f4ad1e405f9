"""What may not leave the machine does not, and what helps does."""

from __future__ import annotations

import json

import pytest

from appliance.bundle.secrets import REMOVED, Scrubber, is_secret_name

KEY = "team-a-3f9c1b77d2"
HF_TOKEN = "hf_" + "Ab1" * 10


@pytest.fixture
def scrubber() -> Scrubber:
    return Scrubber({"HF_TOKEN": HF_TOKEN, "PATH": "/usr/local/bin", "DB_PASSWORD": "pass word/1"})


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "api_key",
        "api-keys",
        "--api-key",
        "AWS_SECRET_ACCESS_KEY",
        "Authorization",
        "password",
        "DB_PASSWD",
        "x-api-key",
        "accessToken",
        "apiKey",
        "serial",
        "KEY",
        "cookie",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "api_keys_file",
        "max_num_batched_tokens",
        "kv_bytes_per_token",
        "tokenizer",
        "PATH",
        "requests_per_minute_per_key",
        "tokens_per_second",
        "key_error",
        "monkey",
        "served_name",
    ],
)
def test_names_of_plain_settings(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "line",
    [
        f"INFO: Authorization: Bearer {KEY}",
        f"authorization: {KEY}",
        f"(b'authorization', b'Bearer {KEY}')",
        f'{{"headers": {{"Authorization": "Bearer {KEY}"}}}}',
        json.dumps({"event": "engine", "line": f'{{"x-api-key": "{KEY}"}}'}),
        json.dumps(json.dumps({"api_key": f"two words {KEY}"})),
        f"Proxy-Authorization: Digest username=x, response={KEY}",
        f"Cookie: session={KEY}; other={KEY}",
        f"args: Namespace(api_key=['{KEY}'], model='x')",
        f"--api-key {KEY} --port 1",
        f"--api-key={KEY}",
        f"token: {KEY}",
        f"password = '{KEY} {KEY}'",
        f'api_key="a\\"{KEY}"',
        f'api_key="""{KEY}"""',
        f"{{'api_key': SecretStr('{KEY}')}}",
        f"'--api-key', '{KEY}', '--port'",
        f'["--api-key", "{KEY}"]',
        f"NVIDIA_API_KEY: |\n  two\n  {KEY}\nport: 1",
        f"api_keys:\n  - one\n  - {KEY}\nport: 1",
        f'{{"api_keys": [\n "{KEY}"\n]}}',
        f"secrets: {{a: {KEY}}}",
        f"secret_key_base: {KEY}",
        f"DB_SECRET_VALUE={KEY}",
        f"key={KEY}",
        f"apikey {KEY}",
        f"api_key -> {KEY}",
        f"Invalid token {KEY}",
        f"password is {KEY}",
        f"Bearer%20{KEY}",
        f"Incorrect API key: {KEY}",
        f"curl -H 'bearer {KEY}' http://x",
        f"GET https://user:{KEY}@example.org/path",
        f"GET https://{KEY}@example.org/path",
        f"GET https://user:a@{KEY}@example.org/path",
        f"GET /v1?a=1&api_key={KEY}&b=2",
        f"GET /blob?X-Amz-Signature={KEY}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{KEY}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{KEY}\n",
        f"{KEY}\n-----END PRIVATE KEY-----\nafter",
    ],
)
def test_secret_by_its_place_is_removed(scrubber: Scrubber, line: str) -> None:
    cleaned = scrubber.text(f"before\n{line}\n" if not line.startswith(KEY) else line)

    assert KEY not in cleaned
    assert REMOVED in cleaned


@pytest.mark.parametrize(
    "secret",
    [
        HF_TOKEN,
        "pass word/1",
        "pass%20word%2F1",
        "sk-" + "a1" * 12,
        "ghp_" + "a1" * 12,
        "hf_" + "Zz9" * 9,
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2ln",
        "AKIA" + "A1B2" * 4,
    ],
)
def test_secret_by_value_or_form_is_removed(scrubber: Scrubber, secret: str) -> None:
    assert scrubber.text(f"loading {secret} failed") == f"loading {REMOVED} failed"


@pytest.mark.parametrize(
    "line",
    [
        "max_num_batched_tokens=2048 tokenizer=/models/x",
        "server.api_keys_file /run/secrets/keys: must hold at least one API key",
        '"kv_bytes_per_token": 65536, "key": "memory.shm_size"',
        "GET http://127.0.0.1:8000/v1/models?limit=5",
        "error[E_PATH] /models/x: a directory, got nothing there",
        "ValueError: hf_overrides must be a dict",
        "basic arithmetic is no credential",
        "KV cache per token: 65536 bytes, eos_token='</s>'",
        "token 12345678901 of 20000000000, secrets_dir=/run/secrets, DB_PASSWORD_FILE=/run/x",
        '{"key": "max_num_batched_tokens", "password_file": "/run/x"}, key: model.layers.10.weight',
        "unexpected_keys: ['model.layers.0.weight']",
    ],
)
def test_what_helps_is_kept(scrubber: Scrubber, line: str) -> None:
    assert scrubber.text(line) == line


def test_structure_stays_and_values_under_secret_names_go(scrubber: Scrubber) -> None:
    value = {
        "serial": "0321",
        "serial_none": None,
        "nested": [{"name": "MY_TOKEN", "value": "x1"}, {"name": "LEVEL", "value": "x1"}],
        "argv": ["--api-key", "short", "--port", "80"],
        "password": {"a": 1},
        "kv_bytes_per_token": 65536,
        "lines": ["-----BEGIN PRIVATE KEY-----", KEY, "-----END PRIVATE KEY-----", "after"],
        HF_TOKEN: 1,
    }

    assert scrubber.plain(value) == {
        "serial": REMOVED,
        "serial_none": None,
        "nested": [{"name": "MY_TOKEN", "value": REMOVED}, {"name": "LEVEL", "value": "x1"}],
        "argv": ["--api-key", REMOVED, "--port", "80"],
        "password": REMOVED,
        "kv_bytes_per_token": 65536,
        "lines": [REMOVED, "after"],
        REMOVED: 1,
    }


def test_values_of_a_document_are_known_everywhere(scrubber: Scrubber) -> None:
    scrubber.learn_values({"execution": {"extra_args": {"api_key": KEY, "pin_token": 12345678}}})

    assert scrubber.text(f"got {KEY} and 12345678") == f"got {REMOVED} and {REMOVED}"
    assert scrubber.plain([12345678, 1]) == [REMOVED, 1]


def test_json_stays_json_and_everything_else_stays_text(scrubber: Scrubber) -> None:
    assert json.loads(scrubber.json_or_text(f'{{"a": "{HF_TOKEN}"}}')) == {"a": REMOVED}
    assert scrubber.json_or_text(f'{{"a": "{HF_TOKEN}') == f'{{"a": "{REMOVED}'
    assert scrubber.json_or_text("[" * 100_000) == "[" * 100_000


@pytest.mark.parametrize(
    "piece",
    [
        "a-",
        "token",
        "a",
        "-----BEGIN PRIVATE KEY-----",
        "://",
        "\\",
        "x-api-key: ",
        "?a",
        "a:",
        "api_key=[",
        "api_key:\n - ",
        "key: a",
        "token a1",
        "secret",
        'x_key="',
        "api_key: |\n x",
    ],
)
@pytest.mark.timeout(60)
def test_two_megabytes_of_anything_are_done_in_seconds(scrubber: Scrubber, piece: str) -> None:
    assert scrubber.text(piece * (2 * 1024**2 // len(piece)))
