"""What is said to one host, and what its answer means: text to distrust. Which hosts, and when, is left to `run.py`."""

from __future__ import annotations

import json
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hetrun.errors import PreflightError
from hetrun.model import Finding, HostSpec, Severity
from hetrun.model.base import UNPRINTABLE
from hetrun.preflight.checks import CHECKS
from hetrun.transport import CommandResult, Transport
from hetrun.transport.guard_link import HELLO, MIN_PYTHON, missing, shell_text, too_old
from hetrun.transport.script import run_script

EXAMINE_S = 60.0  # importing torch from a cold network file system is slow
MAX_ANSWER = 4 << 20
MAX_WORDS = 400
MAX_FINDINGS = 200
_UNPRINTABLE = re.compile(rf"[\t\n{UNPRINTABLE}]+")

# Runs under any Python, so that one which is too old can still say so. The data comes in the environment, which other
# users of the host cannot read, as they can arguments.
_BOOT = """
import os, sys
os.write(1, ("\\nhetrun-python %d.%d.%d %s\\n" % (sys.version_info[:3] + (sys.executable,))).encode())
if sys.version_info < (3, 10):
    sys.exit(0)
import json, time
data = json.loads(os.environ.pop("HETRUN_PREFLIGHT"))
def tell_clock(nonce=data["nonce"]):
    os.write(1, ("\\n%s@%.6f\\n" % (nonce, time.time())).encode())
tell_clock()
for name, text in data["sources"]:
    module = sys.modules[name] = type(sys)(name)
    exec(compile(text, name, "exec"), module.__dict__)
tell_clock()
answer = sys.modules[data["module"]].run(data["config"])
tell_clock()
os.umask(0o077)
text = "\\n" + data["nonce"] + " " + json.dumps(answer) + "\\n"
data = text.encode()
while data:
    data = data[os.write(1, data):]
os._exit(0)  # threads of ours may hang in a resolver
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one script of ours said on a host."""

    told: Mapping[str, Any]
    clock_offset_s: float | None  # the host's clock minus ours; None where it did not tell
    python: str


def ask(
    transport: Transport, module: str, config: Mapping[str, Any], *, timeout_s: float
) -> Answer:
    """Run one of our modules under the host's interpreter; nothing of it stays there.

    Raises:
        HostError: unreachable, or not through in time.
        PreflightError: no interpreter, a broken or an old one, or an answer that makes no sense.
    """
    spec = transport.spec
    nonce = secrets.token_hex(16)
    script = preflight_script(spec, module, config, nonce=nonce)
    result = run_script(transport, script, timeout_s=timeout_s, max_bytes=MAX_ANSWER)
    hello = HELLO.search(result.stdout)
    if hello is None:
        raise _unusable(spec, f"does not run{_said(result.stderr)}")
    if hello[5]:
        raise missing(spec, hello[5].decode())
    path = plain(hello[4].decode(errors="replace"))
    version = tuple(int(part) for part in hello.groups()[:3])
    if version < MIN_PYTHON:
        raise too_old(spec, path, version)
    for line in reversed(result.stdout.splitlines()):
        if line.startswith(nonce.encode() + b" "):
            told = _parsed(line.partition(b" ")[2], spec)
            return Answer(told=told, clock_offset_s=_clock_offset_s(result, nonce), python=path)
    raise _unusable(spec, f"broke off{_said(result.stderr)}")


def _clock_offset_s(result: CommandResult, nonce: str) -> float | None:
    """Return the best of a few samples: a way back that takes long makes a clock look slow, never fast."""
    found = []
    for match in re.finditer(
        rb"^%s@(\d{1,12}\.\d{6})\n" % nonce.encode(), result.stdout, re.MULTILINE
    ):
        arrived_s = next(
            when_s for num_bytes, when_s in result.arrivals if num_bytes >= match.end()
        )
        found.append(float(match[1]) - arrived_s)
    return round(max(found), 3) + 0.0 if found else None


def preflight_script(spec: HostSpec, module: str, config: Mapping[str, Any], *, nonce: str) -> str:
    """Return the text that /bin/sh gets; all data is quoted once, none of it becomes an argument."""
    data = {"sources": _sources(), "module": module, "config": dict(config), "nonce": nonce}
    lines = [f"{key}={shlex.quote(value)}; export {key}" for key, value in spec.env.items()]
    lines.append(f"HETRUN_PREFLIGHT={shlex.quote(json.dumps(data))}; export HETRUN_PREFLIGHT")
    return "\n".join([*lines, shell_text(spec.python, spec.activate, boot=_BOOT)])


@cache
def _sources() -> list[tuple[str, str]]:
    root = Path(__file__).parents[1]
    names = (
        "greeting",
        "transport.guard_host",
        "preflight.onhost_tools",
        "preflight.onpair",
        "preflight.onhost",
        "preflight.onmeet",
    )
    return [
        (f"hetrun.{name}", (root / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
        for name in names
    ]


def findings(host: str, told: Mapping[str, Any]) -> list[Finding]:
    """Return what a host says of itself; what is not in our words is dropped."""
    found: list[Finding] = []
    said = told.get("findings")
    for item in said[:MAX_FINDINGS] if isinstance(said, list) else []:
        if not isinstance(item, dict) or item.get("check") not in CHECKS:
            continue
        try:
            severity = Severity(item.get("severity"))
        except ValueError:
            continue
        found.append(
            Finding(
                check=item["check"],
                host=host,
                severity=severity,
                what=plain(item.get("what")),
                fix=plain(item.get("fix")),
            )
        )
    return found


def text(told: Mapping[str, Any], key: str) -> str | None:
    """Return a word that the host told, None where it is none."""
    value = told.get(key)
    return plain(value) if isinstance(value, str) and value else None


def number(told: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number that the host told, None where it is none."""
    value = told.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < 1e18 else None


def plain(value: object) -> str:
    """Return text of a host on one line, without controls, and not too long."""
    line = _UNPRINTABLE.sub(" ", str(value if value is not None else "")).strip()
    return line if len(line) <= MAX_WORDS else line[: MAX_WORDS - 3] + "..."


def _parsed(line: bytes, spec: HostSpec) -> Mapping[str, Any]:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _unusable(spec, "gave an answer that is no JSON") from error
    if not isinstance(told, dict):
        raise _unusable(spec, "gave an answer that is no JSON object")
    return told


def _unusable(spec: HostSpec, what: str) -> PreflightError:
    return PreflightError(
        f"interpreter {spec.python!r} {what}",
        hint="set `python` of the host to a Python 3.10 or newer, and check `activate`",
        host=spec.name,
    )


def _said(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return f": {plain(lines[-1])}" if lines else ""
