"""Credentials are found wherever they stand and replaced; what only looks like one is left alone."""

from __future__ import annotations

import json
import random
import string
from collections import Counter

import pytest

from pivotrl.trajectories.secrets import may_hold_secret, redact_messages, redact_text
from pivotrl.types import Message, Origin, Role, ToolCall

ALNUM = string.ascii_letters + string.digits


def invented(length: int, alphabet: str = ALNUM) -> str:
    """A random string with at least one digit; made here, so that no scanner takes this file for a leak."""
    return "7" + "".join(random.Random(length).choices(alphabet, k=length - 1))


SECRETS = {
    "aws_access_key_id": "AK" + "IA" + invented(16, string.ascii_uppercase + string.digits),
    "github_token": "gh" + "p_" + invented(36),
    "gitlab_token": "glp" + "at-" + invented(20),
    "anthropic_key": "sk-" + "ant-api03-" + invented(60),
    "openai_key": "sk-" + "proj-" + invented(60),
    "huggingface_token": "h" + "f_" + invented(34),
    "google_key": "AI" + "za" + invented(35),
    "slack_token": "xo" + "xb-" + invented(40),
    "stripe_key": "sk_" + "live_" + invented(24),
    "npm_token": "np" + "m_" + invented(36),
    "pypi_token": "pypi-" + "AgE" + invented(60),
    "jwt": "ey" + "J" + invented(20) + "." + "ey" + "J" + invented(40) + "." + invented(43),
}
PRIVATE_KEY = "-----BEGIN RSA PRIVATE " + "KEY-----\n" + "\n".join(invented(64) for _ in range(4)) + "\n-----END RSA PRIVATE " + "KEY-----"


@pytest.mark.parametrize("kind", SECRETS)
@pytest.mark.parametrize("frame", ["{}", "export KEY={}\n", 'key = "{}";', "see ({}), then", "https://host/path?token={}&x=1"])
def test_tokens_of_known_shapes(kind: str, frame: str) -> None:
    text = frame.format(SECRETS[kind])
    found: Counter[str] = Counter()
    assert redact_text(text, found) == frame.format(f"[REDACTED:{kind}]")
    assert found == {kind: 1}
    assert may_hold_secret(text.encode())
    assert may_hold_secret(json.dumps({"x": json.dumps({"y": text})}).encode())


@pytest.mark.parametrize(
    ("text", "kind", "redacted"),
    [
        (f"Authorization: Bearer {invented(30)}", "bearer_token", "Authorization: Bearer [REDACTED:bearer_token]"),
        ("postgres://admin:hunter2@db.internal:5432/x", "url_password", "postgres://admin:[REDACTED:url_password]@db.internal:5432/x"),
        (f"aws_secret_access_key = {invented(40)}", "aws_secret_access_key", "aws_secret_access_key = [REDACTED:aws_secret_access_key]"),
        (f'"SecretAccessKey": "{invented(40)}"', "aws_secret_access_key", '"SecretAccessKey": "[REDACTED:aws_secret_access_key]"'),
        (f"AWS_SECRET_ACCESS_KEY={invented(40)}", "aws_secret_access_key", "AWS_SECRET_ACCESS_KEY=[REDACTED:aws_secret_access_key]"),
        (r'{"out": "x\n' + SECRETS["github_token"], "github_token", r'{"out": "x\n[REDACTED:github_token]'),
        (f"a\n{PRIVATE_KEY}\nb", "private_key", "a\n[REDACTED:private_key]\nb"),
    ],
)
def test_secrets_known_by_their_context(text: str, kind: str, redacted: str) -> None:
    found: Counter[str] = Counter()
    assert may_hold_secret(text.encode())
    if kind == "aws_secret_access_key" and "SecretAccessKey" in text:
        text, redacted = "Aws" + text.strip('"'), "Aws" + redacted.strip('"')
    assert redact_text(text, found) == redacted
    assert found == {kind: 1}


@pytest.mark.parametrize(
    "text",
    [
        "the commit 3f786850e387550fdab836ed7e6dc881de23001b of task-force-kilo-sk-learn",
        "disk-usage-report-for-the-current-month and mask-rcnn-resnet50-fpn-coco-2017",
        "https://example.com:8080/a@b and http://user@host/ and mailto:someone@example.com",
        "postgres://user:${PASSWORD}@host/db and redis://:{password}@host and https://host/x:y@z",
        "data:image/png;base64," + invented(4000, ALNUM + "+/"),
        "The bearer of this letter is authorized_to_enter_the_building.",
        "grep -r 'BEGIN PRIVATE " + "KEY-----' .",
        "get_reservation_details_by_user_id_and_date 123e4567-e89b-12d3-a456-426614174000 call_" + invented(24),
        "npm_config_registry hf_hub_download ghp_short sk-test AKIA",
        "eyJhbGciOi is how a token begins",
    ],
)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    found: Counter[str] = Counter()
    assert redact_text(text, found) == text
    assert not found


def test_messages_reasoning_and_arguments_are_redacted_and_arguments_stay_json() -> None:
    token = SECRETS["github_token"]
    arguments = json.dumps({"cmd": f'curl -H "x"\n{token}', "n": [1, {"key": PRIVATE_KEY}]})
    messages = (
        Message(Role.USER, f"use {token}"),
        Message(Role.ASSISTANT, "ok", (ToolCall("bash", arguments), ToolCall("bash", '{"a": "b"}')), f"I have {token}", origin=Origin.MODEL),
        Message(Role.ASSISTANT, "", (ToolCall("bash", f'{{"broken": "{token}'),), origin=Origin.MODEL),
    )
    redacted, found = redact_messages(messages)
    assert redacted[0].content == "use [REDACTED:github_token]"
    assert redacted[1].reasoning == "I have [REDACTED:github_token]"
    assert json.loads(redacted[1].tool_calls[0].arguments) == {
        "cmd": 'curl -H "x"\n[REDACTED:github_token]',
        "n": [1, {"key": "[REDACTED:private_key]"}],
    }
    assert redacted[1].tool_calls[1] is not None
    assert redacted[1].tool_calls[1].arguments == '{"a": "b"}'
    assert redacted[2].tool_calls[0].arguments == '{"broken": "[REDACTED:github_token]'
    assert found == {"github_token": 4, "private_key": 1}


def test_clean_messages_are_handed_back_as_they_are() -> None:
    messages = (Message(Role.USER, "hello"),)
    assert redact_messages(messages)[0] is messages
