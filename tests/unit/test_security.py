"""Rules of docs/security.md that hold for all of the code: nothing is unpickled, no shell reads our data, nothing is forwarded."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hetrun.transport import OPEN_SHELL

ROOT = Path(__file__).parents[2] / "hetrun"
FILES = sorted(ROOT.rglob("*.py"))
MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "telnetlib"}
CALLS = {
    *("eval", "os.system", "os.popen", "pickle.loads", "yaml.load", "yaml.unsafe_load"),
    *("yaml.full_load", "torch.load", "numpy.load", "np.load"),
}
# Collectives of torch that unpickle what other ranks sent.
OBJECTS = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}
FORWARDING = {"request_x11", "request_forward_agent", "get_pty", "invoke_shell"}


def offences(source: str) -> list[str]:
    """Return what a source does that none of ours may."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS or called.rpartition(".")[2] in OBJECTS | FORWARDING:
                found.append(called)
            for keyword in node.keywords:
                true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("shell", "forward_agent", "look_for_keys") and true:
                    found.append(f"{called}({keyword.arg}=True)")
                if keyword.arg == "env" and called.endswith("connection.run"):
                    found.append("fabric's env=")
    return found


def test_no_file_unpickles_or_hands_text_to_a_shell_or_forwards_anything() -> None:
    found = {path.name: bad for path in FILES if (bad := offences(path.read_text()))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "import torch\ntorch.load('x')",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "Connection('x', forward_agent=True)",
        "channel.request_x11()",
    ],
)
def test_the_rule_sees_each_of_them(source: str) -> None:
    assert offences(source)


def test_the_command_that_ssh_is_given_is_one_constant_of_safe_characters() -> None:
    assert set(OPEN_SHELL) <= set("abcdefghijklmnopqrstuvwxyz-;/ ")
    calls = [
        node
        for path in (ROOT / "transport").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("exec_command")
    ]
    assert [ast.unparse(node.args[0]) for node in calls] == ["OPEN_SHELL"]
