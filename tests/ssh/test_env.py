"""Values of variables arrive byte for byte under every login shell; nobody but the rank sees secrets."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from shutil import which

import pytest

from hetrun.launch.files import Meeting, host_files, read_secrets
from hetrun.model import HostSpec
from hetrun.transport.bundle import build_bundle
from hetrun.transport.connect import open_transport
from hetrun.transport.fanout import on_all
from hetrun.transport.jobs import run_module
from tests.ssh.lab import Lab, LabHost
from tests.ssh.plans import make_plan

pytestmark = pytest.mark.ssh
SHELLS = ("dash", "bash", "tcsh", "fish", "ash")
MODULE = "hetrun_show_env"
# Loads a rank's file as the worker does, and tells what the kernel has of it then.
SHOW = b"""
import hashlib, json, os, sys
from pathlib import Path
from hetrun.runtime.job import env_path, read_env
folder = Path(sys.argv[1])
names = read_env(folder, 0)
os.environ.update(names)
told = {name: hashlib.sha256(os.environb[name.encode()]).hexdigest() for name in names}
told["mode"] = oct(env_path(folder, 0).stat().st_mode), oct(env_path(folder, 0).parent.stat().st_mode)
(folder / "out" / "told.json").write_text(json.dumps(told))
"""
NASTY = [
    b"two words",
    b"$(touch /tmp/x) `id` ; exit !! %s &&",
    b"line\nbreak\r\ttab",
    b'{"json": "\\" \'"}',
    b"*?[a]{b,c}~ 64(x2) \\\\ ^ # ${HOME}",
    "äöü 漢 \U0001f600".encode(),
    b"",
    b"a=b==c",
    b"'",
    b'"',
    b"\\",
    b"!",
    b"-n",
    b"\x1b[31m\x07",
    b"\xff\xfe not utf-8",
]


def values() -> dict[str, bytes]:
    """The nasty ones and random bytes without NUL, 200 in all."""
    drawn = random.Random(7)
    more = [
        bytes(drawn.randrange(1, 256) for _ in range(drawn.randrange(40)))
        for _ in range(200 - len(NASTY))
    ]
    return {f"V{number}": value for number, value in enumerate([*NASTY, *more])}


def shell_path(name: str, lab: Lab) -> str:
    if name != "ash":
        return which(name) or f"no {name} here"
    path = lab.folder / "ash"  # busybox is what it is called
    if not path.exists():
        path.symlink_to(which("busybox") or "/nowhere")
    return str(path)


def test_200_values_survive_five_login_shells_byte_for_byte(
    lab: Lab,
) -> None:
    wanted = values()
    hosts = {
        name: lab.host(50 + number, shell=shell_path(name, lab))
        for number, name in enumerate(SHELLS)
    }
    start_files = {
        "bash": (".bashrc", "echo noise; printf '{\"t\": 1}'\nreturn\nexit 3\n"),
        "tcsh": (".cshrc", 'echo hi {"ok":1}\n'),
        "dash": (".profile", "echo noise\n"),
    }
    for name, (path, text) in start_files.items():
        hosts[name].start_file(path, text)
    as_text = {name: value.decode(errors="surrogateescape") for name, value in wanted.items()}
    plain = {name: text for name, text in as_text.items() if text.isascii()}
    plan = make_plan([(hosts["bash"].spec(), 1)], env=plain, secrets=tuple(as_text.keys() - plain))
    secrets = read_secrets(plan, as_text)
    meeting = Meeting(addr="10.77.0.50", port=1, rdzv_id="x")
    files = host_files(plan, 0, meeting=meeting, nic="eth0", secrets=secrets).files
    bundle = build_bundle({f"{MODULE}.py": SHOW})
    try:
        answers = on_all(
            [host.spec(name=name) for name, host in hosts.items()],
            lambda t: run_module(t, MODULE, files, timeout_s=40, bundle=bundle),
        )
    finally:
        for host in hosts.values():
            lab.drop(host)
    for name, answer in answers.items():
        assert isinstance(answer, dict), (name, answer)
        told = json.loads(answer["told.json"])
        assert told.pop("mode") == ["0o100600", "0o40700"], name
        wrong = [
            wanted[key]
            for key, value in wanted.items()
            if told[key] != hashlib.sha256(value).hexdigest()
        ]
        assert wrong == [], name


def test_no_process_list_shows_a_value(lab: Lab, three: tuple[LabHost, ...]) -> None:
    """The inventory's own variables reach preflight and the guard, but no argument of any process there."""
    seen: list[str] = []
    spec: HostSpec = three[0].spec(env={"TOKEN": "s3cret-in-inventory"})
    transport = open_transport(spec)
    slow = b"import time\ntime.sleep(1)\n"

    def watch() -> None:
        while not done.wait(0.05):
            seen.extend(three[0].processes().values())

    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        bundle = build_bundle({f"{MODULE}.py": slow})
        run_module(transport, MODULE, {}, timeout_s=30, bundle=bundle)
    finally:
        done.set()
        watcher.join()
        transport.close()
    assert any(MODULE in line for line in seen)
    assert not [line for line in seen if "s3cret" in line]
