import shlex
from dataclasses import replace

from hetrun.model import Connection, EmulatedChip, HostSpec
from hetrun.probe.script import probe_script, tool_sections
from hetrun.vendors import ProbeCommand, Vendor, all_vendors

SPEC = HostSpec(name="a1", connection=Connection.LOCAL)
CHIP = EmulatedChip(vendor="v", model="m", num_devices=1, flops_per_s=1.0, memory_bytes=1)


def vendor(name: str, *commands: ProbeCommand, nodes: tuple[str, ...] = ()) -> Vendor:
    return replace(all_vendors()["cpu"], name=name, probe_commands=commands, device_nodes=nodes)


def test_every_vendor_is_asked_beside_the_others() -> None:
    vendors = all_vendors()
    asked = {tool.vendor for tool in tool_sections(SPEC, vendors)}
    assert asked == {name for name, item in vendors.items() if item.probe_commands}
    script = probe_script(SPEC, vendors, nonce="n")
    assert script.count('lanes="$lanes $!"') == len(asked) + 3  # and python, names, and the rest


def test_commands_of_one_vendor_wait_for_each_other() -> None:
    two = vendor("x", ProbeCommand(command="tool a"), ProbeCommand(command="tool b"))
    script = probe_script(SPEC, {"x": two}, nonce="n")
    assert "tool tool-x-0 tool 'tool a'\ntool tool-x-1 tool 'tool b'\n" in script


def test_emulated_host_is_asked_for_no_real_chip() -> None:
    played = replace(SPEC, emulate=(CHIP,))
    assert {tool.vendor for tool in tool_sections(played, all_vendors())} == {"cpu"}
    script = probe_script(played, all_vendors(), nonce="n")
    assert "/sys/bus/pci" not in script


def test_values_are_quoted() -> None:
    nasty = 'it\'s $(touch x); `y` "z" \\'
    spec = replace(SPEC, env={"A": nasty}, work_dir=f"/w {nasty}", python=f"/p {nasty}")
    script = probe_script(spec, {}, nonce="n")
    assert f"\nA={shlex.quote(nasty)}; export A\n" in script
    for path in (spec.work_dir, spec.python):
        once = shlex.quote(path or "")  # in the command, which is quoted again for the outer shell
        assert shlex.quote(once)[1:-1] in script
        assert script.count("touch x") == 3


def test_activation_comes_before_the_interpreter_and_the_tools() -> None:
    spec = replace(SPEC, activate="/opt/x y/env.sh")
    script = probe_script(spec, {"x": vendor("x", ProbeCommand(command="tool -q"))}, nonce="n")
    activate = shlex.quote(". '/opt/x y/env.sh' >/dev/null\n")[1:-1]
    assert f"{activate}tool -q" in script
    assert f"{activate}python3 -c " in script


def test_only_plain_patterns_are_expanded_by_the_shell() -> None:
    odd = ProbeCommand(command="tool", paths=("/opt/*/bin", "/x;reboot", "relative", "/$(x)"))
    script = probe_script(
        SPEC, {"x": vendor("x", odd, nodes=("/dev/x[0-9]*", "/dev/`y`"))}, nonce="n"
    )
    assert 'for f in /opt/*/bin; do [ -d "$f" ]' in script
    assert "for f in /dev/x[0-9]*; do" in script
    assert "reboot" not in script
    assert "`y`" not in script


def test_command_that_is_no_plain_tool_runs_without_a_look_at_path() -> None:
    odd = vendor("x", ProbeCommand(command="A=1 tool"))
    assert "run tool-x-0 15 'A=1 tool'\n" in probe_script(SPEC, {"x": odd}, nonce="n")
